//! Ops with routed experts that the host computes for a device that has no room for them: the kernels and the bits of
//! a program of the CPU, one op at a time, on rows that the caller keeps.

use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Op, Plan, Rows, Weight};
use quant::Planes;

use super::Cpu;
use super::compile::Needs;
use super::copies::Matrices;
use super::kernels::{ActsShared, Kernels, Scratch};
use super::mem::{Arena, PerWorker, View};
use super::ops::attention::{AttentionScratch, SplitStates};
use super::ops::experts::{self, ExpertLists, ExpertMats, Extras, Stack, Stacks};
use super::ops::linear::N_KINDS;
use super::pool::Pool;
use super::program::{Mat, Run, StepTokens, Worker};
use crate::residency::Residencies;
use crate::routing::RoutingTrace;
use crate::{Batch, CompileError, Limits, weights};

/// An op with its matrices, and its buffers between the products.
struct ExpertOp {
    mats: ExpertMats,
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
    _arenas: Vec<Arena>,
    weights: Arc<Checkpoint>,
}

impl Apart {
    /// The ops of these places in `plan`, which are [`Op::Experts`], for at most `max_rows` rows at a time.
    ///
    /// # Errors
    /// As [`crate::Backend::compile`].
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
        let needs = Needs::of(&plan, limits);
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
        let resolve = |op: &Op| resolve(&plan, weights, &matrices, [hidden.ptr(), spare.ptr()], op);
        let resolved = plan.ops.iter().map(resolve).collect::<Result<_, _>>()?;
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
            pool,
            _arenas: vec![hidden, spare, matrices.into_arena()],
            weights: Arc::clone(weights),
        })
    }

    /// Rows and experts of op `op`.
    pub fn shape(&self, op: usize) -> Shape {
        let ExpertOp { ref mats, n_used, .. } = self.ops[op];
        Shape { d: mats.gate.k, d_out: mats.down.n, n_used, n_expert: mats.gate.n_stack() }
    }

    /// Threads that compute.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Bytes of the files that were cut or lost while they were mapped: an error that names the file.
    ///
    /// # Errors
    /// As [`Checkpoint::intact`].
    pub fn intact(&self) -> Result<(), checkpoint::Error> {
        self.weights.intact()
    }

    /// The planes of the matrices of op `op`, one expert after the other: of gate, up and down.
    pub fn planes(&self, op: usize) -> [Vec<Planes<'_>>; 3] {
        let mats = &self.ops[op].mats;
        [Stack::Gate, Stack::Up, Stack::Down]
            .map(|stack| (0..mats.gate.n_stack()).map(|i| mats.matrix(stack, i).planes).collect())
    }

    /// The rows of all pairs of op `op`, `[rows * n_used, d]`, from rows `x`, `[rows, d]`, and the experts of each,
    /// `[rows, n_used]`. Ids past the last expert count as the last: what a device hands over cannot end the process.
    pub fn compute(&mut self, op: usize, x: &mut [f32], ids: &mut [u32], out: &mut [f32]) {
        let ExpertOp { ref mats, hidden, spare, n_used } = self.ops[op];
        let rows = ids.len() / n_used;
        let (d, n) = (mats.gate.k, mats.down.n);
        assert!(x.len() == rows * d && out.len() == rows * n_used * n, "rows of another shape");
        let last = mats.gate.n_stack() as u32 - 1;
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
            routing: &mut self.routing,
            streaming: None,
        };
        experts::experts(&mut run, x, ids, mats, hidden, out, spare);
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
        ..plan.clone()
    }
}

/// An op with its weights, whose buffers begin at `hidden` and `spare`.
fn resolve(
    plan: &Plan,
    checkpoint: &Checkpoint,
    matrices: &Matrices,
    [hidden_at, spare_at]: [*mut u8; 2],
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
    Ok(ExpertOp {
        mats: ExpertMats { gate: mat(gate)?, up: mat(up)?, down: mat(down)?, extras: Extras { biases, act } },
        hidden: view(hidden_at),
        spare: needs_spare.then(|| view(spare_at)),
        n_used: plan.buf(ids).width,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CacheType;
    use crate::residency::Policy;

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
            apart.compute(op, &mut x, &mut ids, &mut out);
            let planes = apart.planes(op);
            for (pair, found) in out.chunks_exact(shape.d_out).enumerate() {
                let x = &x[pair / shape.n_used * shape.d..][..shape.d];
                let exact = plain(&planes, &apart.ops[op].mats, ids[pair] as usize, x);
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
        three.compute(1, &mut x, &mut ids, &mut together);
        for (row, wanted) in together.chunks_exact(shape.n_used * shape.d_out).enumerate() {
            let mut alone = vec![0.0; wanted.len()];
            let x = &mut x[row * shape.d..][..shape.d];
            let ids = &mut ids[row * shape.n_used..][..shape.n_used];
            one.compute(1, x, ids, &mut alone);
            assert_eq!(alone, wanted, "row {row}");
        }
    }

    #[test]
    fn ids_of_no_expert_end_nothing() {
        let (checkpoint, plan, ops) = embedded();
        let mut apart = Apart::new(&Cpu { threads: 1, ..Cpu::default() }, &plan, &ops, &checkpoint, 1).expect("made");
        let shape = apart.shape(0);
        let mut ids = vec![u32::MAX; shape.n_used];
        let mut out = vec![f32::NAN; shape.n_used * shape.d_out];
        apart.compute(0, &mut vec![1.0; shape.d], &mut ids, &mut out);
        assert!(out.iter().all(|v| v.is_finite()));
    }
}
