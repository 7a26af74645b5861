//! The headers of `kernels/quant`, embedded, and how a source is told which weight type it is compiled for. Device
//! backends share them.

use quant::{ScaleType, WeightType};

/// Headers by the names that sources include them by.
pub const ALL: &[(&str, &str)] = &[
    ("quant/affine.h", include_str!("../kernels/quant/affine.h")),
    ("quant/bf16.h", include_str!("../kernels/quant/bf16.h")),
    ("quant/f16.h", include_str!("../kernels/quant/f16.h")),
    ("quant/f32.h", include_str!("../kernels/quant/f32.h")),
    ("quant/f8_e4m3.h", include_str!("../kernels/quant/f8_e4m3.h")),
    ("quant/grid.h", include_str!("../kernels/quant/grid.h")),
    ("quant/grids.h", include_str!("../kernels/quant/grids.h")),
    ("quant/ints.h", include_str!("../kernels/quant/ints.h")),
    ("quant/iq1_m.h", include_str!("../kernels/quant/iq1_m.h")),
    ("quant/iq1_s.h", include_str!("../kernels/quant/iq1_s.h")),
    ("quant/iq2_s.h", include_str!("../kernels/quant/iq2_s.h")),
    ("quant/iq2_xs.h", include_str!("../kernels/quant/iq2_xs.h")),
    ("quant/iq2_xxs.h", include_str!("../kernels/quant/iq2_xxs.h")),
    ("quant/iq3_s.h", include_str!("../kernels/quant/iq3_s.h")),
    ("quant/iq3_xxs.h", include_str!("../kernels/quant/iq3_xxs.h")),
    ("quant/iq4_nl.h", include_str!("../kernels/quant/iq4_nl.h")),
    ("quant/iq4_xs.h", include_str!("../kernels/quant/iq4_xs.h")),
    ("quant/mxfp4.h", include_str!("../kernels/quant/mxfp4.h")),
    ("quant/mxfp4_planar.h", include_str!("../kernels/quant/mxfp4_planar.h")),
    ("quant/nvfp4.h", include_str!("../kernels/quant/nvfp4.h")),
    ("quant/nvfp4_scaled.h", include_str!("../kernels/quant/nvfp4_scaled.h")),
    ("quant/q2_k.h", include_str!("../kernels/quant/q2_k.h")),
    ("quant/q3_k.h", include_str!("../kernels/quant/q3_k.h")),
    ("quant/q4_0.h", include_str!("../kernels/quant/q4_0.h")),
    ("quant/q4_1.h", include_str!("../kernels/quant/q4_1.h")),
    ("quant/q4_k.h", include_str!("../kernels/quant/q4_k.h")),
    ("quant/q5_0.h", include_str!("../kernels/quant/q5_0.h")),
    ("quant/q5_1.h", include_str!("../kernels/quant/q5_1.h")),
    ("quant/q5_k.h", include_str!("../kernels/quant/q5_k.h")),
    ("quant/q6_k.h", include_str!("../kernels/quant/q6_k.h")),
    ("quant/q8_0.h", include_str!("../kernels/quant/q8_0.h")),
    ("quant/tq1_0.h", include_str!("../kernels/quant/tq1_0.h")),
    ("quant/tq2_0.h", include_str!("../kernels/quant/tq2_0.h")),
    ("quant/unit.h", include_str!("../kernels/quant/unit.h")),
];

/// The header that decodes a type.
pub fn name(w: WeightType) -> String {
    match w {
        WeightType::Affine(_) => "quant/affine.h".into(),
        _ => format!("quant/{}.h", w.name()),
    }
}

/// What the header and the kernels want defined: the name of the type's struct, and the parameters of a family.
pub fn defines(w: WeightType) -> Vec<(&'static str, String)> {
    match w {
        WeightType::Affine(a) => vec![
            ("WEIGHT", "affine".into()),
            ("AFFINE_BITS", a.bits().to_string()),
            ("AFFINE_GROUP", a.group().to_string()),
            (
                "AFFINE_SCALE",
                match a.scales() {
                    ScaleType::F16 => "0",
                    ScaleType::BF16 => "1",
                    ScaleType::F32 => "2",
                }
                .into(),
            ),
        ],
        _ => vec![("WEIGHT", w.name().into())],
    }
}
