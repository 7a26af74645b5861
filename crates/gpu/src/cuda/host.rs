//! Experts in host memory: the host computes them between two parts of a step, or copies a layer's weights to a
//! staging buffer on the device, where a step has rows enough that copying is faster.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use model::plan::Plan;

use super::compile::Failed;
use super::driver::{Context, DriverError, Event, Memory, Pinned, Ptr, Stream};
use super::gate::Held;
use super::handover::Costs;
use super::hot::{Judge, Layout, Move, NONE, Placement, Step};
use super::nodes::{ExpertsNode, HostNode};
use super::split::{self, Moves, Slots, Split, plane_starts};
use super::upload::STAGE;
use backend::{CompileError, Failure, Footprint, Limits, StreamStats};
use cpu::apart::Apart;

/// Maximum number of rows that the host computes: of more, the experts are copied.
const MAX_ROWS: usize = 512;

/// Words of the flags: each on a cache line of its own.
const REACHED: usize = 0;
const ANSWERED: usize = 32;

/// How often a host that waits looks whether the device has failed.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes of host memory and where they go in the staging buffer.
struct Piece {
    from: *const u8,
    len: usize,
    to: Ptr,
    part: Part,
}

/// What of an expert a piece is.
#[derive(Clone, Copy)]
struct Part {
    expert: u32,
    /// Gate, up or down.
    stack: usize,
    plane: usize,
    /// First byte of it in the expert's plane.
    at: usize,
}

// SAFETY: bytes of the checkpoint or of copies, which are written to no more and live as long as [`Host::apart`].
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

/// What a thread copies with: one piece is on its way while the next is staged.
struct Lane {
    stages: [(Pinned, Stream, Event); 2],
    turn: usize,
}

/// Experts under way to slots at a time.
const MOVES: usize = 2;

/// A thread that copies experts to slots while steps run.
struct Mover {
    jobs: Option<mpsc::Sender<(Move, Vec<Piece>)>>,
    done: mpsc::Receiver<(Move, Result<(), DriverError>)>,
    thread: Option<JoinHandle<()>>,
    under_way: usize,
}

/// The memory that slots and whole layers take in turn, and what is known of its contents.
struct Hot {
    /// First byte of the memory.
    base: Ptr,
    slots: Vec<Slots>,
    /// Layers on the device otherwise, and where each begins.
    whole: Vec<(usize, Ptr)>,
    placement: Placement,
    judge: Judge,
    /// The tables on the device, and what they are to be.
    tables: Ptr,
    to_be: Pinned,
    is_changed: bool,
    // Before the weights that it reads, and the memory that it writes to.
    mover: Mover,
}

/// Ops that the host may compute, and the most rows at a time.
fn share(host: &split::Host, split: &Split, slots: &[Slots], limits: Limits) -> (Vec<usize>, usize) {
    let ops = match slots {
        [] => split.host().map(|layer| layer.op).collect(),
        slots => slots.iter().map(|slots| slots.op).collect(),
    };
    // What is on disk is never copied: the host computes all rows.
    let most_rows = if host.is_streamed() { usize::MAX } else { host.copies_from.unwrap_or(MAX_ROWS) };
    (ops, limits.max_tokens.min(most_rows).max(1))
}

/// Threads that copy weights.
fn n_lanes(host: &split::Host) -> usize {
    if host.is_streamed() { 0 } else { host.cpu.threads.max(1) }
}

/// What [`Host::new`] takes of the host's memory, with rows of logits.
pub fn footprint(host: &split::Host, plan: &Plan, split: &Split, slots: &[Slots], limits: Limits) -> Footprint {
    let (ops, max_rows) = share(host, split, slots, limits);
    let mut sum = Apart::footprint(&host.cpu, plan, &ops, max_rows);
    let n_lanes = n_lanes(host) + usize::from(!slots.is_empty());
    sum.add(backend::Part::Scratch, n_lanes.saturating_mul(2 * STAGE));
    let rows = limits.max_outputs.min(limits.max_tokens);
    sum.add(backend::Part::Scratch, rows.saturating_mul(4 * plan.n_vocab));
    sum
}

/// What [`Host::new`] takes of where slots are.
pub struct HotPlaces {
    /// First byte of the memory of experts on the device.
    pub base: Ptr,
    pub slots: Vec<Slots>,
    pub tables: Ptr,
}

