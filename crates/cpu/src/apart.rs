//! Ops with routed experts that the host computes for a device that has no room for them: the kernels and the bits of
//! a program of the CPU, one op at a time, on rows that the caller keeps.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use checkpoint::Checkpoint;
use model::plan::cost::Kind;
use model::plan::{Op, Plan, Rows, Weight};
use quant::Planes;

use super::Cpu;
use super::compile::{Needs, stack_shapes, streaming};
use super::copies::{self, Matrices};
use super::kernels::{ActsShared, Kernels, Scratch};
use super::mem::{PerWorker, View};
use super::ops::attention::{AttentionScratch, SplitStates};
use super::ops::experts::{self, ExpertLists, ExpertMats, Extras, Stack, Stacks};
use super::ops::experts_streamed::{self, StreamedMats, Streaming, lookahead_values};
use super::ops::linear::N_KINDS;
use super::pool::Pool;
use super::program::{Mat, Run, StepTokens, Worker};
use backend::experts::layout::Layout;
use backend::experts::{StreamStats, Streams};
use backend::residency::{Residencies, Residency};
use backend::routing::RoutingTrace;
use backend::{Batch, Cause, CompileError, Failure, Footprint, Limits, Part, weights};
use sys::arena::Arena;

/// Where the matrices of an op are.
enum Mats {
    /// In memory, all of them.
    Resident(ExpertMats),
    /// On disk, and in slabs those that are there.
    Streamed(StreamedMats),
}

/// An op with its matrices, and its buffers between the products.
struct ExpertOp {
    mats: Mats,
    hidden: View,
    spare: Option<View>,
    n_used: usize,
}

/// Rows and experts of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Width of the input's rows.
    pub d: usize,
    /// Width of the output's.
    pub d_out: usize,
    /// Experts of a row.
    pub n_used: usize,
    /// Experts of the op.
    pub n_expert: usize,
}

/// The ops of a plan that the host computes, and what that takes. Fields drop in order: what points into the arenas
/// and the checkpoint goes first.
pub struct Apart {
    ops: Vec<ExpertOp>,
    pool: Pool,
    kernels: Kernels,
    step: StepTokens,
    acts: [ActsShared; N_KINDS],
    workers: PerWorker<Worker>,
    lists: ExpertLists,
    split: SplitStates,
    routing: RoutingTrace,
    batch: Batch,
    /// Slabs of experts, where the CPU's policy streams them.
    streaming: Option<Box<Streaming>>,
    _arenas: Vec<Arena>,
    weights: Arc<Checkpoint>,
}

impl Apart {
    /// The ops of these places in `plan`, which are [`Op::Experts`], for at most `max_rows` rows at a time.
    ///
    /// # Errors
    /// As [`backend::Backend::compile`].
    pub fn new(
        cpu: &Cpu,
        plan: &Plan,
        ops: &[usize],
        weights: &Arc<Checkpoint>,
        max_rows: usize,
    ) -> Result<Apart, CompileError> {
        let isa = cpu.isa.check().map_err(|e| CompileError::Unsupported {
            backend: "cpu",
            what: format!("run experts on {}: {e}", cpu.isa),
        })?;
        let plan = only(plan, ops);
        let limits = Limits { max_tokens: max_rows, max_outputs: max_rows, ..Limits::default() };
        let needs = Needs::of(&plan, limits, cpu.cache);
        let mut pool = Pool::new(cpu.threads.max(1))?;
        let matrices = Matrices::new(&plan, weights, &Residencies::new(&plan, cpu.residency), &mut pool)?;
        let hidden_bytes = plan.ops.iter().map(|op| match *op {
            Op::Experts { hidden, ids, .. } => {
                4usize.saturating_mul(max_rows).saturating_mul(plan.buf(ids).width * plan.buf(hidden).width)
            }
            _ => 0,
        });
        let hidden = Arena::new("activations of experts", hidden_bytes.max().unwrap_or(0))?;
        let spare = Arena::new("activations of experts", needs.spare.saturating_mul(4))?;
        let layout = cpu.layout(&plan);
        let at = [hidden.ptr(), spare.ptr()];
        let resolve = |(i, op)| resolve(&plan, weights, (&matrices, &layout), at, i, op);
        let resolved = plan.ops.iter().enumerate().map(resolve).collect::<Result<_, _>>()?;
        let streaming = streaming(&plan, weights, layout, &needs, None)?;
        Ok(Apart {
            ops: resolved,
            kernels: Kernels::new(isa),
            step: StepTokens::new(max_rows, 1),
            acts: needs.acts()?,
            workers: PerWorker::new(pool.threads(), || {
                let attention = AttentionScratch::new(0, 0, 0)?;
                Ok::<_, CompileError>(Worker {
                    kernel: Scratch::default(),
                    attention,
                    rows: Vec::new(),
                    tried: Vec::new(),
                })
            })?,
            lists: ExpertLists::new(needs.n_expert, needs.pairs),
            split: SplitStates::new(1, 0, 0)?,
            routing: RoutingTrace::new(&plan),
            batch: Batch::default(),
            streaming,
            pool,
            _arenas: vec![hidden, spare, matrices.into_arena()],
            weights: Arc::clone(weights),
        })
    }

