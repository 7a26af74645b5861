//! The types with code books, for every instruction set: where their entries, signs and sub-scales are.
//! [`quant::types::grid`] draws the layouts.
//!
//! Entries are eight bytes, looked up in memory by general registers; vectors put the signs in, from a bit for each.

use quant::types::grid;
use quant::types::layout::{self, SuperBlock};

const ONES: u64 = 0x0101_0101_0101_0101;

/// A type with a code book, of super-blocks without minimums.
///
/// # Safety
/// Of every method: `p` points to a readable block.
pub(super) trait Coded {
    /// Where a block has its parts.
    const LAYOUT: SuperBlock;
    /// What the scale is multiplied with ([`quant::WeightType::factor`]).
    const FACTOR: f32;
    /// The bits say where 1 is taken off, and elsewhere it is added; else they say which integers are negative.
    const ADDS: bool = false;
    /// Offset that makes the integers positive, for products of unsigned bytes: 16 or 64.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const OFFSET: i16;
    /// The entries of 32-group `j`, eight bytes a word, and a bit for each.
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32);
    /// The sub-scales of the 16-groups.
    unsafe fn scales(p: *const u8) -> [u64; 2];
    /// The bits of the f16 scale.
    #[inline(always)]
    unsafe fn d(p: *const u8) -> u16 {
        // SAFETY: the promise of the trait.
        unsafe { word16(p, Self::LAYOUT.d) }
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

/// Entries as words.
macro_rules! words {
    ($($name:ident: $word:ident, $n:literal;)*) => {
        $(static $name: [$word; $n] = {
            let mut words = [0; $n];
            let mut i = 0;
            while i < $n {
                let mut k = 0;
                while k < grid::$name[i].len() {
                    words[i] |= (grid::$name[i][k] as u8 as $word) << (8 * k);
                    k += 1;
                }
                i += 1;
            }
            words
        };)*
    };
}

words! {
    IQ2_XXS: u64, 256;
    IQ2_XS: u64, 512;
    IQ2_S: u64, 1024;
    IQ1: u64, 2048;
    IQ3_XXS: u32, 256;
    IQ3_S: u32, 512;
}

#[inline(always)]
fn two(a: u32, b: u32) -> u64 {
    u64::from(a) | u64::from(b) << 32
}

/// Four times eight signs of four times seven ([`grid::signs`]), those in the low 28 bits.
#[inline(always)]
fn even_signs(bits: u32) -> u32 {
    let sevens = bits & 0x7f | (bits & 0x3f80) << 1 | (bits & 0x1f_c000) << 2 | (bits & 0xfe0_0000) << 3;
    let odd = sevens ^ sevens >> 4;
    let odd = odd ^ odd >> 2;
    sevens | ((odd ^ odd >> 1) & 0x0101_0101) << 7
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

/// The sub-scales of 16-groups from the numbers `s` of the 32-groups.
#[inline(always)]
fn of_groups(s: impl Fn(usize) -> u64) -> [u64; 2] {
    array!(2, |h| odd(twice(s(4 * h) | s(4 * h + 1) << 8 | s(4 * h + 2) << 16 | s(4 * h + 3) << 24)))
}

impl Coded for Iq2Xxs {
    const LAYOUT: SuperBlock = layout::IQ2_XXS;
    const FACTOR: f32 = 0.125;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let (entries, bits) = unsafe { (word32(p, 2 + 8 * j).to_le_bytes(), word32(p, 6 + 8 * j)) };
        (array!(4, |k| IQ2_XXS[usize::from(entries[k])]), even_signs(bits))
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let s = |j: usize| unsafe { byte(p, 9 + 8 * j) as u64 >> 4 };
        of_groups(s)
    }
}

impl Coded for Iq2Xs {
    const LAYOUT: SuperBlock = layout::IQ2_XS;
    const FACTOR: f32 = 0.125;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let bits = unsafe { word64(p, 2 + 8 * j) };
        let seven = |k: usize| (bits >> (16 * k + 9)) as u32 & 0x7f;
        let sevens = seven(0) | seven(1) << 7 | seven(2) << 14 | seven(3) << 21;
        (array!(4, |k| IQ2_XS[(bits >> (16 * k)) as usize & 511]), even_signs(sevens))
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        nibbles(unsafe { word64(p, 66) }).map(odd)
    }
}

