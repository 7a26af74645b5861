//! The types of MLX files, whose scales and biases lie in planes of their own; the layouts are told in
//! [`quant::types::planar`].
//!
//! Scales of eight groups of eight rows are read and transposed together, since a row's scales follow each other.

use std::arch::x86_64::*;

use quant::{ScaleType, WeightType};

use super::super::acts::RowPtr;
use super::super::panel::{Panel, ROWS, UnpackFn};
use super::super::prefetch::{Far, Hint, Near, prefetch};
use super::super::variants::OneFn;
use super::super::{ActsShared, ColPtr, RowSet};
use super::small::{E2M1_RAISED, e8m0, e8m0_halves, nibbles_of_two, table};
use super::unpack::{at, prefetch_next_rows, word_at};
use super::words::{self, turned, words4};
use super::{array, both, eights, hsum8, in_turn, load64, load128, load256, opaque, put_eight, sums, transpose8};

/// How 32 values lie in plane `q`. `p` always points to them, `4·BITS` readable bytes; the machine has AVX2.
#[allow(clippy::missing_safety_doc)]
trait Ints {
    /// Bits a value.
    const BITS: usize;
    /// What the integers of [`Ints::sums`] have too much.
    const OFFSET: i32 = 0;
    /// The integers of eight rows as words of four, as the panel has them, a lane a row.
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8];
    /// `Σ (q + OFFSET)·x` of eight rows, a lane a row, for block `b` of the column.
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i;
}

struct Bits<const B: usize>;
struct Fp4;

impl Ints for Bits<8> {
    const BITS: usize = 8;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
        // SAFETY: the promise of the trait: 32 bytes.
        let (a, b) = unsafe { (words4(p, 0), words4(p, 16)) };
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
        // SAFETY: the promise of the trait; the column has the block.
        unsafe {
            let x = split(x.wide.add(32 * b).cast());
            hsum8(array!(8, |r| {
                let v = load256(p[r]);
                let (even, odd) = (_mm256_and_si256(v, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(v));
                _mm256_add_epi32(_mm256_madd_epi16(even, x[0]), _mm256_madd_epi16(odd, x[1]))
            }))
        }
    }
}

/// Low and high halves of 16 bytes of eight rows in turn.
///
/// # Safety
/// They are readable; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(p: &[*const u8; 8]) -> [__m256i; 8] {
    // SAFETY: the caller's promise.
    let w = unsafe { words4(p, 0) };
    let lane = both(_mm_setr_epi32(0, 0x0004_0004, 0x0008_0008, 0x000c_000c));
    array!(8, |i| {
        // Two bytes become 16 bits each.
        let two = _mm256_set1_epi32(if i.is_multiple_of(2) { 0x8001_8000u32 } else { 0x8003_8002 }.cast_signed());
        let v = _mm256_shuffle_epi8(w[i / 2], _mm256_add_epi8(two, lane));
        _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16::<4>(v)), _mm256_set1_epi8(15))
    })
}

impl Ints for Bits<4> {
    const BITS: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
        // SAFETY: the promise of the trait: 16 bytes.
        unsafe { nibbles(p) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
        // SAFETY: the promise of the trait; the column has the block.
        unsafe {
            let x = sums::even_odd(x.q.add(32 * b));
            sums::of_halves::<15, false>(array!(4, |i| nibbles_of_two(p[i], p[i + 4])), x)
        }
    }
}

impl Ints for Fp4 {
    const BITS: usize = 4;
    const OFFSET: i32 = 12;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
        // SAFETY: the promise of the trait: 16 bytes.
        let codes = unsafe { nibbles(p) };
        array!(8, |i| table(&words::E2M1_RAISED, codes[i]))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
        // SAFETY: the promise of the trait; the column has the block, the table 16 bytes.
        unsafe {
            let x = sums::even_odd(x.q.add(32 * b));
            let values = both(load128(E2M1_RAISED.as_ptr().cast()));
            let two = array!(4, |i| {
                let codes = nibbles_of_two(p[i], p[i + 4]);
                array!(2, |h| _mm256_shuffle_epi8(values, codes[h]))
            });
            sums::of_halves::<24, false>(two, x)
        }
    }
}

