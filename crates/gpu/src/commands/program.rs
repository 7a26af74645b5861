//! A program on a GPU: a step writes its tables, fills a list from the plan's dispatches and submits it.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use model::plan::{Buf, Rows};

use super::node::{CopySlot, Counts, Schedule};
use super::tables::Tables;
use super::{Cmd, Gpu, GpuError, List, Pipe, Span, Ticket};
use crate::drafts::Slots;
use backend::inputs::{self, Inputs};
use backend::routing::RoutingTrace;
use backend::{
    Ask, Batch, Cause, Drafts, Failure, Fault, Kinds, Limits, Output, Picks, Profile, Program, RouterInfo, Save,
    StepError, StreamStats, SumInputs, Takes,
};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Limit of a step. A GPU that takes longer is not coming back: the system ends what runs for seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// What a program is made of.
pub struct Parts {
    pub gpu: Box<dyn Gpu>,
    /// What steps take whose inputs are summed; none where dispatches stand for several ops.
    pub plain: Option<Plain>,
    pub model: Half,
    pub head: Option<Head>,
    /// What copies each state of the plan.
    pub copies: Vec<CopySlot>,
    pub pipes: Vec<Pipe>,
    pub tables: Tables,
    /// A word for each row of each router: 1 where the row has no answer.
    pub faults: Vec<Span>,
    /// Ids of each router.
    pub routes: Vec<Span>,
    pub router_rows: Vec<Rows>,
    pub router_layers: Vec<u32>,
    pub routing: RoutingTrace,
    pub n_vocab: usize,
    pub n_layers: usize,
    pub limits: Limits,
    pub kinds: Kinds,
    pub takes: Takes,
}

/// What a step of the model, or one of its draft head, runs and returns.
pub struct Half {
    /// The dispatches; a barrier parts each level of a step from the next.
    pub schedule: Schedule,
    pub logits: Span,
    /// With its width.
    pub hidden: Option<(Span, usize)>,
    /// Its routers.
    pub routers: Range<usize>,
}

/// A draft head.
pub struct Head {
    pub half: Half,
    /// The model's rows that it may be given.
    pub source: Span,
    /// What a step of it is given.
    pub input: Span,
    /// Numbers of such a row.
    pub width: usize,
}

/// A program op by op.
pub struct Plain {
    /// An op, and the place behind its dispatches, in the order in which they run.
    pub ends: Vec<(usize, usize)>,
    /// Each buffer.
    pub bufs: Vec<Span>,
    pub inputs: Inputs,
}

/// Lists of a step: two for few tokens, one more for each eight, and one a layer at most. A layer of 512 tokens takes
/// an M1 some 100 ms (derived from its TFLOPS); each list costs about 20 us (measured by the authors of MLX).
fn n_lists(tokens: usize, n_layers: usize) -> usize {
    (tokens / 8).clamp(2, n_layers.max(2))
}

/// Whether a list ends before this level of so many. Where there are two, the first is short: the GPU waits for it.
fn is_cut(level: usize, n_levels: usize, n_lists: usize) -> bool {
    match n_lists {
        2 => level == n_levels.div_ceil(10),
        _ => level > 0 && level * n_lists / n_levels != (level - 1) * n_lists / n_levels,
    }
}

/// A compiled plan.
pub struct CommandProgram {
    parts: Parts,
    list: List,
    words: Vec<u32>,
    /// Slots to be copied before the next step, in order: from, to, and the number of drafts that are copied along.
    pending: Vec<[u32; 3]>,
    slots: Slots,
    /// Slots that a step has computed; the others hold nothing, `[n_states]`.
    is_computed: Vec<bool>,
    /// The step under way.
    batch: Batch,
    ticket: Option<Ticket>,
    is_traced: bool,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    /// Rows that the draft head may be given.
    all_hidden: Vec<f32>,
    faults: Vec<Fault>,
    picks: Picks,
    bytes: Vec<u8>,
    ids: Vec<u32>,
    /// The first error of the GPU: nothing runs after it.
    broken: Option<GpuError>,
}

