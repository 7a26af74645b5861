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
use super::super::kernels::ActsShared;
use super::super::mem::{View, over_rows};
use super::super::program::{QueryTile, Run};
use super::attention_tile::{Queries, Scoring, Seen, Tile, tile_on, unpack, unpack_blocks};
use super::kv_append::CacheView;
use super::linear::{N_KINDS, kind_index, quantize};
use super::softmax_state::{Shared, State, merge};
use backend::cache_type::{BLOCK, rotate};
use backend::{Batch, CompileError, KvType, PAGE};
use quant::act::{ActKind, ActRow};
use sys::arena::zeroed;

/// Pages of a segment.
pub const SEGMENT: usize = 16;
/// Maximum of query rows (tokens · heads) in a unit.
pub const UNIT_ROWS: usize = 64;
/// A unit of fewer than twice these heads is not cut further: its parts would share too few loads.
const UNIT_HEADS: usize = 8;
/// From this many query rows on, f16 tiles of a latent cache are unpacked to f32 first: their scores read every number
/// of a tile once for two rows. Others are unpacked in registers: a whole tile in f32 would fill the first cache. Those
/// of blocks always are.
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
    /// The window begins at a multiple of its length.
    pub chunked: bool,
    /// Tokens see the later ones of their span.
    pub spans: bool,
    /// How many positions from its own on a token sees at most.
    pub reach: usize,
    pub softcap: Option<f32>,
    /// Positions that tokens see, u32 `[T, n]`, ascending.
    pub chosen: Option<View>,
    /// `[n_head]`.
    pub sinks: Option<Vec<f32>>,
}

/// A worker's memory for attention.
pub struct AttentionScratch {
    q: Vec<f32>,       // [rows, d_k], rows on whole lanes
    q16: Vec<i16>,     // [rows, d_k], for keys in blocks
    scales: Vec<f32>,  // [rows, d_k/32]
    segment: Vec<f32>, // [rows, stride]
    total: Vec<f32>,   // [rows, stride]
    tile: Vec<f32>,    // a tile in f32, in the cache's layout
    valid: Vec<Seen>,
}

impl AttentionScratch {
    /// Bytes that [`AttentionScratch::new`] allocates.
    pub fn bytes(rows: usize, d_k: usize, d_v: usize) -> usize {
        let stride = State::stride(d_v);
        let row = 4 * (q_stride(d_k) + d_k / BLOCK + 2 * stride) + 2 * d_k + size_of::<Seen>();
        rows.saturating_mul(row).saturating_add(PAGE.saturating_mul(4 * (d_k + stride)))
    }

    /// For units of up to `rows` query rows.
    pub fn new(rows: usize, d_k: usize, d_v: usize) -> Result<AttentionScratch, CompileError> {
        let stride = State::stride(d_v);
        Ok(AttentionScratch {
            q: zeroed(WHAT, rows.saturating_mul(q_stride(d_k)))?,
            q16: zeroed(WHAT, rows.saturating_mul(d_k))?,
            scales: zeroed(WHAT, rows.saturating_mul(d_k / BLOCK))?,
            segment: zeroed(WHAT, rows.saturating_mul(stride))?,
            total: zeroed(WHAT, rows.saturating_mul(stride))?,
            tile: zeroed(WHAT, PAGE.saturating_mul(d_k + stride))?,
            valid: zeroed(WHAT, rows)?,
        })
    }

    /// Room for a tile of any latent cache in f32.
    pub fn tile(&mut self) -> &mut [f32] {
        &mut self.tile
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
    /// Position after the last that each token of the step sees.
    ends: &'a [u32],
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
        let i = r / self.n_head;
        let next = self.tile.pos as usize + i + 1;
        let end = if self.step.spans { self.ends[self.tile.first as usize + i] as usize } else { next };
        let end = end.min((next - 1).saturating_add(self.step.reach));
        match self.step.window {
            Some(chunk) if self.step.chunked => (next - 1) - (next - 1) % chunk..end,
            window => window.map_or(0, |w| next.saturating_sub(w))..end,
        }
    }

