//! `linear` and `gated_linear`: quantises the input once for every kind of activation its weights want, then cuts the
//! rows of all weights into chunks.

use model::plan::Gate;
use quant::act::ActKind;

use super::super::kernels::{ActsShared, Gated, OutPtr};
use super::super::math;
use super::super::mem::{View, over_rows};
use super::super::program::{Mat, PartStep, Run};

/// Kinds of activations.
pub const N_KINDS: usize = 4;

/// Index of a kind in [`Run::acts`].
pub fn kind_index(kind: ActKind) -> usize {
    match kind {
        ActKind::F32 => 0,
        ActKind::Block32 => 1,
        ActKind::Byte32 => 2,
        ActKind::Block256 => 3,
    }
}

/// Quantises the first `rows` rows of `x` for weights of `kind`.
pub fn quantise(run: &mut Run, kind: ActKind, x: View, rows: usize) {
    let acts: &mut ActsShared = &mut run.acts[kind_index(kind)];
    acts.reshape(kind, rows, x.width);
    let (acts, kernels) = (&*acts, run.kernels);
    over_rows(run.pool, rows, 2 * x.width, |_, range| {
        // SAFETY: ranges of rows are disjoint between chunks; nobody writes x meanwhile.
        unsafe { kernels.quantise(x.read(rows), x.width, range, acts) }
    });
}

/// Quantises `x` once for each kind among `weights`.
pub fn quantise_for<'a>(run: &mut Run, weights: impl Iterator<Item = &'a Mat>, x: View, rows: usize) {
    let mut done = [false; N_KINDS];
    for w in weights {
        let kind = w.dtype.act();
        if !std::mem::replace(&mut done[kind_index(kind)], true) {
            quantise(run, kind, x, rows);
        }
    }
}

/// `out = x·wᵀ (+ bias)` for every part.
pub fn linear(run: &mut Run, x: View, parts: &[PartStep]) {
    let rows = run.step.rows(x.rows);
    if rows == 0 {
        return;
    }
    quantise_for(run, parts.iter().map(|part| &part.w), x, rows);
    let threads = run.pool.threads();
    let (kernels, acts, workers) = (run.kernels, &*run.acts, run.workers);
    let cols = &run.cols[..rows];
    let chunk_of = |part: &PartStep| kernels.row_chunk(part.w.dtype, (part.w.n, part.w.k), 1, rows, threads);
    let n_chunks = parts.iter().map(|part| part.w.n.div_ceil(chunk_of(part))).sum();
    run.pool.run(n_chunks, &|worker, mut i| {
        for part in parts {
            let (n, chunk) = (part.w.n, chunk_of(part));
            if i >= n.div_ceil(chunk) {
                i -= n.div_ceil(chunk);
                continue;
            }
            let range = i * chunk..((i + 1) * chunk).min(n);
            // SAFETY: the worker index is ours; chunks write different columns of the output.
            let (worker, y) = unsafe { (workers.get(worker), OutPtr::new(part.out.ptr(), rows, n)) };
            let acts = &acts[kind_index(part.w.dtype.act())];
            kernels.matmul(&part.w.matrix(0), range.clone(), acts, cols, y, &mut worker.kernel);
            if let Some(bias) = &part.bias {
                for r in 0..rows {
                    // SAFETY: these columns are this chunk's.
                    let out = unsafe { part.out.part_mut(r, range.clone()) };
                    out.iter_mut().zip(&bias[range.clone()]).for_each(|(y, b)| *y += b);
                }
            }
            return;
        }
    });
}

/// `out = act(x·gateᵀ) ⊙ (x·upᵀ)`. Weights that want different kinds of activations go through `spare` `[T, n]`.
pub fn gated_linear(run: &mut Run, x: View, gate: &Mat, up: &Mat, act: Gate, out: View, spare: Option<View>) {
    let rows = run.step.rows(x.rows);
    if rows == 0 {
        return;
    }
    quantise_for(run, [gate, up].into_iter(), x, rows);
    let (kernels, acts, workers, isa) = (run.kernels, &*run.acts, run.workers, run.isa);
    let cols = &run.cols[..rows];
    let chunk = kernels.row_chunk(gate.dtype, (gate.n, gate.k), 1, 2 * rows, run.pool.threads());
    run.pool.run(gate.n.div_ceil(chunk), &|worker, i| {
        let range = i * chunk..((i + 1) * chunk).min(gate.n);
        // SAFETY: the worker index is ours; chunks write different columns of the output.
        let (worker, y) = unsafe { (workers.get(worker), OutPtr::new(out.ptr(), rows, gate.n)) };
        let (g, u) = (gate.matrix(0), up.matrix(0));
        let acts_of = |w: &Mat| &acts[kind_index(w.dtype.act())];
        let Some(spare) = spare else {
            let w = Gated { gate: g, up: u, act, biases: None };
            return kernels.matmul_gated(&w, range, acts_of(gate), cols, y, &mut worker.kernel);
        };
        // SAFETY: as above.
        let y2 = unsafe { OutPtr::new(spare.ptr(), rows, gate.n) };
        kernels.matmul(&g, range.clone(), acts_of(gate), cols, y, &mut worker.kernel);
        kernels.matmul(&u, range.clone(), acts_of(up), cols, y2, &mut worker.kernel);
        for r in 0..rows {
            // SAFETY: these columns are this chunk's in both buffers.
            let (g, u) = unsafe { (out.part_mut(r, range.clone()), spare.part_mut(r, range.clone())) };
            math::gate_in_place(isa, act, g, u);
        }
    });
}