/// The host's half of a program.
pub struct Host {
    // The mover ends before what it reads goes.
    hot: Option<Hot>,
    context: Arc<Context>,
    /// Pieces of each op's weights.
    pieces: Vec<Vec<Piece>>,
    apart: Apart,
    x: Pinned,
    ids: Pinned,
    out: Pinned,
    /// `out` as the device sees it.
    out_ptr: Ptr,
    flags: Pinned,
    flags_ptr: Ptr,
    /// One a thread.
    lanes: Vec<Mutex<Lane>>,
    /// The staging buffer is free.
    free: Event,
    _stage: Memory,
    /// Rows that the buffers hold.
    max_rows: usize,
    /// Rows from which experts are copied, once it is known.
    from_rows: Option<usize>,
    /// The device waits for answers by itself.
    waits: bool,
    /// Handovers queued, and answered; both wrap.
    handed: u32,
    answered: u32,
    /// The device may wait for an answer.
    held: Option<Held>,
    /// Why the step under way is lost.
    lost: Option<Failure>,
}

impl Host {
    /// For a plan's experts in host memory. `stage` is the buffer that [`Split::stage_bytes`] says.
    pub fn new(
        context: &Arc<Context>,
        stream: &Stream,
        host: split::Host,
        plan: &Plan,
        split: &Split,
        checkpoint: &Arc<Checkpoint>,
        limits: Limits,
        stage: Memory,
        places: Option<HotPlaces>,
    ) -> Result<Host, CompileError> {
        let is_streamed = host.is_streamed();
        let slots = places.as_ref().map_or(&[][..], |places| &places.slots);
        let (ops, max_rows) = share(&host, split, slots, limits);
        let apart = Apart::new(&host.cpu, plan, &ops, checkpoint, max_rows)?;
        let (mut x, mut ids, mut out) = (0, 0, 0);
        let mut pieces = Vec::with_capacity(ops.len());
        for op in 0..ops.len() {
            let shape = apart.shape(op);
            x = x.max(4 * max_rows * shape.d);
            ids = ids.max(4 * max_rows * shape.n_used);
            out = out.max(4 * max_rows * shape.n_used * shape.d_out);
            pieces.push(cut(&apart, op, stage.ptr()));
        }
        let pinned = |bytes| Pinned::new(context, bytes).failed("memory for what the host computes");
        let flags = pinned(4 * 64)?;
        let flags_ptr = flags.device_ptr().failed("flags")?;
        let out = pinned(out)?;
        let hot = places.map(|places| Hot::new(context, places, split, host.moves == Moves::Always)).transpose()?;
        let lane = || Ok::<_, DriverError>(Mutex::new(Lane::new(context)?));
        let made = Host {
            context: Arc::clone(context),
            pieces,
            lanes: (0..n_lanes(&host)).map(|_| lane()).collect::<Result<_, _>>().failed("staging memory")?,
            apart,
            x: pinned(x)?,
            ids: pinned(ids)?,
            out_ptr: out.device_ptr().failed("memory for what the host computes")?,
            out,
            hot,
            waits: can_wait(stream, &flags, flags_ptr),
            flags,
            flags_ptr,
            free: Event::without_time(context).failed("an event")?,
            _stage: stage,
            max_rows,
            from_rows: if is_streamed { Some(usize::MAX) } else { host.copies_from },
            handed: 0,
            answered: 0,
            held: None,
            lost: None,
        };
        made.flags.atomic(REACHED).store(0, Release);
        Ok(made)
    }

    /// Measures from how many rows on copies pay, where the caller has not said; the weights of the device have come.
    pub fn measure(&mut self, stream: &Stream) -> Result<(), DriverError> {
        let (few, many) = (32.min(self.max_rows), 128.min(self.max_rows));
        if self.from_rows.is_some() || few == many || self.pieces.is_empty() {
            return Ok(());
        }
        let mut copy = 0.0;
        for _ in 0..2 {
            let start = Instant::now();
            self.stage(stream, 0)?;
            stream.wait()?;
            copy = start.elapsed().as_secs_f64();
        }
        if let Some(hot) = &mut self.hot {
            hot.judge.set_cost(Duration::from_secs_f64(copy * hot.whole.len() as f64));
        }
        let [few, many] = [few, many].map(|rows| (rows, self.time(rows)));
        self.from_rows = Some(Costs { copy, few, many }.threshold(self.max_rows));
        Ok(())
    }

