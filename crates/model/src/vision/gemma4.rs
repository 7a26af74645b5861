//! The encoder of Gemma 4: a ViT with gated feed-forwards and norms before and after, a table of positions for each
//! axis, and a rotary embedding that turns one half of a head with x and the other with y. Three by three patches are
//! averaged, and the text model's tokens of an image see each other in some sizes. After `modeling_gemma4.py` in
//! transformers.

use checkpoint::{Checkpoint, Kind};

use super::{ImageTokens, Keys, Patches, PixelOrder, Places, Positions, Sizing, Vision, table, token};
use crate::Error;
use crate::names::{Alias, Names};
use crate::plan::build::Builder;
use crate::plan::{
    Buf, Cache, CacheDecl, Gate, InputMode, Op, Plan, Read, Rope, RopeDecl, RopePairing, Rows, ValidPlan, Weight,
};
use crate::rope::{Scaling, table as rope_table};

const MAX_WIDTH: usize = 1 << 16;
const MAX_LAYERS: usize = 256;
const MAX_HEADS: usize = 256;
const MAX_SIDE: usize = 256;
const MAX_POSITIONS: usize = 1 << 20;

/// Features of an image, where no processor says it.
const MAX_FEATURES: usize = 280;

/// Whether an image's tokens see the earlier ones alone: a key that `moebius convert` writes and llama.cpp ignores.
const IS_CAUSAL: &str = "clip.vision.is_causal";
/// Widths of the text models of which that holds in files without the key: E2B and E4B (llama.cpp's `mtmd.cpp`).
const CAUSAL_WIDTHS: [usize; 2] = [1536, 2560];

const ALIASES: &[Alias] = &[
    ("v.patch_embd", &["patch_embedder.input_proj"]),
    ("v.position_embd.weight", &["patch_embedder.position_embedding_table"]),
    ("v.blk.#.ln1", &["encoder.layers.#.input_layernorm"]),
    ("v.blk.#.attn_q", &["encoder.layers.#.self_attn.q_proj.linear", "encoder.layers.#.self_attn.q_proj"]),
    ("v.blk.#.attn_k", &["encoder.layers.#.self_attn.k_proj.linear", "encoder.layers.#.self_attn.k_proj"]),
    ("v.blk.#.attn_v", &["encoder.layers.#.self_attn.v_proj.linear", "encoder.layers.#.self_attn.v_proj"]),
    ("v.blk.#.attn_out", &["encoder.layers.#.self_attn.o_proj.linear", "encoder.layers.#.self_attn.o_proj"]),
    ("v.blk.#.attn_q_norm", &["encoder.layers.#.self_attn.q_norm"]),
    ("v.blk.#.attn_k_norm", &["encoder.layers.#.self_attn.k_norm"]),
    ("v.blk.#.attn_post_norm", &["encoder.layers.#.post_attention_layernorm"]),
    ("v.blk.#.ln2", &["encoder.layers.#.pre_feedforward_layernorm"]),
    ("v.blk.#.ffn_gate", &["encoder.layers.#.mlp.gate_proj.linear", "encoder.layers.#.mlp.gate_proj"]),
    ("v.blk.#.ffn_up", &["encoder.layers.#.mlp.up_proj.linear", "encoder.layers.#.mlp.up_proj"]),
    ("v.blk.#.ffn_down", &["encoder.layers.#.mlp.down_proj.linear", "encoder.layers.#.mlp.down_proj"]),
    ("v.blk.#.ffn_post_norm", &["encoder.layers.#.post_feedforward_layernorm"]),
    ("v.std_bias", &["std_bias"]),
    ("v.std_scale", &["std_scale"]),
    ("mm.input_projection", &["embed_vision.embedding_projection"]),
];

/// Dimensions of the encoder.
#[derive(Clone, Copy)]
struct Dims {
    d: usize,
    d_ff: usize,
    n_head: usize,
    d_head: usize,
    eps: f32,
    /// Patches of a feature.
    n_merged: usize,
}

