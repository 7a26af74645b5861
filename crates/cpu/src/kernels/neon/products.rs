//! Products of eight rows of a panel with up to four columns: by `sdot`, or by `smmla` where the machine has it.
//!
//! Both keep eight registers of sums. To `sdot` a register is four rows of a column; one multiplies a word of four
//! values of each with a word of the column: 16 products. `smmla` takes two rows and two columns, eight values of each:
//! 32 products, whose four sums are sorted by column when a block ends. All other operations are element-wise, one
//! source for both.

use std::arch::aarch64::*;

use super::super::panel::ROWS;
use super::{Split, split};

/// Columns at a time.
pub(super) const COLS: usize = 4;

/// The sums of eight rows and four columns; behind the last column they are zeros or copies.
///
/// Of `sdot` lane `l` of `[c][i]` is row `4i + l` of column `c`. Of `smmla` `[c][i]` has rows `4·(c % 2) + 2i` and the
/// next, of column `c - c % 2` in the lower half and of its neighbour in the upper.
pub(super) type Sums = [[int32x4_t; 2]; COLS];

/// The products of an instruction set, of the first `C` columns.
///
/// # Safety
/// Of every method: the machine has the instruction set; `w` and all pointers in `x`, also those behind the first `C`,
/// are readable for the values that are multiplied; `r` is a multiple of 4 (`put_scales`) or of 8, below 16.
pub(in super::super) trait Products {
    /// Contiguous values of a row in the panel, a word.
    const WORD: usize;
    /// Columns that share registers of sums.
    const SHARE: usize;
    /// Low bytes of activations have 128 taken off; [`super::panel::Bytes::sums`] corrects the sums.
    const LESS: bool;
    /// Adds the products of 16 bytes of eight rows, the first of them at `w`, and C columns.
    unsafe fn bytes<const C: usize>(sums: &mut Sums, w: *const i8, x: &[*const i8; COLS]);
    /// Sums of the products of N times 16 bytes with activations of 16 bits: 256 times those of the high bytes plus
    /// those of the low bytes.
    unsafe fn words<const C: usize, const N: usize>(w: *const i8, x: &[*const i16; COLS]) -> Sums;
    /// Writes the sub-scales of the four rows from `r` on to a row of [`super::panel::Bytes::scales`].
    unsafe fn put_scales(to: &mut [i32; 2 * ROWS], r: usize, scales: int32x4_t);
    /// Reads them for eight rows: `[column % 2][register]`.
    unsafe fn scales(from: &[i32; 2 * ROWS], r: usize) -> [[int32x4_t; 2]; 2];
    /// Sub-scale `j` of each column as factors of the sums; `bytes` holds the eight of two columns in a register.
    unsafe fn by_column(bytes: [uint8x16_t; COLS / 2], j: usize) -> [int32x4_t; COLS];
    /// Sorts the registers as `sdot` has them.
    unsafe fn to_rows(sums: Sums) -> Sums;
}

/// No products yet.
// SAFETY: all bits zero are zeros.
pub(super) const ZERO: Sums = [[unsafe { std::mem::zeroed() }; 2]; COLS];

pub(in super::super) struct Sdot;
pub(in super::super) struct Smmla;

