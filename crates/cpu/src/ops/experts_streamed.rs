//! `experts` of a layer whose experts are streamed: those that are there compute while the others are read.
//!
//! The op takes its experts in waves, in whatever order they come. A pair's row depends on no other pair, so the bits
//! are those of [`super::experts`]. While the disk works, the next layer's router is applied to this layer's input, and
//! the experts that it chooses are prefetched.

use model::plan::Rows;
use quant::{Planes, WeightType};

use super::super::kernels::{ActsShared, Matrix, OutPtr};
use super::super::mem::{View, pieces};
use super::super::program::{Mat, Run};
use super::experts::{Extras, Shared, Stack, Stacks, down_rows, gate_up};
use super::linear::{kind_index, quantize};
use super::route::best;
use backend::experts::layout::Layout;
use backend::experts::{Streams, Waiting};
use backend::{Cause, Chunks, Failure};

/// Maximum number of tokens whose next experts are looked up one by one; of more, all experts are expected.
pub const LOOKAHEAD_ROWS: usize = 32;

/// What a program has for streamed experts.
pub struct Streaming {
    pub streams: Streams,
    /// Inputs of the last product. Other inputs stay as they are, for the waves to come.
    pub hidden: ActsShared,
    /// Logits of a router, `[LOOKAHEAD_ROWS, n_expert]`, and choices, `[LOOKAHEAD_ROWS, n_used]`.
    pub logits: Vec<f32>,
    pub ids: Vec<u32>,
}

/// Numbers of [`Streaming::logits`] and [`Streaming::ids`].
pub fn lookahead_values(layout: &Layout) -> usize {
    let most = layout.layers.iter().map(|layer| layer.n_expert + layer.n_used).max().unwrap_or(0);
    LOOKAHEAD_ROWS * most
}

/// Weights of a layer whose experts are streamed.
pub struct StreamedMats {
    /// Number of the layer among those that are streamed.
    pub layer: usize,
    /// Type, rows and values in a row of gate, up and down.
    pub shapes: [(WeightType, usize, usize); 3],
    pub n_expert: usize,
    pub extras: Extras,
    pub next: Option<Lookahead>,
}

/// The next router: a guess at what it will choose.
pub struct Lookahead {
    pub router: Mat,
    /// What is added to a score, `[n_expert]`.
    pub bias: Option<Vec<f32>>,
    /// Number of experts a token.
    pub n_used: usize,
}

/// Those experts of a layer that are there.
struct Wave<'a> {
    mats: &'a StreamedMats,
    streams: &'a Streams,
}

impl Stacks for Wave<'_> {
    fn shape(&self, stack: Stack) -> (WeightType, usize, usize) {
        self.mats.shapes[stack as usize]
    }

    fn matrix(&self, stack: Stack, expert: usize) -> Matrix<'_> {
        let (dtype, n, k) = self.shape(stack);
        // SAFETY: the op asks for experts of its wave only.
        let planes: Planes = unsafe { self.streams.planes(stack as usize, expert) };
        Matrix { dtype, n, k, planes }
    }

    fn extras(&self) -> &Extras {
        &self.mats.extras
    }
}

/// As [`super::experts::experts`].
///
/// # Errors
/// An expert that could not be read, which its tokens' chunks are lost for, or an interruption.
pub fn experts(
    run: &mut Run,
    x: View,
    ids: View,
    mats: &StreamedMats,
    hidden: View,
    out: View,
    spare: Option<View>,
) -> Result<(), Failure> {
    let tokens = run.step.rows(x.rows);
    let n_used = ids.width;
    let n_pairs = tokens * n_used;
    // SAFETY: the ids are not written during this op.
    let chosen = unsafe { ids.ids(tokens) };
    run.lists.fill(chosen, n_used, mats.n_expert);
    let [gate, up, down] = mats.shapes.map(|(dtype, ..)| dtype.act());
    quantize(run, gate, x, tokens);
    if up != gate {
        quantize(run, up, x, tokens);
    }
    let Some(streaming) = run.streaming.take() else { unreachable!("a program with streamed experts has slabs") };
    streaming.hidden.reshape(down, n_pairs, hidden.width);
    // The lists are read while their order changes.
    let mut active = std::mem::take(&mut run.lists.active);
    streaming.streams.start(mats.layer, &active, |expert| run.lists.of(expert).len());
    if let Some(next) = &mats.next {
        look_ahead(run, streaming, mats, next, x, [gate, up]);
    }
    let mut pending = &mut active[..];
    let mut result = Ok(());
    while !pending.is_empty() {
        match streaming.streams.ready(pending) {
            Ok(n) => {
                let (wave, rest) = std::mem::take(&mut pending).split_at_mut(n);
                compute(run, streaming, mats, wave, n_pairs, (hidden, spare, out));
                streaming.streams.release(wave);
                pending = rest;
            }
            Err(waiting) => {
                result = Err(failure(run, waiting, chosen, n_used, x.rows));
                break;
            }
        }
    }
    run.lists.active = active;
    run.streaming = Some(streaming);
    result
}

