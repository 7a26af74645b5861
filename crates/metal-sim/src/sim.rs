//! The simulated GPU: checks each list, has the runner replay it, and turns what the runner saw into errors.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use gpu::commands::{Buf, Caps, Cmd, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit, Use};

use crate::clang::Clang;
use crate::options::{Call, Moment, Options};
use crate::protocol::{Answer, Message, Outcome, Request, Runner};
use crate::rules::{self, Checked, Counts, Kernel, Param};

/// Limit of what is not a list.
const SOON: Duration = Duration::from_secs(60);
/// How much longer than a GPU the simulator may take.
const SLOWER: u32 = 20;

/// What the lists so far were made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Lists that ran.
    pub lists: usize,
    /// Dispatches.
    pub dispatches: usize,
    /// Barriers.
    pub barriers: usize,
    /// Barriers that order nothing.
    pub needless_barriers: usize,
}

/// A list that was submitted and has not run.
struct Pending {
    ticket: Ticket,
    checked: Checked,
    bytes: Vec<u8>,
}

/// A simulated GPU.
pub struct Sim {
    clang: Clang,
    options: Options,
    caps: Caps,
    runner: Runner,
    sizes: Vec<u64>,
    /// Buffers of mapped files, which are only read.
    mapped: HashSet<Buf>,
    kernels: Vec<Kernel>,
    libraries: Vec<PathBuf>,
    loaded: HashMap<PathBuf, (u32, Vec<Kernel>)>,
    calls: [u32; 4],
    tickets: u64,
    pending: Vec<Pending>,
    times: Times,
    broken: Option<GpuError>,
    stats: Stats,
    /// Once lists run, nothing is allocated: a step that allocates is a mistake of the host.
    is_running: bool,
}

impl Sim {
    /// Starts one.
    ///
    /// # Errors
    /// A sentence where there is no clang, or where the runner does not compile or start.
    pub fn new(options: Options) -> Result<Sim> {
        let clang = Clang::find()?;
        let program = clang.runner(&options.cache)?;
        let runner = Runner::start(&program).with_context(|| format!("start {}", program.display()))?;
        let caps = Caps { name: "simulated GPU".into(), family: options.family, max_buffer: options.max_buffer };
        Ok(Sim {
            clang,
            options,
            caps,
            runner,
            sizes: Vec::new(),
            mapped: HashSet::new(),
            kernels: Vec::new(),
            libraries: Vec::new(),
            loaded: HashMap::new(),
            calls: [0; 4],
            tickets: 0,
            pending: Vec::new(),
            times: Times::default(),
            broken: None,
            stats: Stats::default(),
            is_running: false,
        })
    }

    /// What the lists so far were made of.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Whether this call is the one that is to fail.
    fn fails(&mut self, call: Call) -> bool {
        let n = &mut self.calls[call as usize];
        *n += 1;
        self.options.fault.is_some_and(|fault| fault.call == call && fault.after + 1 == *n)
    }

