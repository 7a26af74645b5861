//! Activation quantisers; the rule is in [`quant::act`], operation by operation.

use std::arch::x86_64::*;

use quant::act::empty_scale;

use super::super::acts::RowPtr;

/// Magnitudes as integers, whose maximum also sees NaN and inf.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn magnitude(x: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fff_ffff))
}

/// The maximum of eight integers, read as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn largest(x: __m256i) -> f32 {
    let m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0x4e>(m));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0xb1>(m));
    f32::from_bits(_mm_cvtsi128_si32(m) as u32)
}

/// # Safety
/// `x` is readable for 32 values.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load32(x: *const f32) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe { array!(4, |i| _mm256_loadu_ps(x.add(8 * i))) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn amax32(x: &[__m256; 4]) -> __m256i {
    let m = array!(4, |i| magnitude(x[i]));
    _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]))
}

/// `clamp(rte(x · inv), -limit, limit)` as i32. Conversion rounds to nearest even; a finite product exceeds the limit
/// by rounding only, so that it never overflows.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn round(x: __m256, inv: __m256, limit: i32) -> __m256i {
    let q = _mm256_cvtps_epi32(_mm256_mul_ps(x, inv));
    _mm256_max_epi32(_mm256_min_epi32(q, _mm256_set1_epi32(limit)), _mm256_set1_epi32(-limit))
}

/// Order 0, 2, 1, 3 in every group of four i16.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn wide_order(x: __m256i) -> __m256i {
    let order = _mm256_setr_epi8(
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
    );
    _mm256_shuffle_epi8(x, order)
}

/// Two vectors of i32 to one of i16, in order.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn narrow(a: __m256i, b: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi32(a, b))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn hsum(x: __m256i) -> i32 {
    let s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
    let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0x4e>(s));
    _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32::<0xb1>(s)))
}

/// Quantises to 32-blocks and writes the wide form.
///
/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn block32(x: &[f32], row: &RowPtr) {
    for b in 0..x.len() / 32 {
        // SAFETY: the row has sections for x.len() values, of which this is block b.
        unsafe {
            let v = load32(x.as_ptr().add(32 * b));
            let amax = largest(amax32(&v));
            let (q, wide) = (row.q.add(64 * b).cast::<__m256i>(), row.wide.add(32 * b).cast::<__m256i>());
            let (d, sum) = (row.d.add(b), row.sums.cast::<i32>().add(b));
            if let Some(scale) = empty_scale(amax) {
                (*d, *sum) = (scale, 0);
                for p in [q, q.add(1), wide, wide.add(1)] {
                    _mm256_storeu_si256(p, _mm256_setzero_si256());
                }
                continue;
            }
            let inv = _mm256_set1_ps(32767.0 / amax);
            let r = array!(4, |i| round(v[i], inv, 32767));
            *d = amax / 32767.0;
            *sum = hsum(_mm256_add_epi32(_mm256_add_epi32(r[0], r[1]), _mm256_add_epi32(r[2], r[3])));
            let (a, b) = (narrow(r[0], r[1]), narrow(r[2], r[3]));
            _mm256_storeu_si256(q, a);
            _mm256_storeu_si256(q.add(1), b);
            put_wide(wide.cast(), a, b);
        }
    }
}

/// The two sums of every 16-group: over values 0 and 1 of every four, and over 2 and 3. Every word of a half has them.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn pairs(bytes: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    let pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32::<0x4e>(pairs));
    _mm256_add_epi16(pairs, _mm256_shuffle_epi32::<0xb1>(pairs))
}

/// Writes the starts of two 16-groups: [`pairs`] times `-2^LOG`.
///
/// # Safety
/// There is room for four.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn put_starts<const LOG: i32>(to: *mut i16, pairs: __m256i) {
    let starts = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<LOG>(pairs));
    let to = to.cast::<i32>();
    // SAFETY: the caller's promise.
    unsafe {
        to.write_unaligned(_mm256_extract_epi32::<0>(starts));
        to.add(1).write_unaligned(_mm256_extract_epi32::<4>(starts));
    }
}

