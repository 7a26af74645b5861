//! `linear` and `gated_linear`: the input is quantised once for every kind of activation of its weights, then the rows
//! of all weights are cut into chunks.

use std::ops::Range;

use model::plan::Gate;
use quant::act::ActKind;

use super::super::kernels::{ActsShared, COLS, Col, Gated, Kernels, Matrix, OutPtr, Scratch};
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
pub fn quantize(run: &mut Run, kind: ActKind, x: View, rows: usize) {
    let acts: &mut ActsShared = &mut run.acts[kind_index(kind)];
    acts.reshape(kind, rows, x.width);
    let (acts, kernels) = (&*acts, run.kernels);
    over_rows(run.pool, rows, 2 * x.width, |_, range| {
        // SAFETY: ranges of rows are disjoint between chunks; x is not written meanwhile.
        unsafe { kernels.quantise(x.read(rows), x.width, range, acts) }
    });
}

/// Quantises `x` once for each kind among `weights`.
pub fn quantise_for<'a>(run: &mut Run, weights: impl Iterator<Item = &'a Mat>, x: View, rows: usize) {
    let mut done = [false; N_KINDS];
    for w in weights {
        let kind = w.dtype.act();
        if !std::mem::replace(&mut done[kind_index(kind)], true) {
            quantize(run, kind, x, rows);
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
    let n_chunks: usize = parts.iter().map(|part| part.w.n.div_ceil(chunk_of(part))).sum();
    // Matrices of few rows, as routers are, have too few chunks for many threads: each takes a part of the columns.
    let n_parts = (2 * threads).div_ceil(n_chunks.max(1)).min(rows / COLS).max(1);
    let part_len = rows.div_ceil(n_parts);
    run.pool.run(n_chunks * n_parts, &|worker, i| {
        let (mut i, columns) = (i / n_parts, (i % n_parts) * part_len..(i % n_parts + 1) * part_len);
        let columns = columns.start.min(rows)..columns.end.min(rows);
        for part in parts {
            let (n, chunk) = (part.w.n, chunk_of(part));
            if i >= n.div_ceil(chunk) {
                i -= n.div_ceil(chunk);
                continue;
            }
            let range = i * chunk..((i + 1) * chunk).min(n);
            let cols = &cols[columns.clone()];
            // SAFETY: the worker index is ours; chunks write different elements of the output.
            let (worker, y) = unsafe { (workers.get(worker), OutPtr::new(part.out.ptr(), rows, n)) };
            let acts = &acts[kind_index(part.w.dtype.act())];
            kernels.matmul(&part.w.matrix(0), range.clone(), acts, cols, y, &mut worker.kernel);
            if let Some(bias) = &part.bias {
                for r in columns {
                    // SAFETY: these elements are this chunk's.
                    let out = unsafe { part.out.part_mut(r, range.clone()) };
                    add_bias(out, &bias[range.clone()]);
                }
            }
            return;
        }
    });
}

/// `out = act(x·gateᵀ) ⊙ (x·upᵀ)`, with `spare` `[T, n]` where gate and up take different kinds of activations.
pub fn gated_linear(run: &mut Run, x: View, gate: &Mat, up: &Mat, act: Gate, out: View, spare: Option<View>) {
    let rows = run.step.rows(x.rows);
    if rows == 0 {
        return;
    }
    quantise_for(run, [gate, up].into_iter(), x, rows);
    let (kernels, acts, workers) = (run.kernels, &*run.acts, run.workers);
    let cols = &run.cols[..rows];
    let chunk = kernels.row_chunk(gate.dtype, (gate.n, gate.k), 1, 2 * rows, run.pool.threads());
    run.pool.run(gate.n.div_ceil(chunk), &|worker, i| {
        let w = Gated { gate: gate.matrix(0), up: up.matrix(0), act, biases: None };
        let range = i * chunk..((i + 1) * chunk).min(gate.n);
        // SAFETY: the worker index is ours; chunks write different columns of the outputs.
        unsafe { gated_rows(kernels, &w, range, acts, cols, (out, spare, rows), &mut workers.get(worker).kernel) }
    });
}

/// Rows `range` of gate and up with their activation for every column, into `out` of `n_rows` rows. Where gate and up
/// take different kinds of activations they are two products, that of up in `spare`.
///
/// # Safety
/// No other thread reads or writes the elements `range` of the columns' rows of `out` and `spare`.
pub unsafe fn gated_rows(
    kernels: &Kernels,
    w: &Gated,
    range: Range<usize>,
    acts: &[ActsShared; N_KINDS],
    cols: &[Col],
    (out, spare, n_rows): (View, Option<View>, usize),
    scratch: &mut Scratch,
) {
    let acts_of = |w: &Matrix| &acts[kind_index(w.dtype.act())];
    // SAFETY: the caller's promise.
    let y = unsafe { OutPtr::new(out.ptr(), n_rows, w.gate.n) };
    let Some(spare) = spare else {
        return kernels.matmul_gated(w, range, acts_of(&w.gate), cols, y, scratch);
    };
    // SAFETY: the caller's promise.
    let y_up = unsafe { OutPtr::new(spare.ptr(), n_rows, w.gate.n) };
    kernels.matmul(&w.gate, range.clone(), acts_of(&w.gate), cols, y, scratch);
    kernels.matmul(&w.up, range.clone(), acts_of(&w.up), cols, y_up, scratch);
    for col in cols {
        let r = col.out as usize;
        // SAFETY: the caller's promise.
        let (g, u) = unsafe { (out.part_mut(r, range.clone()), spare.part_mut(r, range.clone())) };
        if let Some([gate, up]) = w.biases {
            add_bias(g, &gate[range.clone()]);
            add_bias(u, &up[range.clone()]);
        }
        math::gate_in_place(kernels.isa(), w.act, g, u);
    }
}

/// `y += bias`.
pub fn add_bias(y: &mut [f32], bias: &[f32]) {
    y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
}
