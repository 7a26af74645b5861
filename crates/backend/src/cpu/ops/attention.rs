//! `attention`: causal softmax(q·kᵀ·scale)·v over the paged cache, grouped heads.
//!
//! The law: a tile is a page (32 positions), a segment is 16 pages by absolute position. Inside a segment an online
//! softmax walks the tiles in order; segments merge in order, sinks before the first. Prefill and decode, split or not,
//! do exactly this for each query, so the bits depend on nothing but the query and the cache.
//!
//! A unit of work is a kv head, some of its query heads and a few tokens of one sequence: they share the loads of keys
//! and values. Few units over long contexts are split into segments, which are merged in a second region.
//! [`super::attention_tile`] has the kernels.

use std::ops::Range;

use super::super::isa::CheckedIsa;
use super::super::mem::{View, zeroed};
use super::super::program::{QueryTile, Run};
use super::attention_tile::{Scoring, Tile, tile_on, unpack};
use super::kv_append::{CacheElem, CacheView};
use super::softmax_state::{Shared, State, merge};
use crate::{Batch, CompileError, PAGE};

/// Pages of a segment.
pub const SEGMENT: usize = 16;
/// Maximum of query rows (tokens · heads) in a unit.
pub const UNIT_ROWS: usize = 64;
/// A unit of fewer than twice these heads is not cut further: its parts would share too few loads.
const UNIT_HEADS: usize = 8;
/// From this many query rows on, f16 tiles of a latent cache are unpacked to f32 first: their scores read every number
/// of a tile once for two rows. Others are unpacked in registers: a whole tile in f32 would fill the first cache.
const UNPACK_ROWS: usize = 8;

/// Name of this op's memory in errors.
const WHAT: &str = "attention";

/// The op's buffers and parameters.
pub struct AttentionStep {
    pub cache: usize,
    pub q: View,
    pub out: View,
    pub n_head: usize,
    pub scale: f32,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    /// `[n_head]`.
    pub sinks: Option<Vec<f32>>,
}

/// A worker's memory for attention.
pub struct AttentionScratch {
    q: Vec<f32>,       // [rows, d_k], rows on whole lanes
    segment: Vec<f32>, // [rows, stride]
    total: Vec<f32>,   // [rows, stride]
    tile: Vec<f32>,    // a tile in f32, in the cache's layout
    valid: Vec<(u8, u8)>,
}

impl AttentionScratch {
    /// Bytes that [`AttentionScratch::new`] allocates.
    pub fn bytes(rows: usize, d_k: usize, d_v: usize) -> usize {
        let stride = State::stride(d_v);
        let row = 4 * (q_stride(d_k) + 2 * stride) + size_of::<(u8, u8)>();
        rows.saturating_mul(row).saturating_add(PAGE.saturating_mul(4 * (d_k + stride)))
    }

    /// For units of up to `rows` query rows.
    pub fn new(rows: usize, d_k: usize, d_v: usize) -> Result<AttentionScratch, CompileError> {
        let stride = State::stride(d_v);
        Ok(AttentionScratch {
            q: zeroed(WHAT, rows.saturating_mul(q_stride(d_k)))?,
            segment: zeroed(WHAT, rows.saturating_mul(stride))?,
            total: zeroed(WHAT, rows.saturating_mul(stride))?,
            tile: zeroed(WHAT, PAGE.saturating_mul(d_k + stride))?,
            valid: zeroed(WHAT, rows)?,
        })
    }
}

/// States of split units, in slots of `unit_rows` rows; allocated once.
pub struct SplitStates {
    partial: Vec<f32>,
    total: Vec<f32>,
    /// Maximum of units that are split.
    max_units: usize,
}

impl SplitStates {
    /// Bytes that [`SplitStates::new`] allocates.
    pub fn bytes(threads: usize, unit_rows: usize, d_v: usize) -> usize {
        let max_units = if threads > 1 { 4 * threads } else { 0 };
        (max_units * unit_rows).saturating_mul(State::stride(d_v)).saturating_mul(9 * 4)
    }

