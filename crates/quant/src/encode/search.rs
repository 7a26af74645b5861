//! The searches for scales: least weighted squares over the levels of a type. Knows no format.
//!
//! Sums run in eight lanes, a fixed order that compilers turn into vectors.

use crate::types::Nearest;

/// The values that the integers of a type can have.
pub(super) trait Grid: Copy {
    /// The smallest.
    fn lo(self) -> f32;
    /// The largest.
    fn hi(self) -> f32;
    /// Distance of the outermost two: scales are tried about that far around the plain one.
    fn outer_gap(self) -> f32;
    /// The value nearest to `v`; past the ends, the end.
    fn nearest(self, v: f32) -> f32;
}

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
    pub fn new(lo: i16, hi: i16) -> Self {
        Self { lo: lo.into(), hi: hi.into() }
    }
}

impl Grid for Integers {
    fn lo(self) -> f32 {
        self.lo
    }

    fn hi(self) -> f32 {
        self.hi
    }

    fn outer_gap(self) -> f32 {
        1.0
    }

    #[inline(always)]
    fn nearest(self, v: f32) -> f32 {
        // Adding 1.5·2^23 leaves no room for a fraction: rounds to nearest, ties to even, without a call.
        const ROUND: f32 = 12_582_912.0;
        (v.max(self.lo).min(self.hi) + ROUND) - ROUND
    }
}

impl Grid for Table {
    fn lo(self) -> f32 {
        self.0.lo.into()
    }

    fn hi(self) -> f32 {
        self.0.hi.into()
    }

    fn outer_gap(self) -> f32 {
        self.0.outer_gap.into()
    }

    #[inline(always)]
    fn nearest(self, v: f32) -> f32 {
        // A cell of the table is half a step wide; what lies past the ends, or is NaN, goes to an end.
        self.0.of[((v + 128.0) * 2.0).min(511.0) as usize & 511].into()
    }
}

/// Magnitudes below which a scale is taken for zero, in blocks brought to about 1.
const TINY: f32 = 1e-20;

/// Times that a search starts from its best scale again.
const REPEATS: usize = 3;

/// The scale `d` with the least `Σ w·(x - d·q)²` among those tried.
///
/// The value of largest magnitude is put on either end of the levels and a little beside it; for the integers that
/// gives, the best scale is `Σ w·x·q / Σ w·q²`, and what it leaves of `Σ w·x²` is least where `(Σ w·x·q)² / Σ w·q²` is
/// largest. From the best, integers and scale are chosen anew for each other.
pub(super) fn scale(grid: impl Grid, x: &[f32], w: &[f32]) -> f32 {
    let peak = x.iter().copied().fold(0.0f32, |a, x| if x.abs() > a.abs() { x } else { a });
    if peak.abs() < TINY {
        return 0.0;
    }
    let attempt = |best: (f32, f32), inv: f32| {
        let [xq, qq] = sums(x, w, |x, w| {
            let q = grid.nearest(x * inv);
            [w * x * q, w * q * q]
        });
        let gain = xq * xq / qq;
        if qq > 0.0 && gain > best.0 { (gain, xq / qq) } else { best }
    };
    // Where steps are fine, what is a little beside gains nothing.
    let steps = if grid.hi() > 100.0 && grid.outer_gap() == 1.0 { 0 } else { 4 };
    let mut best = (0.0, 0.0);
    for end in [grid.lo(), grid.hi()] {
        for step in -steps..=steps {
            best = attempt(best, (end + 0.2 * step as f32 * grid.outer_gap()) / peak);
        }
    }
    for _ in 0..REPEATS {
        let next = attempt(best, 1.0 / best.1);
        if next.0 <= best.0 {
            break;
        }
        best = next;
    }
    best.1
}