pub(super) fn build(source: &Checkpoint, keys: &Keys, text: &Checkpoint, plan: &Plan) -> Result<Vision, Error> {
    let names = Names::new(source, ALIASES);
    let n_layer = keys.count("vision.block_count", "num_hidden_layers", MAX_LAYERS)?;
    let merge = keys.opt_count("vision.projector.scale_factor", "pooling_kernel_size", 16)?.unwrap_or(3);
    let side = keys.count("vision.patch_size", "patch_size", MAX_SIDE)?;
    let d = keys.count("vision.embedding_length", "hidden_size", MAX_WIDTH)?;
    let n_head = keys.count("vision.attention.head_count", "num_attention_heads", MAX_HEADS)?;
    let dims = Dims {
        d,
        d_ff: keys.count("vision.feed_forward_length", "intermediate_size", MAX_WIDTH)?,
        n_head,
        d_head: keys.opt_count("vision.attention.head_dim", "head_dim", MAX_WIDTH)?.unwrap_or(d / n_head),
        eps: keys.positive("vision.attention.layer_norm_epsilon", "rms_norm_eps", 1e-6)?,
        n_merged: merge * merge,
    };
    if !dims.d_head.is_multiple_of(4) || dims.d_head == 0 {
        let name = keys.name("vision.embedding_length", "head_dim");
        return Err(keys.error(&name, format!("gives heads of {}, expected whole pairs on two axes", dims.d_head)));
    }
    refuse(keys, n_head)?;
    let shape = names.tensor("v.position_embd.weight").map(|info| info.shape.clone()).unwrap_or_default();
    let &[2, n_positions, _] = shape.as_slice() else {
        return Err(names.error("v.position_embd.weight", format!("has shape {shape:?}, expected [2, .., {d}]")));
    };
    if n_positions > MAX_POSITIONS {
        return Err(names.error("v.position_embd.weight", format!("has {n_positions} rows an axis")));
    }
    let base = keys.positive("vision.rope.freq_base", "rope_parameters.rope_theta", 100.0)?;

    // The converter to GGUF makes a convolution of the product.
    let n_frames = 1;
    let order = match keys.is_folder {
        true => PixelOrder::Pixels { n_frames },
        false => PixelOrder::Channels { n_frames },
    };
    let n_pixels = 3 * side * side;
    let mut b = Builder::new(names, &format!("{}_images", plan.arch), plan.d_model, d, plan.n_ctx_train);
    b.skip("v.position_embd.weight");
    // x for the first half of a head, y for the second.
    let half = |axis: u8| -> RopeDecl {
        let mut rope = rope_table(dims.d_head / 2, f64::from(base), None, Scaling::None, RopePairing::Half);
        rope.axes = vec![axis; rope.inv_freq.len()];
        rope
    };
    let ropes = [b.rope(half(2)), b.rope(half(1))];
    let cache = b.cache(CacheDecl { n_kv: n_head, d_k: dims.d_head, d_v: dims.d_head, v_in_k: false, window: None });
    let x = patches(&mut b, dims, n_pixels)?;
    for layer in 0..n_layer {
        b.layer(Some(layer as u32));
        block(&mut b, dims, layer, (ropes, cache), x)?;
    }
    b.layer(None);
    let pooled = pool(&mut b, dims, x);
    if b.has("v.std_bias") {
        let bias = b.vector_read("v.std_bias", d, Read::Neg)?;
        b.push(Op::AddBias { x: pooled, w: bias });
        let scale = b.vector("v.std_scale", d)?;
        b.push(Op::ScaleBy { x: pooled, w: scale });
    }
    b.push(Op::HeadNorm { x: pooled, w: None, eps: dims.eps, n_head: 1, d_head: d });
    let w = b.weight("mm.input_projection.weight", &[plan.d_model, d])?;
    let features = b.linear(pooled, w, None, "features");
    let encoder = ValidPlan::new(b.finish_encoder(features)?)?;
    let is_gguf = text.kind() == Kind::Gguf;
    Ok(Vision {
        encoder,
        patches: Patches { side, merge, order, d_position: d },
        positions: Positions::ByAxis {
            table: table(&names, "v.position_embd.weight", &[2, n_positions, d])?,
            n: n_positions,
        },
        sizing: Sizing::Features { max: MAX_FEATURES },
        mean_std: [0.0, 1.0],
        is_centered: true,
        tokens: ImageTokens {
            feature: token(text, "image_token_id")?,
            feature_text: "<|image|>",
            around: ["<|image>", "<image|>"],
            around_ids: [token(text, "boi_token_id")?, token(text, "eoi_token_id")?],
            // What the original code looks up for an image's tokens in tables besides the embeddings.
            filler: token(text, if is_gguf { "tokenizer.ggml.padding_token_id" } else { "text_config.pad_token_id" })?,
        },
        places: Places::Line,
        sees_image: sees_image(keys, text, plan)?,
    })
}

