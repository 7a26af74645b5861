//! The sixteen lanes in four registers of NEON.

use std::arch::aarch64::*;

use super::{Float, Lanes, Part};

/// Four 128-bit registers: lanes 0..4, 4..8, 8..12 and 12..16.
#[derive(Clone, Copy, Debug)]
pub struct Neon(pub [float32x4_t; 4]);

/// Intrinsics inside [`Float`] and [`Lanes`] methods.
macro_rules! simd {
    ($e:expr) => {{
        // SAFETY: every aarch64 machine that this is compiled for has NEON; pointers are valid by the contract of the
        // method.
        #[allow(unused_unsafe)]
        unsafe {
            $e
        }
    }};
}

/// Applies an operation to each of the four registers.
macro_rules! each {
    ($($arg:ident = $from:expr),+ => $e:expr) => {{
        let quarter = |i: usize| {
            $(let $arg = $from.0[i];)+
            simd!($e)
        };
        Neon([quarter(0), quarter(1), quarter(2), quarter(3)])
    }};
}

/// `a` where it is above `b`, otherwise `b`. `fmax` would give NaN when either is, and +0 for zeros of unlike signs.
#[inline(always)]
fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    simd!(vbslq_f32(vcgtq_f32(a, b), a, b))
}

/// `a` where it is below `b`, otherwise `b`.
#[inline(always)]
fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    simd!(vbslq_f32(vcltq_f32(a, b), a, b))
}

/// `2^e` for whole `e` in `-126..=127`, in every lane.
#[inline(always)]
fn pow2(e: int32x4_t) -> float32x4_t {
    simd!(vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(e, vdupq_n_s32(127)))))
}

#[inline(always)]
fn scale2(x: float32x4_t, n: float32x4_t) -> float32x4_t {
    simd!({
        let n = vcvtnq_s32_f32(n);
        let half = vshrq_n_s32::<1>(n);
        vmulq_f32(vmulq_f32(x, pow2(half)), pow2(vsubq_s32(n, half)))
    })
}

/// Four f16 as f32.
///
/// # Safety
/// `p` points to four readable u16.
#[inline(always)]
unsafe fn halves(p: *const u16) -> float32x4_t {
    simd!(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))))
}