/// How values of 2, 3, 5 and 6 bits come out of their stream: two neighbours lie in two bytes, which go to the 16-bit
/// lane of the pair and are shifted left, each by its own number of bits, so that they end at the same bit of the lane.
struct Stream {
    /// Which bytes go to the lane, `[half][byte]`.
    bytes: [[u8; 16]; 2],
    /// What shifts the lane left, `[half][lane]`.
    shift: [[i16; 8]; 2],
}

impl Stream {
    /// Bits of the lane below the pair.
    const fn low(bits: usize) -> usize {
        match bits {
            3 | 5 => 6,
            _ => 4,
        }
    }

    /// Where the bytes of the upper half are loaded from; both halves have all their bytes in the load.
    const fn upper(bits: usize) -> usize {
        match bits {
            2 => 0,
            6 => 8,
            _ => 4,
        }
    }

    const fn new(bits: usize) -> Self {
        let mut s = Self { bytes: [[0x80; 16]; 2], shift: [[1; 8]; 2] };
        let mut lane = 0;
        while lane < 16 {
            let (bit, half, at) = (2 * bits * lane, lane / 8, lane % 8);
            let byte = bit / 8 - half * Self::upper(bits);
            s.bytes[half][2 * at] = byte as u8;
            if bit % 8 + 2 * bits > 8 {
                s.bytes[half][2 * at + 1] = byte as u8 + 1;
            }
            s.shift[half][at] = 1 << (Self::low(bits) - bit % 8);
            lane += 1;
        }
        s
    }
}

/// The values of the streams in both halves as bytes in order; `half` says which values these are.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn stream<const B: usize, const LOW: i32>(v: __m256i, s: &Stream, half: usize) -> __m256i {
    // SAFETY: a half of both tables has 16 bytes.
    let (bytes, shift) =
        unsafe { (both(load128(s.bytes[half].as_ptr())), both(load128(s.shift[half].as_ptr().cast()))) };
    let t = _mm256_mullo_epi16(_mm256_shuffle_epi8(v, bytes), shift);
    let mask = (1 << B) - 1;
    let even = _mm256_and_si256(_mm256_srli_epi16::<LOW>(t), _mm256_set1_epi16(mask));
    // The odd value goes from bit LOW + B to bit 8.
    let odd = match LOW as usize + B {
        6 => _mm256_slli_epi16::<2>(t),
        9 => _mm256_srli_epi16::<1>(t),
        10 => _mm256_srli_epi16::<2>(t),
        _ => _mm256_srli_epi16::<3>(t),
    };
    _mm256_or_si256(even, _mm256_and_si256(odd, _mm256_set1_epi16(mask << 8)))
}

macro_rules! stream {
    ($bits:literal, $low:literal, $load:path) => {
        impl Bits<$bits> {
            /// Values 0 .. 16 of two rows, then values 16 .. 32.
            ///
            /// # Safety
            /// As in [`Ints`].
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn of_two(p: *const u8, q: *const u8) -> [__m256i; 2] {
                const { assert!(Stream::low($bits) == $low) };
                static STREAM: Stream = Stream::new($bits);
                array!(2, |h| {
                    let at = h * Stream::upper($bits);
                    // SAFETY: the caller's promise; no load ends past the bytes of the values.
                    let v = unsafe { _mm256_set_m128i($load(q.add(at)), $load(p.add(at))) };
                    stream::<$bits, $low>(v, &STREAM, h)
                })
            }
        }

        impl Ints for Bits<$bits> {
            const BITS: usize = $bits;
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
                // SAFETY: the promise of the trait.
                let two = unsafe { array!(4, |i| Self::of_two(p[i], p[i + 4])) };
                let (a, b) = (array!(4, |i| two[i][0]), array!(4, |i| two[i][1]));
                let (a, b) = (turned(a), turned(b));
                [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
            }
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
                // SAFETY: the promise of the trait; the column has the block.
                unsafe {
                    let x = sums::halves(x.q.add(32 * b));
                    sums::of_halves::<{ (1 << $bits) - 1 }, false>(array!(4, |i| Self::of_two(p[i], p[i + 4])), x)
                }
            }
        }
    };
}

stream!(2, 4, load64);
stream!(3, 6, load64);
stream!(5, 6, load128);
stream!(6, 4, load128);

