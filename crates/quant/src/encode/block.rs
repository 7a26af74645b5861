//! Blocks as the searches want them: brought to magnitudes of about 1, with weights of the errors. Knows no format.

use fearless_simd::{f32x8, prelude::*};
use half::f16;

use super::eight::{self, Eight};
use super::{RowUse, search};

/// A block brought to magnitudes of about 1, and how much the error of each value counts.
pub(crate) struct Block<const N: usize> {
    /// Values, divided by `unit`; the largest magnitude is 1 to 2, or less where that is below 2^-100.
    pub(super) x: [f32; N],
    /// A power of two.
    unit: f32,
    /// Weights of the squared errors, all above 0.
    pub(super) w: [f32; N],
    has_gain: bool,
}

impl<const N: usize> Block<N> {
    /// A block whose errors are weighed by importance, and by the size of values too where that is asked for.
    #[inline(always)]
    pub(super) fn new(x: &[f32; N], usage: RowUse<'_>, by_size: bool) -> Self {
        let by_size = by_size && usage.importance.is_some();
        // Weights by size keep large values, and with them what the gain would restore.
        let mut block = Self { x: [0.0; N], unit: 0.0, w: [1.0; N], has_gain: !by_size && !usage.is_normalised };
        block.unit = bring(x, f32::MAX, &mut block.x);
        weigh(usage.importance, &mut block.w);
        if by_size {
            weigh_by_size(&block.x, &mut block.w);
        }
        block
    }

    /// What the values that stand for those of the block are to be multiplied with to lose nothing of them along their
    /// own direction, by `Σ w·x·y`. Least squares draw what they fit towards zero, by the share that the error has; one
    /// block's shrinking is small beside its error, but all blocks shrink the same way, and layers multiply it. Where
    /// products are normalized that is no loss, and longer values have the larger error.
    #[inline(always)]
    pub(super) fn gain_by(&self, xy: f32) -> f32 {
        if !self.has_gain {
            return 1.0;
        }
        let [xx] = search::sums_of(&self.x, &self.w, |x, w| [w * x * x]);
        if xy > 0.0 && xx < 2.0 * xy { xx / xy } else { 1.0 }
    }

    /// [`Block::gain_by`] of the values `y`.
    #[inline(always)]
    pub(super) fn gain(&self, y: &[f32]) -> f32 {
        if self.has_gain {
            self.gain_by(self.x.iter().zip(&self.w).zip(y).map(|((x, w), y)| w * x * y).sum())
        } else {
            1.0
        }
    }

    /// The f16 nearest to a scale, never infinite, as f32 and in units of the block.
    #[inline(always)]
    pub(super) fn half(&self, d: f32) -> (f32, f32) {
        half(d, self.unit)
    }
}

/// Eight blocks as [`Block`] has one.
pub(super) struct Blocks<S: Simd, const N: usize> {
    pub b: Eight<S, N>,
    pub unit: [f32; 8],
    has_gain: bool,
}

impl<S: Simd, const N: usize> Blocks<S, N> {
    /// Eight blocks whose errors are weighed by importance and size, and whose scales have a [`Blocks::gain`] where
    /// [`Block::new`] gives them one.
    #[inline(always)]
    pub(super) fn new(simd: S, x: &[[f32; N]; 8], importance: Option<&[[f32; N]; 8]>, is_normalised: bool) -> Self {
        let blocks = Self::without_gain(simd, f32::MAX, x, importance, true);
        Self { has_gain: importance.is_none() && !is_normalised, ..blocks }
    }

    /// Eight blocks of values whose magnitudes are cut to `most`.
    #[inline(always)]
    pub(super) fn without_gain(
        simd: S,
        most: f32,
        x: &[[f32; N]; 8],
        importance: Option<&[[f32; N]; 8]>,
        by_size: bool,
    ) -> Self {
        let zero = f32x8::splat(simd, 0.0);
        let (mut x, mut w) = (eight::side_by_side(simd, x), [f32x8::splat(simd, 1.0); N]);
        let mut max = zero;
        for x in &mut x {
            *x = x.simd_eq(*x).select(x.max(-most).min(most), zero);
            max = max.max(x.abs());
        }
        let (mut unit, mut factor) = ([0.0; 8], [0.0; 8]);
        for k in 0..8 {
            (unit[k], factor[k]) = unit_of(max[k]);
        }
        let factor = f32x8::simd_from(simd, factor);
        for x in &mut x {
            *x *= factor;
        }
        if let Some(importance) = importance {
            w = eight::side_by_side(simd, importance);
            eight::weigh(simd, &mut w);
            if by_size {
                eight::weigh_by_size(&x, &mut w);
            }
        }
        Self { b: Eight::new(x, w), unit, has_gain: false }
    }

