//! Types of the numbers in a key-value cache: floats, or blocks of 32 along a head ([`encode_block`]).

use std::fmt;
use std::str::FromStr;

use half::f16;
use model::plan::{CacheDecl, Plan};
use quant::WeightType;

use crate::CompileError;

/// Numbers in a block.
pub const BLOCK: usize = 32;

/// Bytes of a block: its scale, then its integers.
pub const BLOCK_BYTES: usize = 34;

/// A block of [`KvType::Q8_0`]: its scale in f16, the 127th of the largest magnitude, and integers of at most 127. Ties
/// go to the even integer; a NaN makes all numbers of the block NaN. Backends that keep such blocks have these bits.
pub fn encode_block(x: &[f32; BLOCK]) -> [u8; BLOCK_BYTES] {
    /// Added and subtracted, it leaves a number of at most 2^22 rounded.
    const ROUND: f32 = 12_582_912.0;
    // As integers NaN is the largest.
    let most = x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    let d = f32::from_bits(most) / 127.0;
    let d = f16::from_f32(if d > 65504.0 { 65504.0 } else { d });
    let by = if d == f16::ZERO { 0.0 } else { 1.0 / d.to_f32() };
    let mut block = [0; BLOCK_BYTES];
    let (scale, q) = block.split_at_mut(2);
    scale.copy_from_slice(&d.to_le_bytes());
    q.iter_mut().zip(x).for_each(|(q, x)| *q = (((x * by).clamp(-127.0, 127.0) + ROUND) - ROUND) as i8 as u8);
    block
}

/// Type of the keys or of the values of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Half precision: half the memory, 3 digits. Numbers past its range become its largest.
    #[default]
    F16,
    /// Single precision.
    F32,
    /// Blocks of 32 bytes with an f16 scale ([`encode_block`]).
    Q8_0,
}

impl KvType {
    /// All of them.
    pub const ALL: [KvType; 3] = [KvType::F16, KvType::F32, KvType::Q8_0];

    /// Name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::Q8_0 => "q8_0",
        }
    }

    /// The weight type of its blocks; `None` for floats.
    pub fn block(self) -> Option<WeightType> {
        match self {
            KvType::F16 | KvType::F32 => None,
            KvType::Q8_0 => Some(WeightType::Q8_0),
        }
    }

    /// Whether a head of `width` numbers can be kept in it.
    pub fn fits(self, width: usize) -> bool {
        self.block().is_none() || width.is_multiple_of(BLOCK)
    }

    /// Bytes of a head of `width` numbers, the last block whole; none when the number does not exist.
    pub fn bytes(self, width: usize) -> Option<usize> {
        match (self, self.block()) {
            (KvType::F32, _) => width.checked_mul(4),
            (_, Some(block)) => width.div_ceil(BLOCK).checked_mul(block.block_bytes()),
            (_, None) => width.checked_mul(2),
        }
    }

    /// Rounds the numbers of a head as writing them to a cache does.
    ///
    /// # Panics
    /// When the head does not fit.
    pub fn round(self, head: &mut [f32]) {
        let Some(block) = self.block() else {
            if self == KvType::F16 {
                head.iter_mut().for_each(|x| *x = f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32());
            }
            return;
        };
        let (blocks, rest) = head.as_chunks_mut();
        assert!(rest.is_empty(), "a head of no whole blocks");
        blocks.iter_mut().for_each(|x| quant::decode_row(block, &encode_block(x)[..], x));
    }
}

/// Types of a cache's keys and values. A cache whose values are a part of its keys has one type for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheType {
    /// Of keys.
    pub k: KvType,
    /// Of values.
    pub v: KvType,
}

impl CacheType {
    /// Both in half precision.
    pub const F16: CacheType = CacheType::of(KvType::F16);
    /// Both in single precision.
    pub const F32: CacheType = CacheType::of(KvType::F32);
    /// Both in blocks of 8 bits.
    pub const Q8_0: CacheType = CacheType::of(KvType::Q8_0);

    /// One type for both.
    pub const fn of(t: KvType) -> CacheType {
        CacheType { k: t, v: t }
    }

    /// Whether it has blocks.
    pub fn has_blocks(self) -> bool {
        self.k.block().is_some() || self.v.block().is_some()
    }

    /// Why a plan's caches cannot be kept in these types; `None` where they can.
    pub fn misfit(self, plan: &Plan) -> Option<String> {
        plan.caches.iter().find_map(|decl| self.misfit_of(decl))
    }

    fn misfit_of(self, decl: &CacheDecl) -> Option<String> {
        if decl.v_in_k && self.k != self.v {
            return Some(format!(
                "keep keys in {} and values in {}: in this model's cache values are a part of the keys, which takes \
                 one type for both",
                self.k.name(),
                self.v.name()
            ));
        }
        let heads = [("keys", self.k, decl.d_k), ("values", self.v, decl.d_v)];
        let (what, t, width) = heads.into_iter().find(|(_, t, width)| !t.fits(*width))?;
        Some(format!(
            "keep {what} of {width} numbers a head in {}, whose blocks have {BLOCK} numbers: f16 and f32 keep any",
            t.name()
        ))
    }

