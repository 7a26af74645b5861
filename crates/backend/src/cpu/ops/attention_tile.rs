//! The kernels of `attention`: query rows against one tile of the cache, on 16 lanes. Knows no pages and no work.

use super::super::isa::on_isa;
use super::super::kernels::{Hint, prefetch};
use super::super::lanes::{Float, Lanes};
use super::super::math;
use super::attention::q_stride;
use super::elementwise::capped;
use super::kv_append::{CacheElem, CacheView};
use super::softmax_state::State;
use crate::PAGE;

/// How dot products become scores: `softcap · tanh(scale · x / softcap)`, or `scale · x`.
#[derive(Clone, Copy)]
pub struct Scoring {
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// One tile against the rows of a unit. Its pointers are valid by the contract of [`Tile::new`].
#[derive(Clone, Copy)]
pub struct Tile<E> {
    k: *const E,
    v: *const E,
    /// The next tile, which is prefetched, or this one.
    pub next: *const E,
    d_k: usize,
    v_width: usize,
    v_stride: usize,
    /// Keys are rows like the values, not columns: scores are dot products on 16 lanes and the fixed tree.
    latent: bool,
    q: *const f32,
    q_stride: usize,
    state: State,
    scoring: Scoring,
}

impl<E> Tile<E> {
    /// The tile of `cache` that begins at `k`.
    ///
    /// # Safety
    /// While the tile is used, its positions up to the last visible one are readable and not written, `q` is readable
    /// for the query rows, and `state` has these rows for the caller alone.
    pub unsafe fn new(cache: &CacheView, scoring: Scoring, k: *const E, q: *const f32, state: State) -> Tile<E> {
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
            scoring,
        }
    }
}

on_isa! {
    /// Elements to f32, whole lanes.
    pub fn unpack<E: CacheElem>(from: &[E], to: &mut [f32]) = unpack_lanes
}
on_isa! {
    /// All query rows against a tile; row `r` sees the tile's positions `valid[r].0 .. valid[r].1`.
    pub fn tile_on<E: CacheElem>(tile: &Tile<E>, valid: &[(u8, u8)]) = tile_lanes
}

#[inline(always)]
fn unpack_lanes<L: Lanes, E: CacheElem>(from: &[E], to: &mut [f32]) {
    for (from, to) in from.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<16>().0) {
        // SAFETY: both arrays have 16 elements.
        unsafe { E::load::<L>(from.as_ptr()).store(to.as_mut_ptr()) };
    }
}

/// Rows that see the same positions go in blocks of up to six, whose sums fill AVX2's registers (AMD EPYC 9004: 40.5
/// GMAC/s; blocks of four 38.8, registers alone 45.7), or of eight by two where there are more registers: AVX-512's two
/// loads a cycle then serve two products each (prompts of 4,096 tokens, 2 layers of Qwen3-30B-A3B's shape, 16 cores of
/// a Xeon of the Sapphire Rapids class: attention takes 0.81 of its time in blocks of six, and 0.84 in blocks of
/// twelve). Without registers each goes alone: blocks of every size, unrolled lane by lane, would be a megabyte of
/// code.
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
        if L::SUMS >= 16 && alike >= 8 {
            block::<L, E, 8, 2>(tile, r, lo.into(), hi.into());
            r += 8;
            continue;
        }
        // Seven and eight make two blocks of nearly one size; one of six would leave a rest that shares little.
        let (n, lo, hi) = (if matches!(alike, 7 | 8) { 4 } else { alike.min(6) }, lo.into(), hi.into());
        if !L::IS_VECTOR {
            block::<L, E, 1, 1>(tile, r, lo, hi);
            r += 1;
            continue;
        }
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
    // The first rows prefetch the next tile, keys and values, a line at a time into the second cache: two tiles fill
    // the first.
    let next = if r == 0 { tile.next } else { tile.k };
    if 2 * Q <= L::SUMS {
        for d in 0..tile.d_k {
            prefetch(next.wrapping_add(2 * d * PAGE), 128, Hint::L2);
            // SAFETY: keys are [d_k][PAGE]; q has the unit's rows.
            unsafe {
                let k: [L; 2] = [E::load(tile.k.add(d * PAGE)), E::load(tile.k.add(d * PAGE + 16))];
                for i in 0..Q {
                    let q = L::splat(*tile.q.add((r + i) * tile.q_stride + d));
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
            let mut s = out[i][h].mul(L::splat(tile.scoring.scale));
            if let Some(cap) = tile.scoring.softcap {
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
