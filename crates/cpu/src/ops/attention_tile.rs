//! The kernels of `attention`: query rows against one tile of the cache, on 16 lanes. Knows no pages and no work.

use super::super::isa::on_isa;
use super::super::kernels::{Hint, prefetch};
use super::super::lanes::{Float, Lanes};
use super::super::math;
use super::attention::q_stride;
use super::elementwise::capped;
use super::kv_append::{CacheElem, CacheView};
use super::softmax_state::State;
use backend::cache_type::BLOCK;
use backend::{CacheType, KvType, PAGE};
use half::f16;

/// How dot products become scores: `softcap · tanh(scale · x / softcap)`, or `scale · x`.
#[derive(Clone, Copy)]
pub struct Scoring {
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// Positions of a tile that a row sees: the first, the one after the last, and of those between a bit each.
pub type Seen = (u8, u8, u32);

/// Query rows of a unit in the forms that scores read. The pointers are valid by the contract of [`Tile::new`].
#[derive(Clone, Copy)]
pub struct Queries {
    /// `[rows, d_k]`, rows on whole lanes; for keys in floats.
    pub floats: *const f32,
    /// `[rows, d_k]`; for keys in blocks.
    pub ints: *const i16,
    /// `[rows, d_k/32]`.
    pub scales: *const f32,
}

/// One tile against the rows of a unit. Its pointers are valid by the contract of [`Tile::new`].
#[derive(Clone, Copy)]
pub struct Tile {
    k: *const u8,
    v: *const u8,
    types: CacheType,
    /// The next tile, which is prefetched, or this one.
    pub next: *const u8,
    /// Bytes of a tile.
    bytes: usize,
    d_k: usize,
    v_width: usize,
    v_stride: usize,
    /// Keys are rows like the values, not columns: scores are dot products on 16 lanes and the fixed tree.
    latent: bool,
    q: Queries,
    q_stride: usize,
    state: State,
    scoring: Scoring,
}

impl Tile {
    /// The tile of `cache` that begins at `k`.
    ///
    /// # Safety
    /// While the tile is used, its positions up to the last visible one are readable and not written, `q` is readable
    /// for the query rows in the form that the type of the keys wants, and `state` has these rows for the caller alone.
    pub unsafe fn new(cache: &CacheView, scoring: Scoring, k: *const u8, q: Queries, state: State) -> Tile {
        Tile {
            k,
            // SAFETY: the values are inside the tile.
            v: unsafe { k.add(cache.v_first()) },
            types: cache.types,
            next: k,
            bytes: cache.tile_bytes,
            d_k: cache.d_k,
            v_width: cache.v_width(),
            v_stride: cache.v_stride(),
            latent: cache.latent,
            q,
            q_stride: q_stride(cache.d_k),
            state,
            scoring,
        }
    }

    /// The same with its rows in f32, of a latent cache.
    ///
    /// # Safety
    /// As for [`Tile::new`].
    pub unsafe fn unpacked(self, rows: *const f32) -> Tile {
        let rows = rows.cast();
        Tile { k: rows, v: rows, types: CacheType::F32, next: rows, ..self }
    }
}

on_isa! {
    /// Elements to f32, whole lanes.
    pub fn unpack(from: &[u16], to: &mut [f32]) = unpack_lanes
}
on_isa! {
    /// The first `n` rows of a latent tile of blocks to f32, as they are stored: rotated; rows have `d` numbers.
    ///
    /// # Safety
    /// `from` points to a tile of blocks of type `t`, whose first `n` rows and their scales are readable; `to` has room
    /// for them.
    pub unsafe fn unpack_blocks(t: KvType, from: *const u8, d: usize, n: usize, to: &mut [f32]) = unpack_blocks_lanes
}
on_isa! {
    /// All query rows against a tile; row `r` sees the tile's positions `valid[r]`.
    pub fn tile_on(tile: &Tile, valid: &[Seen]) = tile_lanes
}

#[inline(always)]
fn unpack_lanes<L: Lanes>(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<16>().0) {
        // SAFETY: both arrays have 16 elements.
        unsafe { L::load_f16(from.as_ptr()).store(to.as_mut_ptr()) };
    }
}