    fn ask(&mut self, message: &Message, limit: Duration) -> Result<Answer, GpuError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let error = match self.runner.ask(message, limit) {
            Outcome::Answer(answer) => return Ok(answer),
            Outcome::Late => GpuError::Late(limit),
            Outcome::Gone(why) => GpuError::Lost(why),
        };
        Err(self.fail(error))
    }

    /// Nothing runs after an error.
    fn fail(&mut self, error: GpuError) -> GpuError {
        self.broken.get_or_insert(error.clone());
        error
    }

    /// Checks that the host may touch a span now.
    fn touch(&mut self, span: Span, len: usize, verb: &str) -> Result<(), GpuError> {
        let checked = rules::check_span(span, &self.sizes);
        let is_busy = self.pending.iter().flat_map(|p| p.checked.spans()).any(|other| other.overlaps(span));
        let why = match checked {
            Err(why) => why,
            Ok(()) if span.len != len as u64 => format!("{} bytes for a span of {}", len, span.len),
            Ok(()) if is_busy => "an unfinished list uses them".into(),
            Ok(()) => return Ok(()),
        };
        Err(self.fail(GpuError::Rule(format!("host {verb} bytes {}..+{}: {why}", span.at, span.len))))
    }

    fn run(&mut self, checked: &Checked, bytes: &[u8], limit: Duration) -> Result<Times, GpuError> {
        let mut message = Message::new(Request::Submit);
        let Options { schedule, seed, sum_order, ulp, .. } = self.options;
        [schedule as u32, seed, sum_order, ulp].into_iter().for_each(|x| message.word(x));
        checked.encode(&self.kernels, bytes, &mut message);
        let mut answer = self.ask(&message, limit)?;
        let gpu = Duration::from_nanos(answer.long());
        let n_reports = answer.word();
        let reports: Vec<String> = (0..n_reports).map(|_| self.report(&mut answer)).collect();
        let Counts { dispatches, barriers, needless } = checked.counts;
        self.stats.lists += 1;
        self.stats.dispatches += dispatches;
        self.stats.barriers += barriers;
        self.stats.needless_barriers += needless;
        if !reports.is_empty() {
            return Err(self.fail(GpuError::Rule(reports.join("\n"))));
        }
        Ok(Times { gpu })
    }

    /// One line of what the runner saw: `[kind] kernel: text at file:line (n times)`.
    fn report(&self, answer: &mut Answer) -> String {
        let (kind, text, module) = (answer.text(), answer.text(), answer.word());
        let (pc, count) = (answer.long(), answer.long());
        let library = self.libraries.get(module as usize).filter(|_| pc != 0);
        let line =
            library.and_then(|library| self.clang.line(library, pc)).map_or(String::new(), |l| format!(" at {l}"));
        let times = if count > 1 { format!(" ({count} times)") } else { String::new() };
        format!("[{kind}] {text}{line}{times}")
    }

    /// Loads a library, once.
    fn load(&mut self, library: PathBuf) -> Result<Vec<Kernel>, GpuError> {
        if let Some((_, kernels)) = self.loaded.get(&library) {
            return Ok(kernels.clone());
        }
        let mut message = Message::new(Request::Load);
        message.text(&library.to_string_lossy());
        let mut answer = self.ask(&message, SOON)?;
        if answer.word() == 0 {
            return Err(GpuError::Lost(answer.text()));
        }
        let module = self.libraries.len() as u32;
        let mut kernels = Vec::new();
        for index in 0..answer.word() {
            let name = answer.text();
            let mut params = Vec::new();
            for _ in 0..answer.word() {
                let [kind, slot, size, is_const, is_ref] = [(); 5].map(|()| answer.word());
                if kind == 0 {
                    params.push(Param { slot, size, is_const: is_const == 1, is_ref: is_ref == 1 });
                }
            }
            kernels.push(Kernel { name, module, index, params, threads: self.options.threads });
        }
        self.libraries.push(library.clone());
        self.loaded.insert(library, (module, kernels.clone()));
        Ok(kernels)
    }
}

impl Gpu for Sim {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError> {
        if self.fails(Call::Alloc) || bytes == 0 || bytes > self.caps.max_buffer {
            return Err(GpuError::Memory { what, bytes });
        }
        if self.is_running {
            return Err(self.fail(GpuError::Rule(format!("{what}: memory is allocated once lists run"))));
        }
        let mut message = Message::new(Request::Alloc);
        message.long(bytes);
        message.text(what);
        if self.ask(&message, SOON)?.word() == 0 {
            return Err(GpuError::Memory { what, bytes });
        }
        self.sizes.push(bytes);
        Ok(Buf(self.sizes.len() as u32 - 1))
    }