/// Writes the wide form of 32 values.
///
/// # Safety
/// There is room for them.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn put_wide(to: *mut i16, a: __m256i, b: __m256i) {
    // SAFETY: the caller's promise.
    unsafe {
        _mm256_storeu_si256(to.cast(), wide_order(a));
        _mm256_storeu_si256(to.add(16).cast(), wide_order(b));
    }
}

/// Quantises to 32-blocks of bytes and writes the starts and the wide form.
///
/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn byte32(x: &[f32], row: &RowPtr) {
    for b in 0..x.len() / 32 {
        // SAFETY: the row has sections for x.len() values, of which this is block b.
        unsafe {
            let v = load32(x.as_ptr().add(32 * b));
            let amax = largest(amax32(&v));
            let (q, start, wide) = (row.q.add(32 * b).cast::<__m256i>(), row.start.add(4 * b), row.wide.add(32 * b));
            let (d, sum) = (row.d.add(b), row.sums.cast::<i32>().add(b));
            if let Some(scale) = empty_scale(amax) {
                (*d, *sum) = (scale, 0);
                _mm256_storeu_si256(q, _mm256_setzero_si256());
                start.write_bytes(0, 4);
                wide.write_bytes(0, 32);
                continue;
            }
            let inv = _mm256_set1_ps(127.0 / amax);
            let r = array!(4, |i| round(v[i], inv, 127));
            *d = amax / 127.0;
            let (a, b) = (narrow(r[0], r[1]), narrow(r[2], r[3]));
            *sum = hsum(_mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1)));
            let bytes = _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi16(a, b));
            _mm256_storeu_si256(q, bytes);
            put_starts::<4>(start, pairs(bytes));
            put_wide(wide, a, b);
        }
    }
}

/// Quantises to 256-blocks and writes the starts and the wide form.
///
/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn block256(x: &[f32], row: &RowPtr) {
    for b in 0..x.len() / 256 {
        // SAFETY: the row has sections for x.len() values, of which this is super-block b.
        unsafe {
            let x = x.as_ptr().add(256 * b);
            let groups = array!(8, |j| amax32(&load32(x.add(32 * j))));
            let mut all = groups[0];
            for group in groups {
                all = _mm256_max_epi32(all, group);
            }
            let amax = largest(all);
            let (q, start, wide) = (row.q.add(256 * b), row.start.add(32 * b), row.wide.add(256 * b));
            let (u, d, sums) = (row.u.add(8 * b), row.d.add(b), row.sums.cast::<i16>().add(16 * b));
            if let Some(scale) = empty_scale(amax) {
                *d = scale;
                q.write_bytes(0, 256);
                start.write_bytes(0, 32);
                wide.write_bytes(0, 256);
                sums.write_bytes(0, 16);
                u.write_bytes(1, 8);
                continue;
            }
            let scale = amax / 1905.0;
            let ratio = 15.0 / amax;
            *d = scale;
            for j in 0..8 {
                let uj = (largest(groups[j]) * ratio).ceil().clamp(1.0, 15.0);
                let inv = _mm256_set1_ps(1.0 / (scale * uj));
                *u.add(j) = uj as u8;
                let v = load32(x.add(32 * j));
                let r = array!(4, |i| round(v[i], inv, 127));
                let (a, b) = (narrow(r[0], r[1]), narrow(r[2], r[3]));
                let bytes = _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi16(a, b));
                _mm256_storeu_si256(q.add(32 * j).cast(), bytes);
                let pairs = pairs(bytes);
                let both = _mm256_madd_epi16(pairs, _mm256_set1_epi16(uj as i16));
                *sums.add(2 * j) = _mm256_extract_epi32::<0>(both) as i16;
                *sums.add(2 * j + 1) = _mm256_extract_epi32::<4>(both) as i16;
                put_starts::<5>(start.add(4 * j), pairs);
                let u = _mm256_set1_epi16(uj as i16);
                put_wide(wide.add(32 * j), _mm256_mullo_epi16(a, u), _mm256_mullo_epi16(b, u));
            }
        }
    }
}