/// # Safety
/// See [`unpack_blocks`].
#[inline(always)]
unsafe fn unpack_blocks_lanes<L: Lanes>(t: KvType, from: *const u8, d: usize, n: usize, to: &mut [f32]) {
    let m = if t == KvType::Q4_0 { BLOCK / 2 } else { BLOCK };
    // SAFETY: the caller's promise.
    let scales = unsafe { std::slice::from_raw_parts(from.add(PAGE * d / BLOCK * m).cast::<[u8; 2]>(), n * d / BLOCK) };
    for (i, (scale, to)) in scales.iter().zip(to.as_chunks_mut::<BLOCK>().0).enumerate() {
        let scale = L::splat(f16::from_le_bytes(*scale).to_f32());
        // SAFETY: as above; the room is a block.
        unsafe {
            let q = from.add(m * i);
            let mut integers = [0i8; BLOCK];
            if t == KvType::Q4_0 {
                let bytes = q.cast::<[u8; BLOCK / 2]>().read();
                let (low, high) = integers.split_at_mut(BLOCK / 2);
                low.iter_mut().zip(bytes).for_each(|(q, byte)| *q = (byte & 15) as i8 - 8);
                high.iter_mut().zip(bytes).for_each(|(q, byte)| *q = (byte >> 4) as i8 - 8);
            } else {
                integers = q.cast::<[i8; BLOCK]>().read();
            }
            for half in [0, 16] {
                L::load_i8(integers.as_ptr().add(half)).mul(scale).store(to.as_mut_ptr().add(half));
            }
        }
    }
}

/// Rows that see the same positions go in blocks of up to six, whose sums fill AVX2's registers (AMD EPYC 9004: 40.5
/// GMAC/s; blocks of four 38.8, registers alone 45.7), or of eight by two where there are more registers: AVX-512's two
/// loads a cycle then serve two products each (prompts of 4,096 tokens, 2 layers of Qwen3-30B-A3B's shape, 16 cores of
/// a Xeon of the Sapphire Rapids class: attention takes 0.81 of its time in blocks of six, and 0.84 in blocks of
/// twelve). Without registers each goes alone: blocks of every size, unrolled lane by lane, would be a megabyte of
/// code.
#[inline(always)]
fn tile_lanes<L: Lanes>(tile: &Tile, valid: &[Seen]) {
    let mut r = 0;
    while r < valid.len() {
        let seen @ (lo, hi, _) = valid[r];
        if lo >= hi {
            r += 1;
            continue;
        }
        let alike = valid[r..].iter().take(9).take_while(|&&v| v == seen).count();
        if L::SUMS >= 16 && alike >= 8 {
            block::<L, 8, 2>(tile, r, seen);
            r += 8;
            continue;
        }
        // Seven and eight make two blocks of nearly one size; one of six would leave a rest that shares little.
        let n = if matches!(alike, 7 | 8) { 4 } else { alike.min(6) };
        if !L::IS_VECTOR {
            block::<L, 1, 1>(tile, r, seen);
            r += 1;
            continue;
        }
        match n {
            6 => block::<L, 6, 1>(tile, r, seen),
            5 => block::<L, 5, 1>(tile, r, seen),
            4 => block::<L, 4, 1>(tile, r, seen),
            3 => block::<L, 3, 1>(tile, r, seen),
            2 => block::<L, 2, 2>(tile, r, seen),
            _ => block::<L, 1, 4>(tile, r, seen),
        }
        r += n;
    }
}

/// Rows `r..r + Q` against the same positions of a tile; the values are taken `C` lanes at a time.
#[inline(always)]
fn block<L: Lanes, const Q: usize, const C: usize>(tile: &Tile, r: usize, (lo, hi, seen): Seen) {
    let (lo, hi) = (lo.into(), hi.into());
    let mut p = [[0.0f32; PAGE]; Q];
    let s = match tile.types.k {
        KvType::F32 if tile.latent => row_dots::<L, f32, Q>(tile, r, lo, hi),
        KvType::F16 if tile.latent => row_dots::<L, u16, Q>(tile, r, lo, hi),
        KvType::F32 => column_dots::<L, f32, Q>(tile, r),
        KvType::F16 => column_dots::<L, u16, Q>(tile, r),
        KvType::Q8_0 => block_dots::<L, Q, 8>(tile, r),
        KvType::Q4_0 => block_dots::<L, Q, 4>(tile, r),
    };
    let s = scores::<L, Q>(tile, s, lo, hi, seen);
    // The correction of the sums so far by a new maximum: one exponential for all rows.
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
    match tile.types.v {
        KvType::F32 => values::<L, f32, Q, C>(tile, r, lo, hi, &p, &corr),
        KvType::F16 => values::<L, u16, Q, C>(tile, r, lo, hi, &p, &corr),
        KvType::Q8_0 => block_values::<L, Q, 8>(tile, r, &p, &corr),
        KvType::Q4_0 => block_values::<L, Q, 4>(tile, r, &p, &corr),
    }
}