    /// Which positions of a page row `r` sees.
    fn seen(&self, r: usize, page: usize) -> Seen {
        let sees = self.sees(r);
        let inside = |p: usize| p.saturating_sub(page * PAGE).min(PAGE) as u8;
        let Some(chosen) = self.step.chosen else { return (inside(sees.start), inside(sees.end), u32::MAX) };
        let (token, width) = (self.tile.first as usize + r / self.n_head, chosen.width);
        // SAFETY: an earlier op has written the choice of the step's tokens.
        let chosen = unsafe { &chosen.ids(token + 1)[token * width..] };
        let first = chosen.partition_point(|&p| (p as usize) < page * PAGE);
        let of_page = chosen[first..].iter().map(|&p| p as usize - page * PAGE).take_while(|&at| at < PAGE);
        let seen = of_page.fold(0u32, |seen, at| seen | 1 << at);
        (seen.trailing_zeros() as u8, (PAGE as u32 - seen.leading_zeros()) as u8, seen)
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

    /// Copies the query rows into `scratch` as the scores read them: quantized, or rotated as the keys are, with zeros
    /// up to whole lanes.
    fn gather(&self, scratch: &mut AttentionScratch, acts: &[ActsShared; N_KINDS]) {
        let d = self.cache.d_k;
        if self.cache.has_key_blocks() {
            let to = scratch.q16.chunks_exact_mut(d).zip(scratch.scales.chunks_exact_mut(d / BLOCK));
            for (r, (q, scales)) in to.take(self.rows()).enumerate() {
                let (token, head) = self.token_and_head(r);
                let row = acts[kind_index(ActKind::Block32)].row(token * self.step.n_head + head);
                let ActRow::Block32(row) = row else { unreachable!("queries were quantized for blocks of 8 bits") };
                q.copy_from_slice(row.q);
                scales.copy_from_slice(row.d);
            }
            return;
        }
        for (r, row) in scratch.q.chunks_exact_mut(q_stride(d)).take(self.rows()).enumerate() {
            let (token, head) = self.token_and_head(r);
            // SAFETY: q is not written during this op.
            row[..d].copy_from_slice(unsafe { &self.step.q.row(token)[head * d..(head + 1) * d] });
            row[d..].fill(0.0);
            rotate(&mut row[..d], self.cache.rotations[0]);
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
                rotate(out, self.cache.rotations[1]);
            }
        }
    }
}

/// Runs the op.
pub fn attention(run: &mut Run, step: &AttentionStep, cache: &CacheView) {
    if cache.has_key_blocks() {
        quantize_queries(run, step.q.by_heads(step.n_head), run.step.pos.len() * step.n_head, cache.rotations[0]);
    }
    let units = Units::new(run, step, cache);
    if units.segments.len() <= 1 || units.n > run.split.max_units {
        whole_units(run, &units);
    } else {
        split_units(run, &units);
    }
}

/// Quantizes heads of queries, of which `rotation` numbers are rotated together, as the keys are.
fn quantize_queries(run: &mut Run, q: View, rows: usize, rotation: usize) {
    if rotation <= 1 {
        return quantize(run, ActKind::Block32, q, rows);
    }
    let acts: &mut ActsShared = &mut run.acts[kind_index(ActKind::Block32)];
    acts.reshape(ActKind::Block32, rows, q.width);
    let (acts, kernels, workers) = (&*acts, run.kernels, run.workers);
    over_rows(run.pool, rows, 8 * q.width, |worker, range| {
        for r in range {
            // SAFETY: the worker index is ours; ranges of rows are disjoint; q is not written meanwhile.
            unsafe {
                let rotated = &mut workers.get(worker).attention.q[..q.width];
                rotated.copy_from_slice(q.row(r));
                rotate(rotated, rotation);
                kernels.quantize_row(rotated, r, acts);
            }
        }
    });
}

