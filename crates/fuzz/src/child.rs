//! The process that runs inputs, and its other end. An input goes down a pipe behind its length; back comes what became
//! of it, with the time and memory that it took.

use std::fs;
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::targets::Target;

/// Address space beyond what a target may have resident, in MiB: stacks and maps that are never touched.
const SPARE_MIB: usize = 8 << 10;
/// How much longer a run may take by the clock than of the processor: machines are busy.
const PATIENCE: u32 = 15;
/// Inputs after which a process is replaced.
const MAX_RUNS: usize = 5_000;

/// What became of an input.
#[derive(Debug)]
pub enum Verdict {
    /// Accepted or refused, in the target's words.
    Fine(String),
    /// A panic.
    Panic(String),
    /// The process ended.
    Died(String),
    /// It took more of the processor's time, or of the clock's, than the target may.
    Slow(Duration),
    /// It took more memory than the target may, in MiB.
    Large(usize),
}

impl Verdict {
    /// Whether a promise is broken.
    pub fn is_find(&self) -> bool {
        !matches!(self, Verdict::Fine(_))
    }

    /// For the summary.
    pub fn kind(&self) -> &'static str {
        match self {
            Verdict::Fine(what) if what.starts_with("ok") => "accepted",
            Verdict::Fine(_) => "refused",
            Verdict::Panic(_) => "panics",
            Verdict::Died(_) => "deaths",
            Verdict::Slow(_) => "slow",
            Verdict::Large(_) => "large",
        }
    }

    /// What tells one outcome from another: the words without numbers and quoted texts.
    pub fn signature(&self) -> String {
        let text = match self {
            Verdict::Fine(what) | Verdict::Panic(what) | Verdict::Died(what) => what.as_str(),
            Verdict::Slow(_) | Verdict::Large(_) => "",
        };
        let mut quoted = false;
        let kept = text.chars().filter(|&c| {
            quoted ^= matches!(c, '"' | '`');
            !quoted && !c.is_ascii_digit()
        });
        format!("{} {}", self.kind(), kept.take(120).collect::<String>())
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verdict::Fine(what) | Verdict::Panic(what) | Verdict::Died(what) => {
                write!(f, "{}: {}", self.kind(), what.escape_debug())
            }
            Verdict::Slow(time) => write!(f, "slow: {time:?}"),
            Verdict::Large(mib) => write!(f, "large: {mib} MiB"),
        }
    }
}

/// A process of this program that runs inputs.
pub struct Child {
    target: &'static Target,
    process: std::process::Child,
    stdin: ChildStdin,
    answers: Receiver<io::Result<Vec<u8>>>,
    n_runs: usize,
}

impl Child {
    pub fn start(target: &'static Target) -> Result<Child, String> {
        let failed = |e: io::Error| format!("start a process: {e}");
        let program = std::env::current_exe().map_err(failed)?;
        // The shell sets the limit: what is watched must not need to be trusted.
        let limit = (target.mib + SPARE_MIB) << 10;
        let script = format!("ulimit -c 0; ulimit -v {limit}; exec \"$0\" --child {}", target.name);
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().map_err(failed)?;
        let (Some(stdin), Some(mut stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("start a process: it has no pipes".into());
        };
        let (send, answers) = channel();
        std::thread::spawn(move || {
            loop {
                let answer = read(&mut stdout);
                let is_end = answer.is_err();
                if send.send(answer).is_err() || is_end {
                    return;
                }
            }
        });
        Ok(Child { target, process, stdin, answers, n_runs: 0 })
    }

    pub fn run(&mut self, input: &[u8]) -> Result<Verdict, String> {
        self.n_runs += 1;
        if self.n_runs > MAX_RUNS {
            *self = Child::start(self.target)?;
        }
        let patience = self.target.time * PATIENCE;
        let answer = match write(&mut self.stdin, input) {
            Ok(()) => self.answers.recv_timeout(patience),
            Err(_) => Ok(Err(io::ErrorKind::BrokenPipe.into())),
        };
        let answer = match answer {
            Ok(Ok(answer)) => String::from_utf8_lossy(&answer).into_owned(),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => {
                let status: ExitStatus = self.process.wait().map_err(|e| format!("wait for a process: {e}"))?;
                return Ok(Verdict::Died(status.to_string()));
            }
            Err(RecvTimeoutError::Timeout) => return Ok(Verdict::Slow(patience)),
        };
        let mut fields = answer.splitn(4, '\n');
        let (ms, kib) = (number(fields.next()), number(fields.next()));
        let (kind, text) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let time = Duration::from_millis(ms);
        Ok(match kind {
            "panic" => Verdict::Panic(text.into()),
            _ if time > self.target.time => Verdict::Slow(time),
            _ if kib as usize >> 10 > self.target.mib => Verdict::Large(kib as usize >> 10),
            _ => Verdict::Fine(text.into()),
        })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn number(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn write(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u32).to_le_bytes())?;
    to.write_all(bytes)?;
    to.flush()
}

fn read(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The last panic, wherever it was.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// The process's part: runs inputs until there are no more.
pub fn serve(target: &Target) -> ExitCode {
    let Some(run) = target.run else { return ExitCode::FAILURE };
    std::panic::set_hook(Box::new(|info| {
        if let Ok(mut panic) = PANIC.lock() {
            panic.get_or_insert_with(|| info.to_string());
        }
    }));
    let (mut stdin, mut stdout) = (io::stdin().lock(), io::stdout().lock());
    while let Ok(input) = read(&mut stdin) {
        // Where this is not Linux, memory is not watched.
        let _ = fs::write("/proc/self/clear_refs", "5");
        let (before, since) = (status("VmRSS:"), cpu_ms());
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&input)));
        let (ms, kib) = (cpu_ms() - since, status("VmHWM:").saturating_sub(before));
        let panic = PANIC.lock().ok().and_then(|mut panic| panic.take());
        // What a library catches of its own is its way to refuse.
        let answer = match (outcome, panic) {
            (Ok(text), None) => format!("{ms}\n{kib}\nfine\n{text}"),
            (Ok(text), Some(_)) if target.catches => format!("{ms}\n{kib}\nfine\n{text}"),
            (_, panic) => format!("{ms}\n{kib}\npanic\n{}", panic.unwrap_or_default()),
        };
        if write(&mut stdout, answer.as_bytes()).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// A size out of this process's status, in KiB.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    number(line.trim().strip_suffix(" kB"))
}

/// The processor's time that this process took, in milliseconds.
fn cpu_ms() -> u64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // User and system time in ticks of 10 ms, as Linux tells them on every architecture.
    let ticks: u64 = [11, 12].iter().map(|&i| number(fields.get(i).copied())).sum();
    ticks * 10
}