/// Folds 16 lanes: `i + 8`, `i + 4`, `i + 2`, `i + 1`.
#[inline(always)]
fn fold(v: [float32x4_t; 4], op: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> f32 {
    let s = op(op(v[0], v[2]), op(v[1], v[3]));
    simd!({
        let s = op(s, vextq_f32::<2>(s, s));
        vgetq_lane_f32::<0>(op(s, vdupq_laneq_f32::<1>(s)))
    })
}

impl Float for Neon {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        simd!(Neon([vdupq_n_f32(v); 4]))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        each!(a = self, b = b => vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        each!(a = self, b = b => vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        each!(a = self, b = b => vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        each!(a = self, b = b => vdivq_f32(a, b))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        each!(a = self, b = b, c = c => vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        each!(a = self, b = b => max(a, b))
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        each!(a = self, b = b => min(a, b))
    }
    #[inline(always)]
    fn select_lt(self, b: Self, x: Self, y: Self) -> Self {
        each!(a = self, b = b, x = x, y = y => vbslq_f32(vcltq_f32(a, b), x, y))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        each!(a = self => vabsq_f32(a))
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        each!(a = self, sign = sign => vbslq_f32(vdupq_n_u32(0x8000_0000), sign, a))
    }
    #[inline(always)]
    fn scale2(self, n: Self) -> Self {
        each!(a = self, n = n => scale2(a, n))
    }
}

/// Four of the sixteen lanes.
#[derive(Clone, Copy, Debug)]
pub struct Four(float32x4_t);

impl Part for Four {
    const LEN: usize = 4;
    #[inline(always)]
    unsafe fn read(p: *const f32) -> Self {
        simd!(Four(vld1q_f32(p)))
    }
    #[inline(always)]
    unsafe fn read_f16(p: *const u16) -> Self {
        simd!(Four(halves(p)))
    }
    #[inline(always)]
    unsafe fn read_bf16(p: *const u16) -> Self {
        simd!(Four(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)))))
    }
    #[inline(always)]
    unsafe fn write(self, p: *mut f32) {
        simd!(vst1q_f32(p, self.0))
    }
    #[inline(always)]
    fn multiply_add(self, b: Self, c: Self) -> Self {
        simd!(Four(vfmaq_f32(c.0, self.0, b.0)))
    }
}

impl Lanes for Neon {
    type Part = Four;
    type Ints = [int32x4_t; 4];
    type Pairs = [int16x8_t; 4];
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        simd!(Neon([vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))]))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for i in 0..4 {
            simd!(vst1q_f32(p.add(4 * i), self.0[i]));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        simd!(Neon([halves(p), halves(p.add(4)), halves(p.add(8)), halves(p.add(12))]))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        for i in 0..4 {
            simd!(vst1_u16(p.add(4 * i), vreinterpret_u16_f16(vcvt_f16_f32(self.0[i]))));
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        simd!({
            let bytes = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            let words = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            Neon(words.map(|words| vcvtq_f32_s32(words)))
        })
    }
    #[inline(always)]
    unsafe fn store_i16(self, p: *mut i16) {
        for i in 0..4 {
            simd!(vst1_s16(p.add(4 * i), vqmovn_s32(vcvtnq_s32_f32(self.0[i]))));
        }
    }
    #[inline(always)]
    fn no_ints() -> [int32x4_t; 4] {
        simd!([vdupq_n_s32(0); 4])
    }
    /// The first of each pair, lanes 0..8 and 8..16, then the second.
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> [int16x8_t; 4] {
        simd!({
            let int8x16x2_t(first, second) = vld2q_s8(p);
            let low = |bytes| vmovl_s8(vget_low_s8(bytes));
            [low(first), vmovl_high_s8(first), low(second), vmovl_high_s8(second)]
        })
    }
    /// As [`Lanes::load_pairs`] here.
    #[inline(always)]
    unsafe fn load_halves(p: *const u8, is_high: bool) -> [int16x8_t; 4] {
        simd!({
            let uint8x16x2_t(first, second) = vld2q_u8(p);
            let half = |bytes| if is_high { vshrq_n_u8::<4>(bytes) } else { vandq_u8(bytes, vdupq_n_u8(15)) };
            let integers = |bytes| vsubq_s8(vreinterpretq_s8_u8(half(bytes)), vdupq_n_s8(8));
            let low = |bytes| vmovl_s8(vget_low_s8(bytes));
            let (first, second) = (integers(first), integers(second));
            [low(first), vmovl_high_s8(first), low(second), vmovl_high_s8(second)]
        })
    }
    #[inline(always)]
    unsafe fn dot_pairs(sum: [int32x4_t; 4], a: [int16x8_t; 4], b: *const i16) -> [int32x4_t; 4] {
        simd!({
            let [first, second] = b.cast::<[i16; 2]>().read_unaligned();
            let low = |sum, words, b| vmlal_n_s16(sum, vget_low_s16(words), b);
            [
                low(low(sum[0], a[0], first), a[2], second),
                vmlal_high_n_s16(vmlal_high_n_s16(sum[1], a[0], first), a[2], second),
                low(low(sum[2], a[1], first), a[3], second),
                vmlal_high_n_s16(vmlal_high_n_s16(sum[3], a[1], first), a[3], second),
            ]
        })
    }
    #[inline(always)]
    fn from_ints(sum: [int32x4_t; 4]) -> Self {
        Neon(sum.map(|sum| simd!(vcvtq_f32_s32(sum))))
    }
    #[inline(always)]
    fn tree_sum(self) -> f32 {
        fold(self.0, |a, b| simd!(vaddq_f32(a, b)))
    }
    #[inline(always)]
    fn tree_max(self) -> f32 {
        fold(self.0, max)
    }
}