impl Coded for Iq2S {
    const LAYOUT: SuperBlock = layout::IQ2_S;
    const FACTOR: f32 = 0.125;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let (low, high, minus) = unsafe { (word32(p, 2 + 4 * j), byte(p, 66 + j), word32(p, 34 + 4 * j)) };
        let low = low.to_le_bytes();
        (array!(4, |k| IQ2_S[(high >> (2 * k) & 3) << 8 | usize::from(low[k])]), minus)
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        nibbles(unsafe { word64(p, 74) }).map(odd)
    }
}

impl Coded for Iq3Xxs {
    const LAYOUT: SuperBlock = layout::IQ3_XXS;
    const FACTOR: f32 = 0.25;
    const OFFSET: i16 = 64;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let (entries, bits) = unsafe { (word64(p, 2 + 8 * j).to_le_bytes(), word32(p, 66 + 4 * j)) };
        let entry = |k: usize| IQ3_XXS[usize::from(entries[k])];
        (array!(4, |k| two(entry(2 * k), entry(2 * k + 1))), even_signs(bits))
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let s = |j: usize| unsafe { byte(p, 69 + 4 * j) as u64 >> 4 };
        of_groups(s)
    }
}

impl Coded for Iq3S {
    const LAYOUT: SuperBlock = layout::IQ3_S;
    const FACTOR: f32 = 1.0;
    const OFFSET: i16 = 16;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let (low, high, minus) = unsafe { (word64(p, 2 + 8 * j), byte(p, 66 + j), word32(p, 74 + 4 * j)) };
        let low = low.to_le_bytes();
        let entry = |k: usize| IQ3_S[(high >> k & 1) << 8 | usize::from(low[k])];
        (array!(4, |k| two(entry(2 * k), entry(2 * k + 1))), minus)
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let [s, _] = nibbles(u64::from(unsafe { word32(p, 106) }));
        [odd(twice(s & 0xffff_ffff)), odd(twice(s >> 32))]
    }
}

impl Coded for Iq1S {
    const LAYOUT: SuperBlock = layout::IQ1_S;
    const FACTOR: f32 = 0.125;
    const ADDS: bool = true;
    const OFFSET: i16 = 16;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let (low, high) = unsafe { (word32(p, 2 + 4 * j).to_le_bytes(), usize::from(word16(p, 34 + 2 * j))) };
        let minus = if high >> 15 == 1 { u32::MAX } else { 0 };
        (array!(4, |k| IQ1[(high >> (3 * k) & 7) << 8 | usize::from(low[k])]), minus)
    }
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [u64; 2] {
        // SAFETY: the promise of the trait.
        let s = |j: usize| unsafe { byte(p, 35 + 2 * j) as u64 >> 4 & 7 };
        of_groups(s)
    }
}

impl Coded for Iq1M {
    const LAYOUT: SuperBlock = layout::IQ1_M;
    const FACTOR: f32 = 0.125;
    const ADDS: bool = true;
    const OFFSET: i16 = 16;
    #[inline(always)]
    unsafe fn parts(p: *const u8, j: usize) -> ([u64; 4], u32) {
        // SAFETY: the promise of the trait.
        let (low, high) = unsafe { (word32(p, 4 * j).to_le_bytes(), usize::from(word16(p, 32 + 2 * j))) };
        // One bit for eight integers, eight bits.
        let minus = high >> 3 & 1 | high << 1 & 0x100 | high << 5 & 0x1_0000 | high << 9 & 0x100_0000;
        (array!(4, |k| IQ1[(high >> (4 * k) & 7) << 8 | usize::from(low[k])]), minus as u32 * 0xff)
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
        let bits = unsafe { word64(p, Self::LAYOUT.d) };
        array!(4, |i| (bits >> (16 * i + 12)) as u16 & 15).into_iter().rev().fold(0, |d, part| d << 4 | part)
    }
}
