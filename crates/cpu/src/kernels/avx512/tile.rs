//! The micro-kernels: a panel of 16 rows, one register a pair or a word of bytes, times up to eight columns.
//!
//! As in AVX2, but one instruction multiplies, adds and broadcasts the activations: `vpdpwssd` for pairs of 16-bit
//! integers, `vpdpbusd` for words of bytes, whose sums have 32 bits. Even and odd registers of the panel have their own
//! sums, so that few columns too have enough of them to hide the latency. Of 32-blocks the results of a group of
//! columns stay in registers. Of super-blocks with few bits ([`Groups::PAIRED`]) a register has two words of half of
//! the rows, and sums have 16 bits when their sub-scales are applied: three instructions for 512 products, not seven.

use std::arch::x86_64::*;

use quant::WeightType;
use quant::act::ActKind;

use super::super::ColPtr;
use super::super::avx2;
use super::super::panel::{Panel, ROWS, offset};
use super::super::types::of_super_block;
use super::super::variants::TileFn;
use super::panel::Groups;

/// Maximum of columns in a group. With more, sums and results do not all have registers.
const GROUP: usize = 8;
/// Maximum of columns in a group of [`paired`], which have two sums each. From registers and the first cache q4_k does
/// with groups of 6, 8 and 9 of 32 columns 198, 188 and 189 GMAC/s (a core of a Xeon of the Sapphire Rapids class).
const PAIRED_GROUP: usize = 6;

/// The tile function of a type.
pub(in super::super) fn tile(t: WeightType) -> TileFn {
    match (t.act(), offset(t), t.has_min()) {
        (ActKind::Byte32, 16, _) => small_columns::<true, 16, false>,
        (ActKind::Byte32, 128, _) => small_columns::<true, 128, false>,
        (ActKind::Byte32, ..) => small_columns::<true, 0, true>,
        (ActKind::Block32, _, true) => small_columns::<false, 0, true>,
        (ActKind::Block32, _, false) => small_columns::<false, 0, false>,
        (ActKind::Block256, ..) => of_super_block!(t, large_columns),
        (ActKind::F32, ..) => unreachable!("floats have no integer panel"),
    }
}

/// Evaluates `$call` for groups of columns of about one length, at most `$max`; the number of a group is in `$c`. For
/// each of them the panel is another one to the compiler, which else loads it once for all groups, and then spills it.
macro_rules! groups {
    ($panel:ident, $cols:ident, $acc:ident, $c:ident => $call:expr, $($n:literal)* or $max:ident) => {
        let n_groups = $cols.len().div_ceil($max);
        let (mut cols, mut acc) = ($cols, $acc);
        for i in 0..n_groups {
            let n = cols.len().div_ceil(n_groups - i);
            let ($cols, rest) = cols.split_at(n);
            let ($acc, rest_acc) = acc.split_at_mut(n);
            (cols, acc) = (rest, rest_acc);
            // SAFETY: the pointer stays the panel's.
            let $panel = unsafe { &*avx2::hide((&raw const *$panel).cast()).cast::<Panel>() };
            match $cols.len() {
                $($n => {
                    const $c: usize = $n;
                    $call
                })*
                _ => {
                    const $c: usize = $max;
                    $call
                }
            }
        }
    };
}

/// # Safety
/// See [`TileFn`]; the type has 32-blocks, and `BYTES` says which form the panel has.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn small_columns<const BYTES: bool, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    groups!(
        // SAFETY: the caller's promise, for each of the columns.
        panel, cols, acc, C => unsafe { small::<C, BYTES, OFFSET, MIN>(panel, blocks, chunk, cols, acc) },
        1 2 3 4 5 6 7 or GROUP
    );
}

/// # Safety
/// See [`TileFn`]; the panel is one super-block of such a type.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn large_columns<T: Groups>(
    panel: &Panel,
    _blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    if T::PAIRED {
        groups!(
            // SAFETY: the caller's promise, for each of the columns.
            panel, cols, acc, C => unsafe { paired::<C, T>(panel, chunk, cols, acc) },
            1 2 3 4 5 or PAIRED_GROUP
        );
        return;
    }
    groups!(
        // SAFETY: the caller's promise, for each of the columns.
        panel, cols, acc, C => unsafe { large::<C, T>(panel, chunk, cols, acc) },
        1 2 3 4 5 6 7 or GROUP
    );
}

