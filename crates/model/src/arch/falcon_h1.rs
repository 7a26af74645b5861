//! Falcon-H1: attention and Mamba-2 next to each other in every layer, both on the same norm of its input. Folders have
//! factors on nearly everything (arXiv 2507.22448), which GGUF files have in their matrices.

use checkpoint::{Checkpoint, Kind};

use super::keys::{Key, Keys, key};
use super::mamba2::Mamba2;
use super::parts::{self, Attention, Head};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Gate, Op, Plan, RopePairing, Rows};

const GATE_LAST: Key = key("", &["mamba_norm_before_gate"]);
const MLP_SCALES: &str = "mlp_multipliers";
const SSM_SCALES: &str = "ssm_multipliers";

const ALIASES: &[Alias] = &[
    ("output_norm", &["final_layernorm"]),
    // What converters write without an ending.
    ("ffn_norm.weight", &["=ffn_norm", "pre_ff_layernorm.weight"]),
    ("ffn_gate", &["feed_forward.gate_proj"]),
    ("ffn_up", &["feed_forward.up_proj"]),
    ("ffn_down", &["feed_forward.down_proj"]),
    ("ssm_in", &["mamba.in_proj"]),
    ("ssm_conv1d", &["mamba.conv1d"]),
    ("ssm_a", &["mamba.A_log"]),
    ("ssm_d", &["mamba.D"]),
    ("ssm_dt.bias", &["mamba.dt_bias"]),
    ("ssm_norm", &["mamba.norm"]),
    ("ssm_out", &["mamba.out_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    if checkpoint.kind() == Kind::Mlx && keys.factor("embedding_multiplier")?.is_some() {
        // mlx-lm multiplies some matrices when it converts, and leaves out the keys' factor.
        let what = "is set, and MLX folders of this model have some of its factors in their matrices".into();
        return Err(keys.error(key("", &["embedding_multiplier"]), what));
    }
    let factor = |name: &'static str| Ok::<_, Error>(keys.factor(name)?.unwrap_or(1.0));
    let (dims, d_ff) = (keys.dims()?, keys.d_ff()?);
    let [gate_scale, down_scale] = keys.factors(MLP_SCALES)?.unwrap_or([1.0; 2]);
    let ssm_in = factor("ssm_in_multiplier")?;
    let scales = keys.factors(SSM_SCALES)?.unwrap_or([1.0; 5]).map(|scale| scale * ssm_in);
    let mamba = Mamba2::new(&keys)?.scaled(scales);
    let [attn_in, attn_out, key_scale, ssm_out] =
        ["attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_out_multiplier"].map(factor);
    let (attn_in, attn_out, key_scale, ssm_out) = (attn_in?, attn_out?, key_scale?, ssm_out?);
    let gate_first = !keys.opt_bool(GATE_LAST)?.unwrap_or(keys.is_folder());
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;
    let logit_scale = factor("lm_head_multiplier")?;
    let head = Head { scale: Some(logit_scale).filter(|&scale| scale != 1.0), ..Head::PLAIN };

    for (name, scale) in [("attn_q", attn_in), ("attn_k", attn_in), ("attn_v", attn_in), ("ssm_in", ssm_in)] {
        let bias = format!("blk.0.{name}.bias");
        if scale != 1.0 && keys.names().has(&bias) {
            return Err(keys.names().error(&bias, format!("is there, and its input has a factor of {scale}")));
        }
    }

    let mut b = Builder::new(keys.names(), "falcon-h1", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    // q and v of the scaled input, and k with another factor: scores grow by the product, values by one of them.
    let plain = Attention::plain(b.rope(rope), dims.d_k);
    let value_scale = Some(attn_in).filter(|&scale| scale != 1.0);
    let attn = Attention { scale: plain.scale * attn_in * attn_in * key_scale, value_scale, ..plain };
    let x = parts::embed_scaled(&mut b, &dims, factor("embedding_multiplier")?)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let h = parts::norm(&mut b, &dims, layer, "attn_norm", x, "h")?;
        let o = parts::attend(&mut b, &dims, attn, layer, h)?;
        let y = mamba.mix(&mut b, &dims, layer, h, gate_first)?;
        for (y, scale) in [(o, attn_out), (y, ssm_out)] {
            scaled(&mut b, y, scale);
            b.push(Op::Add { x, y });
        }
        let f = parts::norm(&mut b, &dims, layer, "ffn_norm", x, "f")?;
        let gate = parts::linear(&mut b, layer, "ffn_gate", f, [d_ff, dims.d_model], "gate")?;
        scaled(&mut b, gate, gate_scale);
        let up = parts::linear(&mut b, layer, "ffn_up", f, [d_ff, dims.d_model], "up")?;
        let hidden = b.buf("act", Rows::Tokens, d_ff);
        b.push(Op::GatedAct { gate, up, act: Gate::Silu, out: hidden });
        let y = parts::linear(&mut b, layer, "ffn_down", hidden, [dims.d_model, d_ff], "ffn")?;
        scaled(&mut b, y, down_scale);
        b.push(Op::Add { x, y });
    }
    parts::head_with(b, &dims, head, x)
}

fn scaled(b: &mut Builder, x: Buf, scale: f32) {
    if scale != 1.0 {
        b.push(Op::Scale { x, scale });
    }
}