/// `acc` plus the products of four words of a row each with word `LANE` of `x`. The intrinsic is not stable in Rust
/// yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot_lane<const LANE: usize>(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers, which the machine has.
    unsafe {
        std::arch::asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inout(vreg) acc, in(vreg) w, in(vreg) x, const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// Defines the product of two by eight bytes and eight by two. The intrinsics are not stable in Rust yet. Only the
/// assembler knows the extension: functions with another target feature than `sdot`'s could not be inlined into the
/// kernels, which are generic.
macro_rules! mmla {
    ($name:ident) => {
        /// # Safety
        /// The machine has `i8mm`.
        #[inline]
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $name(mut acc: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
            // SAFETY: one instruction on registers.
            unsafe {
                std::arch::asm!(
                    ".arch_extension i8mm",
                    concat!(stringify!($name), " {0:v}.4s, {1:v}.16b, {2:v}.16b"),
                    inout(vreg) acc, in(vreg) x, in(vreg) w,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            acc
        }
    };
}
mmla!(smmla);
mmla!(usmmla);

/// Sixteen values of eight rows in the panel of `sdot`: four words.
macro_rules! by_word {
    ($w:ident, |$word:ident, $i:ident| $body:expr) => {
        by_word!(@ $w, $word, $i, $body, 0 1 2 3)
    };
    (@ $w:ident, $word:ident, $i:ident, $body:expr, $($n:literal)*) => {
        $({
            const $i: usize = $n;
            // SAFETY: the caller's promise.
            let $word = unsafe { [vld1q_s8($w.add(4 * ROWS * $i)), vld1q_s8($w.add(4 * ROWS * $i + 16))] };
            $body
        })*
    };
}

impl Products for Sdot {
    const WORD: usize = 4;
    const SHARE: usize = 1;
    const LESS: bool = true;

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn bytes<const C: usize>(sums: &mut Sums, w: *const i8, x: &[*const i8; COLS]) {
        // SAFETY: the caller's promise.
        let x = unsafe { array!(4, |c| vld1q_s8(x[c])) };
        by_word!(w, |word, I| for c in 0..C {
            sums[c] = array!(2, |i| sdot_lane::<I>(sums[c][i], word[i], x[c]));
        });
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn words<const C: usize, const N: usize>(w: *const i8, x: &[*const i16; COLS]) -> Sums {
        let mut sums = ZERO;
        // SAFETY: the caller's promise.
        let x: [[Split; COLS]; N] = std::array::from_fn(|n| unsafe { array!(4, |c| split(x[c].add(16 * n))) });
        for n in 0..N {
            // SAFETY: as above.
            let w = unsafe { w.add(16 * ROWS * n) };
            by_word!(w, |word, I| for c in 0..C {
                sums[c] = array!(2, |i| sdot_lane::<I>(sums[c][i], word[i], x[n][c].high));
            });
        }
        sums = array!(4, |c| array!(2, |i| vshlq_n_s32::<8>(sums[c][i])));
        for n in 0..N {
            // SAFETY: as above.
            let w = unsafe { w.add(16 * ROWS * n) };
            by_word!(w, |word, I| for c in 0..C {
                sums[c] = array!(2, |i| sdot_lane::<I>(sums[c][i], word[i], x[n][c].low));
            });
        }
        sums
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn put_scales(to: &mut [i32; 2 * ROWS], r: usize, scales: int32x4_t) {
        // SAFETY: slicing has checked that there are four places.
        unsafe { vst1q_s32(to[r..r + 4].as_mut_ptr(), scales) }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn scales(from: &[i32; 2 * ROWS], r: usize) -> [[int32x4_t; 2]; 2] {
        // SAFETY: r is 0 or 8.
        [unsafe { array!(2, |i| vld1q_s32(from.as_ptr().add(r + 4 * i))) }; 2]
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn by_column(bytes: [uint8x16_t; COLS / 2], j: usize) -> [int32x4_t; COLS] {
        // The other bytes of a lane are out of range and become zeros.
        let at = [j, 8 + j].map(|j| vreinterpretq_u8_s32(vdupq_n_s32(j as i32 - 256)));
        array!(4, |c| vreinterpretq_s32_u8(vqtbl1q_u8(bytes[c / 2], at[c % 2])))
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn to_rows(sums: Sums) -> Sums {
        sums
    }
}

/// The lower halves of both, or the upper ones.
#[inline]
#[target_feature(enable = "neon")]
fn halves(a: int32x4_t, b: int32x4_t) -> [int32x4_t; 2] {
    let (a, b) = (vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b));
    [vreinterpretq_s32_s64(vzip1q_s64(a, b)), vreinterpretq_s32_s64(vzip2q_s64(a, b))]
}

/// Eight values of eight rows in the panel of `smmla`, from word `word` of those at `w`.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn pairs(w: *const i8, word: usize) -> [int8x16_t; 4] {
    // SAFETY: the caller's promise.
    unsafe { array!(4, |i| vld1q_s8(w.add(8 * ROWS * word + 16 * i))) }
}

impl Products for Smmla {
    const WORD: usize = 8;
    const SHARE: usize = 2;
    const LESS: bool = false;

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn bytes<const C: usize>(sums: &mut Sums, w: *const i8, x: &[*const i8; COLS]) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = array!(4, |c| vreinterpretq_s32_s8(vld1q_s8(x[c])));
            let x = array!(2, |p| halves(x[2 * p], x[2 * p + 1]));
            for word in 0..2 {
                let w = pairs(w, word);
                for c in 0..C.next_multiple_of(2) {
                    let x = vreinterpretq_s8_s32(x[c / 2][word]);
                    sums[c] = array!(2, |i| smmla(sums[c][i], x, w[c % 2 * 2 + i]));
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn words<const C: usize, const N: usize>(w: *const i8, x: &[*const i16; COLS]) -> Sums {
        let mut sums = ZERO;
        // SAFETY: the caller's promise.
        unsafe {
            // Of every eight values and two columns low bytes, then high ones.
            let x: [[[[int8x16_t; 2]; 2]; 2]; N] = std::array::from_fn(|n| {
                array!(2, |word| {
                    let x = array!(4, |c| vreinterpretq_s8_s16(vld1q_s16(x[c].add(16 * n + 8 * word))));
                    array!(2, |p| [vuzp1q_s8(x[2 * p], x[2 * p + 1]), vuzp2q_s8(x[2 * p], x[2 * p + 1])])
                })
            });
            for (n, word) in (0..2 * N).map(|i| (i / 2, i % 2)) {
                let w = pairs(w.add(16 * ROWS * n), word);
                for c in 0..C.next_multiple_of(2) {
                    sums[c] = array!(2, |i| smmla(sums[c][i], x[n][word][c / 2][1], w[c % 2 * 2 + i]));
                }
            }
            sums = array!(4, |c| array!(2, |i| vshlq_n_s32::<8>(sums[c][i])));
            for (n, word) in (0..2 * N).map(|i| (i / 2, i % 2)) {
                let w = pairs(w.add(16 * ROWS * n), word);
                for c in 0..C.next_multiple_of(2) {
                    sums[c] = array!(2, |i| usmmla(sums[c][i], x[n][word][c / 2][0], w[c % 2 * 2 + i]));
                }
            }
        }
        sums
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn put_scales(to: &mut [i32; 2 * ROWS], r: usize, scales: int32x4_t) {
        let to = &mut to[2 * r..2 * r + 8];
        let [a, b] = halves(scales, scales);
        // SAFETY: there are eight places.
        unsafe {
            vst1q_s32(to.as_mut_ptr(), a);
            vst1q_s32(to.as_mut_ptr().add(4), b);
        }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn scales(from: &[i32; 2 * ROWS], r: usize) -> [[int32x4_t; 2]; 2] {
        // SAFETY: r is 0 or 8.
        unsafe { array!(2, |h| array!(2, |i| vld1q_s32(from.as_ptr().add(2 * r + 8 * h + 4 * i)))) }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn by_column(bytes: [uint8x16_t; COLS / 2], j: usize) -> [int32x4_t; COLS] {
        let at = vcombine_s32(vdup_n_s32(-256), vdup_n_s32(8 - 256));
        let at = vreinterpretq_u8_s32(vaddq_s32(at, vdupq_n_s32(j as i32)));
        array!(4, |c| vreinterpretq_s32_u8(vqtbl1q_u8(bytes[c / 2], at)))
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn to_rows(s: Sums) -> Sums {
        // Of each two columns rows 0 to 3, then 4 to 7.
        let [a, b, c, d] = array!(4, |c| halves(s[c][0], s[c][1]));
        [[a[0], b[0]], [a[1], b[1]], [c[0], d[0]], [c[1], d[1]]]
    }
}