    /// For a pool of `threads`: more units than `4 · threads` are not split.
    pub fn new(threads: usize, unit_rows: usize, d_v: usize) -> Result<SplitStates, CompileError> {
        let max_units = if threads > 1 { 4 * threads } else { 0 };
        let len = (max_units * unit_rows).saturating_mul(State::stride(d_v));
        // Eight segments a unit at the limit; fewer units take more segments in a round.
        Ok(SplitStates { partial: zeroed(WHAT, len.saturating_mul(8))?, total: zeroed(WHAT, len)?, max_units })
    }
}

/// Stride of the query rows, whole lanes.
pub(super) fn q_stride(d_k: usize) -> usize {
    d_k.next_multiple_of(16)
}

/// One unit: the rows are tokens, and for each token the unit's heads.
#[derive(Clone, Copy)]
struct Unit<'a> {
    step: &'a AttentionStep,
    cache: &'a CacheView,
    batch: &'a Batch,
    tile: QueryTile,
    kv_head: usize,
    /// First query head and number of heads.
    head: usize,
    n_head: usize,
}

impl Unit<'_> {
    fn rows(&self) -> usize {
        self.tile.len as usize * self.n_head
    }

    /// Positions that row `r` sees.
    fn sees(&self, r: usize) -> Range<usize> {
        let end = self.tile.pos as usize + r / self.n_head + 1;
        self.step.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// Segments that any row sees.
    fn segments(&self) -> Range<usize> {
        let (first, last) = (self.sees(0), self.sees(self.rows() - 1));
        first.start / (SEGMENT * PAGE)..last.end.div_ceil(SEGMENT * PAGE)
    }

    fn scoring(&self) -> Scoring {
        Scoring { scale: self.step.scale, softcap: self.step.softcap }
    }

    fn token_and_head(&self, r: usize) -> (usize, usize) {
        (self.tile.first as usize + r / self.n_head, self.head + r % self.n_head)
    }

    /// Copies the query rows into `q`, with zeros up to whole lanes.
    fn gather(&self, q: &mut [f32]) {
        let d = self.cache.d_k;
        for (r, row) in q.chunks_exact_mut(q_stride(d)).take(self.rows()).enumerate() {
            let (token, head) = self.token_and_head(r);
            // SAFETY: q is not written during this op.
            row[..d].copy_from_slice(unsafe { &self.step.q.row(token)[head * d..(head + 1) * d] });
            row[d..].fill(0.0);
        }
    }

    /// Sets `total` to the state before the first segment: nothing, or the sinks, each a position without a value.
    ///
    /// # Safety
    /// `total` has the unit's rows for the caller alone.
    unsafe fn start(&self, total: State) {
        // SAFETY: the caller's promise.
        unsafe { total.reset(self.rows()) };
        if let Some(sinks) = &self.step.sinks {
            for r in 0..self.rows() {
                // SAFETY: as above.
                unsafe { *total.ml(r) = [sinks[self.token_and_head(r).1], 1.0] };
            }
        }
    }

    /// Writes `o / l` of every row.
    fn finish(&self, total: State) {
        let d = self.cache.d_v;
        for r in 0..self.rows() {
            let (token, head) = self.token_and_head(r);
            // SAFETY: the unit alone writes these heads of these tokens, and alone uses its state.
            unsafe {
                let out = self.step.out.part_mut(token, head * d..(head + 1) * d);
                let o = std::slice::from_raw_parts(total.o(r), d);
                let l = total.ml(r)[1];
                out.iter_mut().zip(o).for_each(|(out, o)| *out = o / l);
            }
        }
    }
}

/// Runs the op.
pub fn attention(run: &mut Run, step: &AttentionStep, cache: &CacheView) {
    if cache.half { attend::<u16>(run, step, cache) } else { attend::<f32>(run, step, cache) }
}

fn attend<E: CacheElem>(run: &mut Run, step: &AttentionStep, cache: &CacheView) {
    let units = Units::new(run, step, cache);
    if units.segments.len() <= 1 || units.n > run.split.max_units {
        whole_units::<E>(run, &units);
    } else {
        split_units::<E>(run, &units);
    }
}

