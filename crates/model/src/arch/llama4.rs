//! Llama 4 (Scout, Maverick), text: rotated layers see the chunk of positions that they are in, and normalize q and k
//! after the rotation; every fourth layer is not rotated, sees everything, and its queries grow with the position.
//! Weights of experts are factors on their input.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_CONTEXT, MAX_WIDTH, key};
use super::parts::{self, Attention, QkNorm, Stack};
use super::windows;
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Gate, GateFactor, Growth, Op, Plan, RopePairing, Router, Rows, Score};
use crate::rope;

const ARCH: &str = "llama4";

const CHUNK: Key = key("attention.sliding_window", &["attention_chunk_size"]);
const ROTATED: Key = key("", &["no_rope_layers"]);
const QK_NORM: Key = key("", &["use_qk_norm"]);
const GROWS: Key = key("", &["attn_temperature_tuning"]);
const BETA: Key = key("attention.temperature_scale", &["attn_scale"]);
const STEP: Key = key("attention.temperature_length", &["floor_scale"]);
const D_FF: Key = key("feed_forward_length", &["intermediate_size_mlp"]);
const D_FF_EXPERT: Key = key("expert_feed_forward_length", &["intermediate_size"]);

const ALIASES: &[Alias] = &[
    ("ffn_gate", &["feed_forward.gate_proj"]),
    ("ffn_up", &["feed_forward.up_proj"]),
    ("ffn_down", &["feed_forward.down_proj"]),
    ("ffn_gate_inp", &["feed_forward.router"]),
    ("ffn_gate_exps", &["feed_forward.experts.gate_proj", "feed_forward.experts.gate_up_proj[0/2]"]),
    ("ffn_up_exps", &["feed_forward.experts.up_proj", "feed_forward.experts.gate_up_proj[1/2]"]),
    ("ffn_down_exps", &["feed_forward.experts.down_proj"]),
    ("ffn_gate_shexp", &["feed_forward.shared_expert.gate_proj"]),
    ("ffn_up_shexp", &["feed_forward.shared_expert.up_proj"]),
    ("ffn_down_shexp", &["feed_forward.shared_expert.down_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let dims = keys.dims()?;
    let n_expert = keys.some_experts()?;
    let n_used = keys.n_used(n_expert)?;
    let (d_ff, d_ff_expert) = (keys.count(D_FF, MAX_WIDTH)?, keys.count(D_FF_EXPERT, MAX_WIDTH)?);
    let chunk = keys.opt_count(CHUNK, MAX_CONTEXT)?.unwrap_or(8192);
    let rotated = rotated(&keys, dims.n_layer)?;
    // GGUF files do not say it; the model with 128 experts has none.
    let has_norm = keys.opt_bool(QK_NORM)?.unwrap_or(keys.is_folder() || n_expert != 128);
    let grows = keys.opt_bool(GROWS)?.unwrap_or(true);
    let rope = keys.rope(dims.d_k, RopePairing::Interleaved)?;
    let growth = Growth {
        beta: keys.opt_positive(BETA)?.unwrap_or(0.1) as f32,
        step: keys.opt_count(STEP, MAX_CONTEXT)?.unwrap_or(8192) as u32,
        offset: 1,
    };

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let growth = rope::growing(growth, dims.d_k).filter(|_| grows).map(|growth| b.rope(growth));
    let norm = has_norm.then_some(QkNorm { has_weights: false, ..QkNorm::LATE });
    let x = parts::embed(&mut b, &dims)?;
    for (layer, is_rotated) in rotated.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let plain = Attention::plain(rope, dims.d_k);
        let attn = match is_rotated {
            true => Attention { qk_norm: norm, window: Some(chunk), chunked: true, ..plain },
            false => Attention { rope: [growth, None], ..plain },
        };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        match b.has(&format!("blk.{layer}.ffn_gate_inp.weight")) {
            true => experts(&mut b, &dims, Stack::plain(n_expert, d_ff_expert), n_used, layer, x)?,
            false => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head(b, &dims, x)
}

/// Returns whether each layer is rotated; all but every fourth where a file does not say it.
fn rotated(keys: &Keys, n_layer: usize) -> Result<Vec<bool>, Error> {
    let found = match keys.is_folder() {
        true => keys.numbers(ROTATED, n_layer)?.map(|list| list.into_iter().map(|n| n != 0.0).collect()),
        false => windows::pattern(keys, n_layer)?,
    };
    Ok(found.unwrap_or_else(|| (0..n_layer).map(|layer| layer % 4 != 3).collect()))
}

/// `x += shared(h) + Σ_s expert_s(w_s · h)` with `h = norm(x)`: for each slot the input is scaled anew, and of what all
/// chosen experts make of it only the slot's own counts.
fn experts(b: &mut Builder, dims: &Dims, stack: Stack, n_used: usize, layer: usize, x: Buf) -> Result<(), Error> {
    let (t, n_expert, d_model) = (Rows::Tokens, stack.n_expert, dims.d_model);
    let h = parts::norm(b, dims, layer, "ffn_norm", x, "f")?;
    let logits = parts::linear(b, layer, "ffn_gate_inp", h, [n_expert, d_model], "router")?;
    let route = |b: &mut Builder, n_used: usize, score: Score, name: &str| {
        let (ids, weights) = (b.ids(&format!("{name}_ids"), t, n_used), b.buf(name, t, n_used));
        let router = Router { score, ..Router::softmax(false, 1.0) };
        b.push(Op::Route { logits, router, n_used, ids, weights });
        (ids, weights)
    };
    let (ids, weights) = route(b, n_used, Score::Sigmoid, "weights");
    // The softmax over one expert.
    let (_, one) = route(b, 1, Score::Raw, "one");
    let y = parts::mlp(b, dims, parts::SHARED, (stack.d_ff, Gate::Silu), layer, h, "shared")?;
    b.push(Op::Add { x, y });
    let zero = copy(b, one, 1, "zero");
    b.push(Op::Scale { x: zero, scale: 0.0 });
    let of_slots: Vec<(usize, Buf)> = (0..n_used).map(|_| (1, b.buf("weight", t, 1))).collect();
    b.push(Op::SplitHeads { x: weights, n_head: 1, parts: of_slots.clone() });
    for (slot, &(_, weight)) in of_slots.iter().enumerate() {
        let scaled = copy(b, h, d_model, "scaled");
        b.push(Op::GateBy { x: scaled, gate: weight, factor: GateFactor::Plain });
        let y = parts::stack(b, dims, stack, layer, scaled, (ids, n_used))?;
        let own = b.buf("own", t, n_used);
        let parts = (0..n_used).map(|other| (1, if other == slot { one } else { zero })).collect();
        b.push(Op::JoinHeads { parts, n_head: 1, out: own });
        b.push(Op::Combine { x, add: true, y, weights: own, norm: None });
    }
    Ok(())
}

/// A buffer with the numbers of another.
fn copy(b: &mut Builder, x: Buf, width: usize, name: &str) -> Buf {
    let out = b.buf(name, Rows::Tokens, width);
    b.push(Op::SplitHeads { x, n_head: 1, parts: vec![(width, out)] });
    out
}
