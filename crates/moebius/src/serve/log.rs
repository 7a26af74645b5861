//! The log on stderr. A line that cannot be written is dropped: neither a full disk, nor a closed or stuck reader may
//! hold up a request. Characters that change how a line looks are written as their numbers. Knows no routes.

use std::io::Write;
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

use crate::args::{LogFormat, LogLevel, ServeArgs};

use super::keys::Key;

tokio::task_local! {
    /// Whose request a task answers.
    pub static WHO: Arc<Who>;
}

/// Who asks: what lines about a request say.
#[derive(Debug, Default)]
pub struct Who {
    /// The address that the connection comes from: the client's, or a proxy's.
    pub client: Option<IpAddr>,
    pub key: Option<Arc<Key>>,
}

impl Who {
    /// Returns the name of its key.
    pub fn key_name(&self) -> Option<&str> {
        self.key.as_deref().map(|key| key.name.as_str())
    }

    /// Counts tokens that were computed for it.
    pub fn charge(&self, n_tokens: usize) {
        if let Some(key) = &self.key {
            key.charge(n_tokens);
        }
    }
}

/// Returns whose request this task answers; empty in other programs.
pub fn who() -> Arc<Who> {
    WHO.try_with(Clone::clone).unwrap_or_default()
}

/// Lines that may wait for a slow reader.
const MAX_WAITING: usize = 4096;

enum Message {
    Line(Vec<u8>),
    /// Wants to hear when the lines before it are written.
    Flush(SyncSender<()>),
}

/// The way to the thread that writes.
#[derive(Clone, Debug)]
struct Log {
    lines: SyncSender<Message>,
    format: LogFormat,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// Starts the log. A second one in the same process is refused; the first one is as good.
pub fn start(args: &ServeArgs) {
    let level = match args.log_level {
        LogLevel::Error => tracing::Level::ERROR,
        LogLevel::Warn => tracing::Level::WARN,
        LogLevel::Info => tracing::Level::INFO,
        LogLevel::Debug => tracing::Level::DEBUG,
    };
    let (lines, inbox) = sync_channel(MAX_WAITING);
    let log = LOG.get_or_init(|| Log { lines, format: args.log_format }).clone();
    // Without a thread there is no log, and the server serves.
    let _ = std::thread::Builder::new().name("log".into()).spawn(move || write(&inbox));
    let subscriber = tracing_subscriber::fmt().with_max_level(level).with_writer(log).with_target(false);
    let subscriber = subscriber.log_internal_errors(false);
    let _ = match args.log_format {
        LogFormat::Text => subscriber.with_ansi(false).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
}

/// Waits until what was logged is written, for a moment.
pub fn flush() {
    let (written, wait) = sync_channel(1);
    if LOG.get().is_some_and(|log| log.lines.try_send(Message::Flush(written)).is_ok()) {
        let _: Result<(), RecvTimeoutError> = wait.recv_timeout(Duration::from_secs(1));
    }
}

fn write(inbox: &Receiver<Message>) {
    while let Ok(message) = inbox.recv() {
        match message {
            // A line that cannot be written is lost; the next one may not be.
            Message::Line(line) => drop(std::io::stderr().write_all(&line)),
            Message::Flush(written) => drop(written.try_send(())),
        }
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        Line { log: self.clone(), bytes: Vec::new() }
    }
}

/// A line on its way: sent when it is complete.
struct Line {
    log: Log,
    bytes: Vec<u8>,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let text = String::from_utf8_lossy(&self.bytes);
        let line = inert(&text, self.log.format);
        // Where the reader is slower than the server, lines are dropped.
        let _ = self.log.lines.try_send(Message::Line(line.into_bytes()));
    }
}

/// Returns a line in which only its end is no plain character.
fn inert(text: &str, format: LogFormat) -> String {
    let body = text.strip_suffix('\n').unwrap_or(text);
    let mut out = String::with_capacity(text.len() + 1);
    for c in body.chars() {
        let plain = matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1;
        match format {
            _ if plain => out.push(c),
            LogFormat::Text => out.extend(c.escape_debug()),
            LogFormat::Json => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
            }
        }
    }
    out.push('\n');
    out
}

/// Milliseconds, to the microsecond.
pub fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// As much of a text as a line has room for.
pub fn cut(text: &str, n_chars: usize) -> &str {
    text.char_indices().nth(n_chars).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_hold_no_character_that_acts() {
        let cases = [
            ("a \"b\" 'c' \\d é 漢\n", "a \"b\" 'c' \\d é 漢\n", "a \"b\" 'c' \\d é 漢\n"),
            ("x\u{202e}y\n", "x\\u{202e}y\n", "x\\u202ey\n"),
            ("a\nb\r\n", "a\\nb\\r\n", "a\\u000ab\\u000d\n"),
            ("\u{1b}[31m\u{9b}", "\\u{1b}[31m\\u{9b}\n", "\\u001b[31m\\u009b\n"),
            (
                "\u{e0041}\u{2028}\u{200b}\u{feff}",
                "\\u{e0041}\\u{2028}\\u{200b}\\u{feff}\n",
                "\\udb40\\udc41\\u2028\\u200b\\ufeff\n",
            ),
        ];
        for (line, text, json) in cases {
            assert_eq!(inert(line, LogFormat::Text), text);
            assert_eq!(inert(line, LogFormat::Json), json);
        }
    }

    #[test]
    fn numbers_and_texts_are_short() {
        assert_eq!(ms(Duration::from_nanos(2_393_000)).to_string(), "2.393");
        assert_eq!((cut("añb", 2), cut("añ", 2), cut("", 2)), ("añ", "añ", ""));
    }
}
