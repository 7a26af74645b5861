//! One program of several: the parts of a plan ([`model::plan::partition`]), each on a device and a thread.
//!
//! All parts take the same steps in the same order. The first answers: rows of logits are the same in every part.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use checkpoint::Checkpoint;
use model::plan::ValidPlan;
use model::plan::partition::{self, Part};

use crate::weights;
use crate::{
    Batch, Cause, CompileError, Drafts, Failure, Kinds, Limits, Output, Profile, Program, RouterInfo, Save, StepError,
    StreamStats, SumInputs,
};

/// Looks of a thread for something to do before it sleeps: as long as the host needs between two steps.
const LOOKS: usize = 20_000;

/// The parts of a plan as one program.
pub struct Parts {
    first: Box<dyn Program>,
    others: Vec<Worker>,
}

/// Another part, on its thread.
struct Worker {
    name: String,
    /// The step that it is told to take.
    batch: Arc<Mutex<Batch>>,
    commands: Option<Sender<Command>>,
    done: Receiver<Result<(), StepError>>,
    is_lost: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Step,
    CopyState(u32, u32),
    Commit(u32, usize),
    Interrupt(Arc<AtomicBool>),
}

impl Parts {
    /// From the programs of all parts in order, with names for messages.
    ///
    /// # Errors
    /// [`CompileError::Start`] when the system gives no thread, or there is no part.
    pub fn new(programs: Vec<(String, Box<dyn Program>)>) -> Result<Parts, CompileError> {
        let mut programs = programs.into_iter();
        let start = |what: String, why: String| CompileError::Start { what, why };
        let Some((_, first)) = programs.next() else { return Err(start("parts".into(), "there are none".into())) };
        let worker = |(name, program): (String, Box<dyn Program>)| {
            let (commands, inbox) = mpsc::channel();
            let (outbox, done) = mpsc::channel();
            let batch = Arc::new(Mutex::new(Batch::default()));
            let is_lost = Arc::new(AtomicBool::new(false));
            let (own, own_lost) = (Arc::clone(&batch), Arc::clone(&is_lost));
            let thread = std::thread::Builder::new().name(format!("part {name}"));
            let thread = thread.spawn(move || serve(program, &inbox, &outbox, &own, &own_lost));
            let thread = thread.map_err(|e| start(format!("the thread of {name}"), e.to_string()))?;
            Ok(Worker { name, batch, commands: Some(commands), done, is_lost, thread: Some(thread) })
        };
        let others = programs.map(worker).collect::<Result<_, CompileError>>()?;
        Ok(Parts { first, others })
    }

    fn tell(&self, command: impl Fn() -> Command) {
        for commands in self.others.iter().filter_map(|other| other.commands.as_ref()) {
            // A thread that is gone is noticed by the next step.
            let _ = commands.send(command());
        }
    }

    /// What became of the step in the other parts: the first error.
    fn collect(others: &[Worker]) -> Result<(), StepError> {
        let results = others.iter().map(|other| {
            let lost = || {
                let (device, why) = (other.name.clone(), "its thread has ended".into());
                Err(Failure::all(Cause::Device { device, op: String::new(), why }).into())
            };
            take(&other.done).unwrap_or_else(lost)
        });
        // All are waited for, whatever the first says.
        results.fold(Ok(()), Result::and)
    }
}

/// The next message; looks for a while before it sleeps. `None` when there will be none.
fn take<T>(inbox: &Receiver<T>) -> Option<T> {
    for _ in 0..LOOKS {
        match inbox.try_recv() {
            Ok(message) => return Some(message),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
    inbox.recv().ok()
}

/// What the thread of a part does.
fn serve(
    mut program: Box<dyn Program>,
    inbox: &Receiver<Command>,
    outbox: &Sender<Result<(), StepError>>,
    batch: &Mutex<Batch>,
    is_lost: &AtomicBool,
) {
    while let Some(command) = take(inbox) {
        match command {
            Command::Step => {
                let batch = batch.lock().unwrap_or_else(|e| e.into_inner());
                let submitted = program.submit(&batch);
                drop(batch);
                let done = submitted.and_then(|()| program.wait().map(drop));
                is_lost.store(program.is_lost(), Ordering::Relaxed);
                if outbox.send(done).is_err() {
                    return;
                }
            }
            Command::CopyState(from, to) => program.copy_state(from, to),
            Command::Commit(slot, n_accepted) => {
                if let Some(drafts) = program.drafts() {
                    drafts.commit(slot, n_accepted);
                }
            }
            Command::Interrupt(flag) => program.set_interrupt(flag),
        }
    }
}

impl Program for Parts {
    fn limits(&self) -> Limits {
        self.first.limits()
    }

    fn kinds(&self) -> Kinds {
        self.first.kinds()
    }

    fn n_vocab(&self) -> usize {
        self.first.n_vocab()
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        for other in &self.others {
            other.batch.lock().unwrap_or_else(|e| e.into_inner()).copy_from(batch);
        }
        self.tell(|| Command::Step);
        let submitted = self.first.submit(batch);
        if submitted.is_err() {
            // What one part refuses all refuse; what failed in one ends the others' step too.
            let _ = Parts::collect(&self.others);
        }
        submitted
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        let output = self.first.wait();
        let others = Parts::collect(&self.others);
        let output = output?;
        others?;
        Ok(output)
    }

    fn d_input(&self) -> Option<usize> {
        self.first.d_input()
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.tell(|| Command::CopyState(from, to));
        self.first.copy_state(from, to);
    }

    /// None are reported: each part knows which of the experts that it has were chosen.
    fn routers(&self) -> &[RouterInfo] {
        &[]
    }

    fn trace_routing(&mut self, _: bool) {}

    fn stream_stats(&self) -> Option<StreamStats> {
        self.first.stream_stats()
    }

    fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        self.tell(|| Command::Interrupt(Arc::clone(&flag)));
        self.first.set_interrupt(flag);
    }

    fn is_lost(&self) -> bool {
        let is_other_lost = |other: &Worker| {
            other.is_lost.load(Ordering::Relaxed) || other.thread.as_ref().is_none_or(JoinHandle::is_finished)
        };
        self.first.is_lost() || self.others.iter().any(is_other_lost)
    }

    /// Pages are spread over the parts.
    fn saver(&mut self) -> Option<&mut dyn Save> {
        None
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        if self.first.drafts().is_some() { Some(self) } else { None }
    }

    /// Times of the first part.
    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        self.first.profiler()
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        None
    }
}

