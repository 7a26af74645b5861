//! Matrix-vector products of super-blocks: eight rows times one column.
//!
//! The blocks of eight rows are walked in memory order, which the hardware's prefetchers follow, eight blocks at a time
//! wherever a row ends among them. First come their sub-scales and minimums, two blocks a register where a block has
//! eight of them. Then come the products, one block after the other; their sums are transposed so that a lane is a
//! block. After the last row the sums are transposed again so that a lane is a row: the law wants one multiply-add per
//! block and row, in the order of blocks.
//!
//! On one core of AMD EPYC 9004, [96, 2048] in the second cache, against four rows side by side: q4_k 17.4 -> 18.7
//! GB/s, q6_k 20.4 -> 22.5, iq4_xs 10.6 -> 13.9; [768, 2048] from memory: q4_k 14.5 -> 16.0, q6_k 16.0 -> 18.4, iq4_xs
//! 9.6 -> 12.5.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::panel::ROWS;
use super::super::prefetch::{Far, Hint, prefetch};
use super::super::{ColPtr, RowSet};
use super::large::Large;
use super::{
    both, hide, hsum4_halves, hsum8, load_transposed_words, load64, load128, load256, row_octets, store_octet,
    transpose8,
};

/// Blocks of a row whose sums are kept until eight rows have them: rows of up to 16384 values are one segment.
const SEGMENT: usize = 64;

/// The same of signed types, whose column takes more memory.
const SIGNED_SEGMENT: usize = 16;

/// A block's eight numbers of 16 bits.
type Eight = [i16; 8];

/// Derived from a segment of the column for all rows of the tile. The first eight entries are repeated behind the last,
/// for eight blocks that go from one row to the next.
#[repr(C, align(32))]
struct Column {
    /// Sub-scales.
    u: [Eight; SEGMENT + 8],
    /// Sums of the 16-groups 0, 2, 4 ...
    even: [Eight; SEGMENT + 8],
    /// Sums of the 16-groups 1, 3, 5 ...
    odd: [Eight; SEGMENT + 8],
    /// Of signed types, four times a block: the first halves of two 32-groups, their second halves, and the magnitudes
    /// of both.
    signed: [[[[u8; 32]; 4]; 4]; SIGNED_SEGMENT],
}

/// Sums of eight rows in a segment, `[8][len]`, and room for a load that starts at the last one.
#[repr(C, align(32))]
struct Sums {
    /// Integer sums.
    isum: [i32; 8 * SEGMENT + 8],
    /// Integer sums of the minimums.
    msum: [i32; 8 * SEGMENT + 8],
    /// Scales, f16.
    d: [u16; 8 * SEGMENT + 8],
    /// Scales of the minimums, f16.
    dmin: [u16; 8 * SEGMENT + 8],
}

/// Shuffles that broadcast word `j` of each half to the whole half.
#[repr(align(32))]
struct Shuffles([[u16; 16]; 8]);

static BROADCAST: Shuffles = Shuffles([
    [0x0100; 16],
    [0x0302; 16],
    [0x0504; 16],
    [0x0706; 16],
    [0x0908; 16],
    [0x0b0a; 16],
    [0x0d0c; 16],
    [0x0f0e; 16],
]);

/// Shuffles that broadcast word `2·j` to the low half and word `2·j + 1` to the high half.
static BROADCAST_TWO: Shuffles = {
    let mut shuffles = [[0; 16]; 8];
    let mut j = 0;
    while j < 4 {
        let mut lane = 0;
        while lane < 16 {
            shuffles[j][lane] = BROADCAST.0[2 * j + lane / 8][0];
            lane += 1;
        }
        j += 1;
    }
    Shuffles(shuffles)
};

