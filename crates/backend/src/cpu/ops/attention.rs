//! `attention`: causal softmax(q·kᵀ·scale)·v over the paged cache, grouped heads.
//!
//! The law: a tile is a page (32 positions), a segment is 16 pages by absolute position. Inside a segment an online softmax
//! walks the tiles in order; segments merge in order, sinks before the first. Prefill and decode, split or not, do exactly this for each
//! query, so the bits depend on nothing but the query and the cache.
//!
//! A unit of work is a kv head, some of its query heads and a few tokens of one sequence: they share the loads of keys and
//! values. Few units over long contexts are split into segments, which are kept apart and merged in a second region.
//!
//! A tile of a latent cache holds rows of positions: its scores are dot products on 16 lanes and the fixed tree.

use std::ops::Range;

use super::super::isa::{CheckedIsa, on_isa};
use super::super::kernels::{Hint, prefetch};
use super::super::lanes::{Float, Lanes};
use super::super::math;
use super::super::mem::{View, zeroed};
use super::super::program::{QueryTile, Run};
use super::elementwise::capped;
use super::kv_append::{CacheElem, CacheView};
use super::softmax_state::{Shared, State, merge};
use crate::{Batch, CompileError, PAGE};

/// Pages of a segment.
pub const SEGMENT: usize = 16;
/// Most query rows (tokens · heads) of a unit.
pub const UNIT_ROWS: usize = 64;
/// Heads below which a unit is not cut further for want of units: fewer would share too little.
const UNIT_HEADS: usize = 8;
/// From this many query rows on, f16 tiles of a latent cache are unpacked to f32 first: their scores take every number of a tile
/// for two rows at a time. Others are unpacked in registers as they are used: a whole tile in f32 would fill the first cache.
const UNPACK_ROWS: usize = 8;

/// What the memory of this op is called in errors.
const WHAT: &str = "attention";

/// What does not change from step to step.
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
    tile: Vec<f32>,    // a tile in f32, as it lies in the cache
    valid: Vec<(u8, u8)>,
}

impl AttentionScratch {
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
    /// Most units that are split, and slots for their segments.
    max_units: usize,
}

impl SplitStates {
    /// For a pool of `threads`: more units than `4 · threads` are not split.
    pub fn new(threads: usize, unit_rows: usize, d_v: usize) -> Result<SplitStates, CompileError> {
        let max_units = if threads > 1 { 4 * threads } else { 0 };
        let len = (max_units * unit_rows).saturating_mul(State::stride(d_v));
        // Eight segments a unit at the limit; fewer units take more segments in a round.
        Ok(SplitStates { partial: zeroed(WHAT, len.saturating_mul(8))?, total: zeroed(WHAT, len)?, max_units })
    }
}

