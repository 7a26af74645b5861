//! Experts in host memory: the host computes them between two parts of a step, or copies a layer's weights to a
//! staging buffer on the device, where a step has rows enough that copying is faster.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use model::plan::Plan;

use super::compile::Failed;
use super::driver::{Context, DriverError, Event, Memory, Pinned, Ptr, Stream};
use super::handover::Costs;
use super::nodes::{ExpertsNode, HostNode};
use super::split::{self, Split, plane_starts};
use super::upload::STAGE;
use crate::cpu::apart::Apart;
use crate::{CompileError, Limits};

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

/// The host's half of a program.
pub struct Host {
    context: Arc<Context>,
    /// Pieces of each op's weights.
    pieces: Vec<Vec<Piece>>,
    apart: Apart,
    x: Pinned,
    ids: Pinned,
    out: Pinned,
    flags: Pinned,
    flags_ptr: Ptr,
    /// One a thread.
    lanes: Vec<Mutex<Lane>>,
    /// The staging buffer is free.
    free: Event,
    _stage: Memory,
    /// Rows that the buffers hold.
    max_rows: usize,
    /// Rows from which experts are copied.
    from_rows: usize,
    /// The device waits for answers by itself.
    waits: bool,
    /// Handovers queued, and answered; both wrap.
    handed: u32,
    answered: u32,
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
    ) -> Result<Host, CompileError> {
        let max_rows = limits.max_tokens.min(host.copies_from.unwrap_or(MAX_ROWS)).max(1);
        let ops: Vec<usize> = split.host().map(|layer| layer.op).collect();
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
        let lane = || {
            let one = || {
                let (stage, stream) = (Pinned::new(context, STAGE)?, Stream::new(context)?);
                Ok::<_, DriverError>((stage, stream, Event::without_time(context)?))
            };
            Ok::<_, DriverError>(Mutex::new(Lane { stages: [one()?, one()?], turn: 0 }))
        };
        let made = Host {
            context: Arc::clone(context),
            pieces,
            lanes: (0..host.cpu.threads.max(1)).map(|_| lane()).collect::<Result<_, _>>().failed("staging memory")?,
            apart,
            x: pinned(x)?,
            ids: pinned(ids)?,
            out: pinned(out)?,
            waits: can_wait(stream, &flags, flags_ptr),
            flags,
            flags_ptr,
            free: Event::without_time(context).failed("an event")?,
            _stage: stage,
            max_rows,
            from_rows: host.copies_from.unwrap_or(usize::MAX),
            handed: 0,
            answered: 0,
        };
        made.flags.atomic(REACHED).store(0, Release);
        Ok(made)
    }

    /// Measures from how many rows on copies pay, where the caller has not said; the weights of the device have come.
    pub fn measure(&mut self, stream: &Stream) -> Result<(), DriverError> {
        let (few, many) = (32.min(self.max_rows), 128.min(self.max_rows));
        if self.from_rows != usize::MAX || few == many || self.pieces.is_empty() {
            return Ok(());
        }
        let mut copy = 0.0;
        for _ in 0..2 {
            let start = Instant::now();
            self.stage(stream, 0)?;
            stream.wait()?;
            copy = start.elapsed().as_secs_f64();
        }
        let [few, many] = [few, many].map(|rows| (rows, self.time(rows)));
        self.from_rows = Costs { copy, few, many }.threshold(self.max_rows);
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
            self.compute_rows(0, rows);
            seconds = start.elapsed().as_secs_f64();
        }
        seconds
    }

    /// Whether the host computes a step of so many rows.
    pub fn is_computed(&self, rows: usize) -> bool {
        rows < self.from_rows && rows <= self.max_rows
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
                stream.wait_until(self.flags_ptr + 4 * ANSWERED as Ptr, self.handed)?;
            }
            stream.upload(out.ptr, &self.out, 4 * rows * n_used * out.width)
        }
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
        self.compute_rows(node.index, rows);
        self.answered = self.answered.wrapping_add(1);
        self.flags.atomic(ANSWERED).store(self.answered, Release);
    }

    fn compute_rows(&mut self, op: usize, rows: usize) {
        let shape = self.apart.shape(op);
        let x = &mut self.x.words_mut::<f32>()[..rows * shape.d];
        let ids = &mut self.ids.words_mut::<u32>()[..rows * shape.n_used];
        let out = &mut self.out.words_mut::<f32>()[..rows * shape.n_used * shape.d_out];
        self.apart.compute(op, x, ids, out);
    }

    /// Copies the weights of op `op` to the staging buffer; what is queued on `stream` behind this finds them there.
    pub fn stage(&mut self, stream: &Stream, op: usize) -> Result<(), DriverError> {
        let lanes = &self.lanes;
        let lock = |i: usize| lanes[i].lock().unwrap_or_else(PoisonError::into_inner);
        for i in 0..lanes.len() {
            lock(i).stages.iter().try_for_each(|(_, stream, _)| stream.wait_for(&self.free))?;
        }
        let (pieces, context) = (&self.pieces[op], &self.context);
        let failed = Mutex::new(None);
        self.apart.pool().run(pieces.len(), &|worker, i| {
            let copied = context.enter().and_then(|()| lock(worker).copy(&pieces[i]));
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

    /// What is queued up to here has read the staging buffer.
    pub fn unstage(&self, stream: &Stream) -> Result<(), DriverError> {
        stream.record(&self.free)
    }

    /// Answers what was handed over, whatever it is worth, so that the device waits for nothing more.
    pub fn release(&mut self) {
        self.answered = self.handed;
        self.flags.atomic(ANSWERED).store(self.answered, Release);
    }

    /// Files that were cut or lost while they were mapped.
    ///
    /// # Errors
    /// Names the file.
    pub fn intact(&self) -> Result<(), checkpoint::Error> {
        self.apart.intact()
    }
}

impl Lane {
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
    for stack in apart.planes(op) {
        let of = |i: usize| stack.iter().map(move |p| [p.q, p.scales, p.biases][i]);
        let (starts, bytes) = plane_starts([0, 1, 2].map(|i| of(i).map(<[u8]>::len).sum()));
        for (i, start) in starts.into_iter().enumerate() {
            let mut to = base + start as Ptr;
            for plane in of(i) {
                for piece in plane.chunks(STAGE) {
                    pieces.push(Piece { from: piece.as_ptr(), len: piece.len(), to });
                    to += piece.len() as Ptr;
                }
            }
        }
        base += bytes as Ptr;
    }
    pieces
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
