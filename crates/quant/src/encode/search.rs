//! The searches for scales: least weighted squares over the levels of a type, in eight blocks at a time. Knows no
//! format.

use fearless_simd::{f32x8, i32x8, prelude::*};

use super::eight::{Eight, always, sums};
use crate::types::Nearest;

/// The values that the integers of a type can have.
pub(super) trait Grid: Copy {
    /// The smallest.
    fn lo(self) -> f32;
    /// The largest.
    fn hi(self) -> f32;
    /// Distance of the outermost two: scales are tried about that far around the plain one.
    fn outer_gap(self) -> f32;
    /// The values nearest to `v`; past the ends, the end.
    fn nearest<S: Simd>(self, v: f32x8<S>) -> f32x8<S>;
}

/// 1.5·2^23. What it is added to has no room for a fraction: rounds to nearest, ties to even, without a call.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Every integer from `lo` to `hi`.
#[derive(Clone, Copy)]
pub(super) struct Integers {
    pub lo: f32,
    pub hi: f32,
}

/// The values of a table.
#[derive(Clone, Copy)]
pub(super) struct Table(pub &'static Nearest);

impl Integers {
    #[inline(always)]
    pub fn new(lo: i16, hi: i16) -> Self {
        Self { lo: lo.into(), hi: hi.into() }
    }
}

impl Grid for Integers {
    #[inline(always)]
    fn lo(self) -> f32 {
        self.lo
    }

    #[inline(always)]
    fn hi(self) -> f32 {
        self.hi
    }

    #[inline(always)]
    fn outer_gap(self) -> f32 {
        1.0
    }

    #[inline(always)]
    fn nearest<S: Simd>(self, v: f32x8<S>) -> f32x8<S> {
        (v.max(self.lo).min(self.hi) + ROUND) - ROUND
    }
}

impl Grid for Table {
    #[inline(always)]
    fn lo(self) -> f32 {
        self.0.lo
    }

    #[inline(always)]
    fn hi(self) -> f32 {
        self.0.hi
    }

    #[inline(always)]
    fn outer_gap(self) -> f32 {
        self.0.outer_gap
    }

    #[inline(always)]
    fn nearest<S: Simd>(self, v: f32x8<S>) -> f32x8<S> {
        // A cell of the table is half a step wide; what lies past the ends, or is NaN, goes to an end.
        let cells = i32x8::truncate_from(((v + 128.0) * 2.0).min_precise(511.0).max(0.0));
        let mut near = [0.0; 8];
        for i in 0..8 {
            near[i] = self.0.of[cells[i] as usize & 511];
        }
        f32x8::simd_from(v.simd, near)
    }
}

/// Magnitudes below which a scale is taken for zero, in blocks brought to about 1.
const TINY: f32 = 1e-20;

/// Times that a search starts from its best scale again.
const REPEATS: usize = 3;

/// For each block the scale `d` with the least `Σ w·(x - d·q)²` among those tried.
///
/// The value of largest magnitude is put on either end of the levels and a little beside it; for the integers that
/// gives, the best scale is `Σ w·x·q / Σ w·q²`, and what it leaves of `Σ w·x²` is least where `(Σ w·x·q)² / Σ w·q²` is
/// largest. From the best, integers and scale are chosen anew for each other.
#[inline(always)]
pub(super) fn scale<S: Simd, const LEN: usize>(simd: S, grid: impl Grid, b: &Eight<S, LEN>) -> f32x8<S> {
    let zero = f32x8::splat(simd, 0.0);
    let mut peak = zero;
    for x in b.x {
        peak = x.abs().simd_gt(peak.abs()).select(x, peak);
    }
    let attempt = always(
        #[inline(always)]
        |best: (f32x8<S>, f32x8<S>), inv: f32x8<S>| {
            let [xq, qq] = sums::<S, LEN, 2>(
                #[inline(always)]
                |i| {
                    let q = grid.nearest(b.x[i] * inv);
                    [b.wx[i] * q, b.w[i] * q * q]
                },
            );
            let gain = xq * xq / qq;
            let is_better = qq.simd_gt(0.0) & gain.simd_gt(best.0);
            (is_better.select(gain, best.0), is_better.select(xq / qq, best.1))
        },
    );
    // Where steps are fine, what is a little beside gains nothing.
    let steps = if grid.hi() > 100.0 && grid.outer_gap() == 1.0 { 0 } else { 4 };
    let mut best = (zero, zero);
    for end in [grid.lo(), grid.hi()] {
        for step in -steps..=steps {
            best = attempt(best, f32x8::splat(simd, end + 0.2 * step as f32 * grid.outer_gap()) / peak);
        }
    }
    for _ in 0..REPEATS {
        let next = attempt(best, 1.0 / best.1);
        if !next.0.simd_gt(best.0).any_true() {
            break;
        }
        best = next;
    }
    peak.abs().simd_lt(TINY).select(zero, best.1)
}

/// For each block the scale `d >= 0` and minimum `m <= m_max` with the least `Σ w·(x - d·q - m)²` among those tried,
/// for integers from 0 to `hi`.
///
/// The range of `x` is laid on the levels and a little beside; for the integers that gives, `d` and `m` come from the
/// two linear equations of least squares. From the best, integers and both numbers are chosen anew for each other.
#[inline(always)]
pub(super) fn scale_and_min<S: Simd, const LEN: usize>(
    simd: S,
    hi: f32,
    b: &Eight<S, LEN>,
    m_max: f32,
) -> (f32x8<S>, f32x8<S>) {
    let grid = Integers { lo: 0.0, hi };
    let zero = f32x8::splat(simd, 0.0);
    let mut low = f32x8::splat(simd, m_max);
    for x in b.x {
        low = low.min(x);
    }
    let mut high = low;
    for x in b.x {
        high = high.max(x);
    }
    let range = high - low;
    let [s_w, s_x] = sums::<S, LEN, 2>(
        #[inline(always)]
        |i| [b.w[i], b.wx[i]],
    );
    let attempt = always(
        #[inline(always)]
        |best: (f32x8<S>, f32x8<S>, f32x8<S>), inv: f32x8<S>, low: f32x8<S>| {
            let mut integers = [zero; LEN];
            for i in 0..LEN {
                integers[i] = grid.nearest((b.x[i] - low) * inv);
            }
            let [s_q, s_xq, s_qq] = sums::<S, LEN, 3>(
                #[inline(always)]
                |i| {
                    let wq = b.w[i] * integers[i];
                    [wq, b.wx[i] * integers[i], wq * integers[i]]
                },
            );
            let det = s_w * s_qq - s_q * s_q;
            let (mut d, mut m) = ((s_w * s_xq - s_x * s_q) / det, (s_qq * s_x - s_q * s_xq) / det);
            let is_past = m.simd_gt(m_max);
            d = is_past.select(s_xq / s_qq - m_max * s_q / s_qq, d);
            m = is_past.select(f32x8::splat(simd, m_max), m);
            let [err] = sums::<S, LEN, 1>(
                #[inline(always)]
                |i| {
                    let e = b.x[i] - d * integers[i] - m;
                    [b.w[i] * e * e]
                },
            );
            let is_better = det.simd_gt(0.0) & err.simd_lt(best.0) & d.simd_gt(0.0);
            (is_better.select(err, best.0), is_better.select(d, best.1), is_better.select(m, best.2))
        },
    );
    let mut best = (f32x8::splat(simd, f32::INFINITY), range / hi, low);
    for step in -6..=10 {
        best = attempt(best, (hi + 0.1 * step as f32) / range, low);
    }
    for _ in 0..REPEATS {
        let next = attempt(best, 1.0 / best.1, best.2);
        if !next.0.simd_lt(best.0).any_true() {
            break;
        }
        best = next;
    }
    let is_flat = range.simd_lt(TINY);
    (is_flat.select(zero, best.1), is_flat.select(low, best.2))
}

/// `Σ w·(x - s·q)²` of each block with the best integers for the scales `s`.
#[inline(always)]
pub(super) fn error<S: Simd, const LEN: usize>(grid: impl Grid, b: &Eight<S, LEN>, s: f32x8<S>) -> f32x8<S> {
    let inv = inverse(s);
    let [err] = sums::<S, LEN, 1>(
        #[inline(always)]
        |i| {
            let e = b.x[i] - s * grid.nearest(b.x[i] * inv);
            [b.w[i] * e * e]
        },
    );
    err
}

/// `Σ w·x·q` and `Σ w·q²` of each block with the best integers for the scales `s`.
#[inline(always)]
pub(super) fn moments<S: Simd, const LEN: usize>(grid: impl Grid, b: &Eight<S, LEN>, s: f32x8<S>) -> [f32x8<S>; 2] {
    let inv = inverse(s);
    sums::<S, LEN, 2>(
        #[inline(always)]
        |i| {
            let q = grid.nearest(b.x[i] * inv);
            [b.wx[i] * q, b.w[i] * q * q]
        },
    )
}

/// `Σ w`, `Σ w·x`, `Σ w·q`, `Σ w·q²` and `Σ w·x·q` of each block with the best integers for `x ≈ s·q - m`.
#[inline(always)]
pub(super) fn moments_min<S: Simd, const LEN: usize>(
    grid: Integers,
    b: &Eight<S, LEN>,
    s: f32x8<S>,
    m: f32x8<S>,
) -> [f32x8<S>; 5] {
    let inv = inverse(s);
    sums::<S, LEN, 5>(
        #[inline(always)]
        |i| {
            let q = grid.nearest((b.x[i] + m) * inv);
            let wq = b.w[i] * q;
            [b.w[i], b.wx[i], wq, wq * q, b.wx[i] * q]
        },
    )
}

/// For each block the sub-scale and minimum near `near`, each in `0..=hi`, with the least
/// `Σ w·(x - d·sc·q + dmin·m)²`: that sum and both.
#[inline(always)]
pub(super) fn sub_scales<S: Simd, const LEN: usize>(
    simd: S,
    grid: Integers,
    b: &Eight<S, LEN>,
    (d, dmin): (f32, f32),
    near: (f32x8<S>, f32x8<S>),
    hi: f32,
) -> (f32x8<S>, f32x8<S>, f32x8<S>) {
    let zero = f32x8::splat(simd, 0.0);
    let clamp = always(
        #[inline(always)]
        |v: f32x8<S>| v.max_precise(0.0).min(hi),
    );
    let [s_w] = sums::<S, LEN, 1>(
        #[inline(always)]
        |i| [b.w[i]],
    );
    let mut best = (f32x8::splat(simd, f32::INFINITY), zero, zero);
    let first = clamp(near.1);
    for sc in [near.0, near.0 - 1.0, near.0 + 1.0] {
        let sc = clamp(sc);
        let (s, inv) = (sc * d, inverse(sc * d));
        let mut m = first;
        // With the minimum that is near, then with the best for the integers that gives.
        for _ in 0..2 {
            let shift = m * dmin;
            let [err, rest] = sums::<S, LEN, 2>(
                #[inline(always)]
                |i| {
                    let moved = b.x[i] + shift;
                    let fit = s * grid.nearest(moved * inv);
                    let e = moved - fit;
                    [b.w[i] * e * e, b.w[i] * (fit - b.x[i])]
                },
            );
            let is_better = err.simd_lt(best.0);
            best = (is_better.select(err, best.0), is_better.select(sc, best.1), is_better.select(m, best.2));
            let next = if dmin > 0.0 { clamp((rest / (s_w * dmin)).round()) } else { zero };
            if !next.simd_eq(m).any_false() {
                break;
            }
            m = next;
        }
    }
    best
}

#[inline(always)]
fn inverse<S: Simd>(s: f32x8<S>) -> f32x8<S> {
    s.simd_eq(0.0).select(f32x8::splat(s.simd, 0.0), 1.0 / s)
}

/// Sums of the terms of all values of one block, which come as `(x, w)`, in the order of [`super::eight::sums`].
#[inline(always)]
pub(super) fn sums_of<const K: usize>(x: &[f32], w: &[f32], term: impl Fn(f32, f32) -> [f32; K]) -> [f32; K] {
    let mut lanes = [[0.0; 8]; K];
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        for i in 0..8 {
            let terms = term(x[i], w[i]);
            for k in 0..K {
                lanes[k][i] += terms[k];
            }
        }
    }
    let mut sums = [0.0; K];
    for (sum, l) in sums.iter_mut().zip(lanes) {
        *sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
    }
    sums
}
