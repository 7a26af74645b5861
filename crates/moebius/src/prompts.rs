//! Prompt caches in a folder, for `serve --cache-dir`: what an engine computed of prompts survives its end.
//!
//! A file holds one page or one recurrent state, and is named after the hash of everything that its bytes depend on
//! (`<identity>/<key>.page`). A thread writes behind the engine, first under another name, so that several servers
//! share a folder; it keeps the folder below its bound, the files that were used least recently going first. What is
//! read is checked: type, length, name and a checksum. No name comes from a file, and nothing is deleted that is not
//! named like a file of this module.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use checkpoint::Checkpoint;
use engine::scheduler::{Key, Part, PromptStore};
use model::plan::Plan;
use ring::digest;

use crate::version;

/// How a file begins; the last byte is the form's number.
const MAGIC: [u8; 8] = *b"moebius\x01";
/// Magic, identity, key, and the checksum of those and the bytes behind them.
const HEADER_BYTES: usize = 8 + 32 + 32 + 32;
/// Maximum number of pieces that wait to be written.
const MAX_WAITING: usize = 2;
/// Maximum number of pieces in memory, those that are read included.
pub const MAX_BUFFERS: usize = MAX_WAITING + 1;
/// File that names tokens of images.
const SECRET: &str = "images.secret";
/// After an error nothing is written for so long.
const PAUSE: Duration = Duration::from_secs(30);
/// Temporary files of this age are nobody's.
const STALE: Duration = Duration::from_secs(600);

/// A folder of prompt caches, as the user has named it.
#[derive(Clone, Debug)]
pub struct Folder {
    pub path: PathBuf,
    /// Maximum length of all its files together, of all models and servers.
    pub max_bytes: u64,
}

/// Returns what the bytes of a cache depend on, but for their sizes: the version that computed them, the model, and how
/// (`how` names backend and cache type). Of weights it reads some bytes of every tensor.
///
/// # Errors
/// A file of the model cannot be read.
pub fn identity(checkpoint: &Checkpoint, plan: &Plan, how: &str) -> Result<[u8; 32]> {
    const SAMPLE: usize = 64;
    let mut text = format!("{} {how} {} {:?}\n", version::short(), plan.arch, cfg!(target_endian = "big"));
    for (key, value) in checkpoint.meta().iter() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key} {value:?}");
    }
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(text.as_bytes());
    checkpoint.files().iter().for_each(|file| hash.update(&file.size().to_le_bytes()));
    for tensor in checkpoint.tensors() {
        hash.update(format!("{} {:?} {:?}\n", tensor.name, tensor.shape, tensor.dtype).as_bytes());
        for plane in tensor.extents().iter() {
            for at in [0, plane.len / 2] {
                let mut sample = vec![0; SAMPLE.min(plane.len - at)];
                checkpoint.files()[plane.file].read_at(plane.offset + at, &mut sample)?;
                hash.update(&sample);
            }
        }
    }
    Ok(sum(hash))
}

/// The files of one model in a folder.
pub struct Files {
    identity: [u8; 32],
    folder: PathBuf,
    /// Files that were found damaged: they count as absent, and are written again.
    damaged: HashSet<PathBuf>,
    /// Files behind a damaged one are not read: what is computed in their place is written, whatever they are.
    has_damage: bool,
    work: Option<mpsc::Sender<Work>>,
    waiting: Arc<AtomicUsize>,
    /// Buffers whose contents are written.
    spare: mpsc::Receiver<Vec<u8>>,
    writer: Option<JoinHandle<()>>,
}

enum Work {
    Store { path: PathBuf, header: Vec<u8>, bytes: Vec<u8> },
    Used(Vec<Key>),
}