    /// [`Block::gain_by`] of the values `y`.
    #[inline(always)]
    pub(super) fn gain(&self, y: impl Fn(usize) -> f32x8<S>) -> f32x8<S> {
        let (b, one) = (&self.b, f32x8::splat(self.b.x[0].simd, 1.0));
        if !self.has_gain {
            return one;
        }
        let mut xy = b.wx[0] * y(0);
        for i in 1..N {
            xy += b.wx[i] * y(i);
        }
        let [xx] = eight::sums::<S, N, 1>(
            #[inline(always)]
            |i| [b.wx[i] * b.x[i]],
        );
        (xy.simd_gt(0.0) & xx.simd_lt(2.0 * xy)).select(xx / xy, one)
    }

    /// [`Block::half`] of a scale for each block.
    #[inline(always)]
    pub(super) fn half(&self, d: f32x8<S>) -> ([f32; 8], f32x8<S>) {
        let (mut halves, mut in_units) = ([0.0; 8], [0.0; 8]);
        for k in 0..8 {
            (halves[k], in_units[k]) = half(d[k], self.unit[k]);
        }
        (halves, f32x8::simd_from(d.simd, in_units))
    }
}

/// The f16 nearest to `d` units, never infinite, as f32 and in units.
#[inline(always)]
pub(super) fn half(d: f32, unit: f32) -> (f32, f32) {
    let half = f16::from_f64((f64::from(d) * f64::from(unit)).clamp(-65504.0, 65504.0)).to_f32();
    (half, half / unit)
}

/// Divides values by a power of two, which brings the largest to 1 to 2, and returns it. NaN becomes 0, and magnitudes
/// are cut to `most`.
#[inline(always)]
fn bring(x: &[f32], most: f32, out: &mut [f32]) -> f32 {
    out.iter_mut().zip(x).for_each(|(y, &x)| *y = if x.is_nan() { 0.0 } else { x.clamp(-most, most) });
    let (unit, factor) = unit_of(crate::act::amax(out));
    out.iter_mut().for_each(|y| *y *= factor);
    unit
}

/// The power of two that goes into a block's largest magnitude once, and what to multiply with to divide by it.
#[inline(always)]
fn unit_of(max: f32) -> (f32, f32) {
    let exponent = (max.to_bits() >> 23).clamp(27, 253);
    (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23))
}

/// Weights of the squared errors: the importance of each column over the mean, 1 where it is not known.
#[inline(always)]
fn weigh(importance: Option<&[f32]>, w: &mut [f32]) {
    w.fill(1.0);
    let Some(importance) = importance else { return };
    let known = |v: f32| if v.is_finite() && v > 0.0 { f64::from(v) } else { 0.0 };
    let mean = importance.iter().map(|&v| known(v)).sum::<f64>() / importance.len() as f64;
    if mean > 0.0 {
        w.iter_mut().zip(importance).for_each(|(w, &v)| *w = (known(v) / mean).max(1e-3) as f32);
    }
}

/// Multiplies the weights by `sqrt(2·m + x²)`, `m` the mean square of the values: importances are those of one text,
/// and large values are what columns add whatever the text. KL with importances, as `tools/kl_table.py` measures it,
/// against weights of importance alone and [`Block::gain`]: the embedded model in Q4_K_M 0.090 and 0.094, in Q3_K_M
/// 0.184 and 0.200, in IQ4_XS 0.129 and 0.136; SmolLM2-135M in Q3_K_M 0.090 and 0.096. Few levels lose by it (the
/// embedded model in Q2_K: 0.90 and 0.77, in IQ2_XXS 1.54 and 1.30).
#[inline(always)]
fn weigh_by_size(x: &[f32], w: &mut [f32]) {
    let square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    if square > 0.0 {
        w.iter_mut().zip(x).for_each(|(w, x)| *w *= (2.0 + x * x / square).sqrt());
    }
}

/// `x / d`, and 0 where `d` is: nothing can be said with a scale of zero.
#[inline(always)]
pub(super) fn over(x: f32, d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { x / d }
}

/// `x / d`, and 0 where `d` is.
#[inline(always)]
pub(super) fn over_each<S: Simd>(x: f32x8<S>, d: f32x8<S>) -> f32x8<S> {
    d.simd_eq(0.0).select(f32x8::splat(d.simd, 0.0), x / d)
}

/// The byte of an integer from -128 to 255. A cast would look for numbers that no byte can be, one by one.
#[inline(always)]
pub(super) fn byte(q: f32) -> u8 {
    (q + search::ROUND).to_bits() as u8
}
