//! The encoder of Qwen3-VL and Qwen3.5: a ViT with an interpolated table of positions and a rotary embedding of height
//! and width, whose patches are merged two by two. In Qwen3-VL, features of some layers are added in the first layers
//! of the text model (DeepStack, arXiv 2406.04334). After `modeling_qwen3_vl.py` in transformers.

use checkpoint::{Checkpoint, Kind};

use super::{ImageTokens, Keys, Patches, PixelOrder, Places, Positions, Sizing, Vision, table, token};
use crate::Error;
use crate::names::{Alias, Names};
use crate::plan::build::Builder;
use crate::plan::{Buf, Cache, CacheDecl, Gelu, InputMode, Op, Plan, Rope, RopePairing, Rows, ValidPlan};
use crate::rope::{Scaling, table as rope_table};

const MAX_WIDTH: usize = 1 << 16;
const MAX_LAYERS: usize = 256;
const MAX_HEADS: usize = 256;
const MAX_SIDE: usize = 256;

/// Epsilon of all norms; fixed in the original code.
const EPS: f32 = 1e-6;
/// Base of the rotary embedding; fixed as well.
const ROPE_BASE: f64 = 10_000.0;

/// Bounds of an image's area in pixels, where no processor says them.
const AREA: Sizing = Sizing::Area { min: 1 << 16, max: 1 << 24 };

const ALIASES: &[Alias] = &[
    ("v.patch_embd", &["patch_embed.proj"]),
    ("v.position_embd", &["pos_embed"]),
    ("v.blk.#.ln1", &["blocks.#.norm1"]),
    ("v.blk.#.ln2", &["blocks.#.norm2"]),
    ("v.blk.#.attn_qkv", &["blocks.#.attn.qkv"]),
    ("v.blk.#.attn_out", &["blocks.#.attn.proj"]),
    ("v.blk.#.ffn_up", &["blocks.#.mlp.linear_fc1"]),
    ("v.blk.#.ffn_down", &["blocks.#.mlp.linear_fc2"]),
    ("v.post_ln", &["merger.norm"]),
    ("mm.0", &["merger.linear_fc1"]),
    ("mm.2", &["merger.linear_fc2"]),
    ("v.deepstack.#.norm", &["deepstack_merger_list.#.norm"]),
    ("v.deepstack.#.fc1", &["deepstack_merger_list.#.linear_fc1"]),
    ("v.deepstack.#.fc2", &["deepstack_merger_list.#.linear_fc2"]),
];

/// Dimensions of the encoder.
#[derive(Clone, Copy)]
struct Dims {
    d: usize,
    d_ff: usize,
    n_head: usize,
    /// Width of the features.
    d_out: usize,
    /// Patches of a feature.
    n_merged: usize,
    act: Gelu,
}

