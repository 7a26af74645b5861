//! Activations as the dot products read them: quantized once per row by one defined rule.
//!
//! Rows are structures of arrays so that kernels load full vectors and broadcast scales. Knows nothing of weights.
//!
//! # The rule, which every instruction set must reproduce to the bit
//! Every step is one f32 operation in the written order; nothing is fused or reassociated. `amax` is the integer
//! maximum of `x.to_bits() & 0x7fff_ffff`, read as f32 again: for finite numbers that is the largest magnitude, inf and
//! NaN are above all of them, so that one maximum measures and checks. `rte` rounds to the nearest integer, ties to
//! even.
//!
//! A block ([`ActKind::Block32`] with `max` = 32767, [`ActKind::Byte32`] with `max` = 127; 32 values):
//! ```text
//! amax not finite:  d = NaN, q = 0, sum = 0       amax < 1e-30:  d = 0, q = 0, sum = 0
//! d = amax / max        inv = max / amax        q = clamp(rte(x · inv), -max, max)          sum = Σ q
//! ```
//! A super-block ([`ActKind::Block256`], 256 values in sub-blocks j of 32):
//! ```text
//! amax over all 256;  not finite:  d = NaN, u = 1, q = 0, sums = 0       amax < 1e-30:  d = 0, u = 1, q = 0, sums = 0
//! ratio = 15 / amax     u[j] = clamp(ceil(amax[j] · ratio), 1, 15)       d = amax / 1905
//! inv[j] = 1 / (d · u[j])     q = clamp(rte(x · inv[j]), -127, 127)      sums[g] = u[g / 2] · Σ q over 16 values
//! ```
//! A value that is not finite thus makes every dot product with its block NaN; it never becomes a number.
//!
//! Why 1e-30: no scale may be subnormal (hardware may flush it) or infinite. With `1e-30 <= amax < 3.41e38`:
//! * `d = amax / 32767` lies in `3.0e-35 ..= 1.1e34`, its `inv` in `9.6e-35 ..= 3.3e34`;
//! * `d = amax / 127` lies in `7.8e-33 ..= 2.7e36`, its `inv` in `3.7e-37 ..= 1.3e32`;
//! * `ratio` lies in `4.4e-38 ..= 1.5e31`, `d = amax / 1905` in `5.2e-34 ..= 1.8e35`, `d · u` in `5.2e-34 ..= 2.7e36`,
//!   `inv[j]` in `3.7e-37 ..= 2.0e33`;
//!
//! all within the normal numbers, `1.18e-38 ..= 3.40e38`. `x · inv` is at most 32767 or 127 but for roundings, since
//! `|x| <= amax[j] <= u[j] · amax / 15 · (1 + 2⁻²²)`; the clamp takes those. A product that is itself subnormal
//! rounds to q = 0 with or without flushing, and so does a subnormal `x`; a subnormal `amax[j]` gives u = 1 either way.

/// The form of the activations that a weight type is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActKind {
    /// Plain f32, for F32, F16 and BF16 weights.
    F32,
    /// 16-bit integers, one f32 scale and one i32 sum per 32 values: for 32-blocks of 8 bits, since activations of 8
    /// bits err as much as such weights do.
    Block32,
    /// 8-bit integers, one f32 scale and one i32 sum per 32 values: for 32-blocks of at most 6 bits.
    Byte32,
    /// 8-bit integers, a 4-bit sub-scale per 32 values, one f32 scale per 256 values, u-scaled sums per 16 values.
    Block256,
}

impl ActKind {
    /// Values a block: 1, 32 or 256.
    pub fn block_len(self) -> usize {
        match self {
            ActKind::F32 => 1,
            ActKind::Block32 | ActKind::Byte32 => 32,
            ActKind::Block256 => 256,
        }
    }
}