    /// The runner has no file: its buffer is a copy, filled up with the zeros behind the file's end.
    fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        let Some(bytes) = mapped.bytes() else { return Ok(None) };
        let buf = self.alloc(mapped.len as u64, "a mapped file")?;
        let mut all = bytes.to_vec();
        all.resize(mapped.len, 0);
        self.write(Span { buf, at: 0, len: all.len() as u64 }, &all)?;
        self.mapped.insert(buf);
        Ok(Some(buf))
    }

    fn write(&mut self, to: Span, bytes: &[u8]) -> Result<(), GpuError> {
        if self.mapped.contains(&to.buf) {
            return Err(self.fail(GpuError::Rule("host writes to a mapped file".into())));
        }
        self.touch(to, bytes.len(), "writes")?;
        let mut message = Message::new(Request::Write);
        message.word(to.buf.0);
        message.long(to.at);
        message.long(to.len);
        message.bytes(bytes);
        self.ask(&message, SOON).map(drop)
    }

    fn read(&mut self, from: Span, out: &mut [u8]) -> Result<(), GpuError> {
        self.touch(from, out.len(), "reads")?;
        let mut message = Message::new(Request::Read);
        message.word(from.buf.0);
        message.long(from.at);
        message.long(from.len);
        let mut answer = self.ask(&message, SOON)?;
        let hole = answer.long();
        if hole != u64::MAX {
            let why = format!("host reads byte {hole} of buffer {}, which nothing has written", from.buf.0);
            return Err(self.fail(GpuError::Rule(why)));
        }
        out.copy_from_slice(&answer.take(from.len as usize));
        Ok(())
    }

    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        // Units of one source are compiled once.
        let mut sources: Vec<&str> = Vec::new();
        for unit in units {
            if !sources.contains(&unit.source.as_str()) {
                sources.push(&unit.source);
            }
        }
        let libraries = self.clang.kernels(&sources, &self.options.cache);
        let compiled: HashMap<&str, Result<PathBuf>> = sources.into_iter().zip(libraries).collect();
        let mut pipes = Vec::new();
        for unit in units {
            let error = |why: String| GpuError::Build { name: unit.name.clone(), why };
            if self.fails(Call::Build) {
                return Err(error("the compiler fails, as it was told to".into()));
            }
            let library = match &compiled[unit.source.as_str()] {
                Ok(library) => library.clone(),
                Err(why) => return Err(error(format!("{why:#}"))),
            };
            let kernels = self.load(library)?;
            let Some(kernel) = kernels.into_iter().find(|kernel| kernel.name == unit.kernel) else {
                return Err(error(format!("the source has no kernel {}", unit.kernel)));
            };
            self.kernels.push(Kernel { name: unit.name.clone(), ..kernel });
            pipes.push(Pipe(self.kernels.len() as u32 - 1));
        }
        Ok(pipes)
    }

    fn threads(&self, pipe: Pipe) -> u32 {
        self.kernels[pipe.0 as usize].threads
    }

    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
        if self.fails(Call::Submit) {
            return Err(self.fail(GpuError::Lost("the GPU is lost, as it was told to be".into())));
        }
        self.is_running = true;
        let writes = |cmd: &Cmd| match cmd {
            Cmd::Bind { span, used, .. } => *used != Use::Read && self.mapped.contains(&span.buf),
            _ => false,
        };
        if list.cmds.iter().any(writes) {
            return Err(self.fail(GpuError::Rule("a mapped file is bound to be written".into())));
        }
        let checked = match rules::check(list, &self.kernels, &self.sizes) {
            Ok(checked) => checked,
            Err(why) => return Err(self.fail(GpuError::Rule(why))),
        };
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        match self.options.moment {
            Moment::Submit => self.times = self.run(&checked, &list.bytes, SOON * SLOWER)?,
            Moment::Wait => self.pending.push(Pending { ticket, checked, bytes: list.bytes.clone() }),
        }
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, limit: Duration) -> Result<Times, GpuError> {
        if self.fails(Call::Wait) {
            return Err(self.fail(GpuError::Lost("the GPU is lost, as it was told to be".into())));
        }
        if ticket.0 > self.tickets {
            return Err(self.fail(GpuError::Rule(format!("ticket {} was never given", ticket.0))));
        }
        let (due, later) = std::mem::take(&mut self.pending).into_iter().partition(|p: &Pending| p.ticket <= ticket);
        self.pending = later;
        let due: Vec<Pending> = due;
        for Pending { checked, bytes, .. } in due {
            self.times = self.run(&checked, &bytes, limit * SLOWER)?;
        }
        Ok(self.times)
    }
}