impl Folder {
    /// Returns the files of a model, and a thread that writes them.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn open(&self, identity: [u8; 32]) -> Result<Files> {
        ensure!(!self.path.as_os_str().is_empty(), "use a folder for prompt caches: its name is empty");
        let folder = self.path.join(&hex(&identity)[..16]);
        private_folder(&folder).with_context(|| format!("failed to make the folder {}", folder.display()))?;
        let (work, inbox) = mpsc::channel();
        let (returned, spare) = mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let mut writer = Writer {
            root: self.path.clone(),
            folder: folder.clone(),
            max_bytes: self.max_bytes,
            total: None,
            paused: None,
            has_warned: false,
        };
        let left = waiting.clone();
        let thread = std::thread::Builder::new().name("prompts".into()).spawn(move || {
            for work in inbox {
                match work {
                    Work::Store { path, header, bytes } => {
                        writer.store(&path, &header, &bytes);
                        left.fetch_sub(1, Ordering::Release);
                        // Nobody may want it any more.
                        let _ = returned.send(bytes);
                    }
                    Work::Used(keys) => writer.used(&keys),
                }
            }
        });
        let writer = Some(thread.context("failed to start the thread that writes prompt caches")?);
        Ok(Files {
            identity,
            folder,
            damaged: HashSet::new(),
            has_damage: false,
            work: Some(work),
            waiting,
            spare,
            writer,
        })
    }
}

impl PromptStore for Files {
    fn has(&mut self, key: &Key, part: Part) -> bool {
        let path = self.folder.join(name(key, part));
        !self.damaged.contains(&path) && fs::symlink_metadata(&path).is_ok_and(|file| file.is_file())
    }

    fn is_stored(&mut self, key: &Key, part: Part) -> bool {
        !self.has_damage && self.has(key, part)
    }

    fn load(&mut self, key: &Key, part: Part, n_bytes: usize, out: &mut Vec<u8>) -> bool {
        let path = self.folder.join(name(key, part));
        match read(&path, &header(&self.identity, key), n_bytes, out) {
            Ok(()) => true,
            // Another server has evicted it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "ignoring a stored prompt cache");
                self.damaged.insert(path);
                self.has_damage = true;
                false
            }
        }
    }

    fn buffer(&mut self) -> Option<Vec<u8>> {
        if self.waiting.load(Ordering::Acquire) >= MAX_WAITING {
            return None;
        }
        let mut buffer = self.spare.try_recv().unwrap_or_default();
        buffer.clear();
        Some(buffer)
    }

    fn store(&mut self, key: Key, part: Part, bytes: Vec<u8>) {
        let path = self.folder.join(name(&key, part));
        self.damaged.remove(&path);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.send(Work::Store { path, header: header(&self.identity, &key), bytes });
    }

    fn used(&mut self, keys: Vec<Key>) {
        self.send(Work::Used(keys));
    }

    fn secret(&mut self) -> [u8; 32] {
        let path = self.folder.join(SECRET);
        let read = || -> io::Result<[u8; 32]> {
            let mut bytes = Vec::new();
            open_plain(OpenOptions::new().read(true), &path)?.take(33).read_to_end(&mut bytes)?;
            bytes.try_into().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "its length is wrong"))
        };
        if let Ok(secret) = read() {
            return secret;
        }
        let secret = engine::scheduler::secret();
        match write(&self.folder, &path, &[&secret]).and_then(|()| read()) {
            Ok(secret) => secret,
            Err(error) => {
                // Without the file, prompts with images are computed again after a restart.
                tracing::warn!(file = %path.display(), %error, "failed to keep the secret of images");
                secret
            }
        }
    }
}

impl Files {
    fn send(&self, work: Work) {
        // A thread that is gone writes nothing any more, and nobody waits for it.
        let _ = self.work.as_ref().map(|inbox| inbox.send(work));
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        drop(self.work.take());
        if self.writer.take().is_some_and(|writer| writer.join().is_err()) {
            tracing::error!("the thread that writes prompt caches failed");
        }
    }
}

/// The thread that writes.
struct Writer {
    /// The user's folder, which is bounded.
    root: PathBuf,
    /// This model's.
    folder: PathBuf,
    max_bytes: u64,
    /// Length of all files when they were last counted, and of what was written since.
    total: Option<Total>,
    paused: Option<Instant>,
    has_warned: bool,
}

#[derive(Clone, Copy)]
struct Total {
    counted: u64,
    written: u64,
}

impl Writer {
    fn store(&mut self, path: &Path, header: &[u8], bytes: &[u8]) {
        if self.paused.is_some_and(|since| since.elapsed() < PAUSE) {
            return;
        }
        self.paused = None;
        if let Err(error) = self.try_store(path, header, bytes) {
            self.paused = Some(Instant::now());
            if !std::mem::replace(&mut self.has_warned, true) {
                tracing::warn!(file = %path.display(), %error, "failed to store a prompt cache");
            }
        }
    }

