//! Where the bytes of experts come from.

use std::sync::Arc;
use std::time::Duration;

use checkpoint::{BLOCK, Checkpoint, Direct, Error, Extent};

/// Reads parts of the files of a checkpoint. Tests have sources that fail, stall and lie.
pub trait Source: Send + Sync {
    /// Reads the bytes of `from`. Directly, they come to `room[from.offset % BLOCK..]`, and `room` begins at a multiple
    /// of [`BLOCK`] and ends behind the last block; otherwise they come to its beginning.
    ///
    /// # Errors
    /// What kept them from being read, in words.
    fn read(&self, from: &Extent, is_direct: bool, room: &mut [u8]) -> Result<(), String>;

    /// Whether a file is as it was when it was opened; otherwise the reason why not, in words.
    ///
    /// # Errors
    /// The file was written to.
    fn check(&self, file: usize) -> Result<(), String>;

    /// How long an op waits for an expert before it fails.
    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }
}

/// The files of a checkpoint.
pub struct Files {
    checkpoint: Arc<Checkpoint>,
    /// Handles for direct reads, `[files]`.
    direct: Vec<Option<Direct>>,
}

impl Files {
    /// Opens the files a second time, for direct reads where those are possible.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Files {
        let direct = checkpoint.files().iter().map(Direct::open).collect();
        Files { checkpoint, direct }
    }
}

impl Source for Files {
    fn read(&self, from: &Extent, is_direct: bool, room: &mut [u8]) -> Result<(), String> {
        let read = match &self.direct[from.file] {
            Some(direct) if is_direct => direct.read_at(from.offset, from.len, room),
            _ => {
                let begin = if is_direct { from.offset % BLOCK } else { 0 };
                self.checkpoint.files()[from.file].read_at(from.offset, &mut room[begin..begin + from.len])
            }
        };
        read.map_err(|error| match error {
            Error::Read { source, .. } => source.to_string(),
            error => error.to_string(),
        })
    }

    fn check(&self, file: usize) -> Result<(), String> {
        match self.checkpoint.files()[file].is_unchanged() {
            Ok(true) => Ok(()),
            Ok(false) => Err("the file was written to while in use".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}
