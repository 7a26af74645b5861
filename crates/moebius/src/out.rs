//! All that commands write: results to stdout, notes to stderr, files.
//!
//! Nothing here panics when a stream is closed or full, and nothing that came out of a file reaches the terminal as a
//! control sequence or as a character that cannot be seen.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use checkpoint::visible;

/// Writes lines to stdout, as [`line()`] does.
macro_rules! say {
    ($($arg:tt)*) => { $crate::out::line(&format!($($arg)*)) };
}

/// Writes a note to stderr, as [`write_note`] does.
macro_rules! note {
    ($($arg:tt)*) => { $crate::out::write_note(&format!($($arg)*)) };
}

pub(crate) use {note, say};

/// Stdout, whose errors say that it is stdout.
pub struct Out(io::StdoutLock<'static>);

impl Out {
    pub fn lock() -> Out {
        Out(io::stdout().lock())
    }

    pub fn is_terminal(&self) -> bool {
        self.0.is_terminal()
    }

    /// Writes a text as it is; to a terminal, with control characters other than line breaks and tabs escaped.
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
        match self.is_terminal() && text.contains(is_control) {
            true => text.chars().try_for_each(|c| match is_control(c) {
                true => write!(self, "{}", c.escape_default()),
                false => write!(self, "{c}"),
            }),
            false => self.write_all(text.as_bytes()),
        }
    }
}

/// Returns the same kind of error, which says where it happened.
pub fn at_stdout(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("failed to write to stdout: {error}"))
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(at_stdout)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(at_stdout)
    }
}

/// Writes lines to stdout, with everything in them made visible.
pub fn line(text: &str) -> Result<()> {
    let mut out = Out::lock();
    Ok(text.split('\n').try_for_each(|line| writeln!(out, "{}", visible(line)))?)
}

/// Writes a text to stdout, as [`Out::text`] does.
pub fn text(text: &str) -> Result<()> {
    Ok(Out::lock().text(text)?)
}

/// JSON for stdout: what cannot be seen is escaped, so that it is the same data on any terminal.
pub fn json(text: &str) -> String {
    let mut units = [0; 2];
    // Such characters stand in strings alone.
    let is_seen = |c: char| c == '\n' || c.is_ascii_graphic() || visible(c.encode_utf8(&mut [0; 4])).starts_with(c);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c == ' ' || is_seen(c) {
            true => out.push(c),
            false => c.encode_utf16(&mut units).iter().for_each(|unit| out += &format!("\\u{unit:04x}")),
        }
    }
    out
}

/// Writes a value to stdout as a line of JSON.
pub fn json_line(value: &impl serde::Serialize) -> Result<()> {
    Ok(writeln!(Out::lock(), "{}", json(&serde_json::to_string(value)?))?)
}

/// Writes lines to stderr, with everything in them made visible. A note that nobody can read is no reason to fail.
pub fn write_note(text: &str) {
    let mut err = io::stderr().lock();
    let _ = text.split('\n').try_for_each(|line| writeln!(err, "{}", visible(line)));
}

/// Writes a piece of text to stderr, on a terminal without control sequences. As [`write_note`], it may be lost.
pub fn aside(text: &str) {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    let mut err = io::stderr().lock();
    let _ = text.chars().try_for_each(|c| match is_control(c) {
        true => write!(err, "{}", c.escape_default()),
        false => write!(err, "{c}"),
    });
}

/// Sends what stdout still holds. At the end of a program it would be lost without a word.
pub fn flush() -> Result<()> {
    Ok(Out::lock().flush()?)
}

/// Returns an error with its causes, each once: an error whose text ends with its cause's has said that already.
pub fn chain(error: &anyhow::Error) -> String {
    let mut out = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if out.is_empty() {
            out = cause;
        } else if !out.ends_with(&cause) {
            out = format!("{out}: {cause}");
        }
    }
    out
}

/// Returns whether a reader of stdout has seen enough (`moebius .. | head`), which is not an error.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    // Windows has one more error for it (ERROR_PIPE_NOT_CONNECTED), which std does not count.
    let is_broken =
        |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe || cfg!(windows) && e.raw_os_error() == Some(233);
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(is_broken))
}

/// The unfinished file, for who ends the program by Ctrl-C.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Removes a file that Ctrl-C left unfinished.
pub fn remove_unfinished() {
    let path = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).take();
    // It may be gone already.
    path.into_iter().for_each(|path| match path.is_dir() {
        true => _ = fs::remove_dir_all(path),
        false => _ = fs::remove_file(path),
    });
}

/// Has Ctrl-C remove the unfinished file and end the program.
pub fn remove_unfinished_when_interrupted() -> Result<()> {
    let leave = || {
        remove_unfinished();
        std::process::exit(130);
    };
    Ok(ctrlc::set_handler(leave)?)
}

/// Returns where what gets the name `path` is written until it is whole.
fn part_of(path: &Path) -> io::Result<PathBuf> {
    let mut part = std::ffi::OsString::from(".");
    part.push(path.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    part.push(format!(".{}.part", std::process::id()));
    Ok(path.with_file_name(part))
}

/// How long an unfinished file is kept.
const KEPT: Duration = Duration::from_secs(3600);

/// Removes what programs that were ended by force left of a file: old files that no program holds.
fn remove_left(path: &Path) {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else { return };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let pid = file.to_str().and_then(|file| file.strip_prefix('.')?.strip_prefix(name)?.strip_prefix('.'));
        let is_part = pid.and_then(|pid| pid.strip_suffix(".part")).is_some_and(|pid| pid.parse::<u32>().is_ok());
        let Some(of) = entry.metadata().ok().filter(|of| is_part && of.is_file()) else { continue };
        let is_old = of.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > KEPT));
        // Who writes it has a lock on it.
        if is_old && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// From now on `part` is what Ctrl-C leaves unfinished.
