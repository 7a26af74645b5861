//! ModernBERT (arXiv 2412.13663): an encoder of whole texts with norms before attention and feed-forward, but for the
//! first layer's attention; every third layer sees all, the others a window, with another rotary base. Nothing has a
//! bias.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_CONTEXT, MAX_LAYERS, Unsaid, key};
use super::parts::{self, Attention};
use super::windows::{self, both_ways};
use crate::Error;
use crate::error::printable;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, CacheDecl, Gate, GateFactor, Gelu, Op, Plan, RopePairing};

const EPS: Key = key("attention.layer_norm_epsilon", &["norm_eps"]);
const ACT: Key = key("hidden_activation", &["hidden_activation"]);
const WINDOW: Key = key("attention.sliding_window", &["local_attention"]);
/// Of this number of layers, the first sees all.
const FULL_EVERY: Key = key("attention.sliding_window_pattern", &["global_attn_every_n_layers"]);

const ALIASES: &[Alias] = &[
    ("token_embd", &["embeddings.tok_embeddings"]),
    ("token_embd_norm", &["embeddings.norm"]),
    ("output_norm", &["final_norm"]),
    ("attn_norm", &["attn_norm"]),
    ("attn_qkv", &["attn.Wqkv"]),
    ("attn_output", &["attn.Wo"]),
    ("ffn_norm", &["mlp_norm"]),
    ("ffn_up", &["mlp.Wi"]),
    ("ffn_down", &["mlp.Wo"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let dims = keys.dims_by(EPS)?;
    let d_ff = keys.d_ff()?;
    let act = act(&keys)?;
    let windows = windows(&keys, dims.n_layer)?;
    let rope = keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?;
    let rope_windowed = keys.rope_windowed(dims.d_k, RopePairing::Half, Unsaid::Gemma)?;

    let mut b = Builder::new(keys.names(), "modern-bert", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (rope, rope_windowed) = (b.rope(rope), b.rope(rope_windowed));
    let Dims { n_kv, d_k, d_v, eps, .. } = dims;
    let cache = b.whole().cache(CacheDecl { n_kv, d_k, d_v, v_in_k: false, window: None });
    let x = parts::embed(&mut b, &dims)?;
    let x = b.centered_norm(x, "token_embd_norm", eps, "embedded")?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let name = format!("blk.{layer}.attn_norm");
        // The embeddings of the first layer are normalized already.
        let h = if layer == 0 && !b.has(&format!("{name}.weight")) { x } else { b.centered_norm(x, &name, eps, "h")? };
        let rope = if window.is_some() { rope_windowed } else { rope };
        let attn = Attention { window, cache: Some(cache), ..Attention::plain(rope, d_k) };
        let y = parts::attend(&mut b, &dims, attn, layer, h)?;
        b.push(Op::Add { x, y });
        let h = b.centered_norm(x, &format!("blk.{layer}.ffn_norm"), eps, "f")?;
        let y = feed_forward(&mut b, &dims, (d_ff, act), layer, h)?;
        b.push(Op::Add { x, y });
    }
    b.layer(None);
    let rows = parts::select(&mut b, &dims, x, "last");
    let rows = b.centered_norm(rows, "output_norm", eps, "final")?;
    // The head that predicts masked words is of no use.
    b.finish(rows, |name| ["head.", "decoder.", "cls.weight", "cls.norm."].iter().any(|part| name.starts_with(part)))
}

/// The activation of gates; GGUF files without the key are of models with the exact form of gelu.
fn act(keys: &Keys) -> Result<Option<Gate>, Error> {
    match keys.opt_str(ACT)? {
        None | Some("gelu") => Ok(None),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Some(Gate::GeluTanh)),
        Some("silu" | "swish") => Ok(Some(Gate::Silu)),
        Some(other) => Err(keys.error(ACT, format!("is {}, expected gelu or silu", printable(other)))),
    }
}

/// The window of each layer: the first of every three sees all where a file does not say another number, or a list.
fn windows(keys: &Keys, n_layer: usize) -> Result<Vec<Option<usize>>, Error> {
    let number = keys.name(FULL_EVERY).filter(|name| keys.meta().get(name).is_some_and(|v| v.to_int().is_some()));
    let (listed, every) = match number.filter(|_| !keys.has("layer_types")) {
        Some(_) => (None, keys.count(FULL_EVERY, MAX_LAYERS)?),
        None => (windows::pattern(keys, n_layer)?, 3),
    };
    let windowed = listed.unwrap_or_else(|| (0..n_layer).map(|layer| layer % every != 0).collect());
    let window = match keys.is_folder() {
        true => Some(keys.count(WINDOW, MAX_CONTEXT)?),
        // Files of models without a window lack it.
        false => Some(keys.count_or_zero(WINDOW, MAX_CONTEXT)?).filter(|&n| n > 0),
    };
    Ok(windowed.into_iter().map(|is| window.map(both_ways).filter(|_| is)).collect())
}

/// `down(act(gate(h)) ⊙ up(h))`; the matrix of the gate stands above the other.
fn feed_forward(
    b: &mut Builder,
    dims: &Dims,
    (d_ff, act): (usize, Option<Gate>),
    layer: usize,
    h: Buf,
) -> Result<Buf, Error> {
    let both = format!("blk.{layer}.ffn_up.weight");
    let [gate, up] = [0, 1].map(|i| b.part(&both, &[d_ff; 2], i, dims.d_model));
    let (gate, up) = (b.linear(h, gate?, None, "gate"), b.linear(h, up?, None, "up"));
    let hidden = match act {
        Some(act) => {
            let out = b.buf("act", b.shape(h).0, d_ff);
            b.push(Op::GatedAct { gate, up, act, out });
            out
        }
        None => {
            b.push(Op::Gelu { x: gate, form: Gelu::Erf });
            b.push(Op::GateBy { x: gate, gate: up, factor: GateFactor::Plain });
            gate
        }
    };
    let down = b.weight(&format!("blk.{layer}.ffn_down.weight"), &[dims.d_model, d_ff])?;
    Ok(b.linear(hidden, down, None, "y"))
}