impl CommandProgram {
    /// From its parts.
    pub fn new(parts: Parts) -> CommandProgram {
        CommandProgram {
            list: List::default(),
            words: Vec::new(),
            pending: Vec::new(),
            slots: Slots::new(if parts.kinds.state { parts.limits.n_states } else { 0 }),
            is_computed: vec![false; parts.limits.n_states],
            batch: Batch::default(),
            ticket: None,
            is_traced: false,
            logits: Vec::new(),
            hidden: Vec::new(),
            all_hidden: Vec::new(),
            faults: Vec::new(),
            picks: Picks::default(),
            bytes: Vec::new(),
            ids: Vec::new(),
            broken: None,
            parts,
        }
    }

    /// What the step in flight runs.
    fn half(&self) -> &Half {
        self.parts.head.as_ref().filter(|_| self.batch.is_draft()).map_or(&self.parts.model, |head| &head.half)
    }

    /// Sends the step's dispatches, in several lists: the GPU begins with the first while the next is written, and a
    /// prompt's lists are short, since systems end those that run for seconds. Each comes behind the one before it.
    fn queue(&mut self) -> Result<(), GpuError> {
        self.parts.tables.fill(&mut *self.parts.gpu, &self.batch, &self.slots)?;
        let counts = Counts::of_batch(&self.batch, &self.slots);
        let is_draft = self.batch.is_draft();
        if let Some(head) = self.parts.head.as_ref().filter(|_| is_draft) {
            self.bytes.clear();
            self.batch.hidden.iter().for_each(|x| self.bytes.extend(x.to_le_bytes()));
            self.parts.gpu.write(head.input.part(0, self.bytes.len() as u64), &self.bytes)?;
        }
        let Parts { copies, pipes, .. } = &self.parts;
        self.list.clear();
        for slots in self.pending.drain(..) {
            copies.iter().for_each(|copy| copy.encode(pipes, slots, &mut self.list));
            self.list.cmds.push(Cmd::Barrier);
        }
        if !is_draft && self.parts.plain.as_ref().is_some_and(|plain| plain.inputs.is_on()) {
            return self.run_plain(counts);
        }
        let Parts { gpu, model, head, pipes, tables, n_layers, .. } = &mut self.parts;
        let half = head.as_mut().filter(|_| is_draft).map_or(model, |head| &mut head.half);
        let (nodes, levels) = half.schedule.of_step(counts);
        let n_lists = n_lists(counts.tokens, *n_layers);
        let mut is_due = false;
        for (i, level) in levels.iter().enumerate() {
            if is_due && is_cut(i, levels.len(), n_lists) {
                gpu.submit(&self.list)?;
                self.list.clear();
                is_due = false;
            }
            let mut runs = false;
            for node in level.iter().map(|&i| &nodes[i]) {
                let from = self.list.cmds.len();
                if node.encode(pipes, counts, |table| tables.span(table), &mut self.words, &mut self.list) {
                    if is_due && !runs {
                        self.list.cmds.insert(from, Cmd::Barrier);
                    }
                    runs = true;
                }
            }
            is_due |= runs;
        }
        self.ticket = Some(gpu.submit(&self.list)?);
        Ok(())
    }

    /// Runs the step op by op and sums the inputs of its products.
    fn run_plain(&mut self, counts: Counts) -> Result<(), GpuError> {
        let Parts { gpu, plain: Some(plain), model, pipes, tables, .. } = &mut self.parts else { return Ok(()) };
        let Plain { ends, bufs, inputs } = plain;
        let mut taps = Taps { gpu: &mut **gpu, bufs };
        taps.run(&self.list)?;
        let of_step = inputs::Counts { tokens: counts.tokens, outputs: counts.outputs };
        let mut from = 0;
        for &(op, end) in &*ends {
            self.list.clear();
            for node in &model.schedule.nodes()[from..end] {
                if node.encode(pipes, counts, |table| tables.span(table), &mut self.words, &mut self.list) {
                    self.list.cmds.push(Cmd::Barrier);
                }
            }
            inputs.run(op, of_step, &mut taps, |taps| taps.run(&self.list))?;
            from = end;
        }
        Ok(())
    }

