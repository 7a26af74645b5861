//! Hugging Face's cache on disk: `models--ORG--REPO` with `blobs` by hash, `snapshots/COMMIT` with links to them, and
//! `refs` from revisions to commits. Its own programs and `find.rs` read the same.

use std::fs;
use std::io::{Read, Seek};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;

use super::File;
use super::client::Client;
use super::sink::{Sink, Sum};

/// Longest path of a file in a repository, in bytes, and its most parts.
const MAX_PATH: usize = 400;
const MAX_PARTS: usize = 8;

/// Returns whether a name from the hub stays below the folder that it is joined to.
pub fn is_plain(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    (1..=MAX_PATH).contains(&path.len())
        && path.split('/').count() <= MAX_PARTS
        && path.split('/').all(is_part)
        && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Returns whether a name is that of a thing in a folder, of characters that can be seen, and no flag of a command.
pub fn is_part(name: &str) -> bool {
    let is_another = cfg!(windows) && means_another(name);
    !["", ".", ".."].contains(&name)
        && !name.starts_with('-')
        && !name.contains(['/', '\\', ':'])
        && !is_another
        && checkpoint::visible(name) == name
}

/// Returns whether Windows takes a name for another: a device's, whatever its ending, or one that loses its end.
fn means_another(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().trim_end_matches(' ').to_uppercase();
    let is_digit = |n: &str| matches!(n.chars().collect::<Vec<_>>()[..], ['0'..='9' | '¹' | '²' | '³']);
    let is_numbered = |device| stem.strip_prefix(device).is_some_and(is_digit);
    ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$", "CLOCK$"].contains(&stem.as_str())
        || ["COM", "LPT"].into_iter().any(is_numbered)
        || name.ends_with(['.', ' '])
        || name.contains(['<', '>', '"', '|', '?', '*'])
}

/// Makes a folder inside another, part by part: others may write there, and their links lead elsewhere.
fn make_inside(root: &Path, inside: &Path) -> Result<PathBuf> {
    let mut path = root.to_path_buf();
    for part in inside.components() {
        path.push(part);
        let made = fs::create_dir(&path);
        if !fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir()) {
            made.with_context(|| format!("failed to create {}", path.display()))?;
        }
    }
    Ok(path)
}

/// Opens a file of the cache to read and write it, which is made where there is none. What is no regular file, such as
/// another's link or pipe, stays as it is.
fn open_own(path: &Path) -> Result<fs::File> {
    let mut options = fs::File::options();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags);
    }
    let file = options.open(path).with_context(|| format!("failed to create {}", path.display()))?;
    ensure!(file.metadata()?.is_file(), "failed to create {}: something else is in its place", path.display());
    Ok(file)
}

/// Bytes that are free where a folder is, where the system says so.
pub fn free(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(folder).ok()?;
        stat.f_bavail.checked_mul(stat.f_frsize)
    }
    #[cfg(windows)]
    return sys::windows::free_on_disk(folder).ok();
    #[cfg(not(any(unix, windows)))]
    {
        let _ = folder;
        None
    }
}

/// The cache.
pub struct Cache {
    hub: PathBuf,
}

/// A repository in it.
pub struct Repository {
    folder: PathBuf,
    locks: PathBuf,
}

impl Cache {
    pub fn new(hub: PathBuf) -> Cache {
        Cache { hub }
    }

    /// Returns a repository's folder, which is made.
    pub fn repository(&self, repo: &str) -> Result<Repository> {
        let name = format!("models--{}", repo.replace('/', "--"));
        let folder = self.hub.join(&name);
        fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
        make_inside(&folder, Path::new("blobs"))?;
        let locks = make_inside(&self.hub, &Path::new(".locks").join(&name))?;
        Ok(Repository { folder, locks })
    }
}

impl Repository {
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn blob(&self, file: &File) -> PathBuf {
        self.folder.join("blobs").join(file.hash.hex())
    }

    fn unfinished(&self, file: &File) -> PathBuf {
        self.folder.join("blobs").join(format!("{}.incomplete", file.hash.hex()))
    }

    /// Returns whether a file is there in whole.
    pub fn has(&self, file: &File) -> bool {
        fs::symlink_metadata(self.blob(file)).is_ok_and(|meta| meta.is_file() && meta.len() == file.size)
    }

    /// Bytes of a file that are there from an earlier time.
    pub fn partial(&self, file: &File) -> u64 {
        fs::symlink_metadata(self.unfinished(file)).map_or(0, |meta| meta.len()).min(file.size)
    }