impl Drafts for Parts {
    fn commit(&mut self, slot: u32, n_accepted: usize) {
        self.tell(|| Command::Commit(slot, n_accepted));
        if let Some(drafts) = self.first.drafts() {
            drafts.commit(slot, n_accepted);
        }
    }

    /// The parts run alike.
    fn is_settled(&mut self) -> bool {
        self.first.drafts().is_none_or(|drafts| drafts.is_settled())
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        for other in &mut self.others {
            other.commands = None;
            if let Some(thread) = other.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// Compiles each part by `compile`, which is given its number, its plan and the checkpoint that has its tensors, and
/// returns its name and its program.
///
/// # Errors
/// What `compile` says, and where the checkpoint has not what the parts want.
pub fn compile(
    parts: Vec<Part>,
    checkpoint: &Arc<Checkpoint>,
    mut compile: impl FnMut(usize, ValidPlan, Arc<Checkpoint>) -> Result<(String, Box<dyn Program>), CompileError>,
) -> Result<Parts, CompileError> {
    let program = |(i, part): (usize, Part)| {
        let (plan, checkpoint) = with_tensors(part, checkpoint)?;
        compile(i, plan, checkpoint)
    };
    Parts::new(parts.into_iter().enumerate().map(program).collect::<Result<_, CompileError>>()?)
}

/// The plan of a part, and the checkpoint that has its tensors.
///
/// # Errors
/// The plan breaks a rule of an op, or the checkpoint has not what the part wants.
pub fn with_tensors(part: Part, checkpoint: &Arc<Checkpoint>) -> Result<(ValidPlan, Arc<Checkpoint>), CompileError> {
    Ok((ValidPlan::new(part.plan)?, weights::with_cuts(checkpoint, &part.cuts)?))
}

/// Cuts a plan into parts on the host, which add up over a loopback, and compiles each by `compile`, which is given its
/// end of that.
///
/// # Errors
/// The plan cannot be cut, or what `compile` says.
pub fn on_host(
    name: &str,
    n_parts: usize,
    plan: &ValidPlan,
    checkpoint: &Arc<Checkpoint>,
    mut compile: impl FnMut(ValidPlan, Arc<Checkpoint>, End) -> Result<Box<dyn Program>, CompileError>,
) -> Result<Parts, CompileError> {
    let link = Arc::new(Loopback::new(n_parts));
    self::compile(partition::partition(plan, n_parts)?, checkpoint, |part, plan, checkpoint| {
        let program = compile(plan, checkpoint, End { link: Arc::clone(&link), part })?;
        Ok((format!("{name} {part}"), program))
    })
}

/// Adds rows up over the parts of a plan that are all in this process and on the host.
#[derive(Debug)]
struct Loopback {
    n_parts: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

/// One part's end of a loopback.
#[derive(Clone, Debug)]
pub struct End {
    link: Arc<Loopback>,
    part: usize,
}

impl End {
    /// `x = Σ x` over the parts, in their order. Returns when all have called.
    pub fn all_reduce(&self, x: &mut [f32]) {
        self.link.all_reduce(self.part, x);
    }
}

/// A sum on its way.
#[derive(Debug, Default)]
struct Round {
    /// Summands, `[n_parts]`, until all are there.
    rows: Vec<Vec<f32>>,
    arrived: usize,
    sum: Vec<f32>,
    /// Parts that have yet to take the sum: the next round begins when all have.
    leaving: usize,
}

impl Loopback {
    /// Between this number of parts.
    fn new(n_parts: usize) -> Loopback {
        let round = Round { rows: vec![Vec::new(); n_parts], ..Round::default() };
        Loopback { n_parts, round: Mutex::new(round), changed: Condvar::new() }
    }

    fn all_reduce(&self, part: usize, x: &mut [f32]) {
        let mut round = self.until(self.lock(), |round| round.leaving == 0);
        round.rows[part].clear();
        round.rows[part].extend_from_slice(x);
        round.arrived += 1;
        if round.arrived == self.n_parts {
            let Round { rows, sum, .. } = &mut *round;
            sum.clear();
            sum.extend_from_slice(&rows[0]);
            for rows in &rows[1..] {
                sum.iter_mut().zip(rows).for_each(|(sum, x)| *sum += x);
            }
            (round.arrived, round.leaving) = (0, self.n_parts);
            self.changed.notify_all();
        }
        let mut round = self.until(round, |round| round.leaving > 0);
        x.copy_from_slice(&round.sum);
        round.leaving -= 1;
        if round.leaving == 0 {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn until<'a>(&'a self, round: MutexGuard<'a, Round>, is_so: fn(&Round) -> bool) -> MutexGuard<'a, Round> {
        self.changed.wait_while(round, |round| !is_so(round)).unwrap_or_else(|e| e.into_inner())
    }
}
