//! The kernels' sources, embedded, and joined to one string for each way of compiling them: Metal compiles strings
//! without an include path.

use std::fmt::Write;

use quant::WeightType;

use crate::commands::Unit;
use crate::quant_headers;

/// Headers besides those of weight types.
const HEADERS: &[(&str, &str)] = &[
    ("metal/chunk.h", include_str!("../../kernels/metal/chunk.h")),
    ("metal/common.h", include_str!("../../kernels/metal/common.h")),
    ("metal/in_place.h", include_str!("../../kernels/metal/in_place.h")),
    ("metal/kv.h", include_str!("../../kernels/metal/kv.h")),
    ("metal/matrix.h", include_str!("../../kernels/metal/matrix.h")),
    ("metal/pair.h", include_str!("../../kernels/metal/pair.h")),
    ("metal/reduce.h", include_str!("../../kernels/metal/reduce.h")),
    ("metal/tile.h", include_str!("../../kernels/metal/tile.h")),
    ("metal/weight.h", include_str!("../../kernels/metal/weight.h")),
];

macro_rules! sources {
    ($($name:ident = $file:literal;)*) => { $(
        #[doc = concat!("`kernels/metal/", $file, "`.")]
        pub const $name: Source =
            Source { file: concat!("metal/", $file), text: include_str!(concat!("../../kernels/metal/", $file)) };
    )* };
}

/// A source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    file: &'static str,
    text: &'static str,
}

sources! {
    ADD = "add.metal";
    ADD_BIAS = "add_bias.metal";
    ATTENTION = "attention.metal";
    ATTENTION_MERGE = "attention_merge.metal";
    ATTENTION_TILES = "attention_tiles.metal";
    CAUSAL_CONV = "causal_conv.metal";
    CHOOSE = "choose.metal";
    CLAMP = "clamp.metal";
    COMBINE = "combine.metal";
    CONSTANT = "constant.metal";
    COPY = "copy.metal";
    DECAY_BETA = "decay_beta.metal";
    DELTA_CHUNKS = "delta_chunks.metal";
    DELTA_IN = "delta_in.metal";
    DELTA_NET = "delta_net.metal";
    DELTA_REPLAY = "delta_replay.metal";
    EMBED = "embed.metal";
    EXPERTS = "experts.metal";
    EXPERT_GROUPS = "expert_groups.metal";
    EXPERT_TILES = "expert_tiles.metal";
    GATED_ACT = "gated_act.metal";
    GATED_LINEAR = "gated_linear.metal";
    GATED_NORM = "gated_norm.metal";
    GELU = "gelu.metal";
    HEADS = "heads.metal";
    HEAD_LINEAR = "head_linear.metal";
    CENTER = "center.metal";
    HEAD_NORM = "head_norm.metal";
    INPUT = "input.metal";
    JOIN_HEADS = "join_heads.metal";
    KEEP_DRAFTS = "keep_drafts.metal";
    KV_APPEND = "kv_append.metal";
    LATENT_IN = "latent_in.metal";
    LAYER_NORM = "layer_norm.metal";
    LINEAR = "linear.metal";
    NORMS = "norms.metal";
    RMS_NORM = "rms_norm.metal";
    ROPE = "rope.metal";
    ROUTE = "route.metal";
    SCALE = "scale.metal";
    SCALE_BY = "scale_by.metal";
    SCAN = "scan.metal";
    SELECT = "select.metal";
    GATE_BY = "gate_by.metal";
    SOFTCAP = "softcap.metal";
    SPLIT_HEADS = "split_heads.metal";
}

/// What a source is compiled for: names and their values.
pub type Defines = Vec<(&'static str, String)>;

/// Definitions for a weight type.
pub fn of_type(w: WeightType) -> Defines {
    // Where the type has no such plane there is no slot for it.
    let row = w.plane_bytes(w.block_len()).unwrap_or_default();
    let planes = 1 + usize::from(row.scales > 0) + usize::from(row.biases > 0);
    let mut defines = quant_headers::defines(w);
    defines.push(("WEIGHT_HEADER", format!("\"{}\"", quant_headers::name(w))));
    defines.push(("PLANES", planes.to_string()));
    defines
}

/// A kernel of a source, compiled with these definitions.
pub fn unit(source: Source, kernel: &'static str, defines: &Defines) -> Unit {
    let mut name = kernel.to_string();
    let mut out = String::from("#include <metal_stdlib>\nusing namespace metal;\n");
    for (key, value) in defines {
        let _ = writeln!(out, "#define {key} {value}");
        if *key != "WEIGHT_HEADER" {
            let _ = write!(name, " {key}={value}");
        }
    }
    join(source.file, source.text, defines, &mut Vec::new(), &mut out);
    Unit { name, source: out, kernel }
}

/// Appends a file with the headers that it includes, each once, and says where lines come from.
fn join(file: &str, text: &str, defines: &Defines, done: &mut Vec<String>, out: &mut String) {
    let _ = writeln!(out, "#line 1 \"{file}\"");
    for (i, line) in text.lines().enumerate() {
        if line == "#pragma once" {
            out.push('\n');
            continue;
        }
        let Some(name) = line.strip_prefix("#include ") else {
            let _ = writeln!(out, "{line}");
            continue;
        };
        let value = defines.iter().find(|(key, _)| *key == name).map_or(name, |(_, value)| value);
        let name = value.trim_matches('"');
        if done.iter().any(|known| known == name) {
            out.push('\n');
            continue;
        }
        done.push(name.into());
        let header = HEADERS.iter().chain(quant_headers::ALL).find(|(known, _)| *known == name);
        // A header that is not embedded stays an include, which no compiler finds: its error names it.
        match header {
            Some((name, text)) => join(name, text, defines, done, out),
            None => drop(writeln!(out, "{line}")),
        }
        let _ = writeln!(out, "#line {} \"{file}\"", i + 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joined_source_has_each_header_once_and_includes_nothing() {
        for t in WeightType::ALL {
            let unit = unit(
                LINEAR,
                "linear",
                &[of_type(t), vec![("N_PARTS", "1".into()), ("BIASES", "0".into()), ("TILED", "1".into())]].concat(),
            );
            assert_eq!(unit.source.matches("#include").count(), 1, "{t}: metal_stdlib only");
            assert_eq!(unit.source.matches("struct Row {").count(), 1, "{t}");
            assert_eq!(unit.source.matches("inline float row_dot(").count(), 1, "{t}");
            assert!(!unit.source.contains("#pragma once"));
        }
    }
}
