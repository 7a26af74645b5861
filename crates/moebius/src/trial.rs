//! Grammars are tried in a process of their own, this program with another job, before they are compiled in this one.
//!
//! What compiles grammars counts steps and not their size, and cannot be stopped: a schema of a kilobyte took all
//! memory. A process can be given limits and ended, whatever it does, and gives everything back; it costs some ten
//! milliseconds a grammar.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use engine::grammar::{self, Error, MAX_COMPILE_SECONDS, MAX_COMPILE_WAIT_SECONDS, Trial};

/// The hidden command that tries a grammar.
const COMMAND: &str = "try-grammar";
/// Memory that a trial may map, in bytes, of which the program and a wide stack take a third.
#[cfg(any(unix, windows))]
const MAX_MAPPED_BYTES: u64 = 1 << 30;
/// Longest message read.
const MAX_MESSAGE_BYTES: u64 = 8 << 20;

/// The command that starts this program in another process, where that is not the file of this one.
static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says how another process becomes this program: a command before its arguments. It counts once.
pub fn start_with(program: Vec<OsString>) {
    // A second one would say the same.
    let _ = PROGRAM.set(program);
}

/// Returns where this program tries grammars; none where it cannot start itself.
pub fn process() -> Option<Arc<dyn Trial>> {
    let program = match PROGRAM.get() {
        Some(program) => program.clone(),
        None => vec![std::env::current_exe().ok()?.into()],
    };
    let mut words = program.into_iter();
    let program = words.next()?;
    Some(Arc::new(Process { program, before: words.collect() }))
}

struct Process {
    program: OsString,
    /// Its first arguments.
    before: Vec<OsString>,
}

/// A process that does not outlive its use.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Trial for Process {
    fn attempt(&self, message: &str, stopped: &dyn Fn() -> bool) -> Result<(), Error> {
        let setup = |e: std::io::Error| Error::Setup(format!("try the grammar in a process: {e}"));
        let mut command = Command::new(&self.program);
        command.args(&self.before).arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = Running(command.spawn().map_err(setup)?);
        let message = message.to_owned();
        if let Some(mut stdin) = child.0.stdin.take() {
            // A pipe holds less than a message. One that is not read to its end breaks when the process ends.
            std::thread::spawn(move || stdin.write_all(message.as_bytes()));
        }
        let end = Instant::now() + Duration::from_secs(MAX_COMPILE_WAIT_SECONDS);
        let mut nap = Duration::from_micros(500);
        while child.0.try_wait().map_err(setup)?.is_none() {
            if stopped() || Instant::now() > end {
                return Err(too_costly());
            }
            std::thread::sleep(nap);
            nap = (2 * nap).min(Duration::from_millis(20));
        }
        let mut answer = String::new();
        if let Some(stdout) = child.0.stdout.take() {
            stdout.take(MAX_MESSAGE_BYTES).read_to_string(&mut answer).map_err(setup)?;
        }
        let (kind, why) = answer.split_once('\n').unwrap_or_default();
        match kind {
            "ok" => Ok(()),
            "rule" => Err(Error::Rule(why.into())),
            "unsatisfiable" => Err(Error::Unsatisfiable(why.into())),
            "setup" => Err(Error::Setup(why.into())),
            // It was ended for what it took.
            _ => Err(too_costly()),
        }
    }
}

fn too_costly() -> Error {
    Error::TooCostly("it takes more time or memory than a grammar may".into())
}

/// The job of the process: a message from stdin, what becomes of it to stdout.
pub fn run() -> Result<()> {
    limit().context("failed to limit a trial")?;
    let mut message = String::new();
    std::io::stdin().take(MAX_MESSAGE_BYTES).read_to_string(&mut message).context("failed to read a grammar")?;
    let (kind, why) = match grammar::attempt(&message) {
        Ok(()) => ("ok", String::new()),
        Err(Error::Rule(why)) => ("rule", why),
        Err(Error::Unsatisfiable(why)) => ("unsatisfiable", why),
        Err(Error::TooCostly(_)) => ("costly", String::new()),
        Err(other) => ("setup", other.to_string()),
    };
    std::io::stdout().write_all(format!("{kind}\n{why}").as_bytes()).context("failed to write what became of a grammar")
}

/// Gives this process its limits: memory, time of the processor, no core file.
#[cfg(unix)]
fn limit() -> std::io::Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let at_most = |n: u64| Rlimit { current: Some(n), maximum: Some(n) };
    setrlimit(Resource::Core, at_most(0))?;
    setrlimit(Resource::Cpu, at_most(MAX_COMPILE_SECONDS))?;
    // macOS has the limit and does not keep it; there, time is what bounds memory.
    let _ = setrlimit(Resource::As, at_most(MAX_MAPPED_BYTES));
    Ok(())
}

#[cfg(windows)]
fn limit() -> std::io::Result<()> {
    sys::windows::limit_process(MAX_MAPPED_BYTES as usize, Duration::from_secs(MAX_COMPILE_SECONDS))
}

#[cfg(not(any(unix, windows)))]
fn limit() -> std::io::Result<()> {
    Ok(())
}