    /// The slabs of these ops' experts, where they are streamed.
    pub fn layout(cpu: &Cpu, plan: &Plan, ops: &[usize]) -> Layout {
        cpu.layout(&only(plan, ops))
    }

    /// What [`Apart::new`] allocates, with the rows of its callers, and the experts that stay in files.
    pub fn footprint(cpu: &Cpu, plan: &Plan, ops: &[usize], max_rows: usize) -> Footprint {
        let plan = only(plan, ops);
        let limits = Limits { max_tokens: max_rows, max_outputs: max_rows, ..Limits::default() };
        let (needs, layout, residencies) =
            (Needs::of(&plan, limits, cpu.cache), cpu.layout(&plan), Residencies::new(&plan, cpu.residency));
        let mut sum = Footprint::new("host memory");
        sum.add(Part::Weights(Kind::Experts, Residency::Streamed), Streams::bytes(&layout));
        let mut widest = 0;
        for op in &plan.ops {
            let Op::Experts { x, ids, gate, up, down, hidden, out, .. } = *op else { continue };
            for w in [gate, up, down] {
                let bytes = match residencies.of(w) {
                    Residency::Mapped => plan.weight(w).bytes(),
                    Residency::Copied => copies::bytes_of(plan.weight(w)),
                    Residency::Streamed => 0,
                };
                sum.add(Part::Weights(Kind::Experts, residencies.of(w)), bytes);
            }
            let [x, n_used, hidden, out] = [x, ids, hidden, out].map(|buf| plan.buf(buf).width);
            widest = widest.max(x.saturating_add(n_used.saturating_mul(hidden.saturating_add(out).saturating_add(1))));
        }
        sum.add(Part::Activations, widest.saturating_mul(4).saturating_mul(max_rows));
        sum.add(Part::Activations, needs.spare.saturating_mul(4));
        sum.add(Part::Inputs, needs.acts_bytes());
        if !layout.layers.is_empty() {
            sum.add(Part::Inputs, needs.hidden_acts_bytes());
            sum.add(Part::Scratch, lookahead_values(&layout).saturating_mul(4));
        }
        sum.add(
            Part::Scratch,
            StepTokens::bytes(max_rows).saturating_add(ExpertLists::bytes(needs.n_expert, needs.pairs)),
        );
        sum.add(Part::Workers, Scratch::BYTES.saturating_mul(cpu.threads.max(1)));
        sum
    }

    /// Rows and experts of op `op`.
    pub fn shape(&self, op: usize) -> Shape {
        let ExpertOp { ref mats, n_used, .. } = self.ops[op];
        match mats {
            Mats::Resident(mats) => Shape { d: mats.gate.k, d_out: mats.down.n, n_used, n_expert: mats.gate.n_stack() },
            Mats::Streamed(mats) => {
                let [(_, _, d), _, (_, d_out, _)] = mats.shapes;
                Shape { d, d_out, n_used, n_expert: mats.n_expert }
            }
        }
    }

    /// A step of so many rows begins.
    pub fn start_step(&mut self, rows: usize) {
        if let Some(streaming) = &mut self.streaming {
            streaming.streams.start_step(rows);
        }
    }

    /// A step ends: whether the files that it read are those that were opened.
    ///
    /// # Errors
    /// One was written to, or was cut or lost while it was mapped.
    pub fn finish_step(&mut self) -> Result<(), Cause> {
        self.weights.intact().map_err(Cause::lost)?;
        self.streaming.as_mut().map_or(Ok(()), |streaming| streaming.streams.finish_step())
    }

    /// What streaming has done so far.
    pub fn stream_stats(&self) -> Option<StreamStats> {
        self.streaming.as_ref().map(|streaming| streaming.streams.stats())
    }

