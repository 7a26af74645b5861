//! The types with code books, for every instruction set: where their entries, signs and sub-scales are.
//! [`quant::types::grid`] draws the layouts.
//!
//! Entries are eight bytes, looked up in memory by general registers; vectors only put the signs in. Signs are looked
//! up too: eight bytes for the eight bits of a byte.

use quant::types::grid::{self, signs};

/// Eight bytes for each byte: 255 where it has a bit, the first for the lowest.
static SIGNS: [u64; 256] = {
    let mut of = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut i = 0;
        while i < 8 {
            of[byte] |= if byte >> i & 1 == 1 { 0xff << (8 * i) } else { 0 };
            i += 1;
        }
        byte += 1;
    }
    of
};

/// The same for seven bits, and the eighth that makes them even.
static EVEN_SIGNS: [u64; 128] = {
    let mut of = [0; 128];
    let mut seven = 0;
    while seven < 128 {
        of[seven] = SIGNS[signs(seven as u8) as usize];
        seven += 1;
    }
    of
};

const ONES: u64 = 0x0101_0101_0101_0101;

/// A type with a code book, of super-blocks without minimums.
///
/// # Safety
/// Of every method: `p` points to a readable block.
pub(super) trait Coded {
    /// Bytes of a block.
    const BYTES: usize;
    /// Byte of the f16 scale.
    const D: usize;
    /// What the scale is multiplied with ([`quant::WeightType::factor`]).
    const FACTOR: f32;
    /// The second part of [`Coded::parts`] is added to the first; else it is a mask of those that are negative.
    const ADDS: bool = false;
    /// Offset that makes the integers positive, for products of unsigned bytes: 16 or 64.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const OFFSET: i16;
    /// The integers of 32-group `j` in two parts, eight bytes a word.
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2];
    /// The sub-scales of the 16-groups.
    unsafe fn scales(p: *const u8) -> [u64; 2];
    /// The bits of the f16 scale.
    #[inline(always)]
    unsafe fn d(p: *const u8) -> u16 {
        // SAFETY: the promise of the trait.
        unsafe { word16(p, Self::D) }
    }
}

pub(super) struct Iq2Xxs;
pub(super) struct Iq2Xs;
pub(super) struct Iq2S;
pub(super) struct Iq3Xxs;
pub(super) struct Iq3S;
pub(super) struct Iq1S;
pub(super) struct Iq1M;

/// # Safety
/// The byte is readable.
#[inline(always)]
unsafe fn byte(p: *const u8, at: usize) -> usize {
    // SAFETY: the caller's promise.
    usize::from(unsafe { p.add(at).read() })
}

/// # Safety
/// The bytes are readable.
#[inline(always)]
unsafe fn word16(p: *const u8, at: usize) -> u16 {
    // SAFETY: the caller's promise.
    unsafe { p.add(at).cast::<u16>().read_unaligned() }
}

/// # Safety
/// The bytes are readable.
#[inline(always)]
unsafe fn word32(p: *const u8, at: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { p.add(at).cast::<u32>().read_unaligned() }
}

/// # Safety
/// The bytes are readable.
#[inline(always)]
unsafe fn word64(p: *const u8, at: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { p.add(at).cast::<u64>().read_unaligned() }
}

#[inline(always)]
fn eight(entry: &[i8; 8]) -> u64 {
    u64::from_le_bytes(entry.map(i8::cast_unsigned))
}

#[inline(always)]
fn two(a: &[i8; 4], b: &[i8; 4]) -> u64 {
    let four = |entry: &[i8; 4]| u64::from(u32::from_le_bytes(entry.map(i8::cast_unsigned)));
    four(a) | four(b) << 32
}

/// `2·s + 1` of eight numbers.
#[inline(always)]
fn odd(s: u64) -> u64 {
    2 * s + ONES
}

/// Eight numbers of four bits, the low half of a byte first, from the eight that `s` holds; then the other eight.
#[inline(always)]
fn nibbles(s: u64) -> [u64; 2] {
    let spread = |s: u64| {
        let s = (s | s << 16) & 0x0000_ffff_0000_ffff;
        let s = (s | s << 8) & 0x00ff_00ff_00ff_00ff;
        (s | s << 4) & 0x0f0f_0f0f_0f0f_0f0f
    };
    [spread(s & 0xffff_ffff), spread(s >> 32)]
}

/// Four numbers in the low four bytes, each twice.
#[inline(always)]
fn twice(s: u64) -> u64 {
    let s = (s | s << 16) & 0x0000_ffff_0000_ffff;
    ((s | s << 8) & 0x00ff_00ff_00ff_00ff) * 0x101
}

impl Coded for Iq2Xxs {
    const BYTES: usize = 66;
    const D: usize = 0;
    const FACTOR: f32 = 0.125;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let (entries, bits) = unsafe { (word32(p, 2 + 8 * j).to_le_bytes(), word32(p, 6 + 8 * j)) };
        [
            array!(4, |k| eight(&grid::IQ2_XXS[usize::from(entries[k])])),
            array!(4, |k| EVEN_SIGNS[(bits >> (7 * k)) as usize & 127]),
        ]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let s = |j: usize| unsafe { byte(p, 9 + 8 * j) as u64 >> 4 };
        array!(2, |h| odd(twice(s(4 * h) | s(4 * h + 1) << 8 | s(4 * h + 2) << 16 | s(4 * h + 3) << 24)))
    }
}