/// `q·k` of 32 positions for `Q` rows, where positions are lanes.
#[inline(always)]
fn column_dots<L: Lanes, E: CacheElem, const Q: usize>(tile: &Tile, r: usize) -> [[L; 2]; Q] {
    let (k, q) = (tile.k.cast::<E>(), tile.q.floats);
    let mut out = [[L::splat(0.0); 2]; Q];
    // The first rows prefetch the next tile, keys and values, a line at a time into the second cache: two tiles fill
    // the first.
    let next = if r == 0 { tile.next } else { tile.k }.cast::<E>();
    if 2 * Q <= L::SUMS {
        for d in 0..tile.d_k {
            prefetch(next.wrapping_add(2 * d * PAGE), 128, Hint::L2);
            // SAFETY: keys are [d_k][PAGE]; q has the unit's rows.
            unsafe {
                let k: [L; 2] = [E::load(k.add(d * PAGE)), E::load(k.add(d * PAGE + 16))];
                for i in 0..Q {
                    let q = L::splat(*q.add((r + i) * tile.q_stride + d));
                    out[i] = [q.fma(k[0], out[i][0]), q.fma(k[1], out[i][1])];
                }
            }
        }
    } else {
        for h in 0..2 {
            let mut sum = [L::splat(0.0); Q];
            for d in 0..tile.d_k {
                prefetch(next.wrapping_add((h * tile.d_k + d) * PAGE), 64, Hint::L2);
                // SAFETY: as above.
                unsafe {
                    let k: L = E::load(k.add(d * PAGE + 16 * h));
                    for i in 0..Q {
                        sum[i] = L::splat(*q.add((r + i) * tile.q_stride + d)).fma(k, sum[i]);
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

/// Pairs of integers of `BITS`: bytes, or their low (0) or high (1) halves.
///
/// # Safety
/// The 32 bytes at `at` are readable.
#[inline(always)]
unsafe fn pairs<L: Lanes, const BITS: usize>(at: *const u8, half: usize) -> L::Pairs {
    // SAFETY: the caller's promise.
    unsafe { if BITS == 8 { L::load_pairs(at.cast()) } else { L::load_halves(at, half == 1) } }
}

/// `q·k` of 32 positions for `Q` rows, where keys are blocks of `BITS` and positions lanes: the dot product of
/// [`quant::dot`], of which a block's sum is exact.
#[inline(always)]
fn block_dots<L: Lanes, const Q: usize, const BITS: usize>(tile: &Tile, r: usize) -> [[L; 2]; Q] {
    let mut out = [[L::splat(0.0); 2]; Q];
    let (n, m) = (tile.d_k / BLOCK, BLOCK * BITS / 8);
    let (k, scales) = (tile.k, tile.k.wrapping_add(PAGE * n * m).cast::<u16>());
    // The first rows prefetch the next tile, as above.
    let (next, lines) = (if r == 0 { tile.next } else { tile.k }, tile.bytes / 64 / n);
    for b in 0..n {
        let next = next.wrapping_add(64 * lines * b);
        prefetch(next.wrapping_add(64 * m), 64 * lines.saturating_sub(m), Hint::L2);
        // SAFETY: keys are [d_k/32][m/2][PAGE][2] and scales [d_k/32][PAGE]; q has the unit's rows.
        unsafe {
            let (k, q) = (k.add(b * m * PAGE), tile.q.ints.add(r * tile.d_k + b * BLOCK));
            let k_scales = [L::load_f16(scales.add(b * PAGE)), L::load_f16(scales.add(b * PAGE + 16))];
            let mut sum = [[L::no_ints(); 2]; Q];
            // Bytes are whole integers, or their low halves and then their high ones.
            for half in 0..8 / BITS {
                let (q, next) = (q.add(m * half), next.wrapping_add(2 * m * m * half));
                if 2 * Q <= L::SUMS {
                    for i in 0..m / 2 {
                        prefetch(next.wrapping_add(4 * m * i), 4 * m, Hint::L2);
                        let k = [0, 32].map(|at| pairs::<L, BITS>(k.add(2 * PAGE * i + at), half));
                        for j in 0..Q {
                            let q = q.add(j * tile.d_k + 2 * i);
                            sum[j] = [L::dot_pairs(sum[j][0], k[0], q), L::dot_pairs(sum[j][1], k[1], q)];
                        }
                    }
                } else {
                    for h in 0..2 {
                        for i in 0..m / 2 {
                            prefetch(next.wrapping_add(4 * m * i + 2 * m * h), 2 * m, Hint::L2);
                            let k = pairs::<L, BITS>(k.add(2 * PAGE * i + 32 * h), half);
                            for j in 0..Q {
                                sum[j][h] = L::dot_pairs(sum[j][h], k, q.add(j * tile.d_k + 2 * i));
                            }
                        }
                    }
                }
            }
            for j in 0..Q {
                let scale = L::splat(*tile.q.scales.add((r + j) * n + b));
                for h in 0..2 {
                    out[j][h] = k_scales[h].mul(scale).fma(L::from_ints(sum[j][h]), out[j][h]);
                }
            }
        }
    }
    out
}

/// `q·k` of the positions `lo..hi` for `Q` rows, where each position is a row; the others are 0.
#[inline(always)]
fn row_dots<L: Lanes, E: CacheElem, const Q: usize>(tile: &Tile, r: usize, lo: usize, hi: usize) -> [[L; 2]; Q] {
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
fn dots_of<L: Lanes, E: CacheElem, const Q: usize>(tile: &Tile, r: usize, pos: usize) -> [[f32; 2]; Q] {
    let mut sum = [[L::splat(0.0); 2]; Q];
    for d in (0..tile.q_stride).step_by(16) {
        // SAFETY: keys are [PAGE][v_stride] with rows on whole lanes, as are the rows of q; a page has an even length.
        unsafe {
            let k: [L; 2] = std::array::from_fn(|j| E::load(tile.k.cast::<E>().add((pos + j) * tile.v_stride + d)));
            for i in 0..Q {
                let q = L::load(tile.q.floats.add((r + i) * tile.q_stride + d));
                for j in 0..2 {
                    sum[i][j] = q.fma(k[j], sum[i][j]);
                }
            }
        }
    }
    sum.map(|sum| sum.map(L::tree_sum))
}

/// Scores from dot products: scaled and capped; those outside `lo..hi` and those whose bit is not set are -inf.
#[inline(always)]
fn scores<L: Lanes, const Q: usize>(tile: &Tile, dots: [[L; 2]; Q], lo: usize, hi: usize, seen: u32) -> [[L; 2]; Q] {
    let none = L::splat(f32::NEG_INFINITY);
    let mut out = dots;
    for i in 0..Q {
        for h in 0..2 {
            let mut s = out[i][h].mul(L::splat(tile.scoring.scale));
            if let Some(cap) = tile.scoring.softcap {
                s = capped(s, cap);
            }
            let at = L::iota().add(L::splat(16.0 * h as f32));
            s = at.select_lt(L::splat(hi as f32), s, none);
            out[i][h] = at.select_lt(L::splat(lo as f32), none, s);
        }
    }
    if seen != u32::MAX {
        let is_seen: [f32; PAGE] = std::array::from_fn(|i| (seen >> i & 1) as f32);
        for i in 0..Q {
            for h in 0..2 {
                out[i][h] = L::load_at(&is_seen, 16 * h, 0.0).select_lt(L::splat(0.5), none, out[i][h]);
            }
        }
    }
    out
}

/// `o = o · corr + Σ p · v` over positions `lo..hi`, `C` lanes of values at a time.
#[inline(always)]
fn values<L: Lanes, E: CacheElem, const Q: usize, const C: usize>(
    tile: &Tile,
    r: usize,
    lo: usize,
    hi: usize,
    p: &[[f32; PAGE]; Q],
    corr: &[f32; 16],
) {
    let mut c = 0;
    while c + 16 * C <= tile.v_width {
        some_values::<L, E, Q, C>(tile, r, c, lo, hi, p, corr);
        c += 16 * C;
    }
    while c < tile.v_width {
        some_values::<L, E, Q, 1>(tile, r, c, lo, hi, p, corr);
        c += 16;
    }
}

/// [`values`] of `C` lanes from `c` on.
#[inline(always)]
fn some_values<L: Lanes, E: CacheElem, const Q: usize, const C: usize>(
    tile: &Tile,
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
                let v: L = E::load(tile.v.cast::<E>().add(pos * tile.v_stride + c + 16 * j));
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

/// `o = o · corr + Σ p · v` where values are blocks. The products of `p` and the scales of a block's positions become
/// integers of 16 bits with a scale for the tile, so that its sums are exact; those of unseen positions are 0.
#[inline(always)]
fn block_values<L: Lanes, const Q: usize, const BITS: usize>(
    tile: &Tile,
    r: usize,
    p: &[[f32; PAGE]; Q],
    corr: &[f32; 16],
) {
    let (n, m, zero) = (tile.v_width / BLOCK, BLOCK * BITS / 8, L::splat(0.0));
    let (v, scales) = (tile.v, tile.v.wrapping_add(PAGE * n * m).cast::<u16>());
    for b in 0..n {
        // SAFETY: values are [PAGE/2][d_v/32][m][2] and scales [d_v/32][PAGE]; the state's rows have d_v values and are
        // this worker's.
        unsafe {
            let v_scales = [L::load_f16(scales.add(b * PAGE)), L::load_f16(scales.add(b * PAGE + 16))];
            let mut weights = [[0i16; PAGE]; Q];
            let mut unit = [0.0f32; Q];
            for i in 0..Q {
                let p = [L::load_at(&p[i], 0, 0.0), L::load_at(&p[i], 16, 0.0)];
                // What is stored at unseen positions may be no number.
                let w = [
                    zero.select_lt(p[0], p[0].mul(v_scales[0]), zero),
                    zero.select_lt(p[1], p[1].mul(v_scales[1]), zero),
                ];
                let most = w[0].abs().max(w[1].abs()).tree_max();
                // As `quant::act` quantizes.
                let inverse = if most >= 1e-30 { 32767.0 / most } else { 0.0 };
                unit[i] = if most >= 1e-30 { most / 32767.0 } else { 0.0 };
                for h in 0..2 {
                    w[h].mul(L::splat(inverse)).store_i16(weights[i].as_mut_ptr().add(16 * h));
                }
            }
            for c in 0..2 {
                let mut sum = [L::no_ints(); Q];
                for i in 0..PAGE / 2 {
                    let at = if BITS == 8 { 16 * c } else { 0 };
                    let v = pairs::<L, BITS>(v.add(((n * i + b) * m + at) * 2), c);
                    for j in 0..Q {
                        sum[j] = L::dot_pairs(sum[j], v, weights[j].as_ptr().add(2 * i));
                    }
                }
                for j in 0..Q {
                    let o = tile.state.o(r + j).add(BLOCK * b + 16 * c);
                    let kept = L::load(o).mul(L::splat(corr[j]));
                    L::splat(unit[j]).fma(L::from_ints(sum[j]), kept).store(o);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use quant::act::{Act32, ActRow, quantise32};
    use quant::{WeightType, encode_row};

    use super::super::super::isa::CheckedIsa;
    use super::*;

    on_isa! {
        /// Dot products of a number of rows with a tile, `[rows][PAGE]`.
        unsafe fn dots_on(tile: &Tile, rows: usize, out: &mut [[f32; PAGE]]) = dots_lanes
    }

    #[inline(always)]
    unsafe fn dots_lanes<L: Lanes>(tile: &Tile, rows: usize, out: &mut [[f32; PAGE]]) {
        fn put<L: Lanes, const Q: usize>(dots: [[L; 2]; Q], out: &mut [[f32; PAGE]]) {
            for (dots, out) in dots.iter().zip(out) {
                dots[0].store_at(out, 0);
                dots[1].store_at(out, 16);
            }
        }
        match (rows, tile.types.k) {
            (1, KvType::Q8_0) => put(block_dots::<L, 1, 8>(tile, 0), out),
            (3, KvType::Q8_0) => put(block_dots::<L, 3, 8>(tile, 0), out),
            (_, KvType::Q8_0) => put(block_dots::<L, 8, 8>(tile, 0), out),
            (1, _) => put(block_dots::<L, 1, 4>(tile, 0), out),
            (3, _) => put(block_dots::<L, 3, 4>(tile, 0), out),
            (_, _) => put(block_dots::<L, 8, 4>(tile, 0), out),
        }
    }

    /// Keys in blocks are rows of weights, queries their activations, and scores the dot products of the law.
    #[test]
    fn scores_are_the_dot_products_of_weights() {
        let x = |i: usize| ((i * i + 3 * i) as f32 * 0.37).sin() * (1 + i % 7) as f32;
        let shapes = [(32, 1), (64, 3), (256, 8), (96, 8)];
        let cases = [CacheType::Q8_0, CacheType::Q4_0].map(|types| shapes.map(|(d, rows)| (types, d, rows)));
        for &(types, d, rows) in cases.as_flattened() {
            let block = types.k.block().unwrap();
            let bytes = block.block_bytes();
            let m = bytes - 2;
            let (mut tile, mut keys) = (vec![0u8; PAGE * d / BLOCK * bytes], Vec::new());
            for pos in 0..PAGE {
                let key: Vec<f32> = (0..d).map(|i| x(pos * d + i)).collect();
                let mut row = vec![0; d / BLOCK * bytes];
                encode_row(block, &key, &mut row);
                let mut wide = Vec::new();
                for (b, block) in row.chunks_exact(bytes).enumerate() {
                    wide.extend(&block[..2]);
                    match types.k {
                        // In Q8_0 with the same integers.
                        KvType::Q4_0 => {
                            wide.extend((0..BLOCK).map(|i| (block[2 + i % 16] >> (i / 16 * 4) & 15).wrapping_sub(8)))
                        }
                        _ => wide.extend(&block[2..]),
                    }
                    tile[PAGE * d / BLOCK * m + 2 * (PAGE * b + pos)..][..2].copy_from_slice(&block[..2]);
                    for (i, &byte) in block[2..].iter().enumerate() {
                        tile[(b * m + i) / 2 * 2 * PAGE + 2 * pos + i % 2] = byte;
                    }
                }
                keys.push(wide);
            }
            let query: Vec<f32> = (0..rows * d).map(|i| x(7 * i + 1)).collect();
            let (mut ints, mut scales, mut sums) =
                (vec![0; rows * d], vec![0.0; rows * d / BLOCK], vec![0; rows * d / BLOCK]);
            quantise32(&query, &mut ints, &mut scales, &mut sums);
            let floats = std::ptr::null();
            let q = Queries { floats, ints: ints.as_ptr(), scales: scales.as_ptr() };
            let state = State { ptr: std::ptr::null_mut(), stride: 0 };
            let tile = Tile {
                k: tile.as_ptr(),
                v: tile.as_ptr(),
                types,
                next: tile.as_ptr(),
                bytes: tile.len(),
                d_k: d,
                v_width: d,
                v_stride: d,
                latent: false,
                q,
                q_stride: d,
                state,
                scoring: Scoring { scale: 1.0, softcap: None },
            };
            for isa in CheckedIsa::all() {
                let mut out = vec![[0.0; PAGE]; rows];
                // SAFETY: the tile and the queries have what their dot products read; no state is touched.
                unsafe { dots_on(isa, &tile, rows, &mut out) };
                for (r, out) in out.iter().enumerate() {
                    let of_row = |n: usize| r * n..(r + 1) * n;
                    let (q, d, sums) = (&ints[of_row(d)], &scales[of_row(d / BLOCK)], &sums[of_row(d / BLOCK)]);
                    for (pos, (found, key)) in out.iter().zip(&keys).enumerate() {
                        let wanted = quant::dot::dot_row(WeightType::Q8_0, key, ActRow::Block32(Act32 { q, d, sums }));
                        assert_eq!(found.to_bits(), wanted.to_bits(), "{isa}, {types}, row {r} of {rows}, {pos}");
                    }
                }
            }
        }
    }
}
