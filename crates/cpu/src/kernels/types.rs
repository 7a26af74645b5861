//! The table of types of the vector kernels: which format stands for each.
//!
//! A format is a type with the traits of an instruction set (`small.rs`, `large.rs` and `planar.rs` of [`super::avx2`]
//! or `neon`), and a kernel is a function over that trait. The macros find the formats in a module `formats` beside
//! their caller's.

/// The function of a type of super-blocks among the instances of `$large`.
macro_rules! of_super_block {
    ($t:expr, $large:ident $(, $m:ident)?) => {{
        use super::formats::{
            Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, Tq1, Tq2,
        };
        use quant::WeightType;
        match $t {
            WeightType::Q2_K => $large::<Q2K $(, $m)?>,
            WeightType::Q3_K => $large::<Q3K $(, $m)?>,
            WeightType::Q4_K => $large::<Q4K $(, $m)?>,
            WeightType::Q5_K => $large::<Q5K $(, $m)?>,
            WeightType::Q6_K => $large::<Q6K $(, $m)?>,
            WeightType::IQ4_XS => $large::<Iq4Xs $(, $m)?>,
            WeightType::IQ2_XXS => $large::<Iq2Xxs $(, $m)?>,
            WeightType::IQ2_XS => $large::<Iq2Xs $(, $m)?>,
            WeightType::IQ2_S => $large::<Iq2S $(, $m)?>,
            WeightType::IQ3_XXS => $large::<Iq3Xxs $(, $m)?>,
            WeightType::IQ3_S => $large::<Iq3S $(, $m)?>,
            WeightType::IQ1_S => $large::<Iq1S $(, $m)?>,
            WeightType::IQ1_M => $large::<Iq1M $(, $m)?>,
            WeightType::TQ1_0 => $large::<Tq1 $(, $m)?>,
            WeightType::TQ2_0 => $large::<Tq2 $(, $m)?>,
            t => unreachable!("{t} has no super-blocks"),
        }
    }};
}
pub(super) use of_super_block;

/// The function of a type among the instances of `$small`, `$large` and `$planar`. Their parameters are the format, of
/// planes its integers, its scales and whether there are biases; then `$m`.
macro_rules! of_type {
    ($t:expr, $small:ident, $large:ident, $planar:ident $(, $m:ident)?) => {{
        use super::formats::{BF16, Bits, E8m0, F16, F32, Fp4, Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
        use crate::kernels::types::of_super_block;
        use quant::{ScaleType, WeightType};
        match $t {
            WeightType::Q4_0 => $small::<Q4_0 $(, $m)?>,
            WeightType::Q4_1 => $small::<Q4_1 $(, $m)?>,
            WeightType::Q5_0 => $small::<Q5_0 $(, $m)?>,
            WeightType::Q5_1 => $small::<Q5_1 $(, $m)?>,
            WeightType::Q8_0 => $small::<Q8_0 $(, $m)?>,
            WeightType::IQ4_NL => $small::<Iq4Nl $(, $m)?>,
            WeightType::MXFP4 => $small::<Mxfp4 $(, $m)?>,
            t if t.act() == quant::act::ActKind::Block256 => of_super_block!(t, $large $(, $m)?),
            WeightType::MXFP4_PLANAR => $planar::<Fp4, E8m0, false $(, $m)?>,
            WeightType::Affine(a) => {
                macro_rules! bits {
                    ($s:ident) => {
                        match a.bits() {
                            2 => $planar::<Bits<2>, $s, true $(, $m)?>,
                            3 => $planar::<Bits<3>, $s, true $(, $m)?>,
                            4 => $planar::<Bits<4>, $s, true $(, $m)?>,
                            5 => $planar::<Bits<5>, $s, true $(, $m)?>,
                            6 => $planar::<Bits<6>, $s, true $(, $m)?>,
                            _ => $planar::<Bits<8>, $s, true $(, $m)?>,
                        }
                    };
                }
                match a.scales() {
                    ScaleType::F16 => bits!(F16),
                    ScaleType::BF16 => bits!(BF16),
                    ScaleType::F32 => bits!(F32),
                }
            }
            t => unreachable!("{t} has kernels of its own"),
        }
    }};
}
pub(super) use of_type;
