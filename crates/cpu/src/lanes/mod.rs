//! Sixteen virtual lanes of f32, the unit of the CPU law: kernels are written once over [`Lanes`] and compiled for
//! every instruction set, so that equal bits follow from equal source.
//!
//! Every method is one IEEE operation per lane (or an exact conversion), the same in all implementations.
//! Values of the vector types may only be made inside functions that enable their target features (see `on_isa!`).

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Lane-wise arithmetic; `f32` itself is the implementation with one lane.
pub trait Float: Copy {
    /// All lanes `v`.
    fn splat(v: f32) -> Self;
    /// `self + b`.
    fn add(self, b: Self) -> Self;
    /// `self - b`.
    fn sub(self, b: Self) -> Self;
    /// `self · b`.
    fn mul(self, b: Self) -> Self;
    /// `self / b`.
    fn div(self, b: Self) -> Self;
    /// `self · b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// `self` where it is above `b`, otherwise `b`; so `b` when either is NaN.
    fn max(self, b: Self) -> Self;
    /// `self` where it is below `b`, otherwise `b`; so `b` when either is NaN.
    fn min(self, b: Self) -> Self;
    /// `x` where `self < b`, otherwise `y`.
    fn select_lt(self, b: Self, x: Self, y: Self) -> Self;
    /// `self` without its sign bit.
    fn abs(self) -> Self;
    /// `self` with the sign bit of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// `self · 2^n`, for whole `n` in `-252..=252`; rounds once, also into subnormals.
    fn scale2(self, n: Self) -> Self;
}

/// The lanes of one register of a [`Lanes`]: kernels whose sums fill the registers walk the sixteen lanes a part at a
/// time.
pub trait Part: Copy {
    /// Lanes of a part.
    const LEN: usize;
    /// Reads `LEN` values.
    ///
    /// # Safety
    /// `p` points to `LEN` readable f32 (any alignment).
    unsafe fn read(p: *const f32) -> Self;
    /// Reads `LEN` f16 values (bits).
    ///
    /// # Safety
    /// `p` points to `LEN` readable u16 (any alignment).
    unsafe fn read_f16(p: *const u16) -> Self;
    /// Reads `LEN` bf16 values (bits).
    ///
    /// # Safety
    /// `p` points to `LEN` readable u16 (any alignment).
    unsafe fn read_bf16(p: *const u16) -> Self;
    /// Writes `LEN` values.
    ///
    /// # Safety
    /// `p` points to `LEN` writable f32 (any alignment).
    unsafe fn write(self, p: *mut f32);
    /// `self · b + c`, rounded once.
    fn multiply_add(self, b: Self, c: Self) -> Self;
}

/// Sixteen lanes with memory access and reductions by the fixed tree.
pub trait Lanes: Float {
    /// The lanes of a register.
    type Part: Part;
    /// Sixteen sums of integers, i32.
    type Ints: Copy;
    /// Sixteen pairs of 16-bit integers.
    type Pairs: Copy;
    /// Whether registers hold lanes. Where none do, code that is unrolled over rows grows and gains nothing.
    const IS_VECTOR: bool = true;
    /// Sums of sixteen lanes that the registers hold beside what is multiplied into them.
    const SUMS: usize = 6;
    /// Reads 16 values.
    ///
    /// # Safety
    /// `p` points to 16 readable f32 (any alignment).
    unsafe fn load(p: *const f32) -> Self;
    /// Writes 16 values.
    ///
    /// # Safety
    /// `p` points to 16 writable f32 (any alignment).
    unsafe fn store(self, p: *mut f32);
    /// Reads 16 f16 values (bits).
    ///
    /// # Safety
    /// `p` points to 16 readable u16 (any alignment).
    unsafe fn load_f16(p: *const u16) -> Self;
    /// Rounds to 16 f16 values (bits), to nearest even; past the range is infinity.
    ///
    /// # Safety
    /// `p` points to 16 writable u16 (any alignment).
    unsafe fn store_f16(self, p: *mut u16);
    /// Reads 16 bytes with a sign.
    ///
    /// # Safety
    /// `p` points to 16 readable bytes.
    unsafe fn load_i8(p: *const i8) -> Self;
    /// Rounds to 16 integers of 16 bits, to nearest even; past the range is its end of that side, and NaN is any.
    ///
    /// # Safety
    /// `p` points to 16 writable i16 (any alignment).
    unsafe fn store_i16(self, p: *mut i16);
    /// Sums of nothing.
    fn no_ints() -> Self::Ints;
    /// Reads 16 pairs of bytes with a sign.
    ///
    /// # Safety
    /// `p` points to 32 readable bytes.
    unsafe fn load_pairs(p: *const i8) -> Self::Pairs;
    /// Reads 16 pairs of integers of 4 bits, stored 8 more than they are: the low or the high halves of 32 bytes.
    ///
    /// # Safety
    /// `p` points to 32 readable bytes.
    unsafe fn load_halves(p: *const u8, is_high: bool) -> Self::Pairs;
    /// `sum + a[0]·b[0] + a[1]·b[1]` in every lane, exact: no sum leaves i32.
    ///
    /// # Safety
    /// `b` points to two readable i16 (any alignment).
    unsafe fn dot_pairs(sum: Self::Ints, a: Self::Pairs, b: *const i16) -> Self::Ints;
    /// The sums as floats, to nearest even.
    fn from_ints(sum: Self::Ints) -> Self;
    /// Sum by the tree of [`quant::dot::tree_sum`].
    fn tree_sum(self) -> f32;
    /// Maximum by the same tree.
    fn tree_max(self) -> f32;