    /// Seconds that the host takes for so many rows, evenly spread over the experts.
    fn time(&mut self, rows: usize) -> f64 {
        let shape = self.apart.shape(0);
        let mut seconds = 0.0;
        for _ in 0..2 {
            let ids = &mut self.ids.words_mut::<u32>()[..rows * shape.n_used];
            // Neighbours of a row are different experts, and rows begin at different ones.
            ids.iter_mut().zip(0u32..).for_each(|(id, i)| *id = i.wrapping_mul(37) % shape.n_expert as u32);
            let start = Instant::now();
            self.compute_rows(0, rows, false);
            seconds = start.elapsed().as_secs_f64();
        }
        seconds
    }

    /// Whether the host computes a step of so many rows.
    pub fn is_computed(&self, rows: usize) -> bool {
        rows < self.from_rows.unwrap_or(usize::MAX) && rows <= self.max_rows
    }

    /// Whether the device waits for answers by itself.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Queues what the host needs to compute a node.
    pub fn hand_over(&mut self, stream: &Stream, node: &HostNode, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { x, ids, n_used, .. } = node.experts;
        self.handed = self.handed.wrapping_add(1);
        // SAFETY: the views lie in the program's arena with so many rows; the host reads when the flag is there, and
        // the flags live as long as the program.
        unsafe {
            stream.download(&mut self.x, 0, x.ptr, 4 * rows * x.width)?;
            stream.download(&mut self.ids, 0, ids.ptr, 4 * rows * n_used)?;
            if self.waits { stream.store(self.flags_ptr + 4 * REACHED as Ptr, self.handed) } else { Ok(()) }
        }
    }

    /// Queues the way back of what the host computes, behind its answer.
    pub fn take_back(&mut self, stream: &Stream, node: &HostNode, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { out, n_used, .. } = node.experts;
        // SAFETY: the host answers every handover, or gives the program up; its rows stay until the next handover has
        // been reached, which is behind this copy.
        unsafe {
            if self.waits {
                if self.handed != self.answered && self.held.is_none() {
                    self.held = Some(self.context.gate.hold());
                }
                stream.wait_until(self.flags_ptr + 4 * ANSWERED as Ptr, self.handed)?;
            }
            // A kernel takes what is wanted of them.
            if node.hot.is_some() { Ok(()) } else { stream.upload(out.ptr, &self.out, 4 * rows * n_used * out.width) }
        }
    }

    /// The rows that the host computes, as the device sees them.
    pub fn rows(&self) -> Ptr {
        self.out_ptr
    }

