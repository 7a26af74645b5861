//! Eight blocks side by side, so that vectors search in all of them at once. Knows no format.
//!
//! Lanes do not depend on each other, and sums over the values of a block have a fixed order: a block becomes the same
//! beside any others and with any vectors.

use fearless_simd::{f32x8, f64x4, prelude::*};

/// Eight blocks of `LEN` values, a multiple of 8: vector `i` holds value `i` of each.
#[derive(Clone, Copy)]
pub(super) struct Eight<S: Simd, const LEN: usize> {
    pub x: [f32x8<S>; LEN],
    /// Weights of the squared errors.
    pub w: [f32x8<S>; LEN],
    /// `w·x`.
    pub wx: [f32x8<S>; LEN],
}

impl<S: Simd, const LEN: usize> Eight<S, LEN> {
    #[inline(always)]
    pub fn new(x: [f32x8<S>; LEN], w: [f32x8<S>; LEN]) -> Self {
        let mut wx = x;
        for i in 0..LEN {
            wx[i] = w[i] * x[i];
        }
        Self { x, w, wx }
    }

    /// Of rows.
    #[inline(always)]
    pub fn of(simd: S, x: &[[f32; LEN]; 8], w: &[[f32; LEN]; 8]) -> Self {
        Self::new(side_by_side(simd, x), side_by_side(simd, w))
    }
}

/// `block::weigh` of eight blocks, in the same steps.
#[inline(always)]
pub(super) fn weigh<S: Simd, const LEN: usize>(simd: S, w: &mut [f32x8<S>; LEN]) {
    let zero = f64x4::splat(simd, 0.0);
    let mut sums = (zero, zero);
    for w in w.iter_mut() {
        *w = (w.simd_gt(0.0) & w.simd_lt(f32::INFINITY)).select(*w, f32x8::splat(simd, 0.0));
        let (low, high) = w.widen();
        sums = (sums.0 + low, sums.1 + high);
    }
    let means = (sums.0 / LEN as f64, sums.1 / LEN as f64);
    let is_known = sums.0.narrow(sums.1).simd_gt(0.0);
    for w in w {
        let (low, high) = w.widen();
        let over_mean = (low / means.0).max(1e-3).narrow((high / means.1).max(1e-3));
        *w = is_known.select(over_mean, f32x8::splat(simd, 1.0));
    }
}

/// `block::weigh_by_size` of eight blocks, in the same steps.
#[inline(always)]
pub(super) fn weigh_by_size<S: Simd, const LEN: usize>(x: &[f32x8<S>; LEN], w: &mut [f32x8<S>; LEN]) {
    let mut square = x[0] * x[0];
    for x in &x[1..] {
        square += *x * *x;
    }
    square /= LEN as f32;
    for i in 0..LEN {
        w[i] = square.simd_gt(0.0).select(w[i] * (2.0 + x[i] * x[i] / square).sqrt(), w[i]);
    }
}

/// Sums of the terms of values `0..LEN` of each block: those of each eighth value, then of these by a tree.
#[inline(always)]
pub(super) fn sums<S: Simd, const LEN: usize, const K: usize>(term: impl Fn(usize) -> [f32x8<S>; K]) -> [f32x8<S>; K] {
    let plus = always(
        #[inline(always)]
        |mut a: [f32x8<S>; K], b: [f32x8<S>; K]| {
            for k in 0..K {
                a[k] += b[k];
            }
            a
        },
    );
    let lane = always(
        #[inline(always)]
        |i: usize| {
            let mut sum = term(i);
            for c in 1..LEN / 8 {
                sum = plus(sum, term(8 * c + i));
            }
            sum
        },
    );
    let even = plus(plus(lane(0), lane(4)), plus(lane(2), lane(6)));
    plus(even, plus(plus(lane(1), lane(5)), plus(lane(3), lane(7))))
}

/// A closure that is inlined wherever it is called, which only arguments can be.
#[inline(always)]
pub(super) fn always<F>(f: F) -> F {
    f
}

/// Eight rows as vectors of eight rows' values.
#[inline(always)]
pub(super) fn side_by_side<S: Simd, const LEN: usize>(simd: S, rows: &[[f32; LEN]; 8]) -> [f32x8<S>; LEN] {
    let mut out = [f32x8::splat(simd, 0.0); LEN];
    for (c, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        for (k, out) in out.iter_mut().enumerate() {
            *out = f32x8::simd_from(simd, rows[k].as_chunks::<8>().0[c]);
        }
        *out = transposed(*out);
    }
    out
}

/// The inverse of [`side_by_side`].
#[inline(always)]
pub(super) fn apart<S: Simd, const LEN: usize>(vectors: &[f32x8<S>; LEN]) -> [[f32; LEN]; 8] {
    let mut rows = [[0.0; LEN]; 8];
    for (c, vectors) in vectors.as_chunks::<8>().0.iter().enumerate() {
        for (k, vector) in transposed(*vectors).into_iter().enumerate() {
            rows[k].as_chunks_mut::<8>().0[c] = *vector;
        }
    }
    rows
}

/// Row and column of 64 values change places. Each round moves the first bit of a value's place to the end.
#[inline(always)]
fn transposed<S: Simd>(mut rows: [f32x8<S>; 8]) -> [f32x8<S>; 8] {
    for _ in 0..3 {
        let was = rows;
        for i in 0..4 {
            (rows[2 * i], rows[2 * i + 1]) = was[i].interleave(was[i + 4]);
        }
    }
    rows
}
