//! BERT and its kin (arXiv 1810.04805): encoders of whole texts, whose tokens see each other. Norms come after the
//! sums, positions are learned, and the first and second text of a pair have a row each that is added to their tokens.
//!
//! Their rows are embeddings; with a classifier in the file they are scores of pairs (`BertForSequenceClassification`).

use checkpoint::Checkpoint;

use super::keys::{D_FF, D_MODEL, Key, Keys, MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, N_CTX_TRAIN, N_HEAD};
use super::keys::{N_LAYER, key};
use crate::Error;
use crate::error::printable;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Cache, CacheDecl, Gelu, Op, Plan, Rows};

const EPS: Key = key("attention.layer_norm_epsilon", &["layer_norm_eps"]);
const IS_CAUSAL: Key = key("attention.causal", &["is_decoder"]);
const ACT: Key = key("", &["hidden_act"]);
const POSITIONS: Key = key("", &["position_embedding_type"]);
const PAD: Key = key("", &["pad_token_id"]);

/// Axes of a token's place: its position, and which text of a pair it is of.
const POSITION: usize = 0;
const SEGMENT: usize = 1;

const ALIASES: &[Alias] = &[
    ("token_embd", &["embeddings.word_embeddings"]),
    ("token_types", &["embeddings.token_type_embeddings"]),
    ("position_embd", &["embeddings.position_embeddings"]),
    ("token_embd_norm", &["embeddings.LayerNorm"]),
    ("attn_q", &["encoder.layer.#.attention.self.query"]),
    ("attn_k", &["encoder.layer.#.attention.self.key"]),
    ("attn_v", &["encoder.layer.#.attention.self.value"]),
    ("attn_output", &["encoder.layer.#.attention.output.dense"]),
    ("attn_output_norm", &["encoder.layer.#.attention.output.LayerNorm"]),
    ("ffn_up", &["encoder.layer.#.intermediate.dense"]),
    ("ffn_down", &["encoder.layer.#.output.dense"]),
    ("layer_output_norm", &["encoder.layer.#.output.LayerNorm"]),
    ("cls", &["classifier.dense", "pooler.dense"]),
    ("cls.output", &["classifier.out_proj", "classifier"]),
];

/// Dimensions of the encoder.
struct Dims {
    d: usize,
    d_ff: usize,
    n_head: usize,
    eps: f32,
    act: Gelu,
}

/// BERT; GGUF files of RoBERTa too, whose converter leaves the first positions out.
pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build_from(checkpoint, |_| Ok(0))
}

/// RoBERTa in folders: positions count from the one after the padding's.
pub(super) fn build_roberta(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build_from(checkpoint, |keys| Ok(keys.count_or_zero(PAD, MAX_CONTEXT)? + 1))
}

fn build_from(checkpoint: &Checkpoint, skipped: fn(&Keys) -> Result<usize, Error>) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let n_layer = keys.count(N_LAYER, MAX_LAYERS)?;
    let n_skipped = skipped(&keys)?;
    let n_ctx = match keys.count(N_CTX_TRAIN, MAX_CONTEXT)? {
        n if n > n_skipped => n - n_skipped,
        n => return Err(keys.error(N_CTX_TRAIN, format!("is {n}, the first {n_skipped} are of no use"))),
    };
    let d = keys.count(D_MODEL, MAX_WIDTH)?;
    let dims = Dims {
        d,
        d_ff: keys.count(D_FF, MAX_WIDTH)?,
        n_head: keys.count(N_HEAD, MAX_HEADS)?,
        eps: keys.eps(EPS)?,
        act: act(&keys)?,
    };
    if !d.is_multiple_of(dims.n_head) {
        return Err(keys.error(N_HEAD, format!("is {}, which does not divide a width of {d}", dims.n_head)));
    }
    // GGUF says whether it is causal, config.json whether it decodes.
    if keys.opt_bool(IS_CAUSAL)? == Some(true) {
        return Err(keys.error(IS_CAUSAL, "is true, expected an encoder".into()));
    }
    if let Some(other) = keys.opt_str(POSITIONS)?.filter(|&kind| kind != "absolute") {
        return Err(keys.error(POSITIONS, format!("is {}, expected absolute", printable(other))));
    }
    let n_vocab = keys.n_vocab()?;
    let mut b = Builder::new(keys.names(), "bert", n_vocab, d, n_ctx);
    b.whole();
    let x = embed(&mut b, &dims, n_vocab, [n_skipped, n_ctx])?;
    let d_head = d / dims.n_head;
    let cache = b.cache(CacheDecl { n_kv: dims.n_head, d_k: d_head, d_v: d_head, v_in_k: false, window: None });
    let mut x = b.layer_norm(x, "token_embd_norm", dims.eps, "normed")?;
    for layer in 0..n_layer {
        b.layer(Some(layer as u32));
        x = block(&mut b, &dims, layer, cache, x)?;
    }
    b.layer(None);
    let rows = b.buf("rows", Rows::Outputs, d);
    b.push(Op::Select { x, out: rows });
    let out = if b.has("cls.output.weight") { classify(&mut b, d, rows)? } else { rows };
    b.finish(out, |name| {
        // Embeddings are pooled without the layer that was trained to tell neighboring sentences.
        const PRETRAINING: [&str; 2] = ["cls.predictions.", "cls.seq_relationship."];
        name.contains("pooler.dense.")
            || name.ends_with("embeddings.position_ids")
            || PRETRAINING.iter().any(|part| name.starts_with(part))
    })
}