/// The products of up to 16 rows with one column.
///
/// # Safety
/// See [`super::super::variants::OneFn`]; the set is of type `T`; the machine has AVX2, FMA and F16C, and VNNI where
/// `VNNI`.
#[inline(always)]
pub(super) unsafe fn product<T: Large, const VNNI: bool>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    let n = set.k / 256;
    if n == 0 {
        return *out = [0.0; ROWS];
    }
    let segment = if T::UNSIGNED { SEGMENT } else { SIGNED_SEGMENT };
    let (mut column, mut sums) = (MaybeUninit::<Column>::uninit(), MaybeUninit::<Sums>::uninit());
    let (column, sums) = (column.as_mut_ptr(), sums.as_mut_ptr());
    // SAFETY: the caller's promise; segments lie inside rows and column and are no longer than `column` and `sums`.
    unsafe {
        derive::<T>(column, col, 0, n.min(segment));
        for (first, step) in row_octets(set.n) {
            let mut acc = _mm256_setzero_ps();
            for start in (0..n).step_by(segment) {
                let len = (n - start).min(segment);
                if n > segment {
                    derive::<T>(column, col, start, len);
                }
                let whole = len == n && step == 1;
                if whole && unrolled::<T>() && len.is_multiple_of(8) {
                    walk::<T, VNNI, true, true>(set, (first, step), col, column, 0, len, sums);
                } else if whole {
                    walk::<T, VNNI, true, false>(set, (first, step), col, column, 0, len, sums);
                } else {
                    walk::<T, VNNI, false, false>(set, (first, step), col, column, start, len, sums);
                }
                acc = add::<T>(sums, len, col.row.d.add(start), acc);
            }
            store_octet(out, first, step, acc);
        }
    }
}

/// Fills `column` for blocks `start .. start + len`.
///
/// # Safety
/// The column has these blocks, and `column` room for them; the machine has AVX2.
#[inline(always)]
unsafe fn derive<T: Large>(column: *mut Column, col: &ColPtr, start: usize, len: usize) {
    let entry = |of: *mut [Eight; SEGMENT + 8], b: usize| of.cast::<__m128i>().wrapping_add(b);
    // SAFETY: the caller's promise.
    unsafe {
        let mut at = start;
        for b in 0..len + 8 {
            let u = _mm_cvtepu8_epi16(load64(col.row.u.add(8 * at)));
            _mm_storeu_si128(entry(&raw mut (*column).u, b), u);
            if T::WIDE_SCALES && T::DMIN.is_some() {
                let sums = load256(col.row.sums.add(32 * at));
                let even = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(sums));
                let odd = _mm256_srai_epi32::<16>(sums);
                // Sums of 16 bits, which packing leaves as they are.
                let packed = _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi32(even, odd));
                _mm_storeu_si128(entry(&raw mut (*column).even, b), _mm256_castsi256_si128(packed));
                _mm_storeu_si128(entry(&raw mut (*column).odd, b), _mm256_extracti128_si256::<1>(packed));
            }
            at = if at + 1 == start + len { start } else { at + 1 };
        }
        if !T::UNSIGNED {
            for b in 0..len {
                for j in 0..4 {
                    let q = col.row.q.add(256 * (start + b) + 64 * j);
                    let (x, y) = (load256(q), load256(q.add(32)));
                    let halves = [_mm256_permute2x128_si256::<0x20>(x, y), _mm256_permute2x128_si256::<0x31>(x, y)];
                    let to = (&raw mut (*column).signed[b][j]).cast::<__m256i>();
                    for (i, half) in halves.into_iter().enumerate() {
                        _mm256_storeu_si256(to.add(i), half);
                        _mm256_storeu_si256(to.add(2 + i), _mm256_abs_epi8(half));
                    }
                }
            }
        }
    }
}

/// Whether the products of eight blocks are unrolled. With sub-scales broadcast from memory that takes a twentieth less
/// than a loop over shuffles; broadcasts alone do not (q4_k and q5_k, AMD EPYC 9004). Longer products, those of types
/// with sixteen sub-scales or with signs, take as much or more.
const fn unrolled<T: Large>() -> bool {
    T::UNSIGNED && T::WIDE_SCALES
}

/// Walks the blocks of eight rows, eight blocks at a time.
struct Blocks<'a> {
    set: &'a RowSet<'a>,
    /// First row and the distance to the next, of [`row_octets`].
    rows: (usize, usize),
    /// Byte of a row's first block.
    start: usize,
    /// Blocks of a row.
    len: usize,
    row: usize,
    /// The next block, and its index in its row.
    p: *const u8,
    b: usize,
}

