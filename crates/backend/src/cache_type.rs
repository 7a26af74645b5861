//! Types of the numbers in a key-value cache: floats, or blocks of 32 along a head ([`encode_block`]). Heads are
//! rotated before they become blocks of 4 bits ([`rotate`]).

use std::fmt;
use std::str::FromStr;

use half::f16;
use model::plan::{CacheDecl, Plan};
use quant::WeightType;

use crate::CompileError;

/// Numbers in a block.
pub const BLOCK: usize = 32;

/// Maximum of bytes of a block: its scale, then its integers.
const BLOCK_BYTES: usize = 34;

/// Maximum of numbers that are rotated together.
pub const MAX_ROTATION: usize = 256;

/// Room for a block of any type.
pub type BlockRoom = [u8; BLOCK_BYTES];

/// A block of type `t`, written to `room`: its scale in f16, then its integers, as GGUF stores them. Backends that keep
/// such blocks have these bits; a NaN makes all numbers of the block NaN.
///
/// - [`KvType::Q8_0`]: the scale is the 127th of the largest magnitude; integers of at most 127, ties to the even one.
/// - [`KvType::Q4_0`]: the scale takes the number of the largest magnitude to -8; integers from -8 to 7, stored as 0 to
///   15, number `i` in the low half and number `i + 16` in the high half of byte `i`; ties go up.
///
/// # Panics
/// When the type has no blocks.
pub fn encode_block<'a>(t: KvType, x: &[f32; BLOCK], room: &'a mut BlockRoom) -> &'a [u8] {
    /// Added and subtracted, it leaves a number of at most 2^22 rounded.
    const ROUND: f32 = 12_582_912.0;
    // As integers NaN is the largest.
    let most = x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    let scale = |d: f32| {
        let d = f16::from_f32(if d.abs() > 65504.0 { 65504.0f32.copysign(d) } else { d });
        (d, if d == f16::ZERO { 0.0 } else { 1.0 / d.to_f32() })
    };
    let (stored, q) = room.split_at_mut(2);
    let (d, n) = match t {
        KvType::Q8_0 => {
            let (d, by) = scale(f32::from_bits(most) / 127.0);
            q.iter_mut().zip(x).for_each(|(q, x)| *q = (((x * by).clamp(-127.0, 127.0) + ROUND) - ROUND) as i8 as u8);
            (d, BLOCK)
        }
        KvType::Q4_0 => {
            let first = x.iter().find(|x| x.to_bits() & 0x7fff_ffff == most).copied().unwrap_or_default();
            let (d, by) = scale(first / -8.0);
            let integer = |x: f32| (x * by + 8.5).clamp(0.0, 15.0) as u8;
            let (low, high) = x.split_at(BLOCK / 2);
            q.iter_mut().zip(low.iter().zip(high)).for_each(|(q, (&l, &h))| *q = integer(l) | integer(h) << 4);
            (d, BLOCK / 2)
        }
        KvType::F16 | KvType::F32 => panic!("{} has no blocks", t.name()),
    };
    stored.copy_from_slice(&d.to_le_bytes());
    &room[..2 + n]
}

/// Multiplies every `width` numbers, a power of two, by the Hadamard matrix of that size over √`width`, which is its
/// own inverse: dot products stay, and what is large in one number is spread over all, so that a block's scale serves
/// them better (QuaRot, arXiv 2404.00456). A width of 1 changes nothing.
pub fn rotate(x: &mut [f32], width: usize) {
    if width <= 1 {
        return;
    }
    let scale = (width as f32).sqrt().recip();
    for x in x.chunks_exact_mut(width) {
        let mut half = 1;
        while half < width {
            for pair in x.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
            }
            half *= 2;
        }
        x.iter_mut().for_each(|x| *x *= scale);
    }
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
    /// Blocks of 32 halves of a byte with an f16 scale, of rotated heads ([`rotate`]).
    Q4_0,
}

impl KvType {
    /// All of them.
    pub const ALL: [KvType; 4] = [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0];