/// `sums + w·x`, where `x` is a pair of 16 bits that all rows share. Of the intrinsic LLVM makes a product and an
/// addition wherever it takes a chain of them to be slow; but here it is the units for products that are busy.
///
/// # Safety
/// `x` is readable for four bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn dot_pair(mut sums: __m512i, w: __m512i, x: *const i32) -> __m512i {
    // SAFETY: the caller's promise; the instruction is one of AVX-512-VNNI.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {0}, {1}, dword ptr [{2}]{{1to16}}",
            inout(zmm_reg) sums,
            in(zmm_reg) w,
            in(reg) x,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    sums
}

/// Sums over pairs of the products of C columns with 16 rows.
///
/// # Safety
/// `w` is readable for `n` pairs of 16 rows (aligned), every `x` for `n` pairs; `n` is even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn pairs<const C: usize>(w: *const __m512i, x: [*const i32; C], n: usize) -> [__m512i; C] {
    let mut even = [_mm512_setzero_si512(); C];
    let mut odd = [_mm512_setzero_si512(); C];
    for i in (0..n).step_by(2) {
        // SAFETY: the caller's promise.
        unsafe {
            let (w0, w1) = (_mm512_load_si512(w.add(i)), _mm512_load_si512(w.add(i + 1)));
            for c in 0..C {
                even[c] = dot_pair(even[c], w0, x[c].add(i));
                odd[c] = dot_pair(odd[c], w1, x[c].add(i + 1));
            }
        }
    }
    for c in 0..C {
        even[c] = _mm512_add_epi32(even[c], odd[c]);
    }
    even
}

/// Sums over `WORDS` words of bytes of the products of C columns with 16 rows.
///
/// # Safety
/// `w` is readable for `WORDS` words of 16 rows (aligned), every `x` for `WORDS` words; `WORDS` is even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn words<const C: usize, const WORDS: usize>(w: *const __m512i, x: [*const i32; C]) -> [__m512i; C] {
    let mut even = [_mm512_setzero_si512(); C];
    let mut odd = [_mm512_setzero_si512(); C];
    for i in (0..WORDS).step_by(2) {
        // SAFETY: the caller's promise.
        unsafe {
            let (w0, w1) = (_mm512_load_si512(w.add(i)), _mm512_load_si512(w.add(i + 1)));
            for c in 0..C {
                even[c] = _mm512_dpbusd_epi32(even[c], w0, _mm512_set1_epi32(x[c].add(i).read_unaligned()));
                odd[c] = _mm512_dpbusd_epi32(odd[c], w1, _mm512_set1_epi32(x[c].add(i + 1).read_unaligned()));
            }
        }
    }
    for c in 0..C {
        even[c] = _mm512_add_epi32(even[c], odd[c]);
    }
    even
}

/// `acc + d·dx·isum`, for C columns.
///
/// # Safety
/// Every column has super-block or block `block`, and `acc` has C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add<const C: usize>(
    d: &[f32; ROWS],
    isum: [__m512i; C],
    block: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for c in 0..C {
        // SAFETY: the caller's promise; both arrays have 16 values.
        unsafe {
            let d = _mm512_mul_ps(_mm512_loadu_ps(d.as_ptr()), _mm512_set1_ps(*cols[c].row.d.add(block)));
            let at = acc[c].as_mut_ptr();
            _mm512_storeu_ps(at, _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(isum[c]), _mm512_loadu_ps(at)));
        }
    }
}