impl<'a> Blocks<'a> {
    #[inline(always)]
    fn new(set: &'a RowSet, rows: (usize, usize), start: usize, len: usize) -> Blocks<'a> {
        let p = set.row(rows.0).wrapping_add(start);
        Blocks { set, rows, start, len, row: 0, p, b: 0 }
    }

    /// The addresses of the next eight blocks and their indices in their rows. `WHOLE` and `EVEN` as in [`walk`].
    ///
    /// # Safety
    /// The walk is not through its blocks.
    #[inline(always)]
    unsafe fn next_eight<T: Large, const WHOLE: bool, const EVEN: bool>(&mut self) -> ([*const u8; 8], [usize; 8]) {
        if EVEN {
            let (first, b) = (hide(self.p), self.b);
            self.p = self.p.wrapping_add(8 * T::BYTES);
            self.b = if b + 8 == self.len { 0 } else { b + 8 };
            // SAFETY: the caller's promise: the eight are contiguous.
            return (array!(8, |i| unsafe { first.add(T::BYTES * i) }), array!(8, |i| b + i));
        }
        let (mut at, mut index) = ([self.p; 8], [0; 8]);
        for i in 0..8 {
            (at[i], index[i]) = (self.p, self.b);
            self.p = self.p.wrapping_add(T::BYTES);
            self.b = if self.b + 1 == self.len { 0 } else { self.b + 1 };
            if !WHOLE && self.b == 0 {
                self.row = (self.row + 1) % 8;
                self.p = self.set.row(self.rows.0 + self.row * self.rows.1).wrapping_add(self.start);
            }
        }
        (at, index)
    }
}

/// Fills `sums` with those of one of [`row_octets`] and blocks `start .. start + len`. `WHOLE`: these are all blocks of
/// eight rows, contiguous in memory. `EVEN`: no row ends among eight of them.
///
/// # Safety
/// The set is of type `T` and has the rows and the blocks, `column` is derived from the same blocks; the machine has
/// the features.
#[inline(always)]
unsafe fn walk<T: Large, const VNNI: bool, const WHOLE: bool, const EVEN: bool>(
    set: &RowSet,
    rows: (usize, usize),
    col: &ColPtr,
    column: *const Column,
    start: usize,
    len: usize,
    sums: *mut Sums,
) {
    let (far, tile) = (Far::new(set, 1), set.row(0).addr());
    let mut walk = Blocks::new(set, rows, T::BYTES * start, len);
    // SAFETY: the caller's promise.
    unsafe {
        let zero = _mm256_setzero_si256();
        let (mut scales, mut isum) = ([zero; 8], [zero; 8]);
        for group in 0..len {
            let (at, blocks) = walk.next_eight::<T, WHOLE, EVEN>();
            for i in 0..8 {
                (&raw mut (*sums).d).cast::<u16>().add(8 * group + i).write(T::d(at[i]));
                if let Some(dmin) = T::DMIN {
                    let dmin = at[i].add(dmin).cast::<u16>().read_unaligned();
                    (&raw mut (*sums).dmin).cast::<u16>().add(8 * group + i).write(dmin);
                }
            }
            let next = far.address(at[0].addr() - tile);
            let x = col.row.sums.add(32 * start);
            let msum = expand_sub_scales::<T>(&at, &blocks, column, x, &mut scales, &mut isum);
            let scales = hide(scales.as_ptr().cast());
            let mut sum = (&raw mut isum).cast::<__m256i>();
            if unrolled::<T>() {
                // The compiler would keep the eight in registers, and save others for them.
                sum = hide(sum.cast_const().cast()).cast_mut().cast();
            }
            macro_rules! products {
                ($($i:expr),*) => {
                    $(
                        let i: usize = $i;
                        let p = if WHOLE { at[0].add(T::BYTES * i) } else { at[i] };
                        prefetch(next.wrapping_add(T::BYTES * i), T::BYTES, Hint::L2);
                        *sum.add(i) = if T::UNSIGNED {
                            let x = col.row.q.add(256 * (start + blocks[i]));
                            let s = scales.add(if T::WIDE_SCALES { 64 * (i / 2) + 16 * (i % 2) } else { 32 * i });
                            unsigned::<T, VNNI>(p, x, s, if T::OFFSET != 0 { *sum.add(i) } else { zero })
                        } else {
                            let x = (&raw const (*column).signed).cast::<u8>().add(512 * blocks[i]);
                            signed::<T, VNNI>(p, x, both(load128(scales.add(16 * i))))
                        };
                    )*
                };
            }
            if unrolled::<T>() {
                products!(0, 1, 2, 3, 4, 5, 6, 7);
            } else {
                for i in 0..8 {
                    products!(i);
                }
            }
            (&raw mut (*sums).isum).cast::<__m256i>().add(group).write_unaligned(hsum8(isum));
            if T::DMIN.is_some() {
                (&raw mut (*sums).msum).cast::<__m256i>().add(group).write_unaligned(msum);
            }
        }
        // Loads go past the last row.
        (&raw mut (*sums).isum).cast::<__m256i>().add(len).write_unaligned(zero);
        (&raw mut (*sums).msum).cast::<__m256i>().add(len).write_unaligned(zero);
        (&raw mut (*sums).d).cast::<__m128i>().add(len).write_unaligned(_mm_setzero_si128());
        (&raw mut (*sums).dmin).cast::<__m128i>().add(len).write_unaligned(_mm_setzero_si128());
    }
}

/// Prepares the products of the eight blocks `at`, which meet blocks `blocks` of the column with sums `sums`.
///
/// Fills `scales` with the sub-scales of the weights times those of the activations: a register a block where it has
/// sixteen. Where it has eight, a register holds two blocks; of unsigned types two registers do, the first four
/// sub-scales and the last four, each twice. Fills `isum` with the term that takes the offset off the integers, where
/// there is one. Returns the products of the minimums, a lane a block.
///
/// # Safety
/// The blocks are of type `T`, and the column has those they meet; the machine has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn expand_sub_scales<T: Large>(
    at: &[*const u8; 8],
    blocks: &[usize; 8],
    column: *const Column,
    sums: *const u8,
    scales: &mut [__m256i; 8],
    isum: &mut [__m256i; 8],
) -> __m256i {
    // SAFETY: the caller's promise. The column repeats behind its last block, so that one load takes two.
    unsafe {
        let zero = _mm256_setzero_si256();
        let entry = |of: *const [Eight; SEGMENT + 8], i: usize| of.cast::<Eight>().add(blocks[0] + i).cast::<u8>();
        if T::WIDE_SCALES {
            let mut m = [zero; 4];
            for i in 0..4 {
                let two = |of| load256(entry(of, 2 * i));
                let [s, min] = T::scale_words(at[2 * i], at[2 * i + 1]);
                let s = _mm256_mullo_epi16(s, two(&raw const (*column).u));
                if T::UNSIGNED {
                    // Each twice, for products of pairs.
                    (scales[2 * i], scales[2 * i + 1]) = (_mm256_unpacklo_epi16(s, s), _mm256_unpackhi_epi16(s, s));
                } else {
                    scales[i] = s;
                }
                if T::DMIN.is_some() {
                    let even = _mm256_madd_epi16(min, two(&raw const (*column).even));
                    m[i] = _mm256_add_epi32(even, _mm256_madd_epi16(min, two(&raw const (*column).odd)));
                }
            }
            let in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            return if T::DMIN.is_some() { _mm256_permutevar8x32_epi32(hsum4_halves(m), in_order) } else { zero };
        }
        let mut m = [zero; 8];
        for i in 0..8 {
            // Even 16-groups to the low half, odd ones to the high half, the order of a 32-group's register.
            let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
            let s = T::scales(at[i]);
            let u = both(load128(entry(&raw const (*column).u, i)));
            scales[i] = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(_mm_shuffle_epi8(s, order)), u);
            let x = load256(sums.add(32 * blocks[i]));
            if T::OFFSET != 0 {
                let off = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(s), _mm256_set1_epi16(-T::OFFSET));
                isum[i] = _mm256_madd_epi16(off, x);
            }
            if T::DMIN.is_some() {
                m[i] = _mm256_madd_epi16(_mm256_cvtepu8_epi16(T::mins(at[i])), x);
            }
        }
        if T::DMIN.is_some() { hsum8(m) } else { zero }
    }
}

