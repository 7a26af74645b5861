//! The sixteen lanes in registers of AVX2 and AVX-512.

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

/// `sum + a·b` of pairs of words. Of the intrinsic LLVM makes a product and an addition where it takes a chain to be
/// slow.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_words(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the instruction is one of AVX-512-VNNI and has no effect but on its first register.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {0}, {1}, {2}",
            inout(zmm_reg) sum,
            in(zmm_reg) a,
            in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// `2^e` for whole `e` in `-126..=127`, in every lane.
#[inline(always)]
fn pow2_256(e: __m256i) -> __m256 {
    simd!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(e, _mm256_set1_epi32(127)))))
}

/// The low or the high halves of bytes, less 8, as bytes with a sign.
#[inline(always)]
fn halves(bytes: __m256i, is_high: bool) -> __m256i {
    simd!({
        let low = if is_high { _mm256_srli_epi16::<4>(bytes) } else { bytes };
        _mm256_sub_epi8(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_set1_epi8(8))
    })
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
    type Ints = [__m256i; 2];
    type Pairs = [__m256i; 2];
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
    unsafe fn load_i8(p: *const i8) -> Self {
        simd!(Avx2(
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()))),
        ))
    }
    #[inline(always)]
    unsafe fn store_i16(self, p: *mut i16) {
        simd!({
            // Each half of the pack takes a half of both registers.
            let packed = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0xd8>(packed));
        })
    }
    #[inline(always)]
    fn no_ints() -> [__m256i; 2] {
        simd!([_mm256_setzero_si256(); 2])
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> [__m256i; 2] {
        simd!([
            _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(16).cast())),
        ])
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u8, is_high: bool) -> [__m256i; 2] {
        simd!({
            let integers = halves(_mm256_loadu_si256(p.cast()), is_high);
            let high = _mm256_extracti128_si256::<1>(integers);
            [_mm256_cvtepi8_epi16(_mm256_castsi256_si128(integers)), _mm256_cvtepi8_epi16(high)]
        })
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: [__m256i; 2], a: [__m256i; 2], b: *const i16) -> [__m256i; 2] {
        simd!({
            let b = _mm256_set1_epi32(b.cast::<i32>().read_unaligned());
            [_mm256_add_epi32(sum[0], _mm256_madd_epi16(a[0], b)), _mm256_add_epi32(sum[1], _mm256_madd_epi16(a[1], b))]
        })
    }
    #[inline(always)]
    fn from_ints(sum: [__m256i; 2]) -> Self {
        simd!(Avx2(_mm256_cvtepi32_ps(sum[0]), _mm256_cvtepi32_ps(sum[1])))
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
    type Ints = __m512i;
    type Pairs = __m512i;
    const SUMS: usize = 16;
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
    unsafe fn load_i8(p: *const i8) -> Self {
        simd!(Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))))
    }
    #[inline(always)]
    unsafe fn store_i16(self, p: *mut i16) {
        simd!(_mm256_storeu_si256(p.cast(), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(self.0))))
    }
    #[inline(always)]
    fn no_ints() -> __m512i {
        simd!(_mm512_setzero_si512())
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> __m512i {
        simd!(_mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u8, is_high: bool) -> __m512i {
        simd!(_mm512_cvtepi8_epi16(halves(_mm256_loadu_si256(p.cast()), is_high)))
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: __m512i, a: __m512i, b: *const i16) -> __m512i {
        simd!(dot_words(sum, a, _mm512_set1_epi32(b.cast::<i32>().read_unaligned())))
    }
    #[inline(always)]
    fn from_ints(sum: __m512i) -> Self {
        simd!(Avx512(_mm512_cvtepi32_ps(sum)))
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
