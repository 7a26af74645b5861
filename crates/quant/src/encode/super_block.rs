//! Encoders of super-blocks: sub-scales, minimums and their scales are searched for in turn. Knows no bytes.

use fearless_simd::{f32x8, prelude::*};

use super::block::{Block, byte, over, over_each};
use super::eight::{self, Eight};
use super::search::{self, Grid, Integers};
use crate::block::Ints256;
use crate::types::Sub;

/// Rounds of a super-block's search: sub-scales for given scales, then scales for given sub-scales.
const ROUNDS: usize = 3;

/// A super-block, of `8·E` sub-blocks of `LEN` values, without minimums: `x ≈ d·sc·q`.
#[inline(always)]
pub(super) fn encode256<S: Simd, const LEN: usize, const E: usize>(
    simd: S,
    block: &Block<256>,
    grid: impl Grid,
    sub: &Sub,
) -> Ints256 {
    let b = sub_blocks::<S, LEN, E>(simd, block);
    let (zero, lo, hi) = (f32x8::splat(simd, 0.0), f32::from(sub.lo), f32::from(sub.hi));
    let mut scales = [zero; E];
    for e in 0..E {
        scales[e] = search::scale(simd, grid, &b[e]);
    }
    // The largest sub-scale takes the end of the range that reaches furthest, the negative one.
    let mut peak = 0.0f32;
    for scale in scales.iter().flat_map(|scales| **scales) {
        peak = if scale.abs() > peak.abs() { scale } else { peak };
    }
    let mut in_d = block.half(peak / lo).1;
    let mut best = (f32::INFINITY, 0.0, [zero; E]);
    for round in 1..=ROUNDS {
        let (mut sum, mut sc) = (0.0, [zero; E]);
        for e in 0..E {
            let near = over_each(scales[e], f32x8::splat(simd, in_d)).round();
            let mut least = f32x8::splat(simd, f32::INFINITY);
            for near in [near, near - 1.0, near + 1.0] {
                let near = near.max(lo).min(hi);
                let err = search::error(grid, &b[e], near * in_d);
                let is_less = err.simd_lt(least);
                (least, sc[e]) = (is_less.select(err, least), is_less.select(near, sc[e]));
            }
            (*least).into_iter().for_each(|err| sum += err);
        }
        if sum >= best.0 {
            break;
        }
        best = (sum, in_d, sc);
        if round == ROUNDS {
            break;
        }
        let (mut xa, mut aa) = (0.0, 0.0);
        for e in 0..E {
            let [xq, qq] = search::moments(grid, &b[e], sc[e] * in_d);
            let (of_x, of_a) = (xq * sc[e], qq * sc[e] * sc[e]);
            for k in 0..8 {
                xa += of_x[k];
                aa += of_a[k];
            }
        }
        in_d = block.half(over(xa, aa)).1;
    }
    let (_, in_d, sc) = best;
    let mut out = Ints256::ZERO;
    let mut y = [[[0.0; LEN]; 8]; E];
    for e in 0..E {
        let (s, mut q) = (sc[e] * in_d, b[e].x);
        for q in &mut q {
            *q = grid.nearest(over_each(*q, s));
        }
        y[e] = eight::apart(&q);
        put_integers(&y[e], &sc[e], e, &mut out);
        for k in 0..8 {
            y[e][k].iter_mut().for_each(|y| *y *= s[k]);
        }
    }
    out.d = block.half(in_d * block.gain(y.as_flattened().as_flattened())).0;
    out
}

