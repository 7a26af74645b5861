//! The folder that the frontend reads of a model: its own, or one into which the texts of a GGUF file are written.
//!
//! Workers of one model are only joined where the folder has one path for all, so that its name follows from what is
//! in it.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use dynamo_kv_router::protocols::compute_block_hash;
use moebius::local::tokens::{Texts, texts};

/// Returns the folder of a model, of the built-in one where none is given. The texts of a GGUF file are written into
/// `given`, else into a folder of the user's in the system's folder for temporary files.
///
/// # Errors
/// The model cannot be opened, its tokenizer has no such form, or writing fails.
pub fn folder(model: Option<&Path>, given: Option<&Path>) -> Result<PathBuf> {
    let files = match texts(model)? {
        Texts::Folder(own) => return Ok(own),
        Texts::Files(files) => files,
    };
    let folder = match given {
        Some(given) => {
            fs::create_dir_all(given).with_context(|| format!("failed to make {}", given.display()))?;
            given.to_path_buf()
        }
        None => {
            let all: Vec<&str> = files.iter().flat_map(|(name, text)| [*name, text]).collect();
            let folder = private()?.join(format!("{:016x}", compute_block_hash(all.concat().as_bytes()).0));
            fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
            folder
        }
    };
    for (name, text) in files {
        // Another worker may read it at the same time.
        let (path, new) = (folder.join(name), folder.join(format!(".{name}.{}", std::process::id())));
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &path));
        written.with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(folder)
}

/// Returns a folder that no other user can write to, under a name that is the same on every machine.
fn private() -> Result<PathBuf> {
    let own = fs::metadata("/proc/self").context("failed to find the user's number")?.uid();
    let path = std::env::temp_dir().join(format!("moebius-dynamo-{own}"));
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
    made.with_context(|| format!("failed to make {}", path.display()))?;
    let found = fs::symlink_metadata(&path).with_context(|| format!("failed to look at {}", path.display()))?;
    let is_ours = found.is_dir() && found.uid() == own && found.mode() & 0o022 == 0;
    ensure!(is_ours, "failed to use {}: another user can write to it; name a folder with --texts", path.display());
    Ok(path)
}