    fn try_store(&mut self, path: &Path, header: &[u8], bytes: &[u8]) -> io::Result<()> {
        let len = (header.len() + 32 + bytes.len()) as u64;
        if len > self.max_bytes {
            return Ok(());
        }
        self.make_room(len);
        write(&self.folder, path, &[header, &checksum(header, bytes), bytes])
    }

    /// Removes files until `len` more bytes keep below the bound. Others write too: everything is counted again when a
    /// 64th of the bound was written.
    fn make_room(&mut self, len: u64) {
        let known = self.total.filter(|t| t.written.saturating_add(len) <= self.max_bytes / 64);
        if let Some(total) = known.filter(|t| t.counted + t.written + len <= self.max_bytes) {
            self.total = Some(Total { written: total.written + len, ..total });
            return;
        }
        let mut files = files(&self.root);
        files.sort_by_key(|file| file.used);
        let mut counted: u64 = files.iter().map(|file| file.len).sum();
        if counted + len > self.max_bytes {
            // Some more, so that not every file costs a count.
            let aim = (self.max_bytes - self.max_bytes / 16).saturating_sub(len);
            for file in files {
                if counted <= aim {
                    break;
                }
                // Another server may have been faster.
                let _ = fs::remove_file(&file.path);
                counted -= file.len;
            }
        }
        self.total = Some(Total { counted, written: len });
    }

    /// Marks the files of a prompt as used now, the last block a little before those that it needs.
    fn used(&self, keys: &[Key]) {
        let now = SystemTime::now();
        for (i, key) in (0..).zip(keys) {
            let time = now - Duration::from_micros(i);
            for part in [Part::Page, Part::Window, Part::State] {
                // Not every block has every part, and not every one is there.
                let file = open_plain(OpenOptions::new().append(true), &self.folder.join(name(key, part)));
                let _ = file.and_then(|file| file.set_modified(time));
            }
        }
    }
}

struct Found {
    path: PathBuf,
    len: u64,
    used: SystemTime,
}

/// Returns the files of this module in a folder of any models. Stale temporary ones are removed.
fn files(root: &Path) -> Vec<Found> {
    let mut found = Vec::new();
    let is_hex = |name: &str, n: usize| name.len() == n && name.bytes().all(|b| b.is_ascii_hexdigit());
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    for folder in entries(root) {
        // A link would lead to files that are not ours.
        let is_folder = folder.file_type().is_ok_and(|kind| kind.is_dir());
        if !is_folder || !folder.file_name().to_str().is_some_and(|name| is_hex(name, 16)) {
            continue;
        }
        for entry in entries(&folder.path()) {
            let (file_name, Ok(data)) = (entry.file_name(), entry.metadata()) else { continue };
            let Some((stem, ending)) = file_name.to_str().and_then(|name| name.split_once('.')) else { continue };
            let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let is_temporary = ending == "tmp" && stem.bytes().all(|b| b.is_ascii_digit() || b == b'-');
            if !data.is_file() || !(is_temporary || is_hex(stem, 64) && ENDINGS.contains(&ending)) {
                continue;
            }
            if is_temporary && used.elapsed().is_ok_and(|age| age > STALE) && fs::remove_file(entry.path()).is_ok() {
                continue;
            }
            found.push(Found { path: entry.path(), len: data.len(), used });
        }
    }
    found
}

const ENDINGS: [&str; 3] = ["page", "window", "state"];

fn name(key: &Key, part: Part) -> String {
    let ending = match part {
        Part::Page => ENDINGS[0],
        Part::Window => ENDINGS[1],
        Part::State => ENDINGS[2],
    };
    format!("{}.{ending}", hex(&key.0))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns all of a header but the checksum.
fn header(identity: &[u8; 32], key: &Key) -> Vec<u8> {
    [&MAGIC[..], identity, &key.0].concat()
}

fn sum(hash: digest::Context) -> [u8; 32] {
    let mut sum = [0; 32];
    sum.copy_from_slice(hash.finish().as_ref());
    sum
}

/// Writes a file that only its owner reads, whole or not at all.
fn write(folder: &Path, path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!("{}-{number}.tmp", std::process::id()));
    // The folder may have been emptied by its owner.
    private_folder(folder)?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&temporary)?;
    let written = pieces.iter().try_for_each(|piece| file.write_all(piece));
    drop(file);
    let written = written.and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // What is half written is of no use; where it cannot be removed it is found as stale.
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn checksum(header: &[u8], bytes: &[u8]) -> [u8; 32] {
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(header);
    hash.update(bytes);
    sum(hash)
}