/// Adds the sums of [`walk`] times the scales to the products of eight rows, a lane a row; `dx` are the column's
/// scales.
///
/// # Safety
/// `sums` holds `len` blocks of eight rows, `dx` as many scales; the machine has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn add<T: Large>(sums: *const Sums, len: usize, dx: *const f32, mut acc: __m256) -> __m256 {
    // SAFETY: the caller's promise. Loads that go past a row's end find the next row, or the zeros behind the last.
    unsafe {
        for first in (0..len).step_by(8) {
            let ints = |of: *const i32| transpose8(array!(8, |r| load256(of.add(len * r + first).cast())));
            let scales = |of: *const u16| load_transposed_words(&array!(8, |r| of.add(len * r + first).cast()));
            let (isum, d) = (ints((&raw const (*sums).isum).cast()), scales((&raw const (*sums).d).cast()));
            let (msum, dmin) = if T::DMIN.is_some() {
                (ints((&raw const (*sums).msum).cast()), scales((&raw const (*sums).dmin).cast()))
            } else {
                (isum, d)
            };
            for b in 0..(len - first).min(8) {
                let dx = _mm256_broadcast_ss(&*dx.add(first + b));
                let mut d = _mm256_cvtph_ps(d[b]);
                if T::FACTOR != 1.0 {
                    d = _mm256_mul_ps(d, _mm256_set1_ps(T::FACTOR));
                }
                acc = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum[b]), acc);
                if T::DMIN.is_some() {
                    acc =
                        _mm256_fnmadd_ps(_mm256_mul_ps(_mm256_cvtph_ps(dmin[b]), dx), _mm256_cvtepi32_ps(msum[b]), acc);
                }
            }
        }
        acc
    }
}

