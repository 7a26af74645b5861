//! The pipe to the runner: commands and answers as little-endian words. `runner.cpp` is the other side.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Commands, by their first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Alloc = 0,
    Write = 1,
    Read = 2,
    Load = 3,
    Submit = 4,
}

/// A message under construction.
#[derive(Default)]
pub struct Message(Vec<u8>);

impl Message {
    pub fn new(request: Request) -> Message {
        let mut message = Message::default();
        message.word(request as u32);
        message
    }

    pub fn word(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }

    pub fn long(&mut self, x: u64) {
        self.0.extend(x.to_le_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn text(&mut self, text: &str) {
        self.word(text.len() as u32);
        self.bytes(text.as_bytes());
    }
}

/// An answer that is read from its front.
pub struct Answer {
    bytes: Vec<u8>,
    at: usize,
}

impl Answer {
    /// The next `n` bytes; zeros where the answer is shorter, which a runner of this version never sends.
    pub fn take(&mut self, n: usize) -> Vec<u8> {
        let end = self.bytes.len().min(self.at + n);
        let mut taken = self.bytes[self.at..end].to_vec();
        taken.resize(n, 0);
        self.at = end;
        taken
    }

    pub fn word(&mut self) -> u32 {
        self.take(4).iter().rev().fold(0, |x, &b| x << 8 | u32::from(b))
    }

    pub fn long(&mut self) -> u64 {
        self.take(8).iter().rev().fold(0, |x, &b| x << 8 | u64::from(b))
    }

    pub fn text(&mut self) -> String {
        let n = self.word() as usize;
        String::from_utf8_lossy(&self.take(n.min(1 << 20))).into_owned()
    }
}

/// What became of a request.
pub enum Outcome {
    /// The runner's answer.
    Answer(Answer),
    /// None in time; the runner was ended.
    Late,
    /// The runner is gone: its kernel brought it down.
    Gone(String),
}

/// A running runner.
pub struct Runner {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<Vec<u8>>,
}

impl Runner {
    /// Starts it.
    pub fn start(program: &Path) -> std::io::Result<Runner> {
        let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let missing = || std::io::Error::other("no pipe to the runner");
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let mut stdout = child.stdout.take().ok_or_else(missing)?;
        let (sender, answers) = channel();
        // A thread of its own reads, so that waiting has a limit.
        std::thread::spawn(move || {
            let mut len = [0; 8];
            while stdout.read_exact(&mut len).is_ok() {
                let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
                if stdout.read_exact(&mut bytes).is_err() || sender.send(bytes).is_err() {
                    break;
                }
            }
        });
        Ok(Runner { child, stdin, answers })
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, message: &Message, limit: Duration) -> Outcome {
        if self.stdin.write_all(&message.0).and_then(|()| self.stdin.flush()).is_err() {
            return self.gone();
        }
        match self.answers.recv_timeout(limit) {
            Ok(bytes) => Outcome::Answer(Answer { bytes, at: 0 }),
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                Outcome::Late
            }
            Err(RecvTimeoutError::Disconnected) => self.gone(),
        }
    }

    fn gone(&mut self) -> Outcome {
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        Outcome::Gone(format!("the simulated GPU ended: {status}"))
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