    /// Waits until the device has handed over what is to be answered next.
    pub fn reach(&mut self, stream: &Stream) -> Result<(), DriverError> {
        if !self.waits {
            return stream.wait();
        }
        let (flag, next) = (self.flags.atomic(REACHED), self.answered.wrapping_add(1));
        let mut look = Instant::now();
        loop {
            for _ in 0..256 {
                if flag.load(Acquire).wrapping_sub(next) < 1 << 31 {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if look.elapsed() > LOOK {
                // An error of the device is one of every call.
                stream.is_done()?;
                look = Instant::now();
            }
        }
    }

    /// Computes a node and answers.
    pub fn compute(&mut self, node: &HostNode, rows: usize) {
        if let Some(hot) = &mut self.hot {
            // The device may read beside this: ids are whatever it has written before it handed over.
            hot.placement.count(node.index, &self.ids.words::<u32>()[..rows * node.experts.n_used]);
        }
        self.compute_rows(node.index, rows, node.hot.is_some());
        self.answered = self.answered.wrapping_add(1);
        self.flags.atomic(ANSWERED).store(self.answered, Release);
        self.held = None;
    }

    /// `is_hot`: without the pairs of experts that have slots.
    fn compute_rows(&mut self, op: usize, rows: usize, is_hot: bool) {
        let shape = self.apart.shape(op);
        let x = &mut self.x.words_mut::<f32>()[..rows * shape.d];
        let ids = &mut self.ids.words_mut::<u32>()[..rows * shape.n_used];
        let out = &mut self.out.words_mut::<f32>()[..rows * shape.n_used * shape.d_out];
        if self.lost.is_some() {
            return;
        }
        let computed = match self.hot.as_ref().filter(|_| is_hot).map(|hot| hot.placement.table(op)) {
            Some(table) => self.apart.compute(op, x, ids, out, |expert| table[expert] == NONE),
            None => self.apart.compute(op, x, ids, out, |_| true),
        };
        self.lost = computed.err();
    }

    /// Copies the weights of op `op` to the staging buffer; what is queued on `stream` behind this finds them there.
    pub fn stage(&mut self, stream: &Stream, op: usize) -> Result<(), DriverError> {
        let lanes = &self.lanes;
        let lock = |i: usize| lanes[i].lock().unwrap_or_else(PoisonError::into_inner);
        for i in 0..lanes.len() {
            lock(i).stages.iter().try_for_each(|(_, stream, _)| stream.wait_for(&self.free))?;
        }
        let pieces = std::mem::take(&mut self.pieces[op]);
        let mut from_host: Vec<&Piece> = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            match self.hot.as_ref().and_then(|hot| hot.place(op, piece.part)) {
                // SAFETY: the slot holds the expert for the whole step, and the piece has its length in both places.
                Some(slot) => unsafe { stream.copy(piece.to, slot, piece.len)? },
                None => from_host.push(piece),
            }
        }
        let copied = self.copy(stream, &from_host);
        self.pieces[op] = pieces;
        copied
    }

    /// Copies pieces of weights; what is queued on `stream` behind this finds them.
    fn copy(&mut self, stream: &Stream, pieces: &[&Piece]) -> Result<(), DriverError> {
        let (lanes, context) = (&self.lanes, &self.context);
        let lock = |i: usize| lanes[i].lock().unwrap_or_else(PoisonError::into_inner);
        let failed = Mutex::new(None);
        self.apart.pool().run(pieces.len(), &|worker, i| {
            let copied = context.enter().and_then(|()| lock(worker).copy(pieces[i]));
            if let Err(e) = copied {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
            }
        });
        if let Some(e) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(e);
        }
        for i in 0..lanes.len() {
            for (_, copies, event) in &lock(i).stages {
                copies.record(event)?;
                stream.wait_for(event)?;
            }
        }
        Ok(())
    }

    /// Between two steps: takes experts that have come to their slots into the tables, sends others, and queues the
    /// tables. The layout of the next step.
    pub fn settle(&mut self, stream: &Stream) -> Result<Layout, DriverError> {
        let Some(hot) = &mut self.hot else { return Ok(Layout::Layers) };
        if hot.judge.layout() == Layout::Slots {
            hot.arrivals(false)?;
            while hot.mover.under_way < MOVES {
                let Some(begun) = hot.placement.begin() else { break };
                // The expert that had the slot is in no table from here on.
                hot.is_changed = true;
                let pieces = unit(&self.apart, begun, &hot.slots[begun.layer], hot.base);
                hot.mover.send(begun, pieces);
            }
            hot.write_tables(stream)?;
        }
        Ok(hot.judge.layout())
    }

    /// A step has ended, and nothing of it is under way: changes the layout where that pays.
    pub fn over(&mut self, stream: &Stream, step: Step) -> Result<(), DriverError> {
        let Some(hot) = &mut self.hot else { return Ok(()) };
        hot.placement.age(step.tokens);
        let Hot { judge, placement, slots, whole, .. } = hot;
        let Some(layout) = judge.step(step, || saves(placement, slots.len(), whole.len())) else {
            return Ok(());
        };
        let start = Instant::now();
        let pieces: Vec<Piece> = match layout {
            Layout::Slots => {
                let moves = hot.placement.refill();
                hot.is_changed = true;
                moves.into_iter().flat_map(|m| unit(&self.apart, m, &hot.slots[m.layer], hot.base)).collect()
            }
            Layout::Layers => {
                hot.arrivals(true)?;
                hot.whole.iter().flat_map(|&(op, at)| cut(&self.apart, op, at)).collect()
            }
        };
        self.copy(stream, &pieces.iter().collect::<Vec<_>>())?;
        stream.wait()?;
        if let Some(hot) = &mut self.hot {
            hot.judge.set_cost(start.elapsed());
        }
        Ok(())
    }