    /// The numbers 0 to 15.
    #[inline(always)]
    fn iota() -> Self {
        const IOTA: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        // SAFETY: the array has 16 values.
        unsafe { Self::load(IOTA.as_ptr()) }
    }

    /// The 16 values of `x` from `i` on; lanes past its end hold `fill`.
    #[inline(always)]
    fn load_at(x: &[f32], i: usize, fill: f32) -> Self {
        if i + 16 <= x.len() {
            // SAFETY: the slice holds elements i..i + 16.
            return unsafe { Self::load(x.as_ptr().add(i)) };
        }
        let mut part = [fill; 16];
        part[..x.len() - i].copy_from_slice(&x[i..]);
        // SAFETY: the array has 16 values.
        unsafe { Self::load(part.as_ptr()) }
    }

    /// Writes to `x` from `i` on; lanes past its end are dropped.
    #[inline(always)]
    fn store_at(self, x: &mut [f32], i: usize) {
        if i + 16 <= x.len() {
            // SAFETY: the slice holds elements i..i + 16.
            return unsafe { self.store(x.as_mut_ptr().add(i)) };
        }
        let part = self.to_array();
        let n = x.len() - i;
        x[i..].copy_from_slice(&part[..n]);
    }

    /// The lanes in order.
    #[inline(always)]
    fn to_array(self) -> [f32; 16] {
        let mut out = [0.0; 16];
        // SAFETY: the array has 16 values.
        unsafe { self.store(out.as_mut_ptr()) };
        out
    }
}

impl Float for f32 {
    #[inline(always)]
    fn splat(v: f32) -> f32 {
        v
    }
    #[inline(always)]
    fn add(self, b: f32) -> f32 {
        self + b
    }
    #[inline(always)]
    fn sub(self, b: f32) -> f32 {
        self - b
    }
    #[inline(always)]
    fn mul(self, b: f32) -> f32 {
        self * b
    }
    #[inline(always)]
    fn div(self, b: f32) -> f32 {
        self / b
    }
    #[inline(always)]
    fn fma(self, b: f32, c: f32) -> f32 {
        self.mul_add(b, c)
    }
    #[inline(always)]
    fn max(self, b: f32) -> f32 {
        if self > b { self } else { b }
    }
    #[inline(always)]
    fn min(self, b: f32) -> f32 {
        if self < b { self } else { b }
    }
    #[inline(always)]
    fn select_lt(self, b: f32, x: f32, y: f32) -> f32 {
        if self < b { x } else { y }
    }
    #[inline(always)]
    fn abs(self) -> f32 {
        f32::from_bits(self.to_bits() & 0x7fff_ffff)
    }
    #[inline(always)]
    fn copysign(self, sign: f32) -> f32 {
        f32::from_bits(self.to_bits() & 0x7fff_ffff | sign.to_bits() & 0x8000_0000)
    }
    #[inline(always)]
    fn scale2(self, n: f32) -> f32 {
        // Two factors, so that results from 2^-149 to infinity need no power outside the normal range.
        let n = n as i32;
        let half = n >> 1;
        let pow2 = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
        self * pow2(half) * pow2(n - half)
    }
}