/// The units of a step.
struct Units<'a> {
    step: &'a AttentionStep,
    cache: &'a CacheView,
    batch: &'a Batch,
    tiles: &'a [QueryTile],
    /// Query heads of a kv head.
    group: usize,
    /// Maximum of query heads in a unit.
    heads: usize,
    /// Segments that any unit sees.
    segments: Range<usize>,
    n: usize,
}

impl<'a> Units<'a> {
    fn new(run: &Run<'a>, step: &'a AttentionStep, cache: &'a CacheView) -> Units<'a> {
        let (batch, tiles) = (run.batch, &run.step.tiles[..]);
        let group = step.n_head / cache.n_kv;
        let mut units = Units { step, cache, batch, tiles, group, heads: 1, segments: 0..0, n: 0 };
        let seen = || tiles.iter().map(|&tile| units.unit_of(tile, 0).segments());
        let first = seen().map(|segments| segments.start).min().unwrap_or(0);
        units.segments = first..seen().map(|segments| segments.end).max().unwrap_or(0);
        let n_pieces = tiles.len() * cache.n_kv * units.segments.len().max(1);
        units.heads = unit_heads(group, n_pieces, run.pool.threads());
        units.n = tiles.len() * cache.n_kv * group.div_ceil(units.heads);
        units
    }

    fn unit_of(&self, tile: QueryTile, head: usize) -> Unit<'a> {
        let Units { step, cache, batch, group, .. } = *self;
        let kv_head = head / group;
        Unit { step, cache, batch, tile, kv_head, head, n_head: self.heads.min((kv_head + 1) * group - head) }
    }

    /// Unit `i`. The last tiles of a chunk see the most positions and go first.
    fn get(&self, i: usize) -> Unit<'a> {
        let parts = self.group.div_ceil(self.heads);
        let per_tile = self.cache.n_kv * parts;
        let (tile, i) = (self.tiles[self.tiles.len() - 1 - i / per_tile], i % per_tile);
        self.unit_of(tile, i / parts * self.group + i % parts * self.heads)
    }
}

/// One region: a chunk is a unit.
fn whole_units<E: CacheElem>(run: &mut Run, units: &Units) {
    let (isa, workers, stride) = (run.isa, run.workers, State::stride(units.cache.d_v));
    run.pool.run(units.n, &|worker, i| {
        // SAFETY: the worker index is ours.
        let scratch = unsafe { &mut workers.get(worker).attention };
        let unit = units.get(i);
        unit.gather(&mut scratch.q);
        let total = State { ptr: scratch.total.as_mut_ptr(), stride };
        let segment = State { ptr: scratch.segment.as_mut_ptr(), stride };
        // SAFETY: both states are this worker's and long enough for a unit; the segments are the unit's own.
        unsafe {
            unit.start(total);
            for s in unit.segments() {
                segment_of::<E>(isa, &unit, s, segment, scratch.q.as_ptr(), &mut scratch.tile, &mut scratch.valid);
                merge(isa, total, segment, unit.rows(), units.cache.v_width());
            }
        }
        unit.finish(total);
    });
}

