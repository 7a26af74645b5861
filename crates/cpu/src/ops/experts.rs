//! `experts`: every (token, slot) pair through its expert.
//!
//! Pairs are sorted into one list per expert, so that an expert's rows are read once for all its pairs; one token takes
//! the same path as many. Three regions: gate and up with the activation, quantisation of the result, down.

use std::ops::Range;

use model::plan::Gate;
use quant::WeightType;

use super::super::kernels::{ActsShared, Col, Gated, Kernels, Matrix, OutPtr};
use super::super::mem::{PerWorker, View};
use super::super::pool::Pool;
use super::super::program::{Mat, Run, Worker};
use super::linear::{N_KINDS, add_bias, gated_rows, kind_index, quantise_for};

/// The lists of a step's pairs; allocated once.
pub struct ExpertLists {
    /// First pair of each expert in `inputs`, `[n_expert + 1]`.
    first: Vec<u32>,
    /// Experts that have pairs.
    pub active: Vec<u32>,
    /// Pairs by expert, in the order of tokens: read the token's row, write the pair's.
    inputs: Vec<Col>,
    /// The same pairs: read the pair's row, write the pair's.
    pub pairs: Vec<Col>,
}

impl ExpertLists {
    /// Bytes that [`ExpertLists::new`] allocates.
    pub fn bytes(n_expert: usize, max_pairs: usize) -> usize {
        (2 * n_expert + 1).saturating_mul(4).saturating_add(max_pairs.saturating_mul(2 * size_of::<Col>()))
    }

    /// Lists for up to `n_expert` experts and `max_pairs` pairs.
    pub fn new(n_expert: usize, max_pairs: usize) -> ExpertLists {
        ExpertLists {
            first: vec![0; n_expert + 1],
            active: Vec::with_capacity(n_expert),
            inputs: vec![Col { act: 0, out: 0 }; max_pairs],
            pairs: vec![Col { act: 0, out: 0 }; max_pairs],
        }
    }

    /// Sorts pairs by expert, `ids` `[T, n_used]`. Pairs of no expert are in no list: a sum gives them no weight.
    pub fn fill(&mut self, ids: &[u32], n_used: usize, n_expert: usize) {
        let first = &mut self.first[..=n_expert];
        first.fill(0);
        ids.iter().filter(|&&id| (id as usize) < n_expert).for_each(|&id| first[id as usize] += 1);
        // From counts to the end of each list; filling from behind then moves it back to the beginning.
        let mut end = 0;
        self.active.clear();
        for e in 0..n_expert {
            if first[e] > 0 {
                self.active.push(e as u32);
            }
            end += first[e];
            first[e] = end;
        }
        first[n_expert] = end;
        for (pair, &id) in ids.iter().enumerate().rev().filter(|&(_, &id)| (id as usize) < n_expert) {
            let at = &mut first[id as usize];
            *at -= 1;
            self.inputs[*at as usize] = Col { act: (pair / n_used) as u32, out: pair as u32 };
            self.pairs[*at as usize] = Col { act: pair as u32, out: pair as u32 };
        }
    }

    /// The pairs of `expert`.
    pub fn of(&self, expert: usize) -> Range<usize> {
        self.first[expert] as usize..self.first[expert + 1] as usize
    }
}

/// Where the matrices of an op's experts lie: in memory of their own for all of them, or in slabs for those that are
/// there.
pub trait Stacks: Sync {
    /// Type, rows and values in a row of the matrices of a stack.
    fn shape(&self, stack: Stack) -> (WeightType, usize, usize);
    /// The matrix of an expert.
    fn matrix(&self, stack: Stack, expert: usize) -> Matrix<'_>;
    /// Biases and activation.
    fn extras(&self) -> &Extras;
}

/// A stack of matrices, one an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    Gate,
    Up,
    Down,
}

/// What experts have besides matrices.
pub struct Extras {
    /// Of gate, up and down, `[n_expert, n]` each.
    pub biases: Option<[Vec<f32>; 3]>,
    pub act: Gate,
}

impl Extras {
    /// The biases of an expert for gate and up, of `n` rows.
    fn gate_biases(&self, expert: usize, n: usize) -> Option<[&[f32]; 2]> {
        let rows = expert * n..(expert + 1) * n;
        self.biases.as_ref().map(|[gate, up, _]| [&gate[rows.clone()], &up[rows]])
    }
}

/// Weights of the experts of a layer, all of them in memory.
pub struct ExpertMats {
    pub gate: Mat,
    pub up: Mat,
    pub down: Mat,
    pub extras: Extras,
}

impl ExpertMats {
    fn mat(&self, stack: Stack) -> &Mat {
        match stack {
            Stack::Gate => &self.gate,
            Stack::Up => &self.up,
            Stack::Down => &self.down,
        }
    }
}

impl Stacks for ExpertMats {
    fn shape(&self, stack: Stack) -> (WeightType, usize, usize) {
        let Mat { dtype, n, k, .. } = *self.mat(stack);
        (dtype, n, k)
    }

    fn matrix(&self, stack: Stack, expert: usize) -> Matrix<'_> {
        self.mat(stack).matrix(expert)
    }

    fn extras(&self) -> &Extras {
        &self.extras
    }
}

/// What the regions of the op share.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    pub kernels: &'a Kernels,
    pub workers: &'a PerWorker<Worker>,
    pub lists: &'a ExpertLists,
    /// Rows of the outputs.
    pub n_pairs: usize,
    /// Pairs that an expert has on average.
    pub cols_each: usize,
}