/// `acc + Σ` of the products of pairs.
///
/// # Safety
/// The machine has AVX2, and VNNI where `VNNI`.
#[inline(always)]
unsafe fn add_pairs<const VNNI: bool>(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { if VNNI { dot_pairs(acc, a, b) } else { _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)) } }
}

/// `acc + Σ` of the products of pairs with the pair at byte `AT` of `b`.
///
/// # Safety
/// As [`add_pairs`]; the pair is readable.
#[inline(always)]
unsafe fn add_pairs_with<const VNNI: bool, const AT: usize>(acc: __m256i, a: __m256i, b: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        if VNNI {
            dot_pair::<AT>(acc, a, b)
        } else {
            add_pairs::<false>(acc, a, _mm256_set1_epi32(b.add(AT).cast::<i32>().read_unaligned()))
        }
    }
}

/// `vpdpwssd`. The compiler makes a product and an addition of each in a chain, as those have the shorter latency; here
/// the chains of other blocks fill it.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512vl,avx512vnni")]
fn dot_pairs(mut acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the machine has the instruction, which reads and writes these registers.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {0}, {1}, {2}",
            inout(ymm_reg) acc,
            in(ymm_reg) a,
            in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// [`dot_pairs`] with the pair at byte `AT` of `b`.
///
/// # Safety
/// The pair is readable.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512vl,avx512vnni")]
unsafe fn dot_pair<const AT: usize>(mut acc: __m256i, a: __m256i, b: *const u8) -> __m256i {
    // SAFETY: the machine has the instruction; the caller's promise.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {0}, {1}, dword ptr [{2} + {3}]{{1to8}}",
            inout(ymm_reg) acc,
            in(ymm_reg) a,
            in(reg) b,
            const AT,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    acc
}

/// `acc` plus the integer dot product of a block of unsigned integers, in eight partial sums.
///
/// # Safety
/// `p` points to a block of type `T`, `x` to 256 bytes, `s` to its sub-scales as expanded by [`expand_sub_scales`]; the
/// machine has the features.
#[inline(always)]
unsafe fn unsigned<T: Large, const VNNI: bool>(p: *const u8, x: *const u8, s: *const u8, mut acc: __m256i) -> __m256i {
    // The compiler would make two shuffles of one with a known pattern.
    let (shuffles, x) = (hide((&raw const BROADCAST).cast()), hide(x));
    macro_rules! groups {
        ($($j:literal)*) => {
            $(
                // SAFETY: the caller's promise.
                unsafe {
                    let pairs = _mm256_maddubs_epi16(T::group(p, $j), load256(x.add(32 * $j)));
                    acc = if T::WIDE_SCALES {
                        add_pairs_with::<VNNI, { 32 * ($j / 4) + 4 * ($j % 4) }>(acc, pairs, s)
                    } else {
                        let scale = _mm256_shuffle_epi8(load256(s), load256(shuffles.add(32 * $j)));
                        add_pairs::<VNNI>(acc, pairs, scale)
                    };
                }
            )*
        };
    }
    groups!(0 1 2 3 4 5 6 7);
    acc
}

/// The integer dot product of a block of signed integers, in eight partial sums. The weights take the sign of the
/// activations, whose magnitudes serve all rows.
///
/// # Safety
/// `p` points to a block of type `T`, `x` to an entry of [`Column::signed`]; the machine has the features.
#[inline(always)]
unsafe fn signed<T: Large, const VNNI: bool>(p: *const u8, x: *const u8, s: __m256i) -> __m256i {
    let (shuffles, x) = (hide((&raw const BROADCAST_TWO).cast()), hide(x));
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = _mm256_setzero_si256();
        macro_rules! groups {
            ($($j:literal)*) => {
                $(
                    let scale = _mm256_shuffle_epi8(s, load256(shuffles.add(32 * $j)));
                    for (i, w) in T::pair(p, $j).into_iter().enumerate() {
                        let x = x.add(128 * $j + 32 * i);
                        let pairs = _mm256_maddubs_epi16(load256(x.add(64)), _mm256_sign_epi8(w, load256(x)));
                        acc = add_pairs::<VNNI>(acc, pairs, scale);
                    }
                )*
            };
        }
        groups!(0 1 2 3);
        acc
    }
}