fn begin(part: &Path) {
    *UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner) = Some(part.to_path_buf());
}

/// What was begun has its name, or is removed.
fn end<E>(wrote: Result<(), E>) -> Result<(), E> {
    match &wrote {
        Ok(()) => _ = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).take(),
        Err(_) => remove_unfinished(),
    }
    wrote
}

/// Writes a folder that is not there yet, or is empty: `write` fills another beside it, which gets its name when it is
/// whole.
pub fn folder(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let is_empty = fs::read_dir(path).map(|mut entries| entries.next().is_none()).unwrap_or(false);
    anyhow::ensure!(
        is_empty || fs::symlink_metadata(path).is_err(),
        "failed to write {}: it exists already",
        path.display()
    );
    let part = part_of(path).with_context(|| format!("failed to write {}: it is not a file name", path.display()))?;
    fs::create_dir(&part).with_context(|| format!("failed to create {}", part.display()))?;
    begin(&part);
    end(write(&part).and_then(|()| {
        // An empty folder makes way.
        let _ = fs::remove_dir(path);
        fs::rename(&part, path).with_context(|| format!("failed to write {}", path.display()))
    }))
}

/// Writes several files, of which one is wanted: `choose` writes them into a folder beside `path` and says which gets
/// that name. The folder goes in any case.
pub fn chosen(path: &Path, choose: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<()> {
    let at = || format!("failed to write {}", path.display());
    let (path, permissions) = match fs::metadata(path) {
        Ok(found) => {
            anyhow::ensure!(found.is_file(), "{}: it is not a file", at());
            (fs::canonicalize(path).with_context(at)?, Some(found.permissions()))
        }
        Err(_) => (path.to_path_buf(), None),
    };
    let folder = part_of(&path).with_context(at)?;
    fs::create_dir(&folder).with_context(at)?;
    begin(&folder);
    let wrote = choose(&folder).and_then(|chosen| {
        let file = File::options().write(true).open(&chosen).with_context(at)?;
        permissions.map_or(Ok(()), |permissions| file.set_permissions(permissions)).with_context(at)?;
        file.sync_all().with_context(at)?;
        fs::rename(&chosen, &path).with_context(at)
    });
    remove_unfinished();
    wrote
}

/// Writes a file. One that is there is replaced when the new one is whole, through links, and keeps its permissions;
/// what is no regular file (a pipe, a device) is written in place.
pub fn file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let wrote = match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            let opened = File::options().write(true).open(path);
            opened.and_then(|file| whole(file, write).map(drop))
        }
        Ok(found) => fs::canonicalize(path).and_then(|path| replace(&path, Some(found.permissions()), write)),
        // A link to nothing becomes a link to the new file.
        Err(_) if fs::symlink_metadata(path).is_ok() => {
            File::create(path).and_then(|file| whole(file, write).map(drop))
        }
        Err(_) => replace(path, None, write),
    };
    wrote.with_context(|| format!("failed to write {}", path.display()))
}

/// Writes all and sends it.
fn whole(file: File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<File> {
    let mut out = io::BufWriter::new(file);
    write(&mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)
}

/// Writes a file beside `path` and gives it that name when it is whole.
fn replace(
    path: &Path,
    permissions: Option<fs::Permissions>,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let part = part_of(path)?;
    remove_left(path);
    let file = File::options().write(true).create_new(true).open(&part)?;
    // Where files have no locks, nothing is removed.
    let _ = file.try_lock();
    begin(&part);
    let wrote = whole(file, write).and_then(|file| {
        permissions.map_or(Ok(()), |permissions| file.set_permissions(permissions))?;
        // The name must not reach the disk before the bytes do.
        file.sync_all()
    });
    end(wrote.and_then(|()| fs::rename(&part, path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once() {
        let io = || io::Error::new(io::ErrorKind::NotFound, "no such file");
        let cases = [
            (anyhow::Error::new(io()).context("failed to read a.txt"), "failed to read a.txt: no such file"),
            (
                anyhow::Error::new(io()).context("failed to read a.txt: no such file"),
                "failed to read a.txt: no such file",
            ),
            (anyhow::Error::new(io()), "no such file"),
        ];
        for (error, expected) in cases {
            assert_eq!(chain(&error), expected);
        }
    }

    #[test]
    fn what_was_left_unfinished_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, hours: u32| {
            let file = File::create(folder.path().join(name)).unwrap();
            let time = std::time::SystemTime::now() - KEPT * hours;
            file.set_modified(time).unwrap();
            file
        };
        let names = [".a.1.part", ".a.2.part", ".a.x.part", ".b.1.part"];
        let files = names.map(|name| make(name, 2));
        files[1].try_lock().unwrap();
        drop(make(".a.3.part", 0));
        fs::create_dir(folder.path().join(".a.4.part")).unwrap();
        file(&folder.path().join("a"), |out| out.write_all(b"x")).unwrap();
        let entries =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<String> = entries.collect();
        left.sort();
        assert_eq!(left, [".a.2.part", ".a.3.part", ".a.4.part", ".a.x.part", ".b.1.part", "a"]);
    }

    #[test]
    fn json_shows_everything_and_stays_the_same_data() {
        let value = serde_json::json!({"a\u{202e}b": "\u{1b}[31m \u{9b}31m ü 日 \"\\ \u{feff}\u{e0041}\u{7f}\r\n"});
        let text = json(&serde_json::to_string_pretty(&value).unwrap());
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        assert!(text.contains("ü 日") && !text.contains(['\u{1b}', '\u{9b}', '\u{202e}', '\u{e0041}', '\u{7f}']));
    }
}
