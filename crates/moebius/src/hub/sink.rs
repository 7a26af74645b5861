//! A file that is coming: its bytes go to the disk and into its hash.

use std::fs;
use std::io::{Seek, SeekFrom, Write};

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use ring::digest;

use super::{File, Hash};

/// The hash of what has come.
pub(super) struct Sum {
    context: digest::Context,
}

impl Sum {
    pub fn new(file: &File) -> Sum {
        let context = match &file.hash {
            Hash::Sha256(_) => digest::Context::new(&digest::SHA256),
            Hash::Git(_) => {
                let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", file.size).as_bytes());
                context
            }
        };
        Sum { context }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    pub fn hex(self) -> String {
        self.context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A file that is coming.
pub struct Sink<'a> {
    pub(super) file: &'a File,
    pub(super) out: fs::File,
    pub(super) sum: Sum,
    pub(super) len: u64,
    pub(super) bar: &'a ProgressBar,
}

impl Sink<'_> {
    /// Bytes that are there.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.file.size
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// They are more than were announced, or cannot be written.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        ensure!(
            bytes.len() as u64 <= self.file.size - self.len,
            "it is longer than the {} bytes that the hub announced",
            self.file.size
        );
        self.out.seek(SeekFrom::Start(self.len))?;
        self.out.write_all(bytes).context("write it to the cache")?;
        self.sum.update(bytes);
        self.len += bytes.len() as u64;
        self.bar.inc(bytes.len() as u64);
        Ok(())
    }

    /// Starts anew.
    ///
    /// # Errors
    /// The file cannot be cut.
    pub fn restart(&mut self) -> Result<()> {
        self.out.set_len(0).context("write it to the cache")?;
        self.sum = Sum::new(self.file);
        self.bar.set_position(self.bar.position().saturating_sub(self.len));
        self.len = 0;
        Ok(())
    }
}