    /// What is queued up to here has read the staging buffer.
    pub fn unstage(&self, stream: &Stream) -> Result<(), DriverError> {
        stream.record(&self.free)
    }

    /// Answers what was handed over, whatever it is worth, so that the device waits for nothing more.
    pub fn release(&mut self) {
        self.answered = self.handed;
        self.flags.atomic(ANSWERED).store(self.answered, Release);
        self.held = None;
    }

    /// A step of so many tokens begins.
    pub fn start_step(&mut self, tokens: usize) {
        self.apart.start_step(tokens);
    }

    /// A step ends.
    ///
    /// # Errors
    /// Weights could not be read, or their file was cut or changed: what was computed is nobody's answer.
    pub fn finish_step(&mut self) -> Result<(), Failure> {
        let finished = self.apart.finish_step().map_err(Failure::all);
        self.lost.take().map_or(finished, Err)
    }

    /// What streaming has done so far.
    pub fn stream_stats(&self) -> Option<StreamStats> {
        self.apart.stream_stats()
    }

    /// A flag that ends the waits of a step.
    pub fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        self.apart.set_interrupt(flag);
    }
}

/// The share of the host's work that slots save, by what was counted in layers of which the host computed something.
fn saves(placement: &Placement, n_layers: usize, n_device: usize) -> f64 {
    let shares: Vec<f64> = (0..n_layers).filter_map(|layer| placement.best_share(layer)).collect();
    let hit = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    1.0 - n_layers as f64 * (1.0 - hit) / (n_layers - n_device).max(1) as f64
}

