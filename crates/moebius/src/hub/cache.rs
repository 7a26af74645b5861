//! Hugging Face's cache on disk: `models--ORG--REPO` with `blobs` by hash, `snapshots/COMMIT` with links to them, and
//! `refs` from revisions to commits. Its own programs and `find.rs` read the same.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use ring::digest;

use super::client::Client;
use super::{File, Hash};

/// Longest path of a file in a repository, in bytes, and its most parts.
const MAX_PATH: usize = 400;
const MAX_PARTS: usize = 8;

/// Whether a name from the hub stays below the folder that it is joined to.
pub fn is_plain(path: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part != "."
            && part != ".."
            && !part.contains(['\\', ':'])
            && !part.contains(char::is_control)
    };
    let mut parts = Path::new(path).components();
    (1..=MAX_PATH).contains(&path.len())
        && path.split('/').count() <= MAX_PARTS
        && path.split('/').all(is_part)
        && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Bytes that are free where a folder is, where the system says so.
pub fn free(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(folder).ok()?;
        stat.f_bavail.checked_mul(stat.f_frsize)
    }
    #[cfg(not(unix))]
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

    /// A repository's folder, which is made.
    pub fn repository(&self, repo: &str) -> Result<Repository> {
        let name = format!("models--{}", repo.replace('/', "--"));
        let (folder, locks) = (self.hub.join(&name), self.hub.join(".locks").join(&name));
        for folder in [&folder.join("blobs"), &locks] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
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

    /// Whether a file is there in whole.
    pub fn has(&self, file: &File) -> bool {
        fs::metadata(self.blob(file)).is_ok_and(|meta| meta.is_file() && meta.len() == file.size)
    }

    /// Bytes of a file that are there from an earlier time.
    pub fn partial(&self, file: &File) -> u64 {
        fs::metadata(self.unfinished(file)).map_or(0, |meta| meta.len()).min(file.size)
    }

    /// Fetches a file, from where an earlier time ended, and gives it its name when it is what was announced.
    ///
    /// # Errors
    /// It does not come, or is something else; then nothing of it stays.
    pub fn store(&self, file: &File, client: &Client, path: &str, bar: &ProgressBar) -> Result<()> {
        let lock = self.locks.join(format!("{}.lock", file.hash.hex()));
        let lock = fs::File::create(&lock).with_context(|| format!("create {}", lock.display()))?;
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            bail!("another program is fetching it");
        }
        let unfinished = self.unfinished(file);
        let shown = || unfinished.display().to_string();
        let open = fs::File::options().read(true).write(true).create(true).truncate(false).open(&unfinished);
        let mut out = open.with_context(|| format!("create {}", shown()))?;
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
            out.read_exact(&mut piece[..n]).with_context(|| format!("read {}", shown()))?;
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
            fs::remove_file(&unfinished).with_context(|| format!("remove {}", shown()))?;
            bail!("its hash is {found}, the hub announced {}", file.hash.hex());
        }
        out.sync_all().with_context(|| format!("write {}", shown()))?;
        let blob = self.blob(file);
        fs::rename(&unfinished, &blob).with_context(|| format!("create {}", blob.display()))
    }

    /// Makes the links of a commit's files; the path of the first.
    pub fn link(&self, commit: &str, files: &[&File]) -> Result<PathBuf> {
        let snapshot = self.folder.join("snapshots").join(commit);
        for file in files {
            let link = snapshot.join(&file.path);
            let parent = link.parent().context("a file has no folder")?;
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
            let blob = self.blob(file);
            if fs::canonicalize(&link).ok().is_some_and(|there| fs::canonicalize(&blob).is_ok_and(|b| b == there)) {
                continue;
            }
            if fs::symlink_metadata(&link).is_ok() {
                fs::remove_file(&link).with_context(|| format!("replace {}", link.display()))?;
            }
            // Relative, so that the cache can be moved.
            let up = "../".repeat(2 + file.path.matches('/').count());
            link_to(&blob, Path::new(&format!("{up}blobs/{}", file.hash.hex())), &link)
                .with_context(|| format!("create {}", link.display()))?;
        }
        Ok(snapshot.join(&files[0].path))
    }

    /// Says which commit a revision is.
    pub fn point(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        }
        crate::out::file(&path, |out| out.write_all(commit.as_bytes()))
    }
}

#[cfg(unix)]
fn link_to(_: &Path, relative: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(relative, link)
}

/// Links want a right that few have there; a second name of the file wants none.
#[cfg(not(unix))]
fn link_to(blob: &Path, _: &Path, link: &Path) -> std::io::Result<()> {
    fs::hard_link(blob, link)
}

/// The hash of what has come.
struct Sum {
    context: digest::Context,
}

impl Sum {
    fn new(file: &File) -> Sum {
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

    fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    fn hex(self) -> String {
        self.context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A file that is coming.
pub struct Sink<'a> {
    file: &'a File,
    out: fs::File,
    sum: Sum,
    len: u64,
    bar: &'a ProgressBar,
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