/// Query rows are this far apart.
fn q_stride(d_k: usize) -> usize {
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

    fn token_and_head(&self, r: usize) -> (usize, usize) {
        (self.tile.first as usize + r / self.n_head, self.head + r % self.n_head)
    }

    /// Copies the query rows into `q`, with zeros up to whole lanes.
    fn gather(&self, q: &mut [f32]) {
        let d = self.cache.d_k;
        for (r, row) in q.chunks_exact_mut(q_stride(d)).take(self.rows()).enumerate() {
            let (token, head) = self.token_and_head(r);
            // SAFETY: nobody writes q during this op.
            row[..d].copy_from_slice(unsafe { &self.step.q.row(token)[head * d..(head + 1) * d] });
            row[d..].fill(0.0);
        }
    }

    /// Sets `total` to what comes before the first segment: nothing, or the sinks, each a position without a value.
    ///
    /// # Safety
    /// `total` has the unit's rows and nobody else uses them.
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

/// One tile against the rows of a unit. Its pointers are valid by the contract of [`Tile::new`].
#[derive(Clone, Copy)]
struct Tile<E> {
    k: *const E,
    v: *const E,
    /// The tile that comes next, or this one.
    next: *const E,
    d_k: usize,
    v_width: usize,
    v_stride: usize,
    /// Keys are rows like the values, not columns.
    latent: bool,
    q: *const f32,
    q_stride: usize,
    state: State,
    scale: f32,
    softcap: Option<f32>,
}

/// Runs the op.
pub fn attention(run: &mut Run, step: &AttentionStep, cache: &CacheView) {
    if cache.half { attend::<u16>(run, step, cache) } else { attend::<f32>(run, step, cache) }
}

fn attend<E: CacheElem>(run: &mut Run, step: &AttentionStep, cache: &CacheView) {
    let (isa, batch, workers, tiles) = (run.isa, run.batch, run.workers, &run.step.tiles);
    let group = step.n_head / cache.n_kv;
    let unit_of = |tile: QueryTile, head: usize, n_head: usize| {
        let kv_head = head / group;
        Unit { step, cache, batch, tile, kv_head, head, n_head: n_head.min((kv_head + 1) * group - head) }
    };
    let seen = |tile: &QueryTile| unit_of(*tile, 0, 1).segments();
    let n_segments = tiles.iter().map(|tile| seen(tile).end).max().unwrap_or(0);
    let first_segment = tiles.iter().map(|tile| seen(tile).start).min().unwrap_or(0);
    let stride = State::stride(cache.d_v);
    let wide = n_segments - first_segment > 1;
    let n_segments_apart = if wide { n_segments - first_segment } else { 1 };
    let heads = unit_heads(group, tiles.len() * cache.n_kv * n_segments_apart, run.pool.threads());
    let parts = group.div_ceil(heads);
    let each = cache.n_kv * parts;
    let n_units = tiles.len() * each;
    // The last tiles of a chunk see most; they go first.
    let unit = |i: usize| {
        let (tile, i) = (tiles[tiles.len() - 1 - i / each], i % each);
        unit_of(tile, i / parts * group + i % parts * heads, heads)
    };
    if !wide || n_units > run.split.max_units {
        run.pool.run(n_units, &|worker, i| {
            // SAFETY: the worker index is ours.
            let scratch = unsafe { &mut workers.get(worker).attention };
            let unit = unit(i);
            unit.gather(&mut scratch.q);
            let total = State { ptr: scratch.total.as_mut_ptr(), stride };
            let segment = State { ptr: scratch.segment.as_mut_ptr(), stride };
            // SAFETY: both states are this worker's and long enough for a unit; the segments are the unit's own.
            unsafe {
                unit.start(total);
                for s in unit.segments() {
                    segment_of::<E>(isa, &unit, s, segment, scratch.q.as_ptr(), &mut scratch.tile, &mut scratch.valid);
                    merge(isa, total, segment, unit.rows(), cache.v_width());
                }
            }
            unit.finish(total);
        });
        return;
    }

    let unit_rows = run.step.tile_tokens * heads;
    let per_unit = run.split.partial.len() / (n_units * unit_rows * stride);
    let partial = Shared(State { ptr: run.split.partial.as_mut_ptr(), stride });
    let total = Shared(State { ptr: run.split.total.as_mut_ptr(), stride });
    for round in (first_segment..n_segments).step_by(per_unit) {
        let width = per_unit.min(n_segments - round);
        run.pool.run(n_units * width, &|worker, i| {
            let (unit, s) = (unit(i / width), round + i % width);
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
        run.pool.run(n_units, &|_, i| {
            let unit = unit(i);
            // SAFETY: the slots of unit i are this chunk's alone.
            unsafe {
                let total = total.get().at(i * unit_rows);
                if round == first_segment {
                    unit.start(total);
                }
                for s in unit.segments().filter(|s| (round..round + width).contains(s)) {
                    let state = partial.get().at((i * width + s - round) * unit_rows);
                    merge(isa, total, state, unit.rows(), cache.v_width());
                }
                if round + width == n_segments {
                    unit.finish(total);
                }
            }
        });
    }
}

/// Heads of a unit: all of a kv head as long as a unit may have them and every thread gets several units, as they are
/// unlike: the last segment of a context is seldom whole.
fn unit_heads(group: usize, n_units: usize, threads: usize) -> usize {
    let mut heads = group.min(UNIT_ROWS);
    while heads >= 2 * UNIT_HEADS && n_units * group.div_ceil(heads) < 4 * threads {
        heads = heads.div_ceil(2).next_multiple_of(4);
    }
    heads
}

/// Attends over one segment into `state`, from nothing.
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
            // SAFETY: the tile has these elements, which nobody writes during this op.
            let elements = unsafe { std::slice::from_raw_parts(k, cache.v_first() + written * cache.v_stride()) };
            unpack(isa, elements, unpacked);
            // SAFETY: the rows up to the last visible position are unpacked; `q` and `state` by the caller's promise.
            tile_on(isa, &unsafe { Tile::new(unit, unpacked.as_ptr(), q, state) }, &valid[..rows]);
        } else {
            let next = page + usize::from(page + 1 < to);
            // SAFETY: as above.
            let next = unsafe { cache.tile::<E>(unit.batch.page(chunk, cache.windowed, next), unit.kv_head) };
            // SAFETY: `k` is the tile of the page; `q` and `state` by the caller's promise.
            tile_on(isa, &Tile { next, ..unsafe { Tile::new(unit, k, q, state) } }, &valid[..rows]);
        }
    }
}