/// Scale `d >= 0` and minimum `m <= m_max` with the least `Σ w·(x - d·q - m)²` among those tried, for integers from 0
/// to `hi`.
///
/// The range of `x` is laid on the levels and a little beside; for the integers that gives, `d` and `m` come from the
/// two linear equations of least squares. From the best, integers and both numbers are chosen anew for each other.
pub(super) fn scale_and_min(hi: f32, x: &[f32], w: &[f32], m_max: f32) -> (f32, f32) {
    let grid = Integers { lo: 0.0, hi };
    let low = x.iter().copied().fold(m_max, f32::min);
    let high = x.iter().copied().fold(low, f32::max);
    if high - low < TINY {
        return (0.0, low);
    }
    let attempt = |best: (f32, (f32, f32)), inv: f32, low: f32| {
        let [s_w, s_x, s_q, s_xq, s_qq] = sums(x, w, |x, w| {
            let q = grid.nearest((x - low) * inv);
            [w, w * x, w * q, w * x * q, w * q * q]
        });
        let det = s_w * s_qq - s_q * s_q;
        if det <= 0.0 {
            return best;
        }
        let (mut d, mut m) = ((s_w * s_xq - s_x * s_q) / det, (s_qq * s_x - s_q * s_xq) / det);
        if m > m_max {
            (d, m) = (s_xq / s_qq - m_max * s_q / s_qq, m_max);
        }
        let [err] = sums(x, w, |x, w| {
            let e = x - d * grid.nearest((x - low) * inv) - m;
            [w * e * e]
        });
        if err < best.0 && d > 0.0 { (err, (d, m)) } else { best }
    };
    let mut best = (f32::INFINITY, ((high - low) / hi, low));
    for step in -6..=10 {
        best = attempt(best, (hi + 0.1 * step as f32) / (high - low), low);
    }
    for _ in 0..REPEATS {
        let (d, m) = best.1;
        let next = attempt(best, 1.0 / d, m);
        if next.0 >= best.0 {
            break;
        }
        best = next;
    }
    best.1
}

/// `Σ w·(x - s·q)²` with the best integers for the scale `s`.
pub(super) fn error(grid: impl Grid, x: &[f32], w: &[f32], s: f32) -> f32 {
    let inv = inverse(s);
    let [err] = sums(x, w, |x, w| {
        let e = x - s * grid.nearest(x * inv);
        [w * e * e]
    });
    err
}

/// `Σ w·x·q` and `Σ w·q²` with the best integers for the scale `s`.
pub(super) fn moments(grid: impl Grid, x: &[f32], w: &[f32], s: f32) -> [f32; 2] {
    let inv = inverse(s);
    sums(x, w, |x, w| {
        let q = grid.nearest(x * inv);
        [w * x * q, w * q * q]
    })
}

/// `Σ w`, `Σ w·x`, `Σ w·q`, `Σ w·q²` and `Σ w·x·q` with the best integers for `x ≈ s·q - m`.
pub(super) fn moments_min(grid: Integers, x: &[f32], w: &[f32], s: f32, m: f32) -> [f32; 5] {
    let inv = inverse(s);
    sums(x, w, |x, w| {
        let q = grid.nearest((x + m) * inv);
        [w, w * x, w * q, w * q * q, w * x * q]
    })
}

/// The sub-scale and minimum near `near`, each in `0..=hi`, with the least `Σ w·(x - d·sc·q + dmin·m)²`, and that sum.
pub(super) fn sub_scales(
    grid: Integers,
    x: &[f32],
    w: &[f32],
    (d, dmin): (f32, f32),
    near: (f32, f32),
    hi: f32,
) -> (f32, (f32, f32)) {
    let clamp = |v: f32| v.max(0.0).min(hi);
    let mut best = (f32::INFINITY, (0.0, 0.0));
    for sc in [near.0, near.0 - 1.0, near.0 + 1.0].map(clamp) {
        let (s, inv) = (d * sc, inverse(d * sc));
        let mut attempt = |m: f32| {
            let shift = dmin * m;
            let [err, s_w, rest] = sums(x, w, |x, w| {
                let fit = s * grid.nearest((x + shift) * inv);
                let e = x + shift - fit;
                [w * e * e, w, w * (fit - x)]
            });
            if err < best.0 {
                best = (err, (sc, m));
            }
            // The best minimum for these integers.
            if dmin > 0.0 { clamp((rest / (s_w * dmin)).round()) } else { 0.0 }
        };
        let first = clamp(near.1);
        let next = attempt(first);
        if next != first {
            attempt(next);
        }
    }
    best
}

fn inverse(s: f32) -> f32 {
    if s == 0.0 { 0.0 } else { 1.0 / s }
}

/// Sums of the terms of all values, which come as `(x, w)`.
#[inline(always)]
pub(super) fn sums<const K: usize>(x: &[f32], w: &[f32], term: impl Fn(f32, f32) -> [f32; K]) -> [f32; K] {
    let mut lanes = [[0.0; 8]; K];
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        for i in 0..8 {
            let terms = term(x[i], w[i]);
            for k in 0..K {
                lanes[k][i] += terms[k];
            }
        }
    }
    lanes.map(|l| ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])))
}