    /// Fetches a file, from where an earlier time ended, and gives it its name when it is what was announced.
    ///
    /// # Errors
    /// It does not come, or is something else; then nothing of it stays.
    pub fn store(&self, file: &File, client: &Client, path: &str, bar: &ProgressBar) -> Result<()> {
        let lock = self.locks.join(format!("{}.lock", file.hash.hex()));
        let lock = open_own(&lock)?;
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            bail!("another program is fetching it");
        }
        let unfinished = self.unfinished(file);
        let shown = || unfinished.display().to_string();
        let mut out = open_own(&unfinished)?;
        let mut have = out.metadata()?.len();
        if have > file.size {
            out.set_len(0)?;
            have = 0;
        }
        // What is there counts as fetched as soon as it was read again for the hash.
        let mut sum = Sum::new(file);
        out.rewind()?;
        let mut piece = vec![0; 1 << 20];
        let mut left = have;
        while left > 0 {
            let n = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            out.read_exact(&mut piece[..n]).with_context(|| format!("failed to read {}", shown()))?;
            sum.update(&piece[..n]);
            left -= n as u64;
        }
        let mut sink = Sink { file, out, sum, len: have, bar };
        client.download(path, &mut sink)?;
        let Sink { out, sum, len, .. } = sink;
        ensure!(len == file.size, "it ended after {len} of {} bytes", file.size);
        let found = sum.hex();
        if found != file.hash.hex() {
            // Nothing of it can be trusted.
            drop(out);
            fs::remove_file(&unfinished).with_context(|| format!("failed to remove {}", shown()))?;
            bail!("its hash is {found}, the hub announced {}", file.hash.hex());
        }
        out.sync_all().with_context(|| format!("failed to write {}", shown()))?;
        let blob = self.blob(file);
        fs::rename(&unfinished, &blob).with_context(|| format!("failed to create {}", blob.display()))
    }

    /// Makes the links of a commit's files; the path of the first.
    pub fn link(&self, commit: &str, files: &[&File]) -> Result<PathBuf> {
        let inside = Path::new("snapshots").join(commit);
        let snapshot = self.folder.join(&inside);
        for file in files {
            let link = snapshot.join(&file.path);
            make_inside(&self.folder, inside.join(&file.path).parent().context("a file has no folder")?)?;
            let blob = self.blob(file);
            if fs::canonicalize(&link).ok().is_some_and(|there| fs::canonicalize(&blob).is_ok_and(|b| b == there)) {
                continue;
            }
            if fs::symlink_metadata(&link).is_ok() {
                fs::remove_file(&link).with_context(|| format!("failed to replace {}", link.display()))?;
            }
            // Relative, so that the cache can be moved.
            let up = "../".repeat(2 + file.path.matches('/').count());
            link_to(&blob, Path::new(&format!("{up}blobs/{}", file.hash.hex())), &link)
                .with_context(|| format!("failed to create {}", link.display()))?;
        }
        Ok(snapshot.join(&files[0].path))
    }

    /// Says which commit a revision is.
    pub fn point(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let inside = Path::new("refs").join(revision);
        let path = self.folder.join(&inside);
        make_inside(&self.folder, inside.parent().context("a revision has no folder")?)?;
        if fs::symlink_metadata(&path).is_ok_and(|meta| !meta.is_file()) {
            fs::remove_file(&path).with_context(|| format!("failed to replace {}", path.display()))?;
        }
        crate::out::file(&path, |out| out.write_all(commit.as_bytes()))
    }
}

#[cfg(unix)]
fn link_to(_: &Path, relative: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(relative, link)
}

/// Links want a right that few have there; a second name of the file wants none. File systems without second names,
/// such as exFAT, get a copy.
#[cfg(not(unix))]
fn link_to(blob: &Path, _: &Path, link: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, link).or_else(|_| fs::copy(blob, link).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_windows_takes_for_others() {
        for name in ["nul", "Con.gguf", "com1", "LPT9.tar.gz", "COM¹", "aux .json", "a.", "a ", "a*b", "CONIN$"] {
            assert!(means_another(name), "{name}");
            assert_eq!(is_part(name), !cfg!(windows), "{name}");
        }
        for name in ["model.gguf", "console", "com10", "COM", "null.json", ".nul", "a b.gguf", "lpt"] {
            assert!(!means_another(name) && is_part(name), "{name}");
        }
    }
}