impl Hot {
    fn new(context: &Arc<Context>, places: HotPlaces, split: &Split, is_forced: bool) -> Result<Hot, CompileError> {
        let HotPlaces { base, slots, tables } = places;
        let whole = (0..slots.len()).filter(|&layer| !split.layers()[layer].is_host);
        let whole = whole.map(|layer| (layer, base + split.offset(layer) as Ptr)).collect();
        let placement = Placement::new(slots.iter().map(|layer| (layer.n_expert, layer.n)));
        let to_be = Pinned::new(context, 4 * placement.tables().count()).failed("tables of experts")?;
        let (jobs, wanted) = mpsc::channel::<(Move, Vec<Piece>)>();
        let (finished, done) = mpsc::channel();
        let mut lane = Lane::new(context).failed("staging memory")?;
        let context = Arc::clone(context);
        let work = move || {
            for (begun, pieces) in wanted {
                let copied = context.enter().and_then(|()| {
                    pieces.iter().try_for_each(|piece| lane.copy(piece))?;
                    lane.stages.iter().try_for_each(|(_, stream, _)| stream.wait())
                });
                if finished.send((begun, copied)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("experts".into()).spawn(work);
        let thread = thread.map_err(|e| CompileError::Start { what: "a thread".into(), why: e.to_string() })?;
        let mover = Mover { jobs: Some(jobs), done, thread: Some(thread), under_way: 0 };
        Ok(Hot { base, slots, whole, placement, judge: Judge::new(is_forced), tables, to_be, is_changed: true, mover })
    }

    /// Takes what has come into the tables; `is_last`: waits for all that is under way.
    fn arrivals(&mut self, is_last: bool) -> Result<(), DriverError> {
        while self.mover.under_way > 0 {
            let next = if is_last { self.mover.done.recv().ok() } else { self.mover.done.try_recv().ok() };
            let Some((done, copied)) = next else { break };
            self.mover.under_way -= 1;
            self.is_changed = true;
            match copied {
                Ok(()) => self.placement.end(done),
                Err(e) => {
                    self.placement.fail(done);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Where a part of an expert lies on the device in this step, where it has a slot.
    fn place(&self, layer: usize, Part { expert, stack, plane, at }: Part) -> Option<Ptr> {
        let slot = self.placement.table(layer)[expert as usize];
        let slots = self.slots.get(layer).filter(|_| self.judge.layout() == Layout::Slots && slot != NONE)?;
        let start = slots.planes(stack)[plane] + slot as usize * slots.lens[stack][plane];
        Some(self.base + (start + at) as Ptr)
    }

    /// Queues the tables, where they have changed.
    fn write_tables(&mut self, stream: &Stream) -> Result<(), DriverError> {
        if std::mem::take(&mut self.is_changed) {
            let words = self.to_be.words_mut::<u32>();
            words.iter_mut().zip(self.placement.tables()).for_each(|(to, slot)| *to = slot);
            let bytes = 4 * words.len();
            // SAFETY: tables of that length; they are written anew after this step has ended.
            unsafe { stream.upload(self.tables, &self.to_be, bytes)? };
        }
        Ok(())
    }
}

impl Mover {
    fn send(&mut self, begun: Move, pieces: Vec<Piece>) {
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send((begun, pieces)).is_ok()) {
            self.under_way += 1;
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.jobs = None;
        // What it has is copied first: the memory that it writes to goes after it.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The weights of an expert on their way to a slot.
fn unit(apart: &Apart, Move { layer, slot, expert }: Move, slots: &Slots, base: Ptr) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (stack, planes) in apart.planes(layer).iter().enumerate() {
        let Some(from) = planes.get(expert as usize) else { continue };
        let starts = slots.planes(stack);
        for (plane, bytes) in [from.q, from.scales, from.biases].into_iter().enumerate() {
            let to = base + (starts[plane] + slot as usize * slots.lens[stack][plane]) as Ptr;
            chop(bytes, to, Part { expert, stack, plane, at: 0 }, &mut pieces);
        }
    }
    pieces
}

impl Lane {
    fn new(context: &Arc<Context>) -> Result<Lane, DriverError> {
        let one = || {
            let (stage, stream) = (Pinned::new(context, STAGE)?, Stream::new(context)?);
            Ok::<_, DriverError>((stage, stream, Event::without_time(context)?))
        };
        Ok(Lane { stages: [one()?, one()?], turn: 0 })
    }

    fn copy(&mut self, piece: &Piece) -> Result<(), DriverError> {
        let (stage, stream, _) = &mut self.stages[self.turn];
        self.turn = 1 - self.turn;
        stream.wait()?;
        // SAFETY: bytes of an op's weights, which live as long as the program.
        let bytes = unsafe { std::slice::from_raw_parts(piece.from, piece.len) };
        stage.words_mut::<u8>()[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: `to` is a place in the staging buffer; the stage stays until its stream was waited for.
        unsafe { stream.upload(piece.to, stage, bytes.len()) }
    }
}

/// The weights of an op in pieces, as they lie in the staging buffer: planes of all experts one behind the other.
fn cut(apart: &Apart, op: usize, stage: Ptr) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut base = stage;
    for (stack, planes) in apart.planes(op).iter().enumerate() {
        let of = |i: usize| planes.iter().map(move |p| [p.q, p.scales, p.biases][i]);
        let (starts, bytes) = plane_starts([0, 1, 2].map(|i| of(i).map(<[u8]>::len).sum()));
        for (plane, start) in starts.into_iter().enumerate() {
            let mut to = base + start as Ptr;
            for (expert, bytes) in (0u32..).zip(of(plane)) {
                chop(bytes, to, Part { expert, stack, plane, at: 0 }, &mut pieces);
                to += bytes.len() as Ptr;
            }
        }
        base += bytes as Ptr;
    }
    pieces
}

/// Pieces of a plane, of which `part` is the first, on their way to `to`.
fn chop(bytes: &[u8], to: Ptr, part: Part, pieces: &mut Vec<Piece>) {
    for (i, piece) in bytes.chunks(STAGE).enumerate() {
        let at = i * STAGE;
        let (from, len) = (piece.as_ptr(), piece.len());
        pieces.push(Piece { from, len, to: to + at as Ptr, part: Part { at, ..part } });
    }
}

/// Whether the device stores and waits for words of host memory: tried once.
fn can_wait(stream: &Stream, flags: &Pinned, flags_ptr: Ptr) -> bool {
    // SAFETY: the flags live, and the word is stored before it is waited for.
    let tried = unsafe {
        let at = flags_ptr + 4 * REACHED as Ptr;
        stream.store(at, 1).and_then(|()| stream.wait_until(at, 1))
    };
    tried.and_then(|()| stream.wait()).is_ok() && flags.atomic(REACHED).load(Acquire) == 1
}