/// The pairs of a wave.
fn compute(
    run: &mut Run,
    streaming: &mut Streaming,
    mats: &StreamedMats,
    active: &[u32],
    n_pairs: usize,
    (hidden, spare, out): (View, Option<View>, View),
) {
    let Streaming { streams, hidden: acts, .. } = streaming;
    let (weights, lists, kernels) = (Wave { mats, streams }, &*run.lists, run.kernels);
    let pairs_of = |expert: u32| &lists.pairs[lists.of(expert as usize)];
    let n: usize = active.iter().map(|&expert| pairs_of(expert).len()).sum();
    let shared = Shared { kernels, workers: run.workers, lists, n_pairs, cols_each: n.div_ceil(active.len().max(1)) };
    gate_up(run.pool, shared, &weights, active, run.acts, (hidden, spare));
    let n_chunks = pieces(run.pool, 2 * n * hidden.width).min(active.len());
    let acts = &*acts;
    run.pool.run(n_chunks, &|_, i| {
        for &expert in &active[i * active.len() / n_chunks..(i + 1) * active.len() / n_chunks] {
            for pair in pairs_of(expert) {
                let row = pair.act as usize;
                // SAFETY: no other chunk has the row; nobody writes `hidden` meanwhile.
                unsafe { kernels.quantise(hidden.read(n_pairs), hidden.width, row..row + 1, acts) }
            }
        }
    });
    down_rows(run.pool, shared, &weights, active, acts, out);
}

/// Prefetches what the next layer will probably want. Inputs that are quantised already, for `kinds` of activations,
/// stay as they are.
fn look_ahead(
    run: &mut Run,
    streaming: &mut Streaming,
    mats: &StreamedMats,
    next: &Lookahead,
    x: View,
    kinds: [quant::act::ActKind; 2],
) {
    let (layer, tokens) = (mats.layer + 1, run.step.rows(x.rows));
    let Streaming { streams, logits, ids, .. } = streaming;
    let n_expert = next.router.n;
    if tokens > LOOKAHEAD_ROWS {
        (0..n_expert).for_each(|expert| streams.prefetch(layer, expert));
        return;
    }
    let kind = next.router.dtype.act();
    if !kinds.contains(&kind) {
        quantize(run, kind, x, tokens);
    }
    let (kernels, acts, workers, cols) = (run.kernels, &run.acts[kind_index(kind)], run.workers, &run.cols[..tokens]);
    let (w, out) = (next.router.matrix(0), logits.as_mut_ptr());
    // SAFETY: the buffer has these rows, and this op alone uses it.
    let y = unsafe { OutPtr::new(out, tokens, n_expert) };
    let chunk = kernels.row_chunk(w.dtype, (w.n, w.k), 1, tokens, run.pool.threads());
    run.pool.run(n_expert.div_ceil(chunk), &|worker, i| {
        let range = i * chunk..((i + 1) * chunk).min(n_expert);
        // SAFETY: the worker index is ours.
        let worker = unsafe { workers.get(worker) };
        kernels.matmul(&w, range, acts, cols, y, &mut worker.kernel);
    });
    for (row, ids) in logits.chunks_exact_mut(n_expert).zip(ids.chunks_exact_mut(next.n_used)).take(tokens) {
        if let Some(bias) = &next.bias {
            row.iter_mut().zip(bias).for_each(|(x, bias)| *x = 1.0 / (1.0 + (-*x).exp()) + bias);
        }
        if row.iter().any(|x| x.is_nan()) {
            return;
        }
        best(row, ids);
    }
    for rank in 0..next.n_used {
        for ids in ids.chunks_exact(next.n_used).take(tokens) {
            streams.prefetch(layer, ids[rank] as usize);
        }
    }
}

/// The failure of a step: of an expert that could not be read, the chunks whose tokens chose it are lost.
fn failure(run: &Run, waiting: Waiting, chosen: &[u32], n_used: usize, rows: Rows) -> Failure {
    let (expert, cause) = match waiting {
        Waiting::Interrupted => return Failure { lost: Chunks::NONE, ..Failure::all(Cause::Interrupted) },
        Waiting::Lost { expert, cause } => (expert as u32, cause),
    };
    let chunk_of = |row: usize| {
        let token = if rows == Rows::Outputs { run.batch.rows[row] as usize } else { row };
        run.step.chunk_of[token]
    };
    let mut lost: Vec<u32> = Vec::new();
    for (row, ids) in chosen.chunks_exact(n_used).enumerate() {
        if ids.contains(&expert) && !lost.contains(&chunk_of(row)) {
            lost.push(chunk_of(row));
        }
    }
    Failure { lost: Chunks::These(lost), ..Failure::all(cause) }
}