/// The units of a step.
struct Units<'a> {
    step: &'a AttentionStep,
    cache: &'a CacheView,
    batch: &'a Batch,
    ends: &'a [u32],
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
        let (batch, ends, tiles) = (run.batch, &run.step.ends[..], &run.step.tiles[..]);
        let group = step.n_head / cache.n_kv;
        let mut units = Units { step, cache, batch, ends, tiles, group, heads: 1, segments: 0..0, n: 0 };
        let segments = || tiles.iter().map(|&tile| units.unit_of(tile, 0).segments());
        let first = segments().map(|segments| segments.start).min().unwrap_or(0);
        units.segments = first..segments().map(|segments| segments.end).max().unwrap_or(0);
        let n_pieces = tiles.len() * cache.n_kv * units.segments.len().max(1);
        units.heads = unit_heads(group, n_pieces, run.pool.threads());
        units.n = tiles.len() * cache.n_kv * group.div_ceil(units.heads);
        units
    }

    fn unit_of(&self, tile: QueryTile, head: usize) -> Unit<'a> {
        let Units { step, cache, batch, ends, group, .. } = *self;
        let kv_head = head / group;
        Unit { step, cache, batch, ends, tile, kv_head, head, n_head: self.heads.min((kv_head + 1) * group - head) }
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
fn whole_units(run: &mut Run, units: &Units) {
    let (isa, acts, workers, stride) = (run.isa, &*run.acts, run.workers, State::stride(units.cache.d_v));
    run.pool.run(units.n, &|worker, i| {
        // SAFETY: the worker index is ours.
        let scratch = unsafe { &mut workers.get(worker).attention };
        let unit = units.get(i);
        unit.gather(scratch, acts);
        let total = State { ptr: scratch.total.as_mut_ptr(), stride };
        let segment = State { ptr: scratch.segment.as_mut_ptr(), stride };
        // SAFETY: both states are this worker's and long enough for a unit; the segments are the unit's own.
        unsafe {
            unit.start(total);
            for s in unit.segments() {
                segment_of(isa, &unit, s, segment, scratch);
                merge(isa, total, segment, unit.rows(), units.cache.v_width());
            }
        }
        unit.finish(total);
    });
}

/// Rounds of two regions: a chunk of the first is a segment of a unit, a chunk of the second merges those of a unit.
fn split_units(run: &mut Run, units: &Units) {
    let (isa, acts, workers, stride) = (run.isa, &*run.acts, run.workers, State::stride(units.cache.d_v));
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
                unit.gather(scratch, acts);
                segment_of(isa, &unit, s, partial.get().at(i * unit_rows), scratch);
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
/// `state` has the unit's rows and is this worker's, as is `scratch`, which has gathered them.
unsafe fn segment_of(isa: CheckedIsa, unit: &Unit, segment: usize, state: State, scratch: &mut AttentionScratch) {
    let (rows, cache) = (unit.rows(), unit.cache);
    let AttentionScratch { q, q16, scales, tile: unpacked, valid, .. } = scratch;
    let queries = Queries { floats: q.as_ptr(), ints: q16.as_ptr(), scales: scales.as_ptr() };
    // SAFETY: the caller's promise.
    unsafe { state.reset(rows) };
    let chunk = &unit.batch.chunks[unit.tile.chunk as usize];
    let (first, last) = (unit.sees(0).start, unit.sees(rows - 1).end);
    let from = (first / PAGE).max(segment * SEGMENT);
    let to = last.div_ceil(PAGE).min((segment + 1) * SEGMENT);
    for page in from..to {
        for r in 0..rows {
            // Heads of a token see alike.
            valid[r] = if r % unit.n_head == 0 { unit.seen(r, page) } else { valid[r - 1] };
        }
        if valid[..rows].iter().all(|(first, end, _)| first >= end) {
            continue;
        }
        // SAFETY: `Batch::check` saw the pages of the chunk's positions.
        let bytes = unsafe { cache.tile(unit.batch.page(chunk, cache.windowed, page), unit.kv_head).cast_const() };
        let is_unpacked = match cache.types.k {
            KvType::F32 => false,
            KvType::F16 => cache.latent && rows >= UNPACK_ROWS,
            KvType::Q8_0 | KvType::Q4_0 => cache.latent,
        };
        // SAFETY: `bytes` is the tile of the page; `q` and `state` by the caller's promise.
        let mut tile = unsafe { Tile::new(cache, unit.scoring(), bytes, queries, state) };
        if is_unpacked {
            let written = (last - page * PAGE).min(PAGE);
            // SAFETY: the tile has rows up to the last visible position, which are not written during this op.
            unsafe {
                match cache.types.k {
                    t @ (KvType::Q8_0 | KvType::Q4_0) => unpack_blocks(isa, t, bytes, cache.d_k, written, unpacked),
                    KvType::F16 | KvType::F32 => {
                        unpack(isa, std::slice::from_raw_parts(bytes.cast(), written * cache.v_stride()), unpacked)
                    }
                }
                tile = tile.unpacked(unpacked.as_ptr());
            }
        } else {
            let next = page + usize::from(page + 1 < to);
            // SAFETY: as above.
            tile.next = unsafe { cache.tile(unit.batch.page(chunk, cache.windowed, next), unit.kv_head) };
        }
        tile_on(isa, &tile, &valid[..rows]);
    }
}