    /// Checks that a backend can keep a plan's caches in these types, which may be blocks.
    ///
    /// # Errors
    /// [`CompileError::Unsupported`] names the first cache that cannot.
    pub fn check(self, backend: &'static str, plan: &Plan) -> Result<(), CompileError> {
        self.misfit(plan).map_or(Ok(()), |what| Err(CompileError::Unsupported { backend, what }))
    }

    /// Whether elements are f16 in a backend that has f16 and f32 alone, the same for keys and values.
    ///
    /// # Errors
    /// [`CompileError::Unsupported`] for other types.
    pub fn is_f16(self, backend: &'static str) -> Result<bool, CompileError> {
        match self {
            CacheType::F16 => Ok(true),
            CacheType::F32 => Ok(false),
            other => Err(CompileError::Unsupported {
                backend,
                what: format!("keep a cache of type {other}: it supports f16 and f32"),
            }),
        }
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.k == self.v {
            true => f.write_str(self.k.name()),
            false => write!(f, "k={},v={}", self.k.name(), self.v.name()),
        }
    }
}

impl FromStr for KvType {
    type Err = String;

    fn from_str(s: &str) -> Result<KvType, String> {
        let names = || KvType::ALL.map(KvType::name).join(", ");
        KvType::ALL.into_iter().find(|t| t.name() == s).ok_or_else(|| format!("{s:?} is no type: use {}", names()))
    }
}

/// `f16` for both, or `k=q8_0,v=f16`; what is left out is f16.
impl FromStr for CacheType {
    type Err = String;

    fn from_str(s: &str) -> Result<CacheType, String> {
        if !s.contains('=') {
            return s.parse().map(CacheType::of);
        }
        let [mut k, mut v] = [None; 2];
        for part in s.split(',') {
            let (half, t) = match part.split_once('=') {
                Some(("k", t)) => (&mut k, t),
                Some(("v", t)) => (&mut v, t),
                _ => return Err(format!("{part:?} is neither k=TYPE nor v=TYPE")),
            };
            if half.replace(t.parse()?).is_some() {
                return Err(format!("{part:?} is given twice"));
            }
        }
        Ok(CacheType { k: k.unwrap_or_default(), v: v.unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for k in KvType::ALL {
            for v in KvType::ALL {
                let both = CacheType { k, v };
                assert_eq!(both.to_string().parse(), Ok(both));
            }
        }
        let halves = |k, v| Ok(CacheType { k, v });
        assert_eq!("v=q8_0".parse(), halves(KvType::F16, KvType::Q8_0));
        assert_eq!("v=f32,k=q8_0".parse(), halves(KvType::Q8_0, KvType::F32));
        for (bad, part) in [
            ("", "is no type: use f16"),
            ("q9", "\"q9\" is no type"),
            ("k=q8_0,v=", "\"\" is no type"),
            ("k=f16,k=f32", "twice"),
            ("k=f16,f32", "neither"),
            ("q=f16", "neither"),
        ] {
            assert!(bad.parse::<CacheType>().is_err_and(|why| why.contains(part)), "{bad}");
        }
    }

    #[test]
    fn heads_that_are_no_whole_blocks_are_refused() {
        let decl = |d_k, d_v, v_in_k| CacheDecl { n_kv: 1, d_k, d_v, v_in_k, window: None };
        let halves = CacheType { k: KvType::Q8_0, v: KvType::F16 };
        for (cache, decl, part) in [
            (CacheType::Q8_0, decl(80, 64, false), Some("keys of 80 numbers")),
            (CacheType::Q8_0, decl(64, 24, false), Some("values of 24 numbers")),
            (CacheType::Q8_0, decl(64, 96, false), None),
            (CacheType::Q8_0, decl(576, 512, true), None),
            (halves, decl(64, 24, false), None),
            (halves, decl(576, 512, true), Some("one type for both")),
            (CacheType::F16, decl(5, 7, false), None),
        ] {
            let found = cache.misfit_of(&decl);
            assert_eq!(found.is_some(), part.is_some(), "{cache} {decl:?}");
            assert!(found.is_none_or(|why| why.contains(part.unwrap_or_default())), "{cache} {decl:?}");
        }
    }

    #[test]
    fn rounding_stays_within_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let mut rounded = x.clone();
        KvType::Q8_0.round(&mut rounded);
        assert!(x.iter().zip(&rounded).all(|(a, b)| (a - b).abs() < 3.0 / 250.0) && x != rounded);
        let mut large = [1e6, -1e6, 1.0 + 1e-5];
        KvType::F16.round(&mut large);
        assert_eq!(large, [65504.0, -65504.0, 1.0]);
        assert_eq!(
            (KvType::Q8_0.bytes(64), KvType::F16.bytes(64), KvType::F32.bytes(64)),
            (Some(68), Some(128), Some(256))
        );
    }
}