/// `out[pair] = down·(act(gate·x) ⊙ up·x)`, each product plus its bias where there are biases; with `spare` where gate
/// and up take different kinds of activations.
pub fn experts(run: &mut Run, x: View, ids: View, mats: &ExpertMats, hidden: View, out: View, spare: Option<View>) {
    experts_of(run, [x, ids, hidden, out], mats, spare, |_| true);
}

/// The same for the pairs of those experts of which `is_ours` holds; rows of other pairs stay as they are. Buffers are
/// x, ids, hidden and out.
pub fn experts_of(
    run: &mut Run,
    [x, ids, hidden, out]: [View; 4],
    mats: &ExpertMats,
    spare: Option<View>,
    is_ours: impl Fn(usize) -> bool,
) {
    let tokens = run.step.rows(x.rows);
    let n_used = ids.width;
    let n_pairs = tokens * n_used;
    let (gate, up, down) = (&mats.gate, &mats.up, &mats.down);
    // SAFETY: the ids are not written during this op.
    run.lists.fill(unsafe { ids.ids(tokens) }, n_used, gate.n_stack());
    run.lists.active.retain(|&expert| is_ours(expert as usize));
    if run.lists.active.is_empty() {
        return;
    }
    quantise_for(run, [gate, up].into_iter(), x, tokens);
    let cols_each = n_pairs.div_ceil(run.lists.active.len().max(1));
    let shared = Shared { kernels: run.kernels, workers: run.workers, lists: run.lists, n_pairs, cols_each };
    gate_up(run.pool, shared, mats, &run.lists.active, run.acts, (hidden, spare));
    quantise_for(run, [down].into_iter(), hidden, n_pairs);
    let shared = Shared { kernels: run.kernels, workers: run.workers, lists: run.lists, n_pairs, cols_each };
    down_rows(run.pool, shared, mats, &run.lists.active, &run.acts[kind_index(down.dtype.act())], out);
}

/// Gate and up with the activation, for the pairs of the experts `active`.
pub fn gate_up(
    pool: &mut Pool,
    shared: Shared,
    mats: &impl Stacks,
    active: &[u32],
    acts: &[ActsShared; N_KINDS],
    (hidden, spare): (View, Option<View>),
) {
    let Shared { kernels, workers, lists, n_pairs, cols_each } = shared;
    let (dtype, n, k) = mats.shape(Stack::Gate);
    let chunk = kernels.row_chunk(dtype, (n, k), active.len(), 2 * cols_each, pool.threads());
    let n_chunks = n.div_ceil(chunk);
    pool.run(active.len() * n_chunks, &|worker, i| {
        let expert = active[i / n_chunks] as usize;
        let range = i % n_chunks * chunk..((i % n_chunks + 1) * chunk).min(n);
        let extras = mats.extras();
        let (cols, biases) = (&lists.inputs[lists.of(expert)], extras.gate_biases(expert, n));
        let (gate, up) = (mats.matrix(Stack::Gate, expert), mats.matrix(Stack::Up, expert));
        let w = Gated { gate, up, act: extras.act, biases };
        // SAFETY: the worker index is ours; chunks write different columns or different pairs of the outputs.
        unsafe { gated_rows(kernels, &w, range, acts, cols, (hidden, spare, n_pairs), &mut workers.get(worker).kernel) }
    });
}

/// The last product, for the pairs of the experts `active`.
pub fn down_rows(pool: &mut Pool, shared: Shared, mats: &impl Stacks, active: &[u32], acts: &ActsShared, out: View) {
    let Shared { kernels, workers, lists, n_pairs, cols_each } = shared;
    let (dtype, n, k) = mats.shape(Stack::Down);
    let chunk = kernels.row_chunk(dtype, (n, k), active.len(), cols_each, pool.threads());
    let n_chunks = n.div_ceil(chunk);
    pool.run(active.len() * n_chunks, &|worker, i| {
        let expert = active[i / n_chunks] as usize;
        let range = i % n_chunks * chunk..((i % n_chunks + 1) * chunk).min(n);
        // SAFETY: the worker index is ours; chunks write different columns or different pairs of the output.
        let (worker, y) = unsafe { (workers.get(worker), OutPtr::new(out.ptr(), n_pairs, n)) };
        let cols = &lists.pairs[lists.of(expert)];
        kernels.matmul(&mats.matrix(Stack::Down, expert), range.clone(), acts, cols, y, &mut worker.kernel);
        if let Some([.., bias]) = &mats.extras().biases {
            for col in cols {
                // SAFETY: these elements are this chunk's.
                let y = unsafe { out.part_mut(col.out as usize, range.clone()) };
                add_bias(y, &bias[expert * n..][range.clone()]);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_hold_every_pair_once_in_order() {
        let mut lists = ExpertLists::new(7, 12);
        for (ids, n_used, n_expert) in
            [(&[3u32, 0, 0, 3, 6, 5][..], 2, 7), (&[1, 0][..], 2, 2), (&[4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4][..], 1, 5)]
        {
            lists.fill(ids, n_used, n_expert);
            let mut seen = 0;
            for e in 0..n_expert {
                let want: Vec<u32> = (0..ids.len() as u32).filter(|&p| ids[p as usize] == e as u32).collect();
                let range = lists.of(e);
                assert_eq!(lists.pairs[range.clone()].iter().map(|c| c.act).collect::<Vec<_>>(), want);
                for col in &lists.inputs[range] {
                    assert_eq!((col.act, col.out), (col.out / n_used as u32, col.out));
                    seen += 1;
                }
                assert_eq!(lists.active.contains(&(e as u32)), !want.is_empty());
            }
            assert_eq!(seen, ids.len());
        }
    }
}