/// One row of activations, `n` values, in the form of its [`ActKind`].
#[derive(Clone, Copy, Debug)]
pub enum ActRow<'a> {
    /// `x[n]`.
    F32(&'a [f32]),
    /// 32-blocks of 16-bit integers.
    Block32(Act32<'a, i16>),
    /// 32-blocks of 8-bit integers.
    Byte32(Act32<'a, i8>),
    /// 256-blocks.
    Block256(Act256<'a>),
}

/// A row of 32-blocks: `x[32·b + i] ≈ d[b] · q[32·b + i]`.
#[derive(Clone, Copy, Debug)]
pub struct Act32<'a, Q> {
    /// Quantized values, `[n]`, in `-32767..=32767` or `-127..=127`.
    pub q: &'a [Q],
    /// Scale of each block, `[n/32]`. NaN when the block held a value that is not finite.
    pub d: &'a [f32],
    /// Sum of `q` over each block, `[n/32]`.
    pub sums: &'a [i32],
}

/// A row of 256-blocks: `x[256·b + 32·j + i] ≈ d[b] · u[8·b + j] · q[256·b + 32·j + i]`.
///
/// The sub-scale `u` costs a kernel nothing (it multiplies the weight's own integer sub-scale once per row and block)
/// and keeps one outlier from blunting the 224 values that do not share its sub-block.
#[derive(Clone, Copy, Debug)]
pub struct Act256<'a> {
    /// Quantized values, `[n]`, in `-127..=127`.
    pub q: &'a [i8],
    /// Sub-scales in `1..=15`, `[n/32]`.
    pub u: &'a [u8],
    /// Scale of each super-block, `[n/256]`. NaN when it held a value that is not finite.
    pub d: &'a [f32],
    /// `u · Σ q` over each 16 values, `[n/16]` (at most 15·16·127 = 30480, so i16 holds it).
    pub sums: &'a [i16],
}

/// Below this largest magnitude a block is zero; the module's text proves that it keeps all scales normal.
const AMAX_MIN: f32 = 1e-30;

/// Returns the largest magnitude of `x`, by the integer maximum that sees NaN and inf.
pub fn amax(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

/// Quantizes `x`, any number of 32-blocks, into the parts of [`ActKind::Block32`].
///
/// # Panics
/// When the lengths are not `n`, `n`, `n/32`, `n/32` with 32 dividing `n`.
pub fn quantise32(x: &[f32], q: &mut [i16], d: &mut [f32], sums: &mut [i32]) {
    blocks32(x, q, d, sums, 32767.0, |q| q as i16);
}

/// Quantizes `x`, any number of 32-blocks, into the parts of [`ActKind::Byte32`].
///
/// # Panics
/// As [`quantise32`].
pub fn quantise_byte32(x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) {
    blocks32(x, q, d, sums, 127.0, |q| q as i8);
}

fn blocks32<Q: Copy + Default + Into<i32>>(
    x: &[f32],
    q: &mut [Q],
    d: &mut [f32],
    sums: &mut [i32],
    max: f32,
    integer: fn(f32) -> Q,
) {
    let n = x.len();
    assert!(n.is_multiple_of(32) && (q.len(), d.len(), sums.len()) == (n, n / 32, n / 32), "parts of {n} values");
    for (b, (x, q)) in x.as_chunks::<32>().0.iter().zip(q.as_chunks_mut::<32>().0).enumerate() {
        let amax = amax(x);
        sums[b] = 0;
        if let Some(scale) = empty_scale(amax) {
            d[b] = scale;
            q.fill(Q::default());
            continue;
        }
        d[b] = amax / max;
        let inv = max / amax;
        for i in 0..32 {
            q[i] = integer((x[i] * inv).round_ties_even().clamp(-max, max));
            sums[b] += q[i].into();
        }
    }
}

/// Quantizes `x`, any number of 256-blocks, into the parts of [`Act256`].
///
/// # Panics
/// When the lengths are not `n`, `n`, `n/32`, `n/256`, `n/16` with 256 dividing `n`.
pub fn quantise256(x: &[f32], q: &mut [i8], u: &mut [u8], d: &mut [f32], sums: &mut [i16]) {
    let n = x.len();
    assert!(n.is_multiple_of(256) && q.len() == n, "{} places for {n} values", q.len());
    assert_eq!((u.len(), d.len(), sums.len()), (n / 32, n / 256, n / 16), "parts of {n} values");
    let parts = q.as_chunks_mut::<256>().0.iter_mut().zip(u.as_chunks_mut::<8>().0);
    let parts = parts.zip(d).zip(sums.as_chunks_mut::<16>().0);
    for (x, (((q, u), d), sums)) in x.as_chunks::<256>().0.iter().zip(parts) {
        super_block(x, q, u, d, sums);
    }
}

fn super_block(x: &[f32; 256], q: &mut [i8; 256], u: &mut [u8; 8], d: &mut f32, sums: &mut [i16; 16]) {
    let amax_all = amax(x);
    *sums = [0; 16];
    if let Some(scale) = empty_scale(amax_all) {
        (*q, *u, *d) = ([0; 256], [1; 8], scale);
        return;
    }
    *d = amax_all / 1905.0; // 127 · 15
    let ratio = 15.0 / amax_all;
    for j in 0..8 {
        let sub = 32 * j..32 * j + 32;
        let uj = (amax(&x[sub.clone()]) * ratio).ceil().clamp(1.0, 15.0);
        let inv = 1.0 / (*d * uj);
        u[j] = uj as u8;
        for i in sub {
            q[i] = (x[i] * inv).round_ties_even().clamp(-127.0, 127.0) as i8;
            sums[i / 16] += i16::from(q[i]);
        }
        sums[2 * j] *= i16::from(u[j]);
        sums[2 * j + 1] *= i16::from(u[j]);
    }
}

/// Returns the scale of a block without integers, whose largest magnitude is `amax`; `None` for other blocks.
#[inline]
pub fn empty_scale(amax: f32) -> Option<f32> {
    if !amax.is_finite() {
        Some(f32::NAN)
    } else if amax < AMAX_MIN {
        Some(0.0)
    } else {
        None
    }
}