/// Whether a feature's token sees the later ones of its image, which text models of GGUF files do not say.
fn sees_image(keys: &Keys, text: &Checkpoint, plan: &Plan) -> Result<bool, Error> {
    const FOLDER: &str = "text_config.use_bidirectional_attention";
    match text.meta().opt_str(FOLDER)? {
        Some("vision") => Ok(true),
        None if text.kind() != Kind::Gguf => Ok(false),
        None => Ok(!keys.meta.opt_bool(IS_CAUSAL)?.unwrap_or(CAUSAL_WIDTHS.contains(&plan.d_model))),
        Some(other) => {
            let what = format!("is {}, expected vision or nothing", crate::error::printable(other));
            Err(keys.error(FOLDER, what))
        }
    }
}

/// Refuses what published encoders of the family have and this one has not.
fn refuse(keys: &Keys, n_head: usize) -> Result<(), Error> {
    let name = keys.name("", "num_key_value_heads");
    match keys.opt_count("", "num_key_value_heads", MAX_HEADS)? {
        Some(n) if n != n_head => Err(keys.error(&name, format!("is {n}, expected as many as {n_head} heads"))),
        _ => Ok(()),
    }
}

/// `x = w · patch + position`.
fn patches(b: &mut Builder, dims: Dims, n_pixels: usize) -> Result<Buf, Error> {
    let given = b.buf("given", Rows::Tokens, n_pixels + dims.d);
    b.push(Op::Input { x: given, first: 0, mode: InputMode::All });
    let pixels = b.buf("pixels", Rows::Tokens, n_pixels);
    let position = b.buf("position", Rows::Tokens, dims.d);
    b.push(Op::SplitHeads { x: given, n_head: 1, parts: vec![(n_pixels, pixels), (dims.d, position)] });
    let w = b.flat("v.patch_embd.weight", [dims.d, n_pixels])?;
    let x = b.linear(pixels, w, None, "x");
    b.push(Op::Add { x, y: position });
    Ok(x)
}

