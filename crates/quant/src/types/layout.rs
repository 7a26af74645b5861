//! Sizes and offsets of super-blocks, once for this crate's decoders and every CPU's kernels.

use super::{f16_at, put_f16};

/// Where a super-block of 256 values has its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuperBlock {
    /// Bytes of a block.
    pub bytes: usize,
    /// Byte of the f16 scale; of [`IQ1_M`] of the words whose high bits make it up.
    pub d: usize,
    /// Byte of the f16 scale of the minimums, when there is one.
    pub dmin: Option<usize>,
    /// Values that share a sub-scale, and a minimum: 16 or 32.
    pub sub: usize,
}

impl SuperBlock {
    /// Reads the scale, and that of the minimums or 0.
    pub(super) fn scales(self, b: &[u8]) -> (f32, f32) {
        (f16_at(b, self.d), self.dmin.map_or(0.0, |at| f16_at(b, at)))
    }

    /// The inverse of [`SuperBlock::scales`].
    pub(super) fn put_scales(self, b: &mut [u8], d: f32, dmin: f32) {
        put_f16(b, self.d, d);
        if let Some(at) = self.dmin {
            put_f16(b, at, dmin);
        }
    }

    const fn new(bytes: usize, d: usize, dmin: Option<usize>, sub: usize) -> SuperBlock {
        SuperBlock { bytes, d, dmin, sub }
    }
}

macro_rules! layouts {
    ($($name:ident = $($field:expr),+;)+) => {
        $(#[allow(missing_docs)] pub const $name: SuperBlock = SuperBlock::new($($field),+);)+
    };
}

layouts! {
    Q2_K = 84, 80, Some(82), 16;
    Q3_K = 110, 108, None, 16;
    Q4_K = 144, 0, Some(2), 32;
    Q5_K = 176, 0, Some(2), 32;
    Q6_K = 210, 208, None, 16;
    IQ4_XS = 136, 0, None, 32;
    IQ2_XXS = 66, 0, None, 32;
    IQ2_XS = 74, 0, None, 16;
    IQ2_S = 82, 0, None, 16;
    IQ3_XXS = 98, 0, None, 32;
    IQ3_S = 110, 0, None, 32;
    IQ1_S = 50, 0, None, 32;
    IQ1_M = 56, 48, None, 16;
    TQ1_0 = 54, 52, None, 16;
    TQ2_0 = 66, 64, None, 16;
}