/// # Safety
/// As [`small_columns`], with C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn small<const C: usize, const BYTES: bool, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let mut y = [_mm512_setzero_ps(); C];
    for c in 0..C {
        // SAFETY: `acc` has C columns of 16 values.
        y[c] = unsafe { _mm512_loadu_ps(acc[c].as_ptr()) };
    }
    for b in 0..blocks {
        let block = chunk / 32 + b;
        // SAFETY: the panel and the columns have the block.
        unsafe {
            let mut x = [std::ptr::null::<i32>(); C];
            for c in 0..C {
                let row = &cols[c].row;
                x[c] = if BYTES { row.q.add(32 * block) } else { row.wide.add(32 * block).cast() }.cast_const().cast();
            }
            let isum = if BYTES {
                words::<C, 8>(panel.bytes.as_ptr().add(32 * ROWS * b).cast(), x)
            } else {
                pairs(panel.w.as_ptr().add(32 * ROWS * b).cast(), x, 16)
            };
            let (d, m) = (_mm512_loadu_ps(panel.d[b].as_ptr()), _mm512_loadu_ps(panel.m[b].as_ptr()));
            for c in 0..C {
                let sum = cols[c].row.sums.cast::<i32>().add(block);
                let mut isum = isum[c];
                if BYTES && OFFSET != 0 {
                    // The sum has 16 bits, and the upper half of the factor is zero.
                    let minus = _mm512_set1_epi32(i32::from((-i16::from(OFFSET)).cast_unsigned()));
                    isum = dot_pair(isum, minus, sum);
                }
                let dx = _mm512_set1_ps(*cols[c].row.d.add(block));
                y[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, dx), _mm512_cvtepi32_ps(isum), y[c]);
                if MIN {
                    y[c] = _mm512_fmadd_ps(_mm512_mul_ps(m, dx), _mm512_cvtepi32_ps(_mm512_set1_epi32(*sum)), y[c]);
                }
            }
        }
    }
    for c in 0..C {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(acc[c].as_mut_ptr(), y[c]) };
    }
}

/// # Safety
/// As [`large_columns`], with C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn large<const C: usize, T: Groups>(panel: &Panel, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
    let zero = [_mm512_setzero_si512(); C];
    let groups = if T::WIDE_SCALES { 2 } else { 1 }; // 16-groups of a sub-scale
    let mut isum = zero;
    for g in (0..16).step_by(groups) {
        let mut start = zero;
        let mut x = [std::ptr::null::<i32>(); C];
        // SAFETY: the panel and the columns have the super-block.
        unsafe {
            for c in 0..C {
                x[c] = cols[c].row.q.add(chunk + 16 * g).cast_const().cast();
                for g in g..g + groups {
                    if T::PANEL_OFFSET != 0 {
                        // Both sums of a 16-group are `-32·Σ q`; here the offset is that of the type.
                        let times = _mm512_set1_epi16(if T::PANEL_OFFSET < 32 { 1 } else { T::PANEL_OFFSET / 32 });
                        start[c] = dot_pair(start[c], times, cols[c].row.start.add(chunk / 8 + 2 * g).cast());
                    }
                }
                start[c] = match T::PANEL_OFFSET {
                    4 => _mm512_srai_epi32::<3>(start[c]),
                    16 => _mm512_srai_epi32::<1>(start[c]),
                    _ => start[c],
                };
            }
            let w = panel.bytes.as_ptr().add(16 * ROWS * g).cast();
            let sum = if T::WIDE_SCALES { words::<C, 8>(w, x) } else { words::<C, 4>(w, x) };
            let scale = _mm512_load_si512(panel.scales[g].as_ptr().cast());
            for c in 0..C {
                // The upper half of `u` is zero, so that the sum of pairs is a product of 16 bits. A product of 32
                // bits takes two instructions.
                let u = _mm512_set1_epi32(i32::from(*cols[c].row.u.add((chunk + 16 * g) / 32)));
                let sum = _mm512_add_epi32(sum[c], start[c]);
                isum[c] = _mm512_add_epi32(isum[c], _mm512_mullo_epi32(sum, _mm512_madd_epi16(scale, u)));
            }
        }
    }
    // SAFETY: as above; `acc` has C columns.
    unsafe { add_scaled(panel, chunk, isum, T::DMIN.is_some(), cols, acc) }
}