/// `x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`; scores are not scaled, q, k and v are normalized instead.
fn block(b: &mut Builder, dims: Dims, layer: usize, (ropes, cache): ([Rope; 2], Cache), x: Buf) -> Result<(), Error> {
    let Dims { d, d_ff, n_head, d_head, eps, .. } = dims;
    let name = |name: &str| format!("v.blk.{layer}.{name}.weight");
    let norm = |b: &mut Builder, of: &str, x: Buf, out: &str| -> Result<Buf, Error> {
        let w = b.vector(&name(of), d)?;
        Ok(b.rms_norm(x, w, eps, out))
    };
    let h = norm(b, "ln1", x, "h")?;
    let mut qkv = [h; 3];
    for (i, of) in ["attn_q", "attn_k", "attn_v"].into_iter().enumerate() {
        qkv[i] = clipped(b, h, &format!("v.blk.{layer}.{of}"), [n_head * d_head, d], ["q", "k", "v"][i])?;
        let w = match i {
            0 => Some(b.vector(&name("attn_q_norm"), d_head)?),
            1 => Some(b.vector(&name("attn_k_norm"), d_head)?),
            _ => None,
        };
        b.push(Op::HeadNorm { x: qkv[i], w, eps, n_head, d_head });
    }
    let [q, k, v] = qkv;
    for x in [q, k] {
        turn(b, dims, ropes, x);
    }
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let out = b.buf("a", Rows::Tokens, n_head * d_head);
    let (window, chunked, softcap, chosen, sinks) = (None, false, None, None, None);
    b.push(Op::Attention { cache, q, n_head, scale: 1.0, window, chunked, softcap, chosen, sinks, out });
    let o = clipped(b, out, &format!("v.blk.{layer}.attn_out"), [d, n_head * d_head], "o")?;
    let y = norm(b, "attn_post_norm", o, "o_normed")?;
    b.push(Op::Add { x, y });
    let f = norm(b, "ln2", x, "f")?;
    let [gate, up] = ["ffn_gate", "ffn_up"].map(|of| clipped(b, f, &format!("v.blk.{layer}.{of}"), [d_ff, d], of));
    let act = b.buf("act", Rows::Tokens, d_ff);
    b.push(Op::GatedAct { gate: gate?, up: up?, act: Gate::GeluTanh, out: act });
    let y = clipped(b, act, &format!("v.blk.{layer}.ffn_down"), [d, d_ff], "y")?;
    let y = norm(b, "ffn_post_norm", y, "y_normed")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// `out = clamp(w · clamp(x))`, each where the file has limits for it (`Gemma4ClippableLinear`).
fn clipped(b: &mut Builder, x: Buf, name: &str, shape: [usize; 2], out: &str) -> Result<Buf, Error> {
    let limits = |b: &mut Builder, of: &str| -> Result<Option<[Weight; 2]>, Error> {
        let [low, high] = ["min", "max"].map(|end| format!("{name}.{of}_{end}"));
        match b.has(&low) || b.has(&high) {
            true => Ok(Some([b.vector(&low, 1)?, b.vector(&high, 1)?])),
            false => Ok(None),
        }
    };
    let mut given = x;
    if let Some([low, high]) = limits(b, "input")? {
        // Other linears read `x` as well, with other limits.
        given = b.buf(&format!("{out}_given"), Rows::Tokens, shape[1]);
        b.push(Op::SplitHeads { x, n_head: 1, parts: vec![(shape[1], given)] });
        b.push(Op::Clamp { x: given, low, high });
    }
    let w = b.weight(&format!("{name}.weight"), &shape)?;
    let y = b.linear(given, w, None, out);
    if let Some([low, high]) = limits(b, "output")? {
        b.push(Op::Clamp { x: y, low, high });
    }
    Ok(y)
}

/// Turns the halves of every head, each with its axis.
fn turn(b: &mut Builder, dims: Dims, ropes: [Rope; 2], x: Buf) {
    let Dims { n_head, d_head, .. } = dims;
    let half = d_head / 2;
    let halves = ["by_x", "by_y"].map(|name| b.buf(name, Rows::Tokens, n_head * half));
    let parts = || halves.iter().map(|&part| (half, part)).collect();
    b.push(Op::SplitHeads { x, n_head, parts: parts() });
    for (x, rope) in halves.into_iter().zip(ropes) {
        b.push(Op::Rope { x, rope, n_head, d_head: half });
    }
    b.push(Op::JoinHeads { parts: parts(), n_head, out: x });
}

/// The mean of the patches of each feature, times `√d`.
fn pool(b: &mut Builder, dims: Dims, x: Buf) -> Buf {
    let Dims { d, n_merged, .. } = dims;
    let merged = b.buf("merged", Rows::Outputs, n_merged * d);
    b.push(Op::Select { x, out: merged });
    let parts: Vec<Buf> = (0..n_merged).map(|i| b.buf(&format!("patch_{i}"), Rows::Outputs, d)).collect();
    b.push(Op::SplitHeads { x: merged, n_head: 1, parts: parts.iter().map(|&part| (d, part)).collect() });
    for &y in &parts[1..] {
        b.push(Op::Add { x: parts[0], y });
    }
    b.push(Op::Scale { x: parts[0], scale: (d as f32).sqrt() / n_merged as f32 });
    parts[0]
}
