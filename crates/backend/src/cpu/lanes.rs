//! Sixteen virtual lanes of f32, the unit of the CPU law: kernels are written once over [`Lanes`] and compiled for every
//! instruction set, so that equal bits follow from equal source.
//!
//! Every method is one IEEE operation per lane (or an exact conversion), the same in all implementations.
//! `Avx2` and `Avx512` values may only be made inside functions that enable their target features (see `on_isa!`).

use half::f16;

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
    /// Without its sign bit.
    fn abs(self) -> Self;
    /// With the sign bit of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// `self · 2^n`, for whole `n` in `-252..=252`; rounds once, also into subnormals.
    fn scale2(self, n: Self) -> Self;
}

/// What one register of a [`Lanes`] holds: kernels whose sums fill the registers walk the parts of the sixteen lanes one
/// after the other.
pub trait Part: Copy {
    /// How many of the lanes.
    const LEN: usize;
    /// Reads `LEN` values.
    ///
    /// # Safety
    /// `p` points to as many readable f32 (any alignment).
    unsafe fn read(p: *const f32) -> Self;
    /// Reads `LEN` f16 values (bits).
    ///
    /// # Safety
    /// `p` points to as many readable u16 (any alignment).
    unsafe fn read_f16(p: *const u16) -> Self;
    /// Reads `LEN` bf16 values (bits).
    ///
    /// # Safety
    /// `p` points to as many readable u16 (any alignment).
    unsafe fn read_bf16(p: *const u16) -> Self;
    /// Writes `LEN` values.
    ///
    /// # Safety
    /// `p` points to as many writable f32 (any alignment).
    unsafe fn write(self, p: *mut f32);
    /// `self · b + c`, rounded once.
    fn multiply_add(self, b: Self, c: Self) -> Self;
}

/// Sixteen lanes with memory access and reductions by the fixed tree.
pub trait Lanes: Float {
    /// What a register holds.
    type Part: Part;
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

/// Sixteen lanes in plain Rust.
#[derive(Clone, Copy, Debug)]
pub struct Scalar(pub [f32; 16]);

/// Applies a one-lane operation to every lane.
macro_rules! each {
    ($($arg:ident = $from:expr),+ => $e:expr) => {{
        let mut out = [0.0f32; 16];
        for i in 0..16 {
            $(let $arg = $from.0[i];)+
            out[i] = $e;
        }
        Scalar(out)
    }};
}

impl Float for Scalar {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Scalar([v; 16])
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        each!(a = self, b = b => a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        each!(a = self, b = b => a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        each!(a = self, b = b => a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        each!(a = self, b = b => a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        each!(a = self, b = b, c = c => a.mul_add(b, c))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        each!(a = self, b = b => Float::max(a, b))
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        each!(a = self, b = b => Float::min(a, b))
    }
    #[inline(always)]
    fn select_lt(self, b: Self, x: Self, y: Self) -> Self {
        each!(a = self, b = b, x = x, y = y => Float::select_lt(a, b, x, y))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        each!(a = self => Float::abs(a))
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        each!(a = self, sign = sign => Float::copysign(a, sign))
    }
    #[inline(always)]
    fn scale2(self, n: Self) -> Self {
        each!(a = self, n = n => Float::scale2(a, n))
    }
}

impl Part for Scalar {
    const LEN: usize = 16;
    #[inline(always)]
    unsafe fn read(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::load(p) }
    }
    #[inline(always)]
    unsafe fn read_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn read_bf16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        Scalar(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }
    #[inline(always)]
    unsafe fn write(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { self.store(p) }
    }
    #[inline(always)]
    fn multiply_add(self, b: Self, c: Self) -> Self {
        self.fma(b, c)
    }
}

impl Lanes for Scalar {
    type Part = Self;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise; [f32; 16] read without alignment.
        Scalar(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        Scalar(bits.map(|b| f16::from_bits(b).to_f32_const()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        let bits = self.0.map(|v| f16::from_f32_const(v).to_bits());
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    fn tree_sum(self) -> f32 {
        quant::dot::tree_sum(&self.0)
    }
    #[inline(always)]
    fn tree_max(self) -> f32 {
        let mut s = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                s[i] = Float::max(s[i], s[i + half]);
            }
        }
        s[0]
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Float, Lanes, Part};
    use std::arch::x86_64::*;

    /// Two 256-bit registers: lanes 0..8 and 8..16.
    #[derive(Clone, Copy, Debug)]
    pub struct Avx2(pub __m256, pub __m256);

    /// One 512-bit register.
    #[derive(Clone, Copy, Debug)]
    pub struct Avx512(pub __m512);

    /// Intrinsics inside [`Float`] and [`Lanes`] methods.
    macro_rules! simd {
        ($e:expr) => {{
            // SAFETY: values of these types are made only inside functions that enable the target features (`on_isa!`),
            // into which these methods are inlined; pointers are valid by the contract of the method.
            #[allow(unused_unsafe)]
            unsafe {
                $e
            }
        }};
    }

    /// `2^e` for whole `e` in `-126..=127`, in every lane.
    #[inline(always)]
    fn pow2_256(e: __m256i) -> __m256 {
        simd!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(e, _mm256_set1_epi32(127)))))
    }