impl<E> Tile<E> {
    /// The tile of `unit`'s cache that begins at `k`.
    ///
    /// # Safety
    /// While the tile is used, its positions up to the last one that a row of the unit sees are readable and written by
    /// nobody, `q` is readable for the unit's rows, and `state` has these rows for the caller alone.
    unsafe fn new(unit: &Unit, k: *const E, q: *const f32, state: State) -> Tile<E> {
        let cache = unit.cache;
        Tile {
            k,
            // SAFETY: the values lie in the tile.
            v: unsafe { k.add(cache.v_first()) },
            next: k,
            d_k: cache.d_k,
            v_width: cache.v_width(),
            v_stride: cache.v_stride(),
            latent: cache.latent,
            q,
            q_stride: q_stride(cache.d_k),
            state,
            scale: unit.step.scale,
            softcap: unit.step.softcap,
        }
    }
}

on_isa! { fn unpack<E: CacheElem>(from: &[E], to: &mut [f32]) = unpack_lanes }
on_isa! { fn tile_on<E: CacheElem>(tile: &Tile<E>, valid: &[(u8, u8)]) = tile_lanes }

/// Elements to f32, whole lanes.
#[inline(always)]
fn unpack_lanes<L: Lanes, E: CacheElem>(from: &[E], to: &mut [f32]) {
    for (from, to) in from.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<16>().0) {
        // SAFETY: both arrays have 16 elements.
        unsafe { E::load::<L>(from.as_ptr()).store(to.as_mut_ptr()) };
    }
}

/// All rows of a unit against a tile: rows that see the same positions in blocks of up to six, whose sums fill AVX2's
/// registers (AMD EPYC 9004: 40.5 GMAC/s where blocks of four do 38.8 and registers alone 45.7).
#[inline(always)]
fn tile_lanes<L: Lanes, E: CacheElem>(tile: &Tile<E>, valid: &[(u8, u8)]) {
    let mut r = 0;
    while r < valid.len() {
        let (lo, hi) = valid[r];
        if lo >= hi {
            r += 1;
            continue;
        }
        let alike = valid[r..].iter().take(9).take_while(|&&v| v == (lo, hi)).count();
        // Seven and eight make two blocks of nearly one size, not six and a rest that shares little.
        let (n, lo, hi) = (if matches!(alike, 7 | 8) { 4 } else { alike.min(6) }, lo.into(), hi.into());
        match n {
            6 => block::<L, E, 6, 1>(tile, r, lo, hi),
            5 => block::<L, E, 5, 1>(tile, r, lo, hi),
            4 => block::<L, E, 4, 1>(tile, r, lo, hi),
            3 => block::<L, E, 3, 1>(tile, r, lo, hi),
            2 => block::<L, E, 2, 2>(tile, r, lo, hi),
            _ => block::<L, E, 1, 4>(tile, r, lo, hi),
        }
        r += n;
    }
}