/// The activation: GGUF files are of models with the exact form.
fn act(keys: &Keys) -> Result<Gelu, Error> {
    match keys.opt_str(ACT)? {
        None | Some("gelu") => Ok(Gelu::Erf),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Gelu::Tanh),
        Some(other) => Err(keys.error(ACT, format!("is {}, expected a gelu", printable(other)))),
    }
}

/// `x = table[id] + positions[place] + segments[place]`.
fn embed(b: &mut Builder, dims: &Dims, n_vocab: usize, positions: [usize; 2]) -> Result<Buf, Error> {
    let table = b.weight("token_embd.weight", &[n_vocab, dims.d])?;
    let x = b.buf("x", Rows::Tokens, dims.d);
    b.push(Op::Embed { table, scale: 1.0, out: x });
    let table = match positions {
        [0, n_ctx] => b.weight("position_embd.weight", &[n_ctx, dims.d])?,
        _ => b.part("position_embd.weight", &positions, 1, dims.d)?,
    };
    let y = b.buf("position", Rows::Tokens, dims.d);
    b.push(Op::EmbedPlace { table, axis: POSITION, out: y });
    b.push(Op::Add { x, y });
    add_segments(b, dims.d, x)?;
    Ok(x)
}

/// `x += segments[place]`, where the file has such.
pub(super) fn add_segments(b: &mut Builder, d: usize, x: Buf) -> Result<(), Error> {
    match b.n_rows("token_types.weight") {
        None => {}
        Some(1) => {
            let w = b.vector("token_types.weight", d)?;
            b.push(Op::AddBias { x, w });
        }
        Some(n) => {
            let table = b.weight("token_types.weight", &[n, d])?;
            let y = b.buf("segment", Rows::Tokens, d);
            b.push(Op::EmbedPlace { table, axis: SEGMENT, out: y });
            b.push(Op::Add { x, y });
        }
    }
    Ok(())
}

/// `h = norm(x + attention(x)); norm(h + mlp(h))`.
fn block(b: &mut Builder, dims: &Dims, layer: usize, cache: Cache, x: Buf) -> Result<Buf, Error> {
    let Dims { d, d_ff, n_head, eps, act } = *dims;
    let name = |name: &str| format!("blk.{layer}.{name}");
    let q = b.biased_linear(x, &name("attn_q"), [d, d], "q")?;
    let k = b.biased_linear(x, &name("attn_k"), [d, d], "k")?;
    let v = b.biased_linear(x, &name("attn_v"), [d, d], "v")?;
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let out = b.buf("a", Rows::Tokens, d);
    let scale = 1.0 / ((d / n_head) as f32).sqrt();
    let (window, chunked, softcap, chosen, sinks) = (None, false, None, None, None);
    b.push(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out });
    let y = b.biased_linear(out, &name("attn_output"), [d, d], "o")?;
    b.push(Op::Add { x, y });
    let x = b.layer_norm(x, &name("attn_output_norm"), eps, "normed")?;
    let hidden = b.biased_linear(x, &name("ffn_up"), [d_ff, d], "hidden")?;
    b.push(Op::Gelu { x: hidden, form: act });
    let y = b.biased_linear(hidden, &name("ffn_down"), [d, d_ff], "y")?;
    b.push(Op::Add { x, y });
    b.layer_norm(x, &name("layer_output_norm"), eps, "normed")
}

/// `classifier(tanh(pooler(h)))`; files of llama.cpp may lack the pooler.
fn classify(b: &mut Builder, d: usize, mut h: Buf) -> Result<Buf, Error> {
    if b.has("cls.weight") {
        h = b.biased_linear(h, "cls", [d, d], "pooled")?;
        b.push(Op::Softcap { x: h, cap: 1.0 });
    }
    match b.n_rows("cls.output.weight") {
        Some(n) if n != 1 => {
            Err(b.error("cls.output.weight", format!("has {n} labels, expected the one of a model that ranks")))
        }
        _ => b.biased_linear(h, "cls.output", [1, d], "score"),
    }
}