/// Super-blocks whose words are pairs ([`super::panel::Paired`]): the sums over the even words of a sub-scale and those
/// over the odd ones have 16 bits, and one instruction multiplies both with the sub-scales and adds them.
///
/// # Safety
/// As [`large_columns`], with C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2")]
unsafe fn paired<const C: usize, T: Groups>(panel: &Panel, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
    // 16-groups that are summed up together: over 16 values of 4 bits the even or the odd words have 16 bits, over 8
    // those of 6 bits with a sign.
    let groups = if T::WIDE_SCALES && T::BITS <= 4 { 2 } else { 1 };
    const {
        let largest = if T::PANEL_OFFSET == 0 { (1 << T::BITS) - 1 } else { T::PANEL_OFFSET as i32 };
        let values = if T::WIDE_SCALES && T::BITS <= 4 { 16 } else { 8 };
        assert!(!T::PAIRED || 127 * largest * values <= i16::MAX as i32);
        // Parts are `-32·Σ q`; where the offset is another one, it is 4.
        assert!(!T::PAIRED || matches!(T::PANEL_OFFSET, 0 | 4 | 32));
    }
    let mut isum = [_mm512_setzero_si512(); C];
    // SAFETY: the panel and the columns have the super-block; `acc` has C columns.
    unsafe {
        // Sub-scales of the columns as pairs of 16 bits.
        let mut u = [[0i32; 8]; C];
        for c in 0..C {
            let bytes = _mm256_set1_epi64x(cols[c].row.u.add(chunk / 32).cast::<i64>().read_unaligned());
            let both = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let both = _mm256_or_si256(both, _mm256_slli_epi32::<16>(both));
            let both = _mm256_or_si256(both, _mm256_set1_epi32(0x8000_8000u32.cast_signed()));
            _mm256_storeu_si256(u[c].as_mut_ptr().cast(), _mm256_shuffle_epi8(bytes, both));
        }
        for g in (0..16).step_by(groups) {
            let mut low = [_mm512_setzero_si512(); C];
            if T::PANEL_OFFSET != 0 {
                for c in 0..C {
                    let start = cols[c].row.parts.add(chunk / 8 + 2 * g).cast::<i64>().read_unaligned();
                    low[c] = _mm512_set1_epi64(start);
                    if T::PANEL_OFFSET < 32 {
                        low[c] = _mm512_srai_epi32::<3>(low[c]);
                    }
                }
            }
            let mut high = low;
            for pair in 2 * g..2 * g + 2 * groups {
                let w = panel.bytes.as_ptr().add(8 * ROWS * pair).cast::<__m512i>();
                let w = [_mm512_load_si512(w), _mm512_load_si512(w.add(1))];
                for c in 0..C {
                    let x = cols[c].row.q.add(chunk + 8 * pair).cast::<i64>().read_unaligned();
                    let x = _mm512_set1_epi64(x);
                    low[c] = _mm512_dpbusd_epi32(low[c], w[0], x);
                    high[c] = _mm512_dpbusd_epi32(high[c], w[1], x);
                }
            }
            let scale = _mm512_load_si512(panel.scales[if T::WIDE_SCALES { g / 2 * 2 } else { g }].as_ptr().cast());
            for c in 0..C {
                let times = _mm512_mullo_epi16(scale, _mm512_set1_epi32(u[c][g / 2]));
                isum[c] = _mm512_dpwssd_epi32(isum[c], _mm512_packs_epi32(low[c], high[c]), times);
            }
        }
        add_scaled(panel, chunk, isum, T::DMIN.is_some(), cols, acc)
    }
}

/// Applies the scales of a super-block to the sums of C columns, and adds the minimums where there are any.
///
/// # Safety
/// The panel is the super-block that begins at value `chunk`, which every column has; `acc` has C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_scaled<const C: usize>(
    panel: &Panel,
    chunk: usize,
    isum: [__m512i; C],
    has_min: bool,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller's promise.
    unsafe {
        add(&panel.d[0], isum, chunk / 256, cols, acc);
        if has_min {
            let mut sums = [std::ptr::null::<i32>(); C];
            for c in 0..C {
                sums[c] = cols[c].row.sums.cast::<i16>().add(chunk / 16).cast_const().cast();
            }
            let msum = pairs(panel.mins.as_ptr().cast(), sums, 8);
            add(&panel.m[0], msum, chunk / 256, cols, acc);
        }
    }
}