/// Rows `r..r + Q` against positions `lo..hi` of a tile; the values are taken `C` lanes at a time.
#[inline(always)]
fn block<L: Lanes, E: CacheElem, const Q: usize, const C: usize>(tile: &Tile<E>, r: usize, lo: usize, hi: usize) {
    let mut p = [[0.0f32; PAGE]; Q];
    let s = if tile.latent { row_dots::<L, E, Q>(tile, r, lo, hi) } else { column_dots::<L, E, Q>(tile, r) };
    let s = scores::<L, E, Q>(tile, s, lo, hi);
    // What a new maximum takes from the sums so far: one exponential for all rows.
    let mut corr = [0.0f32; 16];
    let mut max = [0.0f32; Q];
    for i in 0..Q {
        // SAFETY: the state's rows are this worker's.
        let [m, _] = unsafe { tile.state.ml(r + i) };
        max[i] = Float::max(*m, s[i][0].max(s[i][1]).tree_max());
        corr[i] = *m - max[i];
        *m = max[i];
    }
    math::exp(L::load_at(&corr, 0, 0.0)).store_at(&mut corr, 0);
    for i in 0..Q {
        let m = L::splat(max[i]);
        let (p0, p1) = (math::exp(s[i][0].sub(m)), math::exp(s[i][1].sub(m)));
        // SAFETY: as above.
        let [_, l] = unsafe { tile.state.ml(r + i) };
        *l = l.mul_add(corr[i], p0.add(p1).tree_sum());
        p0.store_at(&mut p[i], 0);
        p1.store_at(&mut p[i], 16);
    }
    let mut c = 0;
    while c + 16 * C <= tile.v_width {
        values::<L, E, Q, C>(tile, r, c, lo, hi, &p, &corr);
        c += 16 * C;
    }
    while c < tile.v_width {
        values::<L, E, Q, 1>(tile, r, c, lo, hi, &p, &corr);
        c += 16;
    }
}

/// `q·k` of 32 positions for `Q` rows, where positions are lanes.
#[inline(always)]
fn column_dots<L: Lanes, E: CacheElem, const Q: usize>(tile: &Tile<E>, r: usize) -> [[L; 2]; Q] {
    let mut out = [[L::splat(0.0); 2]; Q];
    if Q == 1 {
        // Both halves at once keep enough sums in flight.
        let mut sum = [L::splat(0.0); 2];
        for d in 0..tile.d_k {
            // SAFETY: keys are [d_k][PAGE]; q has the unit's rows.
            unsafe {
                let q = L::splat(*tile.q.add(r * tile.q_stride + d));
                sum[0] = q.fma(E::load(tile.k.add(d * PAGE)), sum[0]);
                sum[1] = q.fma(E::load(tile.k.add(d * PAGE + 16)), sum[1]);
            }
        }
        out[0] = sum;
    } else {
        // The first rows prefetch the next tile, keys and values, a line at a time into the second cache: two tiles fill
        // the first.
        let next = if r == 0 { tile.next } else { tile.k };
        for h in 0..2 {
            let mut sum = [L::splat(0.0); Q];
            for d in 0..tile.d_k {
                prefetch(next.wrapping_add((h * tile.d_k + d) * PAGE), 64, Hint::L2);
                // SAFETY: as above.
                unsafe {
                    let k: L = E::load(tile.k.add(d * PAGE + 16 * h));
                    for i in 0..Q {
                        sum[i] = L::splat(*tile.q.add((r + i) * tile.q_stride + d)).fma(k, sum[i]);
                    }
                }
            }
            for i in 0..Q {
                out[i][h] = sum[i];
            }
        }
    }
    out
}

