//! `head_linear`: one matrix a head.
//!
//! Plain, a head is a matrix product like any other. Transposed, the rows of a matrix are added up, each times one
//! number of the input: `out += x[d] · w[d, :]`, d after d, from nothing. Rows are decoded to f32 once for all tokens
//! of a tile, and one token and many add in the same order, so that they give the same bits.

use super::super::isa::on_isa;
use super::super::kernels::{Col, OutPtr};
use super::super::lanes::Lanes;
use super::super::mem::View;
use super::super::program::{Mat, Run};
use super::linear::{kind_index, quantize};

/// Rows that are decoded at a time.
pub const ROWS: usize = 16;
/// Maximum of tokens in a tile, whose outputs stay in the second-level cache.
const TOKENS: usize = 128;

/// Rows are this far apart once decoded: two registers of lanes.
pub fn stride(n: usize) -> usize {
    n.next_multiple_of(32)
}

/// `out[t,h,n] = Σ_k w[h,n,k]·x[t,h,k]`.
pub fn head_linear(run: &mut Run, x: View, w: &Mat, out: View) {
    let (tokens, n_head) = (run.step.rows(x.rows), w.n_stack());
    let rows = tokens * n_head;
    if rows == 0 {
        return;
    }
    quantize(run, w.dtype.act(), x.by_heads(n_head), rows);
    for (i, col) in run.head_cols[..rows].iter_mut().enumerate() {
        let row = (i % tokens * n_head + i / tokens) as u32;
        *col = Col { act: row, out: row };
    }
    let (kernels, acts, workers) = (run.kernels, &run.acts[kind_index(w.dtype.act())], run.workers);
    let cols = &run.head_cols[..rows];
    let per_head = (4 * run.pool.threads()).div_ceil(n_head).min(w.n.div_ceil(16));
    let chunk = w.n.div_ceil(per_head).next_multiple_of(16);
    let n_chunks = w.n.div_ceil(chunk);
    run.pool.run(n_head * n_chunks, &|worker, i| {
        let (head, range) = (i / n_chunks, i % n_chunks * chunk..((i % n_chunks + 1) * chunk).min(w.n));
        // SAFETY: the worker index is ours; chunks write different rows or columns of the output.
        let (worker, y) = unsafe { (workers.get(worker), OutPtr::new(out.ptr(), rows, w.n)) };
        let cols = &cols[head * tokens..(head + 1) * tokens];
        kernels.matmul(&w.matrix(head), range, acts, cols, y, &mut worker.kernel);
    });
}

/// `out[t,h,n] = Σ_k w[h,k,n]·x[t,h,k]`.
pub fn head_linear_transposed(run: &mut Run, x: View, w: &Mat, out: View) {
    let (tokens, n_head, isa, workers) = (run.step.rows(x.rows), w.n_stack(), run.isa, run.workers);
    let (k, n) = (w.n, w.k); // the stored rows are the inputs
    let n_tiles = tokens.div_ceil(TOKENS).max((4 * run.pool.threads()).div_ceil(n_head).min(tokens));
    run.pool.run(n_head * n_tiles, &|worker, i| {
        let (head, tile) = (i / n_tiles, i % n_tiles);
        let tile = tile * tokens / n_tiles..(tile + 1) * tokens / n_tiles;
        // SAFETY: the worker index is ours.
        let decoded = unsafe { &mut workers.get(worker).rows };
        for first in (0..k).step_by(ROWS) {
            let len = ROWS.min(k - first);
            for (d, row) in decoded.chunks_exact_mut(stride(n)).take(len).enumerate() {
                quant::decode_row(w.dtype, w.row_of(head, first + d), &mut row[..n]);
            }
            let rows = Rows { w: decoded, len, n, from_nothing: first == 0 };
            let inputs = head * k + first..head * k + first + len;
            // SAFETY: x is not written during this op.
            let input = |t| unsafe { &x.row(t)[inputs.clone()] };
            // SAFETY: these heads of these tokens of `out` are this chunk's, and only one slice of each is alive at a
            // time.
            let output = |t| unsafe { out.part_mut(t, head * n..(head + 1) * n) };
            for t in tile.clone().step_by(2) {
                match t + 1 < tile.end {
                    true => add_two(isa, &rows, [input(t), input(t + 1)], [output(t), output(t + 1)]),
                    false => add_one(isa, &rows, [input(t)], [output(t)]),
                }
            }
        }
    });
}

/// Rows of a transposed matrix as f32.
struct Rows<'a> {
    w: &'a [f32], // [len, stride(n)]
    len: usize,
    n: usize,
    /// They are the first of the matrix.
    from_nothing: bool,
}

on_isa! { fn add_one(rows: &Rows, x: [&[f32]; 1], out: [&mut [f32]; 1]) = add_one_lanes }
on_isa! { fn add_two(rows: &Rows, x: [&[f32]; 2], out: [&mut [f32]; 2]) = add_two_lanes }

#[inline(always)]
fn add_one_lanes<L: Lanes>(rows: &Rows, x: [&[f32]; 1], out: [&mut [f32]; 1]) {
    add::<L, 1>(rows, x, out);
}

#[inline(always)]
fn add_two_lanes<L: Lanes>(rows: &Rows, x: [&[f32]; 2], out: [&mut [f32]; 2]) {
    add::<L, 2>(rows, x, out);
}

/// `out[t] += x[t][d] · w[d]` for every row `d` in turn.
#[inline(always)]
fn add<L: Lanes, const T: usize>(rows: &Rows, x: [&[f32]; T], out: [&mut [f32]; T]) {
    let stride = stride(rows.n);
    assert!(rows.w.len() >= rows.len * stride && x.iter().all(|x| x.len() == rows.len));
    for i in (0..rows.n).step_by(32) {
        let second = i + 16 < rows.n;
        let mut sum = [[L::splat(0.0); 2]; T];
        if !rows.from_nothing {
            for t in 0..T {
                sum[t][0] = L::load_at(out[t], i, 0.0);
                if second {
                    sum[t][1] = L::load_at(out[t], i + 16, 0.0);
                }
            }
        }
        for d in 0..rows.len {
            // SAFETY: `w` holds `len` rows of `stride` numbers, whole pairs of lanes.
            let w: [L; 2] = unsafe {
                let row = rows.w.as_ptr().add(d * stride + i);
                [L::load(row), L::load(row.add(16))]
            };
            for t in 0..T {
                let x = L::splat(x[t][d]);
                sum[t] = [x.fma(w[0], sum[t][0]), x.fma(w[1], sum[t][1])];
            }
        }
        for t in 0..T {
            sum[t][0].store_at(out[t], i);
            if second {
                sum[t][1].store_at(out[t], i + 16);
            }
        }
    }
}
