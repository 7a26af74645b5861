//! What GGUF files say of models with recurrent states besides delta nets: short convolutions (LFM2) and Mamba-2
//! (Granite 4 H, Nemotron-H, Falcon-H1), and Mamba-1 (Jamba).

use anyhow::{Context, Result, ensure};
use checkpoint::{Metadata, Value};
use model::plan::{DeltaHeads, Op, Plan};

use super::weights::Scaled;

/// Architectures whose files list the heads of keys by layer, 0 where it has no attention.
pub const STATES: &[&str] = &["lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "jamba"];

/// Returns whether some layers of a Nemotron-H have experts, of which it has two ways to say it.
pub fn has_experts(config: &Metadata) -> bool {
    match (config.opt_str("hybrid_override_pattern"), config.get("layers_block_type")) {
        (Ok(Some(pattern)), _) => pattern.contains('E'),
        (_, Some(Value::Strings(types))) => types.iter().any(|name| name == b"moe"),
        _ => false,
    }
}

/// Returns whether some layers of a Granite are Mamba-2.
pub fn has_mamba(config: &Metadata) -> bool {
    matches!(config.get("layer_types"), Some(Value::Strings(types)) if types.iter().any(|name| name == b"mamba"))
}

/// `n` for each layer with one of these tensors, 0 for the others.
pub fn by_layer(plan: &Plan, n_layer: u32, n: u32, stems: &[&str]) -> Vec<u32> {
    let has = |name: String| plan.weights.iter().any(|w| w.name == name);
    let is_there = |layer| stems.iter().any(|stem| has(format!("blk.{layer}.{stem}.weight")));
    (0..n_layer).map(|layer| if is_there(layer) { n } else { 0 }).collect()
}

/// Heads of the first Mamba-2 layer, which are those of all, and the width of its convolution.
pub fn mamba(plan: &Plan) -> Result<(DeltaHeads, usize)> {
    let heads = plan.ops.iter().find_map(|op| match op {
        Op::DeltaNet { heads, .. } => Some(*heads),
        _ => None,
    });
    let width = plan.ops.iter().find_map(|op| match op {
        Op::CausalConv { w, .. } => plan.weight(*w).shape.last().copied(),
        _ => None,
    });
    heads.zip(width).context("the model has no Mamba-2 layer")
}

/// Returns the factors of a Falcon-H1, by the tensors that take them in.
///
/// # Errors
/// Its output is its embedding, whose factors differ.
pub fn falcon_scales(config: &Metadata, plan: &Plan) -> Result<Vec<Scaled>> {
    let factor = |name: &str| Ok::<_, anyhow::Error>(config.opt_f32(name)?.unwrap_or(1.0));
    let list = |name: &str, n: usize| match config.get(name) {
        Some(_) => {
            let list = config.f32s(name)?;
            ensure!(list.len() == n, "failed to convert {}: {name} has {} numbers", config.file(), list.len());
            Ok(list)
        }
        None => Ok(vec![1.0; n]),
    };
    let (embed, output) = (factor("embedding_multiplier")?, factor("lm_head_multiplier")?);
    ensure!(
        embed == output || plan.weights.iter().any(|w| w.name == "output.weight"),
        "failed to convert {}: its output matrix is its embedding, and their factors differ",
        config.file()
    );
    let (mlp, ssm) = (list("mlp_multipliers", 2)?, list("ssm_multipliers", 5)?);
    let (attn_in, ssm_in) = (factor("attention_in_multiplier")?, factor("ssm_in_multiplier")?);
    let (heads, _) = mamba(plan)?;
    let (inner, k_row) = (heads.n_v_head * heads.d_v, heads.n_k_head * heads.d_k);
    let mut end = 0;
    let rows = [inner, inner, k_row, k_row, heads.n_v_head].into_iter().zip(ssm).map(|(n, scale)| {
        end += n;
        (end, scale * ssm_in)
    });
    let whole = |stem, scale| Scaled { stem, rows: vec![(usize::MAX, scale)] };
    let all = vec![
        Scaled { stem: "ssm_in", rows: rows.collect() },
        whole("ssm_out", factor("ssm_out_multiplier")?),
        whole("token_embd", embed),
        whole("output", output),
        whole("attn_q", attn_in),
        whole("attn_k", attn_in * factor("key_multiplier")?),
        whole("attn_v", attn_in),
        whole("attn_output", factor("attention_out_multiplier")?),
        whole("ffn_gate", mlp[0]),
        whole("ffn_down", mlp[1]),
    ];
    Ok(all.into_iter().filter(|scaled| scaled.rows.iter().any(|(_, scale)| *scale != 1.0)).collect())
}