/// `q·k` of the positions `lo..hi` for `Q` rows, where each position is a row; the others are 0.
#[inline(always)]
fn row_dots<L: Lanes, E: CacheElem, const Q: usize>(tile: &Tile<E>, r: usize, lo: usize, hi: usize) -> [[L; 2]; Q] {
    let mut dots = [[0.0f32; PAGE]; Q];
    // Two rows and two positions at a time: every load serves two multiply-adds.
    for pos in (lo / 2 * 2..hi).step_by(2) {
        for i in (0..Q).step_by(2) {
            if i + 1 < Q {
                let [a, b] = dots_of::<L, E, 2>(tile, r + i, pos);
                (dots[i][pos], dots[i][pos + 1]) = (a[0], a[1]);
                (dots[i + 1][pos], dots[i + 1][pos + 1]) = (b[0], b[1]);
            } else {
                let [a] = dots_of::<L, E, 1>(tile, r + i, pos);
                (dots[i][pos], dots[i][pos + 1]) = (a[0], a[1]);
            }
        }
    }
    std::array::from_fn(|i| [L::load_at(&dots[i], 0, 0.0), L::load_at(&dots[i], 16, 0.0)])
}

/// `q·k` of the positions `pos` and `pos + 1` for `Q` rows.
#[inline(always)]
fn dots_of<L: Lanes, E: CacheElem, const Q: usize>(tile: &Tile<E>, r: usize, pos: usize) -> [[f32; 2]; Q] {
    let mut sum = [[L::splat(0.0); 2]; Q];
    for d in (0..tile.q_stride).step_by(16) {
        // SAFETY: keys are [PAGE][v_stride] with rows on whole lanes, as are the rows of q; a page has an even length.
        unsafe {
            let k: [L; 2] = std::array::from_fn(|j| E::load(tile.k.add((pos + j) * tile.v_stride + d)));
            for i in 0..Q {
                let q = L::load(tile.q.add((r + i) * tile.q_stride + d));
                for j in 0..2 {
                    sum[i][j] = q.fma(k[j], sum[i][j]);
                }
            }
        }
    }
    sum.map(|sum| sum.map(L::tree_sum))
}

/// Scores from dot products: scaled and capped; those outside `lo..hi` are -inf.
#[inline(always)]
fn scores<L: Lanes, E: CacheElem, const Q: usize>(
    tile: &Tile<E>,
    dots: [[L; 2]; Q],
    lo: usize,
    hi: usize,
) -> [[L; 2]; Q] {
    let none = L::splat(f32::NEG_INFINITY);
    let mut out = dots;
    for i in 0..Q {
        for h in 0..2 {
            let mut s = out[i][h].mul(L::splat(tile.scale));
            if let Some(cap) = tile.softcap {
                s = capped(s, cap);
            }
            let at = L::iota().add(L::splat(16.0 * h as f32));
            s = at.select_lt(L::splat(hi as f32), s, none);
            out[i][h] = at.select_lt(L::splat(lo as f32), none, s);
        }
    }
    out
}

/// `o = o · corr + Σ p · v` over positions `lo..hi`, for `C` lanes of values from `c` on.
#[inline(always)]
fn values<L: Lanes, E: CacheElem, const Q: usize, const C: usize>(
    tile: &Tile<E>,
    r: usize,
    c: usize,
    lo: usize,
    hi: usize,
    p: &[[f32; PAGE]; Q],
    corr: &[f32; 16],
) {
    let mut o = [[L::splat(0.0); C]; Q];
    // SAFETY: values are [PAGE][v_stride], the state's rows at least v_stride long, and both this worker's to use.
    unsafe {
        for i in 0..Q {
            for j in 0..C {
                o[i][j] = L::load(tile.state.o(r + i).add(c + 16 * j)).mul(L::splat(corr[i]));
            }
        }
        for pos in lo..hi {
            for j in 0..C {
                let v: L = E::load(tile.v.add(pos * tile.v_stride + c + 16 * j));
                for i in 0..Q {
                    o[i][j] = L::splat(p[i][pos]).fma(v, o[i][j]);
                }
            }
        }
        for i in 0..Q {
            for j in 0..C {
                o[i][j].store(tile.state.o(r + i).add(c + 16 * j));
            }
        }
    }
}