    /// Name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::Q8_0 => "q8_0",
            KvType::Q4_0 => "q4_0",
        }
    }

    /// The weight type of its blocks; `None` for floats.
    pub fn block(self) -> Option<WeightType> {
        match self {
            KvType::F16 | KvType::F32 => None,
            KvType::Q8_0 => Some(WeightType::Q8_0),
            KvType::Q4_0 => Some(WeightType::Q4_0),
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

    /// Numbers of a head of `width` that are rotated together before they become blocks; 1 where none are.
    fn rotation(self, width: usize) -> usize {
        match self {
            KvType::Q4_0 => 1 << width.trailing_zeros().min(MAX_ROTATION.trailing_zeros()),
            KvType::F16 | KvType::F32 | KvType::Q8_0 => 1,
        }
    }

    /// Rounds the numbers of a head, of which `rotation` are rotated together, as writing them to a cache does.
    ///
    /// # Panics
    /// When the head does not fit.
    pub fn round(self, rotation: usize, head: &mut [f32]) {
        let Some(block) = self.block() else {
            if self == KvType::F16 {
                head.iter_mut().for_each(|x| *x = f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32());
            }
            return;
        };
        rotate(head, rotation);
        let (blocks, rest) = head.as_chunks_mut();
        assert!(rest.is_empty(), "a head of no whole blocks");
        blocks.iter_mut().for_each(|x| quant::decode_row(block, encode_block(self, x, &mut [0; BLOCK_BYTES]), x));
        rotate(head, rotation);
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
    /// Both in blocks of 4 bits.
    pub const Q4_0: CacheType = CacheType::of(KvType::Q4_0);

    /// One type for both.
    pub const fn of(t: KvType) -> CacheType {
        CacheType { k: t, v: t }
    }

    /// Whether it has blocks.
    pub fn has_blocks(self) -> bool {
        self.k.block().is_some() || self.v.block().is_some()
    }

    /// Numbers of a head that are rotated together ([`rotate`]), of keys and of values; 1 where none are. Values that
    /// are a part of the keys are rotated with them.
    pub fn rotations(self, decl: &CacheDecl) -> [usize; 2] {
        let [k, v] = [self.k.rotation(decl.d_k), self.v.rotation(decl.d_v)];
        if decl.v_in_k { [k.min(v); 2] } else { [k, v] }
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
            (CacheType::Q4_0, decl(64, 80, false), Some("values of 80 numbers a head in q4_0")),
            (CacheType::Q4_0, decl(576, 512, true), None),
        ] {
            let found = cache.misfit_of(&decl);
            assert_eq!(found.is_some(), part.is_some(), "{cache} {decl:?}");
            assert!(found.is_none_or(|why| why.contains(part.unwrap_or_default())), "{cache} {decl:?}");
        }
    }

    #[test]
    fn rounding_stays_within_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        for (t, steps) in [(KvType::Q8_0, 127.0), (KvType::Q4_0, 8.0)] {
            let mut rounded = x.clone();
            t.round(1, &mut rounded);
            // The largest number of the other sign may be half a step beyond the last integer.
            let most = 3.0 / steps * if t == KvType::Q4_0 { 1.01 } else { 0.51 };
            assert!(x.iter().zip(&rounded).all(|(a, b)| (a - b).abs() < most) && x != rounded, "{}", t.name());
        }
        let mut large = [1e6, -1e6, 1.0 + 1e-5];
        KvType::F16.round(1, &mut large);
        assert_eq!(large, [65504.0, -65504.0, 1.0]);
        assert_eq!(KvType::ALL.map(|t| t.bytes(64)), [128, 256, 68, 36].map(Some));
    }

    /// llama.cpp's blocks of Q4_0: its encoder differs in the scale, which it does not round before it divides.
    #[test]
    fn blocks_of_4_bits_are_those_of_files() {
        let x: [f32; BLOCK] = std::array::from_fn(|i| if i == 9 { -16.0 } else { (i as f32 - 15.5) / 2.0 });
        let mut room = [0; BLOCK_BYTES];
        let block = encode_block(KvType::Q4_0, &x, &mut room);
        let mut file = vec![0; 18];
        quant::encode_row(WeightType::Q4_0, &x, &mut file);
        assert_eq!(block.len(), 18);
        let mut decoded = [[0.0; BLOCK]; 2];
        quant::decode_row(WeightType::Q4_0, block, &mut decoded[0]);
        quant::decode_row(WeightType::Q4_0, &file, &mut decoded[1]);
        let error = |y: &[f32; BLOCK]| x.iter().zip(y).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        assert_eq!(decoded[0][9], -16.0);
        assert!(error(&decoded[0]) < 32.0 / 3.0 && error(&decoded[0]) < 2.0 * error(&decoded[1]), "{decoded:?}");
        let mut nan = x;
        nan[3] = f32::NAN;
        quant::decode_row(WeightType::Q4_0, encode_block(KvType::Q4_0, &nan, &mut room), &mut decoded[0]);
        assert!(decoded[0].iter().all(|x| x.is_nan()));
    }

    /// A rotation keeps dot products, undoes itself, and spreads one large number over all.
    #[test]
    fn rotations_keep_dot_products() {
        let x = |k: usize| -> Vec<f32> { (0..192).map(|i| ((i * i * k + i) as f32 * 0.37).sin()).collect() };
        let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
        for width in [1, 32, 64] {
            let (a, b) = (x(3), x(5));
            let (mut c, mut d) = (a.clone(), b.clone());
            rotate(&mut c, width);
            rotate(&mut d, width);
            assert!(near(dot(&a, &b), dot(&c, &d)) && (width == 1) == (a == c), "{width}");
            rotate(&mut c, width);
            assert!(a.iter().zip(&c).all(|(&a, &c)| near(a, c)), "{width}");
        }
        let mut one = [0.0; 64];
        one[5] = 8.0;
        rotate(&mut one, 64);
        assert!(one.iter().all(|x| x.abs() == 1.0));
        let decl = |d_k, d_v, v_in_k| CacheDecl { n_kv: 1, d_k, d_v, v_in_k, window: None };
        assert_eq!(CacheType::Q4_0.rotations(&decl(96, 512, false)), [32, 256]);
        assert_eq!(CacheType::Q4_0.rotations(&decl(576, 512, true)), [64, 64]);
        assert_eq!(CacheType::Q8_0.rotations(&decl(96, 512, false)), [1, 1]);
    }
}