    /// A flag that ends the waits of a step.
    pub fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        if let Some(streaming) = &mut self.streaming {
            streaming.streams.set_interrupt(flag);
        }
    }

    /// Threads that compute.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The planes of the matrices of op `op`, one expert after the other: of gate, up and down. None where they are
    /// streamed.
    pub fn planes(&self, op: usize) -> [Vec<Planes<'_>>; 3] {
        let Mats::Resident(mats) = &self.ops[op].mats else { return Default::default() };
        [Stack::Gate, Stack::Up, Stack::Down]
            .map(|stack| (0..mats.gate.n_stack()).map(|i| mats.matrix(stack, i).planes).collect())
    }

    /// The rows of all pairs of op `op`, `[rows * n_used, d]`, from rows `x`, `[rows, d]`, and the experts of each,
    /// `[rows, n_used]`. Ids past the last expert count as the last: what a device hands over cannot end the process.
    /// Rows of pairs whose experts are not `is_ours` stay as they are, unless experts are streamed: then all are.
    ///
    /// # Errors
    /// An expert that is streamed could not be read, or the step was interrupted.
    pub fn compute(
        &mut self,
        op: usize,
        x: &mut [f32],
        ids: &mut [u32],
        out: &mut [f32],
        is_ours: impl Fn(usize) -> bool,
    ) -> Result<(), Failure> {
        let Shape { d, d_out: n, n_expert, .. } = self.shape(op);
        let ExpertOp { ref mats, hidden, spare, n_used } = self.ops[op];
        let rows = ids.len() / n_used;
        assert!(x.len() == rows * d && out.len() == rows * n_used * n, "rows of another shape");
        let last = n_expert as u32 - 1;
        ids.iter_mut().for_each(|id| *id = (*id).min(last));
        self.step.set_rows(rows);
        // SAFETY: the slices have these rows, and outlive the op, which alone uses them.
        let [x, ids, out] = unsafe {
            [
                View::new(x.as_mut_ptr(), Rows::Tokens, d),
                View::new(ids.as_mut_ptr().cast(), Rows::Tokens, n_used),
                View::new(out.as_mut_ptr(), Rows::Slots(n_used), n),
            ]
        };
        let mut run = Run {
            pool: &mut self.pool,
            isa: self.kernels.isa(),
            kernels: &self.kernels,
            batch: &self.batch,
            step: &self.step,
            accepted: &[],
            acts: &mut self.acts,
            cols: &[],
            head_cols: &mut [],
            workers: &self.workers,
            lists: &mut self.lists,
            split: &mut self.split,
            ranks: &mut [],
            max_positions: 0,
            routing: &mut self.routing,
            streaming: self.streaming.as_deref_mut(),
        };
        match mats {
            Mats::Resident(mats) => {
                experts::experts_of(&mut run, [x, ids, hidden, out], mats, spare, is_ours);
                Ok(())
            }
            // The rows' chunks are the device's: a step that fails loses all.
            Mats::Streamed(mats) => experts_streamed::experts(&mut run, x, ids, mats, hidden, out, spare)
                .map_err(|failure| Failure { dirty: backend::Chunks::All, lost: backend::Chunks::All, ..failure }),
        }
    }
}

/// A plan of these ops alone.
fn only(plan: &Plan, ops: &[usize]) -> Plan {
    Plan {
        ops: ops.iter().map(|&i| plan.ops[i].clone()).collect(),
        layers: ops.iter().map(|&i| plan.layers[i]).collect(),
        caches: Vec::new(),
        states: Vec::new(),
        ropes: Vec::new(),
        long_ropes: None,
        draft: None,
        ..plan.clone()
    }
}