pub(super) fn build(source: &Checkpoint, keys: &Keys, text: &Checkpoint, plan: &Plan) -> Result<Vision, Error> {
    let names = Names::new(source, ALIASES);
    let n_layer = keys.count("vision.block_count", "depth", MAX_LAYERS)?;
    let merge = keys.opt_count("vision.spatial_merge_size", "spatial_merge_size", 16)?.unwrap_or(2);
    let side = keys.count("vision.patch_size", "patch_size", MAX_SIDE)?;
    let dims = Dims {
        d: keys.count("vision.embedding_length", "hidden_size", MAX_WIDTH)?,
        d_ff: keys.count("vision.feed_forward_length", "intermediate_size", MAX_WIDTH)?,
        n_head: keys.count("vision.attention.head_count", "num_heads", MAX_HEADS)?,
        d_out: keys.count("vision.projection_dim", "out_hidden_size", MAX_WIDTH)?,
        n_merged: merge * merge,
        act: act(keys)?,
    };
    if !dims.d.is_multiple_of(4 * dims.n_head) {
        let name = keys.name("vision.embedding_length", "hidden_size");
        return Err(
            keys.error(&name, format!("is {}, expected {} heads of whole pairs on two axes", dims.d, dims.n_head))
        );
    }
    let tapped = deepstack(keys, n_layer)?;
    // The converter to GGUF cuts the convolution in two, one for each frame.
    let is_cut = names.has("v.patch_embd.weight.1");
    let n_frames = match keys.is_folder {
        true => keys.opt_count("", "temporal_patch_size", 4)?.unwrap_or(2),
        false => 1,
    };
    let order = match source.kind() {
        Kind::Mlx => PixelOrder::Pixels { n_frames },
        _ => PixelOrder::Channels { n_frames },
    };
    let n_rows = names.tensor("v.position_embd.weight").and_then(|info| info.shape.first().copied()).unwrap_or(0);
    let n_positions = keys.opt_count("", "num_position_embeddings", MAX_WIDTH)?.unwrap_or(n_rows);
    let square = n_positions.isqrt();
    if square == 0 || square * square != n_positions {
        return Err(names.error("v.position_embd.weight", format!("has {n_positions} rows, expected a square of them")));
    }

    let d_given = 3 * n_frames * side * side;
    let d_features = dims.d_out * (1 + tapped.len());
    let mut b = Builder::new(names, &format!("{}_images", plan.arch), d_features, dims.d, plan.n_ctx_train);
    b.skip("v.position_embd.weight");
    let rope = b.rope(axial(dims.d / dims.n_head));
    let cache = b.cache(CacheDecl {
        n_kv: dims.n_head,
        d_k: dims.d / dims.n_head,
        d_v: dims.d / dims.n_head,
        v_in_k: false,
        window: None,
    });
    let x = patches(&mut b, dims, d_given, is_cut)?;
    let mut features = Vec::new();
    for layer in 0..n_layer {
        b.layer(Some(layer as u32));
        block(&mut b, dims, layer, (rope, cache), x)?;
        if let Some(i) = tapped.iter().position(|&of| of == layer) {
            // Folders number these by their order, GGUF files by their layer.
            let i = if keys.is_folder { i } else { layer };
            let h = merged(&mut b, dims, x);
            let h = b.layer_norm(h, &format!("v.deepstack.{i}.norm"), EPS, "normed")?;
            features.push((
                layer,
                project(&mut b, dims, [&format!("v.deepstack.{i}.fc1"), &format!("v.deepstack.{i}.fc2")], h)?,
            ));
        }
    }
    b.layer(None);
    let h = b.layer_norm(x, "v.post_ln", EPS, "normed")?;
    let h = merged(&mut b, dims, h);
    let last = project(&mut b, dims, ["mm.0", "mm.2"], h)?;
    let parts: Vec<(usize, Buf)> =
        std::iter::once(last).chain(features.iter().map(|f| f.1)).map(|f| (dims.d_out, f)).collect();
    let out = match parts.len() {
        1 => last,
        _ => {
            let out = b.buf("features", Rows::Outputs, d_features);
            b.push(Op::JoinHeads { parts, n_head: 1, out });
            out
        }
    };
    let encoder = ValidPlan::new(b.finish_encoder(out)?)?;
    Ok(Vision {
        encoder,
        patches: Patches { side, merge, order, d_position: dims.d },
        positions: Positions::Interpolated {
            table: table(&names, "v.position_embd.weight", &[n_positions, dims.d])?,
            side: square,
        },
        sizing: AREA,
        mean_std: [0.5, 0.5],
        is_centered: false,
        tokens: ImageTokens {
            feature: token(text, "image_token_id")?,
            feature_text: "<|image_pad|>",
            around: ["<|vision_start|>", "<|vision_end|>"],
            around_ids: [token(text, "vision_start_token_id")?, token(text, "vision_end_token_id")?],
            filler: None,
        },
        places: Places::Grid,
        sees_image: false,
    })
}

/// The activation of the blocks.
fn act(keys: &Keys) -> Result<Gelu, Error> {
    let name = keys.name("", "hidden_act");
    match keys.meta.opt_str(&name)?.filter(|_| keys.is_folder) {
        None | Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Gelu::Tanh),
        Some("gelu") => Ok(Gelu::Erf),
        Some(other) => Err(keys.error(&name, format!("is {}, expected a gelu", crate::error::printable(other)))),
    }
}

/// Layers whose features are added in the text model, ascending.
fn deepstack(keys: &Keys, n_layer: usize) -> Result<Vec<usize>, Error> {
    let name = keys.name("vision.is_deepstack_layers", "deepstack_visual_indexes");
    let layers: Vec<usize> = match keys.is_folder {
        true => keys.meta.opt_u32s(&name)?.unwrap_or_default().into_iter().map(|layer| layer as usize).collect(),
        false => {
            let is_tapped = keys.meta.opt_bools(&name)?.unwrap_or_default();
            (0..is_tapped.len()).filter(|&layer| is_tapped[layer]).collect()
        }
    };
    let is_ascending = layers.windows(2).all(|w| w[0] < w[1]);
    match is_ascending && layers.iter().all(|&layer| layer < n_layer) {
        true => Ok(layers),
        false => Err(keys.error(&name, format!("names layers {layers:?}, expected ascending ones of {n_layer}"))),
    }
}

