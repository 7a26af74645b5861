//! gpt-oss (20B, 120B): every second layer sees a window, sinks in every softmax, YaRN, experts with biases behind a
//! clamped gate, softmax over the chosen experts only.

use checkpoint::Checkpoint;

use super::keys::{Key, Keys, key};
use super::parts::{self, Attention, Stack};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Gate, Op, Plan, RopePairing, Router, Rows, Score};

const ARCH: &str = "gpt-oss";

const SWIGLU_ALPHA: Key = key("", &["swiglu_alpha"]);
const SWIGLU_LIMIT: Key = key("", &["swiglu_limit"]);

const ALIASES: &[Alias] = &[
    ("post_attention_norm", &["post_attention_layernorm"]),
    ("attn_sinks.weight", &["self_attn.sinks"]),
    ("ffn_gate_inp", &["mlp.router"]),
    ("ffn_gate_exps", &["mlp.experts.gate_proj"]),
    ("ffn_up_exps", &["mlp.experts.up_proj"]),
    ("ffn_down_exps", &["mlp.experts.down_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    refuse_interleaved(&keys)?;
    let dims = keys.dims()?;
    let n_expert = keys.some_experts()?;
    let n_used = keys.n_used(n_expert)?;
    let act = Gate::ClampedSwiglu {
        alpha: keys.opt_positive(SWIGLU_ALPHA)?.unwrap_or(1.702) as f32,
        limit: keys.opt_positive(SWIGLU_LIMIT)?.unwrap_or(7.0) as f32,
    };
    let experts = Stack { act, biases: true, ..Stack::plain(n_expert, keys.d_ff_expert()?) };
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::ButEvery(2))?;
    let router = Router { score: Score::Raw, renormalise: None, ..Router::softmax(false, 1.0) };

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let attn = Attention { window, sinks: true, ..Attention::plain(rope, dims.d_k) };
        parts::attention(&mut b, &dims, attn, layer, x)?;

        let h = parts::norm(&mut b, &dims, layer, "post_attention_norm", x, "f")?;
        let logits = parts::linear(&mut b, layer, "ffn_gate_inp", h, [n_expert, dims.d_model], "router")?;
        let ids = b.ids("ids", Rows::Tokens, n_used);
        let weights = b.buf("weights", Rows::Tokens, n_used);
        b.push(Op::Route { logits, router, n_used, ids, weights });
        let y = parts::stack(&mut b, &dims, experts, layer, h, (ids, n_used))?;
        b.push(Op::Combine { x, add: true, y, weights, norm: None });
    }
    parts::head(b, &dims, x)
}

/// Folders of the original form keep gate and up as every other row of one tensor, and transposed where they are not
/// quantized; no piece of it is a matrix.
fn refuse_interleaved(keys: &Keys) -> Result<(), Error> {
    let names = keys.names();
    let tensors = names.checkpoint().tensors().iter();
    let mut fused = tensors.filter(|t| t.name.contains(".mlp.experts.gate_up_proj"));
    match fused.next() {
        None => Ok(()),
        Some(tensor) => Err(names.error(
            &tensor.name,
            "holds gate and up in turn, row by row; use the model's GGUF file, or an MLX folder (mlx-community), which \
             keep them apart"
                .into(),
        )),
    }
}