/// How numbers lie in the planes of scales and biases.
#[allow(clippy::missing_safety_doc)]
trait Scale {
    /// Bytes of a number.
    const BYTES: usize;
    /// The number at each of eight places, which are readable for it.
    unsafe fn one(p: &[*const u8; 8]) -> __m256;
    /// Numbers 0 .. 8 at each of eight places, which are readable for them: `[number]`, a lane a place.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        unsafe { array!(8, |i| Self::one(&p.map(|p| p.wrapping_add(i * Self::BYTES)))) }
    }
}

struct F16;
struct BF16;
struct F32;
struct E8m0;

/// The 16 bits at each of eight places.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn words(p: &[*const u8; 8]) -> __m128i {
    // SAFETY: the caller's promise.
    let h = |i: usize| u64::from(unsafe { p[i].cast::<u16>().read_unaligned() });
    let lo = h(0) | h(1) << 16 | h(2) << 32 | h(3) << 48;
    let hi = h(4) | h(5) << 16 | h(6) << 32 | h(7) << 48;
    _mm_set_epi64x(hi as i64, lo as i64)
}

/// Two of the eight words of 16 bits at each of eight places: in each half one and then the other of four places.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn two_words(p: &[*const u8; 8]) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let t = array!(4, |i| unsafe { _mm256_set_m128i(load128(p[i + 4]), load128(p[i])) });
    let (a, b) = (_mm256_unpacklo_epi16(t[0], t[1]), _mm256_unpackhi_epi16(t[0], t[1]));
    let (c, d) = (_mm256_unpacklo_epi16(t[2], t[3]), _mm256_unpackhi_epi16(t[2], t[3]));
    [_mm256_unpacklo_epi32(a, c), _mm256_unpackhi_epi32(a, c), _mm256_unpacklo_epi32(b, d), _mm256_unpackhi_epi32(b, d)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bf16(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
}

impl Scale for F16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        _mm256_cvtph_ps(unsafe { words(p) })
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let t = unsafe { two_words(p) };
        let t = array!(4, |i| _mm256_permute4x64_epi64::<0xd8>(t[i]));
        array!(8, |i| _mm256_cvtph_ps(if i.is_multiple_of(2) {
            _mm256_castsi256_si128(t[i / 2])
        } else {
            _mm256_extracti128_si256::<1>(t[i / 2])
        }))
    }
}

impl Scale for BF16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        bf16(unsafe { words(p) })
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let (t, zero) = (unsafe { two_words(p) }, _mm256_setzero_si256());
        array!(8, |i| _mm256_castsi256_ps(if i.is_multiple_of(2) {
            _mm256_unpacklo_epi16(zero, t[i / 2])
        } else {
            _mm256_unpackhi_epi16(zero, t[i / 2])
        }))
    }
}

impl Scale for F32 {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        let x = |i: usize| unsafe { p[i].cast::<f32>().read_unaligned() };
        _mm256_setr_ps(x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let t = transpose8(unsafe { array!(8, |i| load256(p[i])) });
        array!(8, |i| _mm256_castsi256_ps(t[i]))
    }
}

impl Scale for E8m0 {
    const BYTES: usize = 1;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        unsafe { e8m0_halves(p) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let r = unsafe { array!(8, |i| load64(p[i])) };
        let a = array!(4, |i| _mm_unpacklo_epi8(r[2 * i], r[2 * i + 1]));
        let (b, c) = (_mm_unpacklo_epi16(a[0], a[1]), _mm_unpackhi_epi16(a[0], a[1]));
        let (d, e) = (_mm_unpacklo_epi16(a[2], a[3]), _mm_unpackhi_epi16(a[2], a[3]));
        // Two numbers of all places.
        let t =
            [_mm_unpacklo_epi32(b, d), _mm_unpackhi_epi32(b, d), _mm_unpacklo_epi32(c, e), _mm_unpackhi_epi32(c, e)];
        array!(8, |i| e8m0(if i.is_multiple_of(2) { t[i / 2] } else { _mm_unpackhi_epi64(t[i / 2], t[i / 2]) }))
    }
}

/// Scales and biases of eight groups, `[group]`, a lane a row.
struct Groups {
    d: [__m256; 8],
    m: [__m256; 8],
}