/// Reads a file that has this header and `n_bytes` behind the checksum.
fn read(path: &Path, header: &[u8], n_bytes: usize, out: &mut Vec<u8>) -> io::Result<()> {
    let bad = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut file = open_plain(OpenOptions::new().read(true), path)?;
    let (data, expected) = (file.metadata()?, (HEADER_BYTES + n_bytes) as u64);
    if data.len() != expected {
        return Err(bad(format!("it has {} bytes, {expected} are expected", data.len())));
    }
    let mut start = [0; HEADER_BYTES];
    file.read_exact(&mut start)?;
    let (found, sum) = start.split_at(header.len());
    if found != header {
        return Err(bad("it is another file's copy, or of another version".into()));
    }
    // Its length was seen; a file that has grown since is damaged.
    out.reserve(n_bytes);
    let n = file.take(n_bytes as u64 + 1).read_to_end(out)?;
    if n != n_bytes || checksum(header, out) != *sum {
        return Err(bad("its checksum is wrong".into()));
    }
    Ok(())
}

/// Opens a regular file. Others may have put a link in its place, or a pipe that would be waited for.
fn open_plain(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags);
    }
    let file = options.open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no regular file")),
    }
}

/// Makes a folder that only its owner reads: prompts can be guessed from what is stored of them.
fn private_folder(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => return Err(io::Error::new(io::ErrorKind::NotADirectory, "a link or a file is in its place")),
        Err(_) => {}
    }
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1000;

    fn key(n: u8) -> Key {
        Key([n; 32])
    }

    fn open(path: &Path, max_bytes: u64) -> Files {
        Folder { path: path.into(), max_bytes }.open([7; 32]).unwrap()
    }

    fn store(files: &mut Files, n: u8) {
        let mut bytes = loop {
            match files.buffer() {
                Some(buffer) => break buffer,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        bytes.resize(BYTES, n);
        files.store(key(n), Part::Page, bytes);
    }

    fn load(files: &mut Files, n: u8) -> bool {
        let mut bytes = Vec::new();
        let found = files.load(&key(n), Part::Page, BYTES, &mut bytes);
        assert!(!found || bytes == [n; BYTES]);
        found
    }

    #[test]
    fn what_is_damaged_or_foreign_is_ignored_and_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = open(folder.path(), 1 << 20);
        (1..9).for_each(|n| store(&mut files, n));
        drop(files);
        let path = |n: u8| folder.path().join(&hex(&[7; 32])[..16]).join(name(&key(n), Part::Page));
        let whole = fs::read(path(1)).unwrap();
        let flipped = |at: usize| [&whole[..at], &[whole[at] ^ 1], &whole[at + 1..]].concat();
        fs::write(path(1), &whole[..whole.len() - 1]).unwrap();
        fs::write(path(2), flipped(3)).unwrap();
        fs::write(path(3), flipped(80)).unwrap();
        fs::write(path(4), flipped(whole.len() - 1)).unwrap();
        fs::rename(path(6), path(5)).unwrap();
        fs::write(path(6), b"not one of them").unwrap();
        fs::write(path(7), [&whole[..], b"more"].concat()).unwrap();
        let foreign = folder.path().join("notes.txt");
        fs::write(&foreign, "mine").unwrap();
        let mut files = open(folder.path(), 1 << 20);
        for n in 1..8 {
            assert!(files.has(&key(n), Part::Page) && !load(&mut files, n), "file {n}");
            assert!(!files.has(&key(n), Part::Page), "file {n}");
        }
        assert!(load(&mut files, 8));
        (1..8).for_each(|n| store(&mut files, n));
        drop(files);
        let mut files = open(folder.path(), 1 << 20);
        assert!((1..9).all(|n| load(&mut files, n)));
        // Another model finds nothing.
        let mut others = Folder { path: folder.path().into(), max_bytes: 1 << 20 }.open([8; 32]).unwrap();
        assert!((1..9).all(|n| !others.has(&key(n), Part::Page) && !load(&mut others, n)));
        assert_eq!(fs::read_to_string(foreign).unwrap(), "mine");
    }

    #[test]
    fn the_folder_keeps_below_its_bound_and_what_was_used_last() {
        let folder = tempfile::tempdir().unwrap();
        let max_bytes = 20 * (BYTES + HEADER_BYTES) as u64;
        let notes = folder.path().join("0123456789abcdef");
        fs::create_dir(&notes).unwrap();
        fs::write(notes.join("notes.page"), vec![0; 1 << 20]).unwrap();
        for n in 0..60 {
            let mut files = open(folder.path(), max_bytes);
            store(&mut files, n);
            files.used(vec![key(0), key(1)]);
            drop(files);
            let found = super::files(folder.path());
            assert!(found.iter().map(|file| file.len).sum::<u64>() <= max_bytes, "after {n}");
        }
        let mut files = open(folder.path(), max_bytes);
        assert!([0, 1, 58, 59].into_iter().all(|n| load(&mut files, n)) && !load(&mut files, 2));
        assert!(notes.join("notes.page").exists());
    }

    /// Pipes, links and devices in the places of files and folders: nothing waits, and nothing outside is touched.
    #[cfg(unix)]
    #[test]
    fn what_is_no_file_of_ours_is_neither_waited_for_nor_followed() {
        use std::os::unix::fs::symlink;
        let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let place = |n: u8| folder.path().join(&hex(&[7; 32])[..16]).join(name(&key(n), Part::Page));
        let mut files = open(folder.path(), 1 << 20);
        (1..5).for_each(|n| store(&mut files, n));
        drop(files);
        let whole = outside.path().join("whole");
        fs::rename(place(2), &whole).unwrap();
        symlink(&whole, place(2)).unwrap();
        fs::remove_file(place(1)).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(place(1)).status().unwrap().success());
        let old = fs::metadata(&whole).unwrap().modified().unwrap();
        let mut files = open(folder.path(), 1 << 20);
        files.used((1..5).map(key).collect());
        assert!(!load(&mut files, 1) && !load(&mut files, 2) && load(&mut files, 3));
        drop(files);
        assert_eq!(fs::metadata(&whole).unwrap().modified().unwrap(), old);
        // A folder of ours that leads elsewhere.
        let foreign = outside.path().join(format!("{}.page", "a".repeat(64)));
        fs::write(&foreign, vec![0; 1 << 20]).unwrap();
        symlink(outside.path(), folder.path().join("0123456789abcdef")).unwrap();
        let mut files = open(folder.path(), 3 * (BYTES + HEADER_BYTES) as u64);
        (5..9).for_each(|n| store(&mut files, n));
        drop(files);
        assert!(foreign.exists());
        symlink(outside.path(), folder.path().join(&hex(&[9; 32])[..16])).unwrap();
        let open = |path: &Path, identity| Folder { path: path.into(), max_bytes: 1 << 20 }.open(identity).map(drop);
        assert!(open(folder.path(), [9; 32]).is_err_and(|why| format!("{why:#}").contains("a link or a file")));
        assert!(open(Path::new(""), [7; 32]).is_err_and(|why| why.to_string().contains("its name is empty")));
    }

    #[test]
    fn servers_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for server in 0..4 {
                let path = folder.path();
                scope.spawn(move || {
                    let mut files = open(path, 1 << 20);
                    // Each has files of its own, and all write the same ones.
                    (0..20).for_each(|n| store(&mut files, 100 + n));
                    (0..20).for_each(|n| store(&mut files, 20 * server + n));
                });
            }
        });
        let mut files = open(folder.path(), 1 << 20);
        assert!((0..80).chain(100..120).all(|n| load(&mut files, n)));
        assert!(super::files(folder.path()).iter().all(|file| file.path.extension().unwrap() == "page"));
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_nothing_but_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = open(folder.path(), 1 << 20);
        let mine = files.folder.clone();
        fs::remove_dir(&mine).unwrap();
        fs::write(&mine, "in the way").unwrap();
        (0..5).for_each(|n| store(&mut files, n));
        files.used(vec![key(1)]);
        assert!(!load(&mut files, 1));
    }
}
