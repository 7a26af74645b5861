//! The sixteen lanes in plain Rust.

use half::f16;

use super::{Float, Lanes, Part};

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
    type Ints = [i32; 16];
    type Pairs = [[i8; 2]; 16];
    const IS_VECTOR: bool = false;
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
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller's promise.
        Scalar(unsafe { p.cast::<[i8; 16]>().read() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store_i16(self, p: *mut i16) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[i16; 16]>().write_unaligned(self.0.map(|v| v.round_ties_even() as i16)) }
    }
    #[inline(always)]
    fn no_ints() -> [i32; 16] {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> [[i8; 2]; 16] {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[[i8; 2]; 16]>().read() }
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u8, is_high: bool) -> [[i8; 2]; 16] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { p.cast::<[[u8; 2]; 16]>().read() };
        bytes.map(|pair| pair.map(|byte| (if is_high { byte >> 4 } else { byte & 15 }) as i8 - 8))
    }
    #[inline(always)]
    unsafe fn dot_pairs(mut sum: [i32; 16], a: [[i8; 2]; 16], b: *const i16) -> [i32; 16] {
        // SAFETY: the caller's promise.
        let b = unsafe { b.cast::<[i16; 2]>().read_unaligned() }.map(i32::from);
        for (sum, a) in sum.iter_mut().zip(a) {
            *sum += i32::from(a[0]) * b[0] + i32::from(a[1]) * b[1];
        }
        sum
    }
    #[inline(always)]
    fn from_ints(sum: [i32; 16]) -> Self {
        Scalar(sum.map(|sum| sum as f32))
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