/// Op `i` with its weights, whose buffers begin at `hidden` and `spare`.
fn resolve(
    plan: &Plan,
    checkpoint: &Checkpoint,
    (matrices, layout): (&Matrices, &Layout),
    [hidden_at, spare_at]: [*mut u8; 2],
    i: usize,
    op: &Op,
) -> Result<ExpertOp, CompileError> {
    let Op::Experts { ids, gate, up, down, ref biases, act, hidden, .. } = *op else {
        return Err(CompileError::Unsupported { backend: "cpu", what: "compute this op for a device".into() });
    };
    let mat = |w: Weight| {
        let decl = plan.weight(w);
        let [_, n, k] = *decl.shape else {
            let why = format!("shape {:?} is no stack of matrices", decl.shape);
            return Err(CompileError::Tensor { name: decl.name.clone(), why });
        };
        let slabs = matrices.planes(w)?;
        // SAFETY: these are slabs of `n` rows of whole blocks each; the caller keeps the checkpoint and the copies.
        Ok(unsafe { Mat::new(decl.dtype, n, k, &slabs) })
    };
    let vector = |w: Weight| weights::vector(checkpoint, plan.weight(w));
    let biases = match biases {
        Some(b) => Some([vector(b.gate)?, vector(b.up)?, vector(b.down)?]),
        None => None,
    };
    let decl = plan.buf(hidden);
    let needs_spare = plan.weight(gate).dtype.act() != plan.weight(up).dtype.act();
    // SAFETY: both arenas hold the rows of the widest op; the caller keeps them.
    let view = |at: *mut u8| unsafe { View::new(at.cast(), decl.rows, decl.width) };
    let extras = Extras { biases, act };
    let mats = match layout.layers.iter().position(|layer| layer.op == i) {
        Some(layer) => {
            let (shapes, n_expert) = (stack_shapes(plan, [gate, up, down])?, layout.layers[layer].n_expert);
            // The routers are the device's.
            Mats::Streamed(StreamedMats { layer, shapes, n_expert, extras, next: None })
        }
        None => Mats::Resident(ExpertMats { gate: mat(gate)?, up: mat(up)?, down: mat(down)?, extras }),
    };
    Ok(ExpertOp {
        mats,
        hidden: view(hidden_at),
        spare: needs_spare.then(|| view(spare_at)),
        n_used: plan.buf(ids).width,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use backend::CacheType;
    use backend::residency::Policy;

    const ROWS: usize = 9;

    /// The embedded model's plan, as the CPU has it, and the places of its experts.
    fn embedded() -> (Arc<Checkpoint>, Plan, Vec<usize>) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
        let checkpoint = Arc::new(checkpoint::open(path.as_ref()).expect("the embedded model opens"));
        let plan = Plan::clone(&model::build(&checkpoint).expect("and is built"));
        let ops = (0..plan.ops.len()).filter(|&i| matches!(plan.ops[i], Op::Experts { .. })).collect();
        (checkpoint, plan, ops)
    }

    fn rows(shape: Shape) -> (Vec<f32>, Vec<u32>) {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let x = (0..ROWS * shape.d).map(|_| next() as f32 / (1 << 23) as f32 - 1.0).collect();
        let of_row = |row: usize| (0..shape.n_used).map(move |i| (5 * row + 3 * i) % shape.n_expert);
        (x, (0..ROWS).flat_map(of_row).map(|id| id as u32).collect())
    }

    /// Down, gate and up in plain f32 of the decoded weights, for one expert.
    fn plain(planes: &[Vec<Planes>; 3], mats: &ExpertMats, expert: usize, x: &[f32]) -> Vec<f32> {
        let product = |mat: &Mat, planes: &[Planes], x: &[f32]| -> Vec<f32> {
            let row_bytes = mat.dtype.plane_bytes(mat.k).expect("whole blocks");
            let mut row = vec![0.0; mat.k];
            let mut dot = |i: usize| {
                quant::decode_row(mat.dtype, planes[expert].row(row_bytes, i), &mut row);
                row.iter().zip(x).map(|(w, x)| w * x).sum()
            };
            (0..mat.n).map(&mut dot).collect()
        };
        let gate = product(&mats.gate, &planes[0], x);
        let up = product(&mats.up, &planes[1], x);
        let hidden: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        product(&mats.down, &planes[2], &hidden)
    }

    #[test]
    fn what_the_host_computes_is_what_the_experts_say() {
        let (checkpoint, plan, ops) = embedded();
        let cpu = Cpu { threads: 2, ..Cpu::default() };
        let mut apart = Apart::new(&cpu, &plan, &ops, &checkpoint, ROWS).expect("made");
        for op in [0, ops.len() - 1] {
            let shape = apart.shape(op);
            let (mut x, mut ids) = rows(shape);
            let mut out = vec![f32::NAN; ROWS * shape.n_used * shape.d_out];
            apart.compute(op, &mut x, &mut ids, &mut out, |_| true).unwrap();
            let planes = apart.planes(op);
            for (pair, found) in out.chunks_exact(shape.d_out).enumerate() {
                let x = &x[pair / shape.n_used * shape.d..][..shape.d];
                let Mats::Resident(mats) = &apart.ops[op].mats else { panic!("all are in memory") };
                let exact = plain(&planes, mats, ids[pair] as usize, x);
                let norm = |v: &[f32]| v.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
                let off: Vec<f32> = found.iter().zip(&exact).map(|(a, b)| a - b).collect();
                let error = norm(&off) / norm(&exact);
                assert!(error < 3e-2, "op {op}, pair {pair}: {error}");
            }
        }
    }

    #[test]
    fn bits_depend_on_neither_threads_nor_company_nor_copies() {
        let (checkpoint, plan, ops) = embedded();
        let with = |threads, residency, rows| {
            let cpu = Cpu { threads, residency, cache: CacheType::F16, ..Cpu::default() };
            Apart::new(&cpu, &plan, &ops, &checkpoint, rows).expect("made")
        };
        let (mut one, mut three) = (with(1, Policy::Mapped, 1), with(3, Policy::CopyAll, ROWS));
        let shape = one.shape(1);
        let (mut x, mut ids) = rows(shape);
        let mut together = vec![0.0; ROWS * shape.n_used * shape.d_out];
        three.compute(1, &mut x, &mut ids, &mut together, |_| true).unwrap();
        for (row, wanted) in together.chunks_exact(shape.n_used * shape.d_out).enumerate() {
            let mut alone = vec![0.0; wanted.len()];
            let x = &mut x[row * shape.d..][..shape.d];
            let ids = &mut ids[row * shape.n_used..][..shape.n_used];
            one.compute(1, x, ids, &mut alone, |_| true).unwrap();
            assert_eq!(alone, wanted, "row {row}");
        }
    }

    #[test]
    fn experts_from_disk_give_the_same_bits() {
        let (checkpoint, plan, ops) = embedded();
        let with = |residency| {
            let cpu = Cpu { threads: 2, residency, ..Cpu::default() };
            Apart::new(&cpu, &plan, &ops[1..], &checkpoint, ROWS).expect("made")
        };
        let mut all = with(Policy::Mapped);
        for slabs in [0, 2_000_000, usize::MAX] {
            let mut streamed = with(Policy::Stream { slabs });
            for round in 0..2 {
                streamed.start_step(ROWS);
                for op in 0..ops.len() - 1 {
                    let shape = all.shape(op);
                    assert_eq!(streamed.shape(op), shape);
                    let (mut x, mut ids) = rows(shape);
                    let [mut wanted, mut found] = [0, 1].map(|_| vec![0.0; ROWS * shape.n_used * shape.d_out]);
                    all.compute(op, &mut x, &mut ids, &mut wanted, |_| true).unwrap();
                    streamed.compute(op, &mut x, &mut ids, &mut found, |_| true).unwrap();
                    assert_eq!(found, wanted, "{slabs} bytes, round {round}, op {op}");
                }
                streamed.finish_step().unwrap();
            }
            let stats = streamed.stream_stats().expect("experts are streamed");
            assert!(stats.bytes > 0 && stats.wanted > 0, "{stats:?}");
            assert!(all.stream_stats().is_none());
            // The flag of one who waits no longer.
            streamed.set_interrupt(Arc::new(true.into()));
            let shape = all.shape(0);
            let (mut x, mut ids) = rows(shape);
            let mut out = vec![0.0; ROWS * shape.n_used * shape.d_out];
            let failed = streamed.compute(0, &mut x, &mut ids, &mut out, |_| true).unwrap_err();
            assert_eq!(failed.cause, Cause::Interrupted);
        }
    }

    #[test]
    fn experts_of_others_are_left_alone_and_change_no_bit_of_ours() {
        let (checkpoint, plan, ops) = embedded();
        let mut apart =
            Apart::new(&Cpu { threads: 2, ..Cpu::default() }, &plan, &ops, &checkpoint, ROWS).expect("made");
        let shape = apart.shape(0);
        let (mut x, mut ids) = rows(shape);
        let mut all = vec![0.0; ROWS * shape.n_used * shape.d_out];
        apart.compute(0, &mut x, &mut ids, &mut all, |_| true).unwrap();
        for n in [1, 2, 3, usize::MAX] {
            let mut ours = vec![7.5; all.len()];
            apart.compute(0, &mut x, &mut ids, &mut ours, |expert| expert % n == 1 % n).unwrap();
            for ((found, wanted), &id) in ours.chunks(shape.d_out).zip(all.chunks(shape.d_out)).zip(&ids) {
                let is_ours = id as usize % n == 1 % n;
                assert!(if is_ours { found == wanted } else { found.iter().all(|&v| v == 7.5) }, "{n} {id}");
            }
        }
    }

    #[test]
    fn ids_of_no_expert_end_nothing() {
        let (checkpoint, plan, ops) = embedded();
        let mut apart = Apart::new(&Cpu { threads: 1, ..Cpu::default() }, &plan, &ops, &checkpoint, 1).expect("made");
        let shape = apart.shape(0);
        let mut ids = vec![u32::MAX; shape.n_used];
        let mut out = vec![f32::NAN; shape.n_used * shape.d_out];
        apart.compute(0, &mut vec![1.0; shape.d], &mut ids, &mut out, |_| true).unwrap();
        assert!(out.iter().all(|v| v.is_finite()));
    }
}