    /// Reads words of a span.
    fn read(&mut self, span: Span) -> Result<impl Iterator<Item = u32> + '_, GpuError> {
        self.bytes.resize(span.len as usize, 0);
        if !self.bytes.is_empty() {
            self.parts.gpu.read(span, &mut self.bytes)?;
        }
        Ok(self.bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)))
    }

    /// Puts the first `n` numbers of a span in the place of those that a vector holds.
    fn read_to(&mut self, to: fn(&mut Self) -> &mut Vec<f32>, span: Span, n: usize) -> Result<(), GpuError> {
        let mut numbers = std::mem::take(to(self));
        numbers.clear();
        numbers.extend(self.read(span.part(0, 4 * n as u64))?.map(f32::from_bits));
        *to(self) = numbers;
        Ok(())
    }

    fn finish(&mut self) -> Result<(), GpuError> {
        if let Some(ticket) = self.ticket.take() {
            self.parts.gpu.wait(ticket, LIMIT)?;
        }
        let n_rows = self.batch.rows.len();
        let last = (0..n_rows).rev().find(|&row| !matches!(self.batch.asks[row], Ask::Hidden));
        let n_logits = last.map_or(0, |row| row + 1) * self.parts.n_vocab;
        let Half { logits, hidden, .. } = *self.half();
        self.read_to(|program| &mut program.logits, logits, n_logits)?;
        if let Some((span, width)) = hidden {
            self.read_to(|program| &mut program.hidden, span, n_rows * width)?;
        }
        if let Some(&Head { source, width, .. }) = self.parts.head.as_ref() {
            let n = if self.batch.is_draft() { 0 } else { self.batch.tokens.len() };
            self.read_to(|program| &mut program.all_hidden, source, n * width)?;
        }
        self.read_faults()?;
        if self.is_traced && !self.batch.is_draft() {
            self.read_routing()?;
        }
        self.picks.fill(&self.batch, &self.logits, self.parts.n_vocab);
        Ok(())
    }

    /// The first fault of every chunk: of the first router that saw one, at its first token.
    fn read_faults(&mut self) -> Result<(), GpuError> {
        self.faults.clear();
        for router in self.half().routers.clone() {
            let rows = self.parts.router_rows[router];
            let n = rows.count(self.batch.tokens.len(), self.batch.rows.len());
            let mut ids = std::mem::take(&mut self.ids);
            ids.clear();
            ids.extend(self.read(self.parts.faults[router].part(0, 4 * n as u64))?);
            self.ids = ids;
            for row in (0..n).filter(|&row| self.ids[row] != 0) {
                let token = if rows == Rows::Outputs { self.batch.rows[row] } else { row as u32 };
                let chunk = self.batch.chunks.partition_point(|c| c.first + c.len <= token) as u32;
                if self.faults.iter().all(|fault| fault.chunk != chunk) {
                    self.faults.push(Fault { chunk, layer: self.parts.router_layers[router], token });
                }
            }
        }
        self.faults.sort_by_key(|fault| fault.chunk);
        Ok(())
    }

    fn read_routing(&mut self) -> Result<(), GpuError> {
        self.parts.routing.start(&self.batch);
        for router in self.parts.model.routers.clone() {
            let rows = self.parts.router_rows[router];
            let n = rows.count(self.batch.tokens.len(), self.batch.rows.len());
            let n_used = self.parts.routing.routers()[router].n_used;
            let mut ids = std::mem::take(&mut self.ids);
            ids.clear();
            ids.extend(self.read(self.parts.routes[router].part(0, 4 * (n * n_used) as u64))?);
            self.parts.routing.record(rows, &ids, &self.batch);
            self.ids = ids;
        }
        Ok(())
    }

    fn device_error(&mut self, e: GpuError) -> StepError {
        let device = self.parts.gpu.caps().name.clone();
        let why = e.to_string();
        self.broken = Some(e);
        Failure::all(Cause::Device { device, op: "step".into(), why }).into()
    }
}

/// The memory of a step that runs op by op.
struct Taps<'a> {
    gpu: &'a mut dyn Gpu,
    bufs: &'a [Span],
}

impl Taps<'_> {
    /// Runs what a list holds to its end.
    fn run(&mut self, list: &List) -> Result<(), GpuError> {
        if list.cmds.is_empty() {
            return Ok(());
        }
        let ticket = self.gpu.submit(list)?;
        self.gpu.wait(ticket, LIMIT).map(drop)
    }
}