impl Groups {
    /// # Safety
    /// The machine has AVX.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        let zero = unsafe { [_mm256_setzero_ps(); 8] };
        Self { d: zero, m: zero }
    }

    /// Takes `n` groups (at most eight) of eight rows of scales and biases, the first of which lie at these places.
    ///
    /// # Safety
    /// The rows have these groups; the machine has AVX2, FMA and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load<S: Scale, const MIN: bool>(&mut self, scales: [*const u8; 8], biases: [*const u8; 8], n: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if n == 8 {
                self.d = S::eight(&scales);
                if MIN {
                    self.m = S::eight(&biases);
                }
                return;
            }
            for g in 0..n {
                self.d[g] = S::one(&scales.map(|p| p.wrapping_add(g * S::BYTES)));
                if MIN {
                    self.m[g] = S::one(&biases.map(|p| p.wrapping_add(g * S::BYTES)));
                }
            }
        }
    }
}

/// # Safety
/// See [`OneFn`]; the set's integers are `Q`, its scales `S`, and it has biases where `MIN`.
#[inline(always)]
unsafe fn column<Q: Ints, S: Scale, const MIN: bool>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    let group = set.dtype.block_len();
    for (first, step) in eights(set.n) {
        // SAFETY: the caller's promise.
        unsafe { put_eight(out, first, step, eight::<Q, S, MIN>(set, first, step, group, col)) }
    }
}

/// The products of one of [`eights`], a lane a row, in groups of `group` values.
///
/// # Safety
/// See [`column()`]; the set has these rows.
#[inline(always)]
unsafe fn eight<Q: Ints, S: Scale, const MIN: bool>(
    set: &RowSet,
    first: usize,
    step: usize,
    group: usize,
    col: &ColPtr,
) -> __m256 {
    let bytes = 4 * Q::BITS;
    let (row, scales, biases) = (set.row(first), set.scales(first), set.biases(first));
    let (near, far) = (Near::new(row, 8, set.bytes.q), Far::new(set, 8).address(first * set.bytes.q));
    let (n_groups, per_group) = (set.k / group, group / 32); // blocks
    let mut b = 0;
    // SAFETY: the caller's promise: groups and blocks lie inside every row and the column.
    unsafe {
        let rows = |p: *const u8, bytes: usize| array!(8, |r| p.wrapping_add(r * step * bytes));
        let mut acc = _mm256_setzero_ps();
        let mut groups = Groups::new();
        for start in (0..n_groups).step_by(8) {
            let n = (n_groups - start).min(8);
            // Addresses of the rows anew for every eight groups: sixteen that run along would do so in memory.
            let (d, m) = (opaque(scales.wrapping_add(start * S::BYTES)), opaque(biases.wrapping_add(start * S::BYTES)));
            groups.load::<S, MIN>(rows(d, set.bytes.scales), rows(m, set.bytes.biases), n);
            for g in 0..n {
                // The planes of the next eight rows, a line at a time: all lines at once hold up the stream of the integers.
                if g % (64 / (8 * S::BYTES)) == 0 {
                    for (plane, bytes) in [(scales, set.bytes.scales), (biases, set.bytes.biases)] {
                        prefetch(plane.wrapping_add(8 * (bytes + (start + g) * S::BYTES)), 64, Hint::Once);
                    }
                }
                let (d, m) = (groups.d[g], groups.m[g]);
                for _ in 0..per_group {
                    if Q::BITS == 8 {
                        prefetch(far.wrapping_add(8 * bytes * b), 8 * bytes, Hint::L2);
                    } else {
                        near.prefetch(8 * bytes * b, 8 * bytes);
                    }
                    let p = opaque(row.add(bytes * b));
                    let mut isum = Q::sums(&rows(p, set.bytes.q), &col.row, b);
                    let dx = _mm256_broadcast_ss(&*col.row.d.add(b));
                    let sum = _mm256_set1_epi32(*col.row.sums.cast::<i32>().add(b));
                    if Q::OFFSET != 0 {
                        isum = _mm256_sub_epi32(isum, _mm256_mullo_epi32(in_turn(sum), _mm256_set1_epi32(Q::OFFSET)));
                    }
                    acc = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), acc);
                    if MIN {
                        acc = _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(sum), acc);
                    }
                    b += 1;
                }
            }
        }
        acc
    }
}