/// A super-block, of `8·E` sub-blocks of `LEN` values, with minimums: `x ≈ d·sc·q - dmin·min`, all factors at least
/// zero.
#[inline(always)]
pub(super) fn encode256_min<S: Simd, const LEN: usize, const E: usize>(
    simd: S,
    block: &Block<256>,
    grid: Integers,
    sub: &Sub,
) -> Ints256 {
    let b = sub_blocks::<S, LEN, E>(simd, block);
    let (zero, hi) = (f32x8::splat(simd, 0.0), f32::from(sub.hi));
    let (mut scales, mut mins, mut largest) = ([zero; E], [zero; E], [0.0f32; 2]);
    for e in 0..E {
        let (d, m) = search::scale_and_min(simd, grid.hi, &b[e], 0.0);
        (scales[e], mins[e]) = (d, -m);
        for k in 0..8 {
            largest = [
                if d[k] > largest[0] { d[k] } else { largest[0] },
                if -m[k] > largest[1] { -m[k] } else { largest[1] },
            ];
        }
    }
    let [mut d, mut dmin] = largest.map(|largest| block.half(largest / hi).1);
    let mut best = (f32::INFINITY, d, dmin, [(zero, zero); E]);
    for round in 1..=ROUNDS {
        let (mut sum, mut subs) = (0.0, [(zero, zero); E]);
        for e in 0..E {
            let near = |of: f32x8<S>, d: f32| over_each(of, f32x8::splat(simd, d)).round();
            let near = (near(scales[e], d), near(mins[e], dmin));
            let (err, sc, m) = search::sub_scales(simd, grid, &b[e], (d, dmin), near, hi);
            (*err).into_iter().for_each(|err| sum += err);
            subs[e] = (sc, m);
        }
        if sum >= best.0 {
            break;
        }
        best = (sum, d, dmin, subs);
        if round == ROUNDS {
            break;
        }
        // Least squares over the whole super-block, with `a = sc·q` and `b = min`.
        let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for e in 0..E {
            let (sc, m) = subs[e];
            let [s_w, s_x, s_q, s_qq, s_xq] = search::moments_min(grid, &b[e], sc * d, m * dmin);
            let of = [s_qq * sc * sc, s_q * sc * m, s_w * m * m, s_xq * sc, s_x * m];
            for k in 0..8 {
                aa += of[0][k];
                ab += of[1][k];
                bb += of[2][k];
                xa += of[3][k];
                xb += of[4][k];
            }
        }
        let det = aa * bb - ab * ab;
        if det > 1e-6 * aa * bb {
            d = block.half(((xa * bb - xb * ab) / det).max(0.0)).1;
            dmin = block.half(((xa * ab - xb * aa) / det).max(0.0)).1;
        } else {
            d = block.half(over(xa + dmin * ab, aa).max(0.0)).1;
        }
    }
    let (_, d, dmin, subs) = best;
    let mut out = Ints256::ZERO;
    let mut y = [[[0.0; LEN]; 8]; E];
    for e in 0..E {
        let ((sc, m), mut q) = (subs[e], b[e].x);
        let (s, shift) = (sc * d, m * dmin);
        for q in &mut q {
            *q = grid.nearest(over_each(*q + shift, s));
        }
        y[e] = eight::apart(&q);
        put_integers(&y[e], &sc, e, &mut out);
        for k in 0..8 {
            out.mins[(8 * e + k) * LEN / 16..][..LEN / 16].fill(m[k] as u8);
            y[e][k].iter_mut().for_each(|y| *y = s[k] * *y - shift[k]);
        }
    }
    let gain = block.gain(y.as_flattened().as_flattened());
    (out.d, out.dmin) = (block.half(d * gain).0, block.half(dmin * gain).0);
    out
}

/// The `8·E` sub-blocks of a super-block.
#[inline(always)]
fn sub_blocks<S: Simd, const LEN: usize, const E: usize>(simd: S, b: &Block<256>) -> [Eight<S, LEN>; E] {
    let (x, w): (&[[f32; LEN]], &[[f32; LEN]]) = (b.x.as_chunks().0, b.w.as_chunks().0);
    let (x, w): (&[[_; 8]], &[[_; 8]]) = (x.as_chunks().0, w.as_chunks().0);
    let mut eights = [Eight::of(simd, &x[0], &w[0]); E];
    for e in 1..E {
        eights[e] = Eight::of(simd, &x[e], &w[e]);
    }
    eights
}

/// Puts integers and sub-scales of the `e`th eight sub-blocks where they belong.
#[inline(always)]
fn put_integers<const LEN: usize>(q: &[[f32; LEN]; 8], sc: &[f32; 8], e: usize, out: &mut Ints256) {
    for k in 0..8 {
        let at = (8 * e + k) * LEN;
        out.sc[at / 16..][..LEN / 16].fill(sc[k] as i8);
        out.q[at..][..LEN].iter_mut().zip(&q[k]).for_each(|(to, q)| *to = byte(*q) as i8);
    }
}