impl inputs::Memory for Taps<'_> {
    type Error = GpuError;

    fn numbers(&mut self, buf: Buf, n: usize) -> Result<Cow<'_, [f32]>, GpuError> {
        Ok(Cow::Owned(self.ids(buf, n)?.into_iter().map(f32::from_bits).collect()))
    }

    fn ids(&mut self, buf: Buf, n: usize) -> Result<Vec<u32>, GpuError> {
        let mut bytes = vec![0; 4 * n];
        if n > 0 {
            self.gpu.read(self.bufs[buf.0 as usize].part(0, 4 * n as u64), &mut bytes)?;
        }
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn put_ids(&mut self, buf: Buf, ids: &[u32]) -> Result<(), GpuError> {
        if ids.is_empty() {
            return Ok(());
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.gpu.write(self.bufs[buf.0 as usize].part(0, bytes.len() as u64), &bytes)
    }
}

impl Program for CommandProgram {
    fn limits(&self) -> Limits {
        self.parts.limits
    }

    fn kinds(&self) -> Kinds {
        self.parts.kinds
    }

    fn n_vocab(&self) -> usize {
        self.parts.n_vocab
    }

    fn d_input(&self) -> Option<usize> {
        self.parts.takes.d_input
    }

    fn draft_width(&self) -> Option<usize> {
        self.parts.takes.d_hidden
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        batch.check_with(self.parts.limits, self.parts.kinds, self.parts.n_vocab, self.parts.takes)?;
        self.slots.check(batch)?;
        if let Some(e) = self.broken.clone() {
            return Err(self.device_error(e));
        }
        self.batch.copy_from(batch);
        self.queue().map_err(|e| self.device_error(e))?;
        self.slots.computed(batch);
        if self.parts.kinds.state && !batch.is_draft() {
            batch.chunks.iter().for_each(|c| self.is_computed[c.state as usize] = true);
        }
        Ok(())
    }

    fn is_lost(&self) -> bool {
        self.broken.is_some()
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        if let Err(e) = self.finish() {
            return Err(self.device_error(e));
        }
        let n_rows = self.batch.rows.len();
        let last = (0..n_rows).rev().find(|&row| matches!(self.batch.asks[row], Ask::Logits));
        Ok(Output {
            logits: &self.logits[..last.map_or(0, |row| row + 1) * self.parts.n_vocab],
            picks: &self.picks,
            hidden: &self.hidden,
            all_hidden: &self.all_hidden,
            faults: &self.faults,
            routing: self.parts.routing.ids().filter(|_| !self.batch.is_draft()),
        })
    }

    /// The copy is made where the next step begins: nothing reads a state before that.
    fn copy_state(&mut self, from: u32, to: u32) {
        let n_states = self.parts.limits.n_states;
        assert!((from.max(to) as usize) < n_states, "states {from} and {to} of {n_states}");
        if self.parts.kinds.state && from != to && self.is_computed[from as usize] {
            let n_kept = self.slots.copied(from, to);
            self.pending.push([from, to, n_kept]);
            self.is_computed[to as usize] = true;
        }
    }

    fn routers(&self) -> &[RouterInfo] {
        self.parts.routing.routers()
    }

    fn trace_routing(&mut self, is_on: bool) {
        self.is_traced = is_on;
        self.parts.routing.turn(is_on, self.parts.limits.max_outputs);
    }

    fn stream_stats(&self) -> Option<StreamStats> {
        None
    }

    fn set_interrupt(&mut self, _: Arc<AtomicBool>) {}

    fn saver(&mut self) -> Option<&mut dyn Save> {
        None
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        Some(self)
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        None
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        self.parts.plain.as_mut().map(|plain| &mut plain.inputs as &mut dyn SumInputs)
    }
}

impl Drafts for CommandProgram {
    fn commit(&mut self, slot: u32, n_accepted: usize) {
        self.slots.commit(slot, n_accepted);
    }

    fn is_settled(&mut self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_cut_in_lists() {
        for (tokens, n_layers, n_levels, first, lists) in
            [(1, 48, 480, 48, 2), (9, 48, 480, 48, 2), (64, 48, 480, 60, 8), (512, 48, 480, 10, 48), (512, 1, 9, 1, 2)]
        {
            let cuts: Vec<usize> =
                (0..n_levels).filter(|&level| is_cut(level, n_levels, n_lists(tokens, n_layers))).collect();
            assert_eq!((cuts[0], cuts.len() + 1), (first, lists), "{tokens} tokens, {n_layers} layers");
        }
    }
}