    #[inline(always)]
    fn scale2_256(x: __m256, n: __m256) -> __m256 {
        simd!({
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            _mm256_mul_ps(_mm256_mul_ps(x, pow2_256(half)), pow2_256(_mm256_sub_epi32(n, half)))
        })
    }

    #[inline(always)]
    fn select_256(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        simd!(_mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)))
    }

    #[inline(always)]
    fn copysign_256(x: __m256, sign: __m256) -> __m256 {
        simd!({
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign))
        })
    }

    /// Folds 8 lanes: `i + 4`, `i + 2`, `i + 1`.
    macro_rules! fold8 {
        ($v:expr, $op:ident, $op1:ident) => {{
            let v = $v;
            let s = $op(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let s = $op(s, _mm_movehl_ps(s, s));
            _mm_cvtss_f32($op1(s, _mm_shuffle_ps::<1>(s, s)))
        }};
    }

    impl Float for Avx2 {
        #[inline(always)]
        fn splat(v: f32) -> Self {
            simd!(Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)))
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            simd!(Avx2(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            simd!(Avx2(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            simd!(Avx2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            simd!(Avx2(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            simd!(Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)))
        }
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            simd!(Avx2(_mm256_max_ps(self.0, b.0), _mm256_max_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn min(self, b: Self) -> Self {
            simd!(Avx2(_mm256_min_ps(self.0, b.0), _mm256_min_ps(self.1, b.1)))
        }
        #[inline(always)]
        fn select_lt(self, b: Self, x: Self, y: Self) -> Self {
            Avx2(select_256(self.0, b.0, x.0, y.0), select_256(self.1, b.1, x.1, y.1))
        }
        #[inline(always)]
        fn abs(self) -> Self {
            simd!({
                let bit = _mm256_set1_ps(-0.0);
                Avx2(_mm256_andnot_ps(bit, self.0), _mm256_andnot_ps(bit, self.1))
            })
        }
        #[inline(always)]
        fn copysign(self, sign: Self) -> Self {
            Avx2(copysign_256(self.0, sign.0), copysign_256(self.1, sign.1))
        }
        #[inline(always)]
        fn scale2(self, n: Self) -> Self {
            Avx2(scale2_256(self.0, n.0), scale2_256(self.1, n.1))
        }
    }

    /// Eight of the sixteen lanes.
    #[derive(Clone, Copy, Debug)]
    pub struct Eight(__m256);

    impl Part for Eight {
        const LEN: usize = 8;
        #[inline(always)]
        unsafe fn read(p: *const f32) -> Self {
            simd!(Eight(_mm256_loadu_ps(p)))
        }
        #[inline(always)]
        unsafe fn read_f16(p: *const u16) -> Self {
            simd!(Eight(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))))
        }
        #[inline(always)]
        unsafe fn read_bf16(p: *const u16) -> Self {
            simd!({
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                Eight(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
            })
        }
        #[inline(always)]
        unsafe fn write(self, p: *mut f32) {
            simd!(_mm256_storeu_ps(p, self.0))
        }
        #[inline(always)]
        fn multiply_add(self, b: Self, c: Self) -> Self {
            simd!(Eight(_mm256_fmadd_ps(self.0, b.0, c.0)))
        }
    }

    impl Lanes for Avx2 {
        type Part = Eight;
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            simd!(Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            simd!({
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            })
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self {
            simd!(Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))))
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut u16) {
            simd!({
                _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
                _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
            })
        }
        #[inline(always)]
        fn tree_sum(self) -> f32 {
            simd!(fold8!(_mm256_add_ps(self.0, self.1), _mm_add_ps, _mm_add_ss))
        }
        #[inline(always)]
        fn tree_max(self) -> f32 {
            simd!(fold8!(_mm256_max_ps(self.0, self.1), _mm_max_ps, _mm_max_ss))
        }
    }

    impl Float for Avx512 {
        #[inline(always)]
        fn splat(v: f32) -> Self {
            simd!(Avx512(_mm512_set1_ps(v)))
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            simd!(Avx512(_mm512_add_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            simd!(Avx512(_mm512_sub_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            simd!(Avx512(_mm512_mul_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            simd!(Avx512(_mm512_div_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            simd!(Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)))
        }
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            simd!(Avx512(_mm512_max_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn min(self, b: Self) -> Self {
            simd!(Avx512(_mm512_min_ps(self.0, b.0)))
        }
        #[inline(always)]
        fn select_lt(self, b: Self, x: Self, y: Self) -> Self {
            simd!(Avx512(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, b.0), y.0, x.0)))
        }
        #[inline(always)]
        fn abs(self) -> Self {
            simd!(Avx512(_mm512_abs_ps(self.0)))
        }
        #[inline(always)]
        fn copysign(self, sign: Self) -> Self {
            simd!({
                let bit = _mm512_set1_ps(-0.0);
                Avx512(_mm512_or_ps(_mm512_andnot_ps(bit, self.0), _mm512_and_ps(bit, sign.0)))
            })
        }
        #[inline(always)]
        fn scale2(self, n: Self) -> Self {
            // One rounding of self · 2^n, as the two-factor form has.
            simd!(Avx512(_mm512_scalef_ps(self.0, n.0)))
        }
    }

    impl Part for Avx512 {
        const LEN: usize = 16;
        #[inline(always)]
        unsafe fn read(p: *const f32) -> Self {
            simd!(Avx512(_mm512_loadu_ps(p)))
        }
        #[inline(always)]
        unsafe fn read_f16(p: *const u16) -> Self {
            simd!(Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
        }
        #[inline(always)]
        unsafe fn read_bf16(p: *const u16) -> Self {
            simd!({
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            })
        }
        #[inline(always)]
        unsafe fn write(self, p: *mut f32) {
            simd!(_mm512_storeu_ps(p, self.0))
        }
        #[inline(always)]
        fn multiply_add(self, b: Self, c: Self) -> Self {
            simd!(Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)))
        }
    }

    impl Lanes for Avx512 {
        type Part = Self;
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            simd!(Avx512(_mm512_loadu_ps(p)))
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            simd!(_mm512_storeu_ps(p, self.0))
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self {
            simd!(Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut u16) {
            simd!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)))
        }
        #[inline(always)]
        fn tree_sum(self) -> f32 {
            simd!({
                let s = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                fold8!(s, _mm_add_ps, _mm_add_ss)
            })
        }
        #[inline(always)]
        fn tree_max(self) -> f32 {
            simd!({
                let s = _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                fold8!(s, _mm_max_ps, _mm_max_ss)
            })
        }
    }
}