impl Coded for Iq2Xs {
    const BYTES: usize = 74;
    const D: usize = 0;
    const FACTOR: f32 = 0.125;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let bits = unsafe { word64(p, 2 + 8 * j) };
        [
            array!(4, |k| eight(&grid::IQ2_XS[(bits >> (16 * k)) as usize & 511])),
            array!(4, |k| EVEN_SIGNS[(bits >> (16 * k + 9)) as usize & 127]),
        ]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        nibbles(unsafe { word64(p, 66) }).map(odd)
    }
}

impl Coded for Iq2S {
    const BYTES: usize = 82;
    const D: usize = 0;
    const FACTOR: f32 = 0.125;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let (low, high, minus) = unsafe { (word32(p, 2 + 4 * j), byte(p, 66 + j), word32(p, 34 + 4 * j)) };
        let (low, minus) = (low.to_le_bytes(), minus.to_le_bytes());
        [
            array!(4, |k| eight(&grid::IQ2_S[(high >> (2 * k) & 3) << 8 | usize::from(low[k])])),
            array!(4, |k| SIGNS[usize::from(minus[k])]),
        ]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        nibbles(unsafe { word64(p, 74) }).map(odd)
    }
}

impl Coded for Iq3Xxs {
    const BYTES: usize = 98;
    const D: usize = 0;
    const FACTOR: f32 = 0.25;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let (entries, bits) = unsafe { (word64(p, 2 + 8 * j).to_le_bytes(), word32(p, 66 + 4 * j)) };
        let entry = |k: usize| &grid::IQ3_XXS[usize::from(entries[k])];
        [
            array!(4, |k| two(entry(2 * k), entry(2 * k + 1))),
            array!(4, |k| EVEN_SIGNS[(bits >> (7 * k)) as usize & 127]),
        ]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let s = |j: usize| unsafe { byte(p, 69 + 4 * j) as u64 >> 4 };
        array!(2, |h| odd(twice(s(4 * h) | s(4 * h + 1) << 8 | s(4 * h + 2) << 16 | s(4 * h + 3) << 24)))
    }
}

impl Coded for Iq3S {
    const BYTES: usize = 110;
    const D: usize = 0;
    const FACTOR: f32 = 1.0;
    const OFFSET: i16 = 16;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let (low, high, minus) = unsafe { (word64(p, 2 + 8 * j), byte(p, 66 + j), word32(p, 74 + 4 * j)) };
        let (low, minus) = (low.to_le_bytes(), minus.to_le_bytes());
        let entry = |k: usize| &grid::IQ3_S[(high >> k & 1) << 8 | usize::from(low[k])];
        [array!(4, |k| two(entry(2 * k), entry(2 * k + 1))), array!(4, |k| SIGNS[usize::from(minus[k])])]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let [s, _] = nibbles(u64::from(unsafe { word32(p, 106) }));
        [odd(twice(s & 0xffff_ffff)), odd(twice(s >> 32))]
    }
}

impl Coded for Iq1S {
    const BYTES: usize = 50;
    const D: usize = 0;
    const FACTOR: f32 = 0.125;
    const ADDS: bool = true;
    const OFFSET: i16 = 16;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let (low, high) = unsafe { (word32(p, 2 + 4 * j).to_le_bytes(), usize::from(word16(p, 34 + 2 * j))) };
        let offset = if high >> 15 == 1 { u64::MAX } else { ONES };
        [array!(4, |k| eight(&grid::IQ1[(high >> (3 * k) & 7) << 8 | usize::from(low[k])])), [offset; 4]]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let s = |j: usize| unsafe { byte(p, 35 + 2 * j) as u64 >> 4 & 7 };
        array!(2, |h| odd(twice(s(4 * h) | s(4 * h + 1) << 8 | s(4 * h + 2) << 16 | s(4 * h + 3) << 24)))
    }
}

impl Coded for Iq1M {
    const BYTES: usize = 56;
    /// Its bits lie in four places.
    const D: usize = 48;
    const FACTOR: f32 = 0.125;
    const ADDS: bool = true;
    const OFFSET: i16 = 16;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> [[u64; 4]; 2] {
        // SAFETY: the promise of the trait.
        let (low, high) = unsafe { (word32(p, 4 * j).to_le_bytes(), usize::from(word16(p, 32 + 2 * j))) };
        [
            array!(4, |k| eight(&grid::IQ1[(high >> (4 * k) & 7) << 8 | usize::from(low[k])])),
            array!(4, |k| if high >> (4 * k + 3) & 1 == 1 { u64::MAX } else { ONES }),
        ]
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let bits = unsafe { word64(p, 48) };
        let four = |w: u64| w & 7 | (w & 0o70) << 5 | (w & 0o700) << 10 | (w & 0o7000) << 15;
        let eight = |bits: u64| four(bits & 0xfff) | four(bits >> 16 & 0xfff) << 32;
        [odd(eight(bits)), odd(eight(bits >> 32))]
    }
    #[inline(always)]
    unsafe fn d(p: *const u8) -> u16 {
        // SAFETY: the promise of the trait.
        let bits = unsafe { word64(p, Self::D) };
        array!(4, |i| (bits >> (16 * i + 12)) as u16 & 15).into_iter().rev().fold(0, |d, part| d << 4 | part)
    }
}