/// Even and odd values of a block of activations from their wide form, in which four values stand as 0, 2, 1, 3.
///
/// # Safety
/// `wide` is readable for 32 values; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn split(wide: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (load256(wide), load256(wide.add(32))) };
    let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
    let even = _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, b));
    let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(a, b));
    [_mm256_permute4x64_epi64::<0xd8>(even), _mm256_permute4x64_epi64::<0xd8>(odd)]
}

/// # Safety
/// See [`UnpackFn`]; the set's integers are `Q`, its scales `S`, and it has biases where `MIN`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel<Q: Ints, S: Scale, const MIN: bool>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel) {
    let (bytes, group) = (4 * Q::BITS, set.dtype.block_len());
    prefetch_next_rows(set, chunk / 32 * bytes, blocks * bytes);
    for r in [0, 8] {
        let q: [*const u8; 8] = std::array::from_fn(|i| set.row(r + i));
        let skip = chunk / group * S::BYTES;
        let scales = std::array::from_fn(|i| set.scales(r + i).wrapping_add(skip));
        let biases = std::array::from_fn(|i| set.biases(r + i).wrapping_add(skip));
        // SAFETY: the rows have the blocks and their groups, the panel has pairs and scales for eight blocks.
        unsafe {
            let mut groups = Groups::new();
            groups.load::<S, MIN>(scales, biases, 32 * blocks / group);
            for b in 0..blocks {
                let p = q.map(|p| p.add((chunk / 32 + b) * bytes));
                for (i, w) in Q::words(&p).into_iter().enumerate() {
                    if Q::BITS < 8 {
                        _mm256_store_si256(word_at(panel, 8 * b + i, r), w);
                    } else {
                        let even = _mm256_and_si256(w, _mm256_set1_epi16(0xff));
                        _mm256_store_si256(at(panel, 16 * b + 2 * i, r), even);
                        _mm256_store_si256(at(panel, 16 * b + 2 * i + 1, r), _mm256_srli_epi16::<8>(w));
                    }
                }
                let g = 32 * b / group;
                _mm256_storeu_ps(panel.d[b].as_mut_ptr().add(r), groups.d[g]);
                if MIN {
                    _mm256_storeu_ps(panel.m[b].as_mut_ptr().add(r), groups.m[g]);
                }
            }
        }
    }
}

/// The function of a type among the instances of `$f`.
macro_rules! of_type {
    ($t:expr, $f:ident) => {
        match $t {
            WeightType::Affine(a) => {
                macro_rules! bits {
                    ($s:ident) => {
                        match a.bits() {
                            2 => $f::<Bits<2>, $s, true>,
                            3 => $f::<Bits<3>, $s, true>,
                            4 => $f::<Bits<4>, $s, true>,
                            5 => $f::<Bits<5>, $s, true>,
                            6 => $f::<Bits<6>, $s, true>,
                            _ => $f::<Bits<8>, $s, true>,
                        }
                    };
                }
                match a.scales() {
                    ScaleType::F16 => bits!(F16),
                    ScaleType::BF16 => bits!(BF16),
                    ScaleType::F32 => bits!(F32),
                }
            }
            _ => $f::<Fp4, E8m0, false>,
        }
    };
}

/// The unpacker of a type.
pub(super) fn unpack(t: WeightType) -> UnpackFn {
    of_type!(t, panel)
}

/// The kernels of one instruction set: the same source, compiled with its features.
macro_rules! kernels {
    ($one:ident, $column:ident, $features:literal) => {
        /// The one-column kernel of a type.
        pub(super) fn $one(t: WeightType) -> OneFn {
            of_type!(t, $column)
        }

        /// # Safety
        /// See [`column()`].
        #[target_feature(enable = $features)]
        unsafe fn $column<Q: Ints, S: Scale, const MIN: bool>(
            set: &RowSet,
            _acts: &ActsShared,
            col: &ColPtr,
            out: &mut [f32; ROWS],
        ) {
            // SAFETY: the caller's promise.
            unsafe { column::<Q, S, MIN>(set, col, out) }
        }
    };
}

kernels!(one, column_avx2, "avx2,fma,f16c");
kernels!(one_avx512, column_avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");