/// Rounds of two regions: a chunk of the first is a segment of a unit, a chunk of the second merges those of a unit.
fn split_units<E: CacheElem>(run: &mut Run, units: &Units) {
    let (isa, workers, stride) = (run.isa, run.workers, State::stride(units.cache.d_v));
    let unit_rows = run.step.tile_tokens * units.heads;
    let per_unit = run.split.partial.len() / (units.n * unit_rows * stride);
    let partial = Shared(State { ptr: run.split.partial.as_mut_ptr(), stride });
    let total = Shared(State { ptr: run.split.total.as_mut_ptr(), stride });
    for round in units.segments.clone().step_by(per_unit) {
        let width = per_unit.min(units.segments.end - round);
        run.pool.run(units.n * width, &|worker, i| {
            let (unit, s) = (units.get(i / width), round + i % width);
            if !unit.segments().contains(&s) {
                return;
            }
            // SAFETY: the worker index is ours; slot i is this chunk's alone.
            unsafe {
                let scratch = &mut workers.get(worker).attention;
                unit.gather(&mut scratch.q);
                let state = partial.get().at(i * unit_rows);
                segment_of::<E>(isa, &unit, s, state, scratch.q.as_ptr(), &mut scratch.tile, &mut scratch.valid);
            }
        });
        run.pool.run(units.n, &|_, i| {
            let unit = units.get(i);
            // SAFETY: the slots of unit i are this chunk's alone.
            unsafe {
                let total = total.get().at(i * unit_rows);
                if round == units.segments.start {
                    unit.start(total);
                }
                for s in unit.segments().filter(|s| (round..round + width).contains(s)) {
                    let state = partial.get().at((i * width + s - round) * unit_rows);
                    merge(isa, total, state, unit.rows(), units.cache.v_width());
                }
                if round + width == units.segments.end {
                    unit.finish(total);
                }
            }
        });
    }
}

/// Heads of a unit: all of a kv head, up to [`UNIT_ROWS`], as long as every thread gets several units. They differ in
/// work: the last segment of a context is seldom whole.
fn unit_heads(group: usize, n_units: usize, threads: usize) -> usize {
    let mut heads = group.min(UNIT_ROWS);
    while heads >= 2 * UNIT_HEADS && n_units * group.div_ceil(heads) < 4 * threads {
        heads = heads.div_ceil(2).next_multiple_of(4);
    }
    heads
}

/// Attends over one segment into a fresh `state`.
///
/// # Safety
/// `state` has the unit's rows and is this worker's, as are the other arguments.
unsafe fn segment_of<E: CacheElem>(
    isa: CheckedIsa,
    unit: &Unit,
    segment: usize,
    state: State,
    q: *const f32,
    unpacked: &mut [f32],
    valid: &mut [(u8, u8)],
) {
    let (rows, cache) = (unit.rows(), unit.cache);
    // SAFETY: the caller's promise.
    unsafe { state.reset(rows) };
    let chunk = &unit.batch.chunks[unit.tile.chunk as usize];
    let (first, last) = (unit.sees(0).start, unit.sees(rows - 1).end);
    let from = (first / PAGE).max(segment * SEGMENT);
    let to = last.div_ceil(PAGE).min((segment + 1) * SEGMENT);
    for page in from..to {
        for (r, valid) in valid[..rows].iter_mut().enumerate() {
            let sees = unit.sees(r);
            let inside = |p: usize| p.saturating_sub(page * PAGE).min(PAGE) as u8;
            *valid = (inside(sees.start), inside(sees.end));
        }
        // SAFETY: `Batch::check` saw the pages of the chunk's positions.
        let k = unsafe { cache.tile::<E>(unit.batch.page(chunk, cache.windowed, page), unit.kv_head).cast_const() };
        if cache.half && cache.latent && rows >= UNPACK_ROWS {
            let written = (last - page * PAGE).min(PAGE);
            // SAFETY: the tile has these elements, which are not written during this op.
            let elements = unsafe { std::slice::from_raw_parts(k, cache.v_first() + written * cache.v_stride()) };
            unpack(isa, elements, unpacked);
            // SAFETY: the rows up to the last visible position are unpacked; `q` and `state` by the caller's promise.
            let tile = unsafe { Tile::new(cache, unit.scoring(), unpacked.as_ptr(), q, state) };
            tile_on(isa, &tile, &valid[..rows]);
        } else {
            let next = page + usize::from(page + 1 < to);
            // SAFETY: as above.
            let next = unsafe { cache.tile::<E>(unit.batch.page(chunk, cache.windowed, next), unit.kv_head) };
            // SAFETY: `k` is the tile of the page; `q` and `state` by the caller's promise.
            let mut tile = unsafe { Tile::new(cache, unit.scoring(), k, q, state) };
            tile.next = next;
            tile_on(isa, &tile, &valid[..rows]);
        }
    }
}