/// The first half of a head's pairs turns with the height, the second with the width, both at the same frequencies.
fn axial(d_head: usize) -> crate::plan::RopeDecl {
    let mut rope = rope_table(d_head / 2, ROPE_BASE, None, Scaling::None, RopePairing::Half);
    let n = rope.inv_freq.len();
    rope.inv_freq.extend_from_within(..);
    rope.axes = [vec![1; n], vec![2; n]].concat();
    rope
}

/// `x = conv(patch) + position`.
fn patches(b: &mut Builder, dims: Dims, n_pixels: usize, is_cut: bool) -> Result<Buf, Error> {
    let given = b.buf("given", Rows::Tokens, n_pixels + dims.d);
    b.push(Op::Input { x: given, first: 0, mode: InputMode::All });
    let pixels = b.buf("pixels", Rows::Tokens, n_pixels);
    let position = b.buf("position", Rows::Tokens, dims.d);
    b.push(Op::SplitHeads { x: given, n_head: 1, parts: vec![(n_pixels, pixels), (dims.d, position)] });
    let w = b.flat("v.patch_embd.weight", [dims.d, n_pixels])?;
    let bias = b.vector("v.patch_embd.bias", dims.d)?;
    let x = b.linear(pixels, w, Some(bias), "x");
    if is_cut {
        let w = b.flat("v.patch_embd.weight.1", [dims.d, n_pixels])?;
        let y = b.linear(pixels, w, None, "x_frame");
        b.push(Op::Add { x, y });
    }
    b.push(Op::Add { x, y: position });
    Ok(x)
}

/// `x += attention(norm(x)); x += mlp(norm(x))`.
fn block(b: &mut Builder, dims: Dims, layer: usize, (rope, cache): (Rope, Cache), x: Buf) -> Result<(), Error> {
    let Dims { d, d_ff, n_head, act, .. } = dims;
    let d_head = d / n_head;
    let name = |name: &str| format!("v.blk.{layer}.{name}");
    let h = b.layer_norm(x, &name("ln1"), EPS, "normed")?;
    let qkv = b.biased_linear(h, &name("attn_qkv"), [3 * d, d], "qkv")?;
    let [q, k, v] = ["q", "k", "v"].map(|name| b.buf(name, Rows::Tokens, d));
    b.push(Op::SplitHeads { x: qkv, n_head: 1, parts: vec![(d, q), (d, k), (d, v)] });
    for x in [q, k] {
        b.push(Op::Rope { x, rope, n_head, d_head });
    }
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let out = b.buf("a", Rows::Tokens, d);
    let scale = 1.0 / (d_head as f32).sqrt();
    let (window, chunked, softcap, chosen, sinks) = (None, false, None, None, None);
    b.push(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out });
    let y = b.biased_linear(out, &name("attn_out"), [d, d], "o")?;
    b.push(Op::Add { x, y });
    let h = b.layer_norm(x, &name("ln2"), EPS, "normed")?;
    let hidden = b.biased_linear(h, &name("ffn_up"), [d_ff, d], "hidden")?;
    b.push(Op::Gelu { x: hidden, form: act });
    let y = b.biased_linear(hidden, &name("ffn_down"), [d, d_ff], "y")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// The patches of each feature side by side.
fn merged(b: &mut Builder, dims: Dims, x: Buf) -> Buf {
    let out = b.buf("merged", Rows::Outputs, dims.n_merged * dims.d);
    b.push(Op::Select { x, out });
    out
}

/// `fc2(gelu(fc1(h)))`, to the width of the text model.
fn project(b: &mut Builder, dims: Dims, [fc1, fc2]: [&str; 2], h: Buf) -> Result<Buf, Error> {
    let d = dims.n_merged * dims.d;
    let hidden = b.biased_linear(h, fc1, [d, d], "projected")?;
    b.push(Op::Gelu { x: hidden, form: Gelu::Erf });
    b.biased_linear(hidden, fc2, [dims.d_out, d], "feature")
}
