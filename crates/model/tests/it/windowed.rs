//! Gemma 3, Gemma 4, gpt-oss and Qwen2: printed plans of tiny ones, what the real ones cost, from headers without
//! weights, and what a file may say of its windows.

use crate::header::Header;
use checkpoint::Value;
use expect_test::{Expect, expect};
use quant::WeightType::{self, F32, MXFP4, Q4_0, Q8_0};

/// Dimensions of a Gemma 4.
struct Gemma4 {
    n_vocab: usize,
    d_model: usize,
    n_layer: usize,
    /// Interval of layers without a window.
    period: usize,
    n_head: usize,
    /// Key-value heads and their width, with a window and without.
    windowed: (usize, usize),
    full: (usize, usize),
    window: u32,
    d_ff: usize,
    /// Experts, how many a token uses, their width.
    experts: (usize, usize, usize),
    ty: WeightType,
}

const GEMMA4_26B: Gemma4 = Gemma4 {
    n_vocab: 262_144,
    d_model: 2816,
    n_layer: 30,
    period: 6,
    n_head: 16,
    windowed: (8, 256),
    full: (2, 512),
    window: 1024,
    d_ff: 2112,
    experts: (128, 8, 704),
    ty: Q4_0,
};

const GEMMA4_TINY: Gemma4 = Gemma4 {
    n_vocab: 96,
    d_model: 64,
    n_layer: 3,
    period: 3,
    n_head: 4,
    windowed: (2, 32),
    full: (1, 64),
    window: 16,
    d_ff: 96,
    experts: (4, 2, 32),
    ty: Q8_0,
};

impl Gemma4 {
    /// The header as llama.cpp's converter writes it.
    fn header(&self) -> Header {
        let &Gemma4 {
            d_model, n_layer, n_head, windowed, full, d_ff, experts: (n_expert, n_used, d_expert), ty, ..
        } = self;
        let is_full = |layer: usize| layer % self.period == self.period - 1;
        let mut h = Header::empty("gemma4");
        for (key, n) in [
            ("block_count", n_layer),
            ("context_length", 262_144),
            ("embedding_length", d_model),
            ("feed_forward_length", d_ff),
            ("attention.head_count", n_head),
            ("attention.key_length", full.1),
            ("attention.value_length", full.1),
            ("attention.key_length_swa", windowed.1),
            ("attention.value_length_swa", windowed.1),
            ("attention.sliding_window", self.window as usize),
            ("attention.shared_kv_layers", 0),
            ("embedding_length_per_layer_input", 0),
            ("rope.dimension_count", full.1),
            ("rope.dimension_count_swa", windowed.1),
            ("expert_count", n_expert),
            ("expert_used_count", n_used),
            ("expert_feed_forward_length", d_expert),
        ] {
            h.set(&format!("gemma4.{key}"), n as u32);
        }
        let heads = |layer: usize| if is_full(layer) { full } else { windowed };
        h.set("gemma4.attention.head_count_kv", (0..n_layer).map(|i| heads(i).0 as u32).collect::<Vec<_>>());
        h.set("gemma4.attention.sliding_window_pattern", (0..n_layer).map(|i| !is_full(i)).collect::<Vec<_>>());
        h.set("gemma4.rope.freq_base", 1e6f32).set("gemma4.rope.freq_base_swa", 1e4f32);
        h.set("gemma4.attention.layer_norm_rms_epsilon", 1e-6f32).set("gemma4.final_logit_softcapping", 30f32);
        h.tensor("token_embd.weight", &[self.n_vocab, d_model], ty).tensor("output_norm.weight", &[d_model], F32);
        for i in 0..n_layer {
            let (n_kv, d_head) = heads(i);
            let mut tensor = |name: &str, shape: &[usize], ty| {
                h.tensor(&format!("blk.{i}.{name}"), shape, ty);
            };
            tensor("attn_q.weight", &[n_head * d_head, d_model], ty);
            tensor("attn_k.weight", &[n_kv * d_head, d_model], ty);
            if !is_full(i) {
                tensor("attn_v.weight", &[n_kv * d_head, d_model], ty);
            }
            tensor("attn_output.weight", &[d_model, n_head * d_head], ty);
            tensor("attn_q_norm.weight", &[d_head], F32);
            tensor("attn_k_norm.weight", &[d_head], F32);
            for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1"] {
                tensor(&format!("{norm}.weight"), &[d_model], F32);
            }
            tensor("pre_ffw_norm_2.weight", &[d_model], F32);
            tensor("post_ffw_norm_2.weight", &[d_model], F32);
            tensor("ffn_gate.weight", &[d_ff, d_model], ty);
            tensor("ffn_up.weight", &[d_ff, d_model], ty);
            tensor("ffn_down.weight", &[d_model, d_ff], ty);
            tensor("ffn_gate_inp.weight", &[n_expert, d_model], F32);
            tensor("ffn_gate_inp.scale", &[d_model], F32);
            tensor("ffn_gate_up_exps.weight", &[n_expert, 2 * d_expert, d_model], ty);
            tensor("ffn_down_exps.weight", &[n_expert, d_model, d_expert], ty);
            tensor("ffn_down_exps.scale", &[n_expert], F32);
            tensor("layer_output_scale.weight", &[1], F32);
        }
        h
    }
}

/// Dimensions of a gpt-oss: vocabulary, width, layers, heads, key-value heads, experts, used experts, expert width.
struct GptOss(usize, usize, usize, usize, usize, usize, usize, usize);

const GPT_OSS_20B: GptOss = GptOss(201_088, 2880, 24, 64, 8, 32, 4, 2880);
const GPT_OSS_120B: GptOss = GptOss(201_088, 2880, 36, 64, 8, 128, 4, 2880);
const GPT_OSS_TINY: GptOss = GptOss(96, 64, 3, 4, 2, 4, 2, 32);

impl GptOss {
    /// The header as llama.cpp's converter writes it; heads are 64 wide.
    fn header(&self) -> Header {
        let &GptOss(n_vocab, d_model, n_layer, n_head, n_kv, n_expert, n_used, d_ff) = self;
        let mut h = Header::empty("gpt-oss");
        for (key, n) in [
            ("block_count", n_layer),
            ("context_length", 131_072),
            ("embedding_length", d_model),
            ("feed_forward_length", d_ff),
            ("expert_feed_forward_length", d_ff),
            ("expert_count", n_expert),
            ("expert_used_count", n_used),
            ("attention.head_count", n_head),
            ("attention.head_count_kv", n_kv),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
            ("attention.sliding_window", 128),
            ("rope.scaling.original_context_length", 4096),
        ] {
            h.set(&format!("gpt-oss.{key}"), n as u32);
        }
        h.set("gpt-oss.rope.freq_base", 150_000f32).set("gpt-oss.rope.scaling.factor", 32f32);
        h.set("gpt-oss.rope.scaling.type", "yarn").set("gpt-oss.attention.layer_norm_rms_epsilon", 1e-5f32);
        h.tensor("token_embd.weight", &[n_vocab, d_model], Q8_0).tensor("output.weight", &[n_vocab, d_model], Q8_0);
        h.tensor("output_norm.weight", &[d_model], F32);
        for i in 0..n_layer {
            let mut linear = |name: &str, shape: &[usize], ty| {
                h.tensor(&format!("blk.{i}.{name}.weight"), shape, ty);
                h.tensor(&format!("blk.{i}.{name}.bias"), &shape[..shape.len() - 1], F32);
            };
            linear("attn_q", &[n_head * 64, d_model], Q8_0);
            linear("attn_k", &[n_kv * 64, d_model], Q8_0);
            linear("attn_v", &[n_kv * 64, d_model], Q8_0);
            linear("attn_output", &[d_model, n_head * 64], Q8_0);
            linear("ffn_gate_inp", &[n_expert, d_model], F32);
            linear("ffn_gate_exps", &[n_expert, d_ff, d_model], MXFP4);
            linear("ffn_up_exps", &[n_expert, d_ff, d_model], MXFP4);
            linear("ffn_down_exps", &[n_expert, d_model, d_ff], MXFP4);
            h.tensor(&format!("blk.{i}.attn_sinks.weight"), &[n_head], F32);
            h.tensor(&format!("blk.{i}.attn_norm.weight"), &[d_model], F32);
            h.tensor(&format!("blk.{i}.post_attention_norm.weight"), &[d_model], F32);
        }
        h
    }
}

/// A tiny Gemma 4.
pub fn gemma4() -> Header {
    GEMMA4_TINY.header()
}

/// A tiny gpt-oss.
pub fn gpt_oss() -> Header {
    GPT_OSS_TINY.header()
}

/// A tiny Gemma 3, as converters write it: which layers see a window is left to the reader.
fn gemma3(n_layer: u32) -> Header {
    let mut h = Header::qwen3(n_layer).rename("gemma3");
    h.set("gemma3.attention.sliding_window", 512u32).set("gemma3.rope.freq_base", 1e6f32);
    for i in 0..n_layer {
        h.tensor(&format!("blk.{i}.post_attention_norm.weight"), &[256], F32);
        h.tensor(&format!("blk.{i}.post_ffw_norm.weight"), &[256], F32);
    }
    h
}

fn qwen2(n_layer: u32) -> Header {
    let mut h = Header::llama(n_layer).rename("qwen2");
    for i in 0..n_layer {
        h.tensor(&format!("blk.{i}.attn_k.bias"), &[64], F32).tensor(&format!("blk.{i}.attn_v.bias"), &[64], F32);
    }
    h
}

/// What a model must cost.
struct Cost {
    name: &'static str,
    header: Header,
    /// Parameters, all and those that a token uses, in millions.
    params: (usize, usize),
    /// Bytes of all weights.
    bytes: usize,
    /// Bytes that a position takes in caches of f16 that keep everything, and in those that keep a window.
    position: (usize, usize),
}

/// By hand. Gemma 4, its layers' parameters: attention 34.60 M with a window (25 layers), 49.02 M without (5);
/// feed-forward 17.84 M, router 0.36 M, an expert 5.947 M; 738.2 M embeddings. gpt-oss: attention 26.54 M, an expert
/// 24.88 M, its biases 8640; 2 · 579.1 M embeddings; q8_0 takes 34 bytes for 32 values, mxfp4 17, q4_0 18.
#[test]
fn real_shapes_cost_what_they_must() {
    // Norms, scales, routers, biases and sinks are f32.
    let gemma_f32 = 30 * (7 * 2816 + 128 * 2816 + 2816 + 128 + 1) + 25 * 512 + 5 * 1024 + 2816;
    let gemma_q4_0 = 262_144 * 2816 + 25 * 34_603_008 + 5 * 49_020_928 + 30 * (3 * 2816 * 2112 + 128 * 3 * 2816 * 704);
    let oss = |n_layer: usize, n_expert: usize| {
        let f32s = n_layer * (8000 + 64 + n_expert * 8640 + n_expert * 2881 + 2 * 2880) + 2880;
        let q8_0 = 2 * 201_088 * 2880 + n_layer * 26_542_080;
        4 * f32s + q8_0 / 32 * 34 + n_layer * n_expert * 24_883_200 / 32 * 17
    };
    let costs = [
        Cost {
            name: "gemma4-26b-a4b",
            header: GEMMA4_26B.header(),
            params: (25_233, 3_823),
            bytes: 4 * gemma_f32 + gemma_q4_0 / 32 * 18,
            position: (5 * 2 * 1024 * 2, 25 * 8 * 512 * 2),
        },
        Cost {
            name: "gpt-oss-20b",
            header: GPT_OSS_20B.header(),
            params: (20_915, 3_608),
            bytes: oss(24, 32),
            position: (12 * 8 * 128 * 2, 12 * 8 * 128 * 2),
        },
        Cost {
            name: "gpt-oss-120b",
            header: GPT_OSS_120B.header(),
            params: (116_829, 5_133),
            bytes: oss(36, 128),
            position: (18 * 8 * 128 * 2, 18 * 8 * 128 * 2),
        },
    ];
    for Cost { name, header, params, bytes, position } in costs {
        let Some(checkpoint) = header.open_hollow(name) else {
            crate::fixtures::skip(format!("no file of the size of {name} can be made here"));
            continue;
        };
        let plan = crate::fused(&checkpoint).unwrap();
        let millions = |n: usize| (n + 500_000) / 1_000_000;
        assert_eq!((millions(plan.n_params()), millions(plan.active_params())), params, "{name}");
        assert_eq!(plan.weight_bytes().iter().map(|(_, bytes)| bytes).sum::<usize>(), bytes, "{name}");
        assert_eq!(crate::sequence_bytes(&plan), (position.0, position.1, 0), "{name}");
    }
}

/// Keys that say which layers see a window, and the layers that do, or what the error says.
struct Windows(fn() -> Header, fn(&mut Header), Result<&'static [u32], &'static str>);

#[rustfmt::skip]
const WINDOWS: &[Windows] = &[
    Windows(|| gemma3(7), |_| {}, Ok(&[0, 1, 2, 3, 4, 6])),
    Windows(|| gemma3(7), |h| { h.set("gemma3.attention.sliding_window_pattern", 3u32); }, Ok(&[0, 1, 3, 4, 6])),
    Windows(|| gemma3(2), |h| { h.set("gemma3.attention.sliding_window_pattern", 0u32); }, Ok(&[0, 1])),
    Windows(|| gemma3(2), |h| { h.set("gemma3.attention.sliding_window_pattern", 1u32); }, Ok(&[])),
    Windows(|| gemma3(3), |h| { h.set("gemma3.attention.sliding_window_pattern", vec![false, true, false]); }, Ok(&[1])),
    Windows(|| gemma3(2), |h| { h.set("gemma3.attention.sliding_window", 0u32); }, Ok(&[])),
    Windows(|| gemma3(3), |h| { h.set("gemma3.attention.sliding_window_pattern", vec![false, true]); },
        Err("key gemma3.attention.sliding_window_pattern: has 2 layers, the model has 3")),
    Windows(|| gemma3(2), |h| { h.set("gemma3.attention.sliding_window_pattern", "LLG"); },
        Err("key gemma3.attention.sliding_window_pattern: found")),
    Windows(|| gemma3(2), |h| { h.set("gemma3.attention.sliding_window_pattern", vec![1.0f32, 0.0]); },
        Err("key gemma3.attention.sliding_window_pattern: found")),
    Windows(|| gemma3(2), |h| {
        h.unset("gemma3.attention.sliding_window").set("gemma3.attention.sliding_window_pattern", vec![false, true]);
    }, Err("key gemma3.attention.sliding_window: is missing or 0, and layer 1 is said to see a window")),
    Windows(gpt_oss, |_| {}, Ok(&[0, 2])),
    Windows(gemma4, |_| {}, Ok(&[0, 1])),
    Windows(|| qwen2(2), |_| {}, Ok(&[])),
    Windows(|| qwen2(2), |h| { h.set("qwen2.attention.sliding_window", 4096u32); }, Ok(&[])),
    Windows(|| qwen2(2), |h| { h.set("qwen2.attention.sliding_window", 4095u32); },
        Err("key qwen2.attention.sliding_window: is 4095 of a context of 4096, and nothing says which layers it holds for")),
    Windows(|| Header::qwen3moe(2), |h| { h.set("qwen3moe.attention.sliding_window", 64u32); }, Err("is 64 of a context of 4096")),
    Windows(|| Header::llama(2), |h| { h.set("llama.attention.sliding_window", 64u32); }, Ok(&[0, 1])),
    Windows(|| Header::llama(2), |h| {
        h.set("llama.attention.sliding_window", 64u32).set("llama.attention.sliding_window_pattern", 2u32);
    }, Ok(&[0])),
];

#[test]
fn layers_see_the_windows_that_the_file_says() {
    for (i, Windows(make, change, wanted)) in WINDOWS.iter().enumerate() {
        let mut header = make();
        change(&mut header);
        match (crate::fused(&header.open()), wanted) {
            (Ok(plan), Ok(layers)) => {
                let windowed = plan.caches.iter().enumerate().filter(|(_, cache)| cache.window.is_some());
                let windowed: Vec<u32> = windowed.map(|(layer, _)| layer as u32).collect();
                assert_eq!(&windowed, layers, "case {i}");
                let seen = plan.to_string().matches(", window ").count();
                assert_eq!(seen > 0, !layers.is_empty(), "case {i}");
            }
            (Err(error), Err(text)) => assert!(error.to_string().contains(text), "case {i}: {error}, {text} wanted"),
            (found, _) => panic!("case {i}: {:?}, {wanted:?} wanted", found.map(|plan| plan.to_string())),
        }
    }
}

#[test]
fn what_is_not_supported_is_refused() {
    let refused = |change: fn(&mut Header), wanted: &str| {
        let mut header = gemma4();
        change(&mut header);
        let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}, {wanted} wanted");
    };
    refused(
        |h| {
            h.set("gemma4.embedding_length_per_layer_input", 256u32);
        },
        "key gemma4.embedding_length_per_layer_input: is 256, 0 wanted: the small Gemma 4 models (E2B, E4B)",
    );
    refused(
        |h| {
            h.set("gemma4.attention.shared_kv_layers", 2u32);
        },
        "key gemma4.attention.shared_kv_layers: is 2, 0 wanted",
    );
    refused(
        |h| {
            h.set("gemma4.attention.head_count_kv", vec![2u32, 3, 1]);
        },
        "key gemma4.attention.head_count_kv: is 3, which does not divide 4 heads",
    );
    refused(
        |h| {
            h.set("gemma4.attention.head_count_kv", vec![2u32, 1]);
        },
        "key gemma4.attention.head_count_kv: has 2 numbers, the model has 3 layers",
    );
    refused(
        |h| {
            h.set("gemma4.attention.head_count_kv", Value::F32(2.0));
        },
        "key gemma4.attention.head_count_kv: found",
    );
}

fn fused(header: Header, wanted: Expect) {
    wanted.assert_eq(&crate::fused(&header.open()).unwrap().to_string());
}

#[test]
fn gemma4_plan() {
    fused(
        gemma4(),
        expect![[r#"
        gemma4: n_vocab 96, d_model 64, n_ctx_train 262144
        82 ops, 68 buffers, 70 weights
        rope 0: half, 32 pairs, inv_freq 1.000000e0 .. 1.539927e-6, factor 1
        rope 1: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
        cache 0 to 1: 2 heads, k 32, v 32, keeps 16
        cache 2: 1 heads, k 64, v 64
        embed        x[T, 64] = token_embd.weight q8_0[96, 64][id] · 8
        layer 0:
          rms_norm     h.0[T, 64] = norm(x) ⊙ blk.0.attn_norm.weight f32[64], eps 1e-6
          linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q8_0[128, 64]
                       k.0[T, 64] = h.0 · blk.0.attn_k.weight q8_0[64, 64]
                       v.0[T, 64] = h.0 · blk.0.attn_v.weight q8_0[64, 64]
          head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
          head_norm    v.0 = norm of 2 heads of 32, eps 1e-6
          rope         q.0 = rope 1 of 4 heads of 32
          rope         k.0 = rope 1 of 2 heads of 32
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 1, window 16
          linear       o.0[T, 64] = a.0 · blk.0.attn_output.weight q8_0[64, 128]
          rms_norm     o_normed.0[T, 64] = norm(o.0) ⊙ blk.0.post_attention_norm.weight f32[64], eps 1e-6
          rms_norm     f.0[T, 64] = norm(x += o_normed.0) ⊙ blk.0.ffn_norm.weight f32[64], eps 1e-6
          gated_linear act.0[T, 96] = gelu_tanh(f.0 · blk.0.ffn_gate.weight q8_0[96, 64]) ⊙ (f.0 · blk.0.ffn_up.weight q8_0[96, 64])
          linear       mlp.0[T, 64] = act.0 · blk.0.ffn_down.weight q8_0[64, 96]
          rms_norm     mlp_normed.0[T, 64] = norm(mlp.0) ⊙ blk.0.post_ffw_norm_1.weight f32[64], eps 1e-6
          rms_norm     r.0[T, 64] = norm(x) ⊙ blk.0.ffn_gate_inp.scale f32[64], eps 1e-6
          linear       router.0[T, 4] = r.0 · blk.0.ffn_gate_inp.weight f32[4, 64]
          scale        router.0 *= 0.125
          route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 4, renormalised · blk.0.ffn_down_exps.scale f32[4]
          rms_norm     e.0[T, 64] = norm(x) ⊙ blk.0.pre_ffw_norm_2.weight f32[64], eps 1e-6
          experts      y.0[T·2, 64] = (gelu_tanh(e.0 · blk.0.ffn_gate_exps.weight q8_0[4, 32, 64]) ⊙ (e.0 · blk.0.ffn_up_exps.weight q8_0[4, 32, 64])) · blk.0.ffn_down_exps.weight q8_0[4, 64, 32], by ids.0, scratch hidden.0[T·2, 32]
          combine      sum.0[T, 64] = weights.0 · y.0; sum_normed.0[T, 64] = norm ⊙ blk.0.post_ffw_norm_2.weight f32[64], eps 1e-6
          rms_norm     y_normed.0[T, 64] = norm(mlp_normed.0 += sum_normed.0) ⊙ blk.0.post_ffw_norm.weight f32[64], eps 1e-6
          add          x += y_normed.0
          scale_by     x *= blk.0.layer_output_scale.weight f32[1]
        layer 1 as layer 0
        layer 2:
          rms_norm     h.2[T, 64] = norm(x) ⊙ blk.2.attn_norm.weight f32[64], eps 1e-6
          linear       q.2[T, 256] = h.2 · blk.2.attn_q.weight q8_0[256, 64]
                       k.2[T, 64] = h.2 · blk.2.attn_k.weight q8_0[64, 64]
          split_heads  v.2[T, 64] = parts of 1 heads of k.2
          head_norm    q.2 = norm of 4 heads of 64 ⊙ blk.2.attn_q_norm.weight f32[64], eps 1e-6
          head_norm    k.2 = norm of 1 heads of 64 ⊙ blk.2.attn_k_norm.weight f32[64], eps 1e-6
          head_norm    v.2 = norm of 1 heads of 64, eps 1e-6
          rope         q.2 = rope 0 of 4 heads of 64
          rope         k.2 = rope 0 of 1 heads of 64
          kv_append    cache.2 ← k.2, v.2
          attention    a.2[T, 256] = q.2 over cache.2, 4 heads, scale 1
          select       a.2.asked[R, 256] = a.2[rows]
          select       x.asked[R, 64] = x[rows]
          linear       o.2.asked[R, 64] = a.2.asked · blk.2.attn_output.weight q8_0[64, 256]
          rms_norm     o_normed.2.asked[R, 64] = norm(o.2.asked) ⊙ blk.2.post_attention_norm.weight f32[64], eps 1e-6
          rms_norm     f.2.asked[R, 64] = norm(x.asked += o_normed.2.asked) ⊙ blk.2.ffn_norm.weight f32[64], eps 1e-6
          gated_linear act.2.asked[R, 96] = gelu_tanh(f.2.asked · blk.2.ffn_gate.weight q8_0[96, 64]) ⊙ (f.2.asked · blk.2.ffn_up.weight q8_0[96, 64])
          linear       mlp.2.asked[R, 64] = act.2.asked · blk.2.ffn_down.weight q8_0[64, 96]
          rms_norm     mlp_normed.2.asked[R, 64] = norm(mlp.2.asked) ⊙ blk.2.post_ffw_norm_1.weight f32[64], eps 1e-6
          rms_norm     r.2.asked[R, 64] = norm(x.asked) ⊙ blk.2.ffn_gate_inp.scale f32[64], eps 1e-6
          linear       router.2.asked[R, 4] = r.2.asked · blk.2.ffn_gate_inp.weight f32[4, 64]
          scale        router.2.asked *= 0.125
          route        ids.2.asked u32[R, 2], weights.2.asked[R, 2] = softmax(router.2.asked) best 2 of 4, renormalised · blk.2.ffn_down_exps.scale f32[4]
          rms_norm     e.2.asked[R, 64] = norm(x.asked) ⊙ blk.2.pre_ffw_norm_2.weight f32[64], eps 1e-6
          experts      y.2.asked[R·2, 64] = (gelu_tanh(e.2.asked · blk.2.ffn_gate_exps.weight q8_0[4, 32, 64]) ⊙ (e.2.asked · blk.2.ffn_up_exps.weight q8_0[4, 32, 64])) · blk.2.ffn_down_exps.weight q8_0[4, 64, 32], by ids.2.asked, scratch hidden.2.asked[R·2, 32]
          combine      sum.2.asked[R, 64] = weights.2.asked · y.2.asked; sum_normed.2.asked[R, 64] = norm ⊙ blk.2.post_ffw_norm_2.weight f32[64], eps 1e-6
          rms_norm     y_normed.2.asked[R, 64] = norm(mlp_normed.2.asked += sum_normed.2.asked) ⊙ blk.2.post_ffw_norm.weight f32[64], eps 1e-6
          add          x.asked += y_normed.2.asked
          scale_by     x.asked *= blk.2.layer_output_scale.weight f32[1]
        rms_norm     final[R, 64] = norm(x.asked) ⊙ output_norm.weight f32[64], eps 1e-6
        linear       logits[R, 96] = final · token_embd.weight q8_0[96, 64]
        softcap      logits = softcap 30
    "#]],
    );
}

#[test]
fn gemma3_plan() {
    fused(
        gemma3(7),
        expect![[r#"
        gemma3: n_vocab 96, d_model 256, n_ctx_train 4096
        103 ops, 82 buffers, 93 weights
        rope 0: half, 16 pairs, inv_freq 1.000000e0 .. 2.371374e-6, factor 1
        rope 1: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
        cache 0 to 4: 2 heads, k 32, v 32, keeps 512
        cache 5: 2 heads, k 32, v 32
        cache 6: 2 heads, k 32, v 32, keeps 512
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id] · 16
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
                       k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
                       v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
          head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.0 = rope 1 of 4 heads of 32
          rope         k.0 = rope 1 of 2 heads of 32
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669, window 512
          linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
          rms_norm     o_normed.0[T, 256] = norm(o.0) ⊙ blk.0.post_attention_norm.weight f32[256], eps 1e-6
          rms_norm     f.0[T, 256] = norm(x += o_normed.0) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.0[T, 512] = gelu_tanh(f.0 · blk.0.ffn_gate.weight q4_k[512, 256]) ⊙ (f.0 · blk.0.ffn_up.weight q4_k[512, 256])
          linear       y.0[T, 256] = act.0 · blk.0.ffn_down.weight q4_k[256, 512]
          rms_norm     y_normed.0[T, 256] = norm(y.0) ⊙ blk.0.post_ffw_norm.weight f32[256], eps 1e-6
          rms_norm     h.1[T, 256] = norm(x += y_normed.0) ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
        layer 1:
          linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256]
                       k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
                       v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
          head_norm    q.1 = norm of 4 heads of 32 ⊙ blk.1.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.1 = norm of 2 heads of 32 ⊙ blk.1.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.1 = rope 1 of 4 heads of 32
          rope         k.1 = rope 1 of 2 heads of 32
          kv_append    cache.1 ← k.1, v.1
          attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669, window 512
          linear       o.1[T, 256] = a.1 · blk.1.attn_output.weight q8_0[256, 128]
          rms_norm     o_normed.1[T, 256] = norm(o.1) ⊙ blk.1.post_attention_norm.weight f32[256], eps 1e-6
          rms_norm     f.1[T, 256] = norm(x += o_normed.1) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.1[T, 512] = gelu_tanh(f.1 · blk.1.ffn_gate.weight q4_k[512, 256]) ⊙ (f.1 · blk.1.ffn_up.weight q4_k[512, 256])
          linear       y.1[T, 256] = act.1 · blk.1.ffn_down.weight q4_k[256, 512]
          rms_norm     y_normed.1[T, 256] = norm(y.1) ⊙ blk.1.post_ffw_norm.weight f32[256], eps 1e-6
          rms_norm     h.2[T, 256] = norm(x += y_normed.1) ⊙ blk.2.attn_norm.weight f32[256], eps 1e-6
        layer 2:
          linear       q.2[T, 128] = h.2 · blk.2.attn_q.weight q4_k[128, 256]
                       k.2[T, 64] = h.2 · blk.2.attn_k.weight q4_k[64, 256]
                       v.2[T, 64] = h.2 · blk.2.attn_v.weight q4_k[64, 256]
          head_norm    q.2 = norm of 4 heads of 32 ⊙ blk.2.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.2 = norm of 2 heads of 32 ⊙ blk.2.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.2 = rope 1 of 4 heads of 32
          rope         k.2 = rope 1 of 2 heads of 32
          kv_append    cache.2 ← k.2, v.2
          attention    a.2[T, 128] = q.2 over cache.2, 4 heads, scale 0.17677669, window 512
          linear       o.2[T, 256] = a.2 · blk.2.attn_output.weight q8_0[256, 128]
          rms_norm     o_normed.2[T, 256] = norm(o.2) ⊙ blk.2.post_attention_norm.weight f32[256], eps 1e-6
          rms_norm     f.2[T, 256] = norm(x += o_normed.2) ⊙ blk.2.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.2[T, 512] = gelu_tanh(f.2 · blk.2.ffn_gate.weight q4_k[512, 256]) ⊙ (f.2 · blk.2.ffn_up.weight q4_k[512, 256])
          linear       y.2[T, 256] = act.2 · blk.2.ffn_down.weight q4_k[256, 512]
          rms_norm     y_normed.2[T, 256] = norm(y.2) ⊙ blk.2.post_ffw_norm.weight f32[256], eps 1e-6
          rms_norm     h.3[T, 256] = norm(x += y_normed.2) ⊙ blk.3.attn_norm.weight f32[256], eps 1e-6
        layers 3 to 4 as layer 2
        layer 5:
          linear       q.5[T, 128] = h.5 · blk.5.attn_q.weight q4_k[128, 256]
                       k.5[T, 64] = h.5 · blk.5.attn_k.weight q4_k[64, 256]
                       v.5[T, 64] = h.5 · blk.5.attn_v.weight q6_k[64, 256]
          head_norm    q.5 = norm of 4 heads of 32 ⊙ blk.5.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.5 = norm of 2 heads of 32 ⊙ blk.5.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.5 = rope 0 of 4 heads of 32
          rope         k.5 = rope 0 of 2 heads of 32
          kv_append    cache.5 ← k.5, v.5
          attention    a.5[T, 128] = q.5 over cache.5, 4 heads, scale 0.17677669
          linear       o.5[T, 256] = a.5 · blk.5.attn_output.weight q8_0[256, 128]
          rms_norm     o_normed.5[T, 256] = norm(o.5) ⊙ blk.5.post_attention_norm.weight f32[256], eps 1e-6
          rms_norm     f.5[T, 256] = norm(x += o_normed.5) ⊙ blk.5.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.5[T, 512] = gelu_tanh(f.5 · blk.5.ffn_gate.weight q4_k[512, 256]) ⊙ (f.5 · blk.5.ffn_up.weight q4_k[512, 256])
          linear       y.5[T, 256] = act.5 · blk.5.ffn_down.weight q4_k[256, 512]
          rms_norm     y_normed.5[T, 256] = norm(y.5) ⊙ blk.5.post_ffw_norm.weight f32[256], eps 1e-6
          rms_norm     h.6[T, 256] = norm(x += y_normed.5) ⊙ blk.6.attn_norm.weight f32[256], eps 1e-6
        layer 6:
          linear       q.6[T, 128] = h.6 · blk.6.attn_q.weight q4_k[128, 256]
                       k.6[T, 64] = h.6 · blk.6.attn_k.weight q4_k[64, 256]
                       v.6[T, 64] = h.6 · blk.6.attn_v.weight q4_k[64, 256]
          head_norm    q.6 = norm of 4 heads of 32 ⊙ blk.6.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.6 = norm of 2 heads of 32 ⊙ blk.6.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.6 = rope 1 of 4 heads of 32
          rope         k.6 = rope 1 of 2 heads of 32
          kv_append    cache.6 ← k.6, v.6
          attention    a.6[T, 128] = q.6 over cache.6, 4 heads, scale 0.17677669, window 512
          select       a.6.asked[R, 128] = a.6[rows]
          select       x.asked[R, 256] = x[rows]
          linear       o.6.asked[R, 256] = a.6.asked · blk.6.attn_output.weight q8_0[256, 128]
          rms_norm     o_normed.6.asked[R, 256] = norm(o.6.asked) ⊙ blk.6.post_attention_norm.weight f32[256], eps 1e-6
          rms_norm     f.6.asked[R, 256] = norm(x.asked += o_normed.6.asked) ⊙ blk.6.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.6.asked[R, 512] = gelu_tanh(f.6.asked · blk.6.ffn_gate.weight q4_k[512, 256]) ⊙ (f.6.asked · blk.6.ffn_up.weight q4_k[512, 256])
          linear       y.6.asked[R, 256] = act.6.asked · blk.6.ffn_down.weight q4_k[256, 512]
          rms_norm     y_normed.6.asked[R, 256] = norm(y.6.asked) ⊙ blk.6.post_ffw_norm.weight f32[256], eps 1e-6
          rms_norm     final[R, 256] = norm(x.asked += y_normed.6.asked) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
    "#]],
    );
}

#[test]
fn gpt_oss_plan() {
    fused(
        gpt_oss(),
        expect![[r#"
        gpt-oss: n_vocab 96, d_model 64, n_ctx_train 131072
        38 ops, 41 buffers, 60 weights
        rope 0: half, 32 pairs, inv_freq 1.000000e0 .. 3.023511e-7, factor 1.3465736
        cache 0: 2 heads, k 64, v 64, keeps 128
        cache 1: 2 heads, k 64, v 64
        cache 2: 2 heads, k 64, v 64, keeps 128
        embed        x[T, 64] = token_embd.weight q8_0[96, 64][id]
        layer 0:
          rms_norm     h.0[T, 64] = norm(x) ⊙ blk.0.attn_norm.weight f32[64], eps 1e-5
          linear       q.0[T, 256] = h.0 · blk.0.attn_q.weight q8_0[256, 64] + blk.0.attn_q.bias f32[256]
                       k.0[T, 128] = h.0 · blk.0.attn_k.weight q8_0[128, 64] + blk.0.attn_k.bias f32[128]
                       v.0[T, 128] = h.0 · blk.0.attn_v.weight q8_0[128, 64] + blk.0.attn_v.bias f32[128]
          rope         q.0 = rope 0 of 4 heads of 64
          rope         k.0 = rope 0 of 2 heads of 64
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 256] = q.0 over cache.0, 4 heads, scale 0.125, window 128, sinks blk.0.attn_sinks.weight f32[4]
          linear       o.0[T, 64] = a.0 · blk.0.attn_output.weight q8_0[64, 256] + blk.0.attn_output.bias f32[64]
          rms_norm     f.0[T, 64] = norm(x += o.0) ⊙ blk.0.post_attention_norm.weight f32[64], eps 1e-5
          linear       router.0[T, 4] = f.0 · blk.0.ffn_gate_inp.weight f32[4, 64] + blk.0.ffn_gate_inp.bias f32[4]
          route        ids.0 u32[T, 2], weights.0[T, 2] = router.0 best 2 of 4, softmax
          experts      y.0[T·2, 64] = (clamped_swiglu[1.702, 7](f.0 · blk.0.ffn_gate_exps.weight mxfp4[4, 32, 64] + blk.0.ffn_gate_exps.bias f32[4, 32]) ⊙ (f.0 · blk.0.ffn_up_exps.weight mxfp4[4, 32, 64] + blk.0.ffn_up_exps.bias f32[4, 32])) · blk.0.ffn_down_exps.weight mxfp4[4, 64, 32] + blk.0.ffn_down_exps.bias f32[4, 64], by ids.0, scratch hidden.0[T·2, 32]
          combine      x += weights.0 · y.0; h.1[T, 64] = norm ⊙ blk.1.attn_norm.weight f32[64], eps 1e-5
        layer 1:
          linear       q.1[T, 256] = h.1 · blk.1.attn_q.weight q8_0[256, 64] + blk.1.attn_q.bias f32[256]
                       k.1[T, 128] = h.1 · blk.1.attn_k.weight q8_0[128, 64] + blk.1.attn_k.bias f32[128]
                       v.1[T, 128] = h.1 · blk.1.attn_v.weight q8_0[128, 64] + blk.1.attn_v.bias f32[128]
          rope         q.1 = rope 0 of 4 heads of 64
          rope         k.1 = rope 0 of 2 heads of 64
          kv_append    cache.1 ← k.1, v.1
          attention    a.1[T, 256] = q.1 over cache.1, 4 heads, scale 0.125, sinks blk.1.attn_sinks.weight f32[4]
          linear       o.1[T, 64] = a.1 · blk.1.attn_output.weight q8_0[64, 256] + blk.1.attn_output.bias f32[64]
          rms_norm     f.1[T, 64] = norm(x += o.1) ⊙ blk.1.post_attention_norm.weight f32[64], eps 1e-5
          linear       router.1[T, 4] = f.1 · blk.1.ffn_gate_inp.weight f32[4, 64] + blk.1.ffn_gate_inp.bias f32[4]
          route        ids.1 u32[T, 2], weights.1[T, 2] = router.1 best 2 of 4, softmax
          experts      y.1[T·2, 64] = (clamped_swiglu[1.702, 7](f.1 · blk.1.ffn_gate_exps.weight mxfp4[4, 32, 64] + blk.1.ffn_gate_exps.bias f32[4, 32]) ⊙ (f.1 · blk.1.ffn_up_exps.weight mxfp4[4, 32, 64] + blk.1.ffn_up_exps.bias f32[4, 32])) · blk.1.ffn_down_exps.weight mxfp4[4, 64, 32] + blk.1.ffn_down_exps.bias f32[4, 64], by ids.1, scratch hidden.1[T·2, 32]
          combine      x += weights.1 · y.1; h.2[T, 64] = norm ⊙ blk.2.attn_norm.weight f32[64], eps 1e-5
        layer 2:
          linear       q.2[T, 256] = h.2 · blk.2.attn_q.weight q8_0[256, 64] + blk.2.attn_q.bias f32[256]
                       k.2[T, 128] = h.2 · blk.2.attn_k.weight q8_0[128, 64] + blk.2.attn_k.bias f32[128]
                       v.2[T, 128] = h.2 · blk.2.attn_v.weight q8_0[128, 64] + blk.2.attn_v.bias f32[128]
          rope         q.2 = rope 0 of 4 heads of 64
          rope         k.2 = rope 0 of 2 heads of 64
          kv_append    cache.2 ← k.2, v.2
          attention    a.2[T, 256] = q.2 over cache.2, 4 heads, scale 0.125, window 128, sinks blk.2.attn_sinks.weight f32[4]
          select       a.2.asked[R, 256] = a.2[rows]
          select       x.asked[R, 64] = x[rows]
          linear       o.2.asked[R, 64] = a.2.asked · blk.2.attn_output.weight q8_0[64, 256] + blk.2.attn_output.bias f32[64]
          rms_norm     f.2.asked[R, 64] = norm(x.asked += o.2.asked) ⊙ blk.2.post_attention_norm.weight f32[64], eps 1e-5
          linear       router.2.asked[R, 4] = f.2.asked · blk.2.ffn_gate_inp.weight f32[4, 64] + blk.2.ffn_gate_inp.bias f32[4]
          route        ids.2.asked u32[R, 2], weights.2.asked[R, 2] = router.2.asked best 2 of 4, softmax
          experts      y.2.asked[R·2, 64] = (clamped_swiglu[1.702, 7](f.2.asked · blk.2.ffn_gate_exps.weight mxfp4[4, 32, 64] + blk.2.ffn_gate_exps.bias f32[4, 32]) ⊙ (f.2.asked · blk.2.ffn_up_exps.weight mxfp4[4, 32, 64] + blk.2.ffn_up_exps.bias f32[4, 32])) · blk.2.ffn_down_exps.weight mxfp4[4, 64, 32] + blk.2.ffn_down_exps.bias f32[4, 64], by ids.2.asked, scratch hidden.2.asked[R·2, 32]
          combine      x.asked += weights.2.asked · y.2.asked; final[R, 64] = norm ⊙ output_norm.weight f32[64], eps 1e-5
        linear       logits[R, 96] = final · output.weight q8_0[96, 64]
    "#]],
    );
}

#[test]
fn qwen2_plan() {
    fused(
        qwen2(2),
        expect![[r#"
        qwen2: n_vocab 96, d_model 256, n_ctx_train 4096
        25 ops, 23 buffers, 26 weights
        rope 0: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
        cache 0 to 1: 2 heads, k 32, v 32
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256] + blk.0.attn_q.bias f32[128]
                       k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256] + blk.0.attn_k.bias f32[64]
                       v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256] + blk.0.attn_v.bias f32[64]
          rope         q.0 = rope 0 of 4 heads of 32
          rope         k.0 = rope 0 of 2 heads of 32
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
          linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
          rms_norm     f.0[T, 256] = norm(x += o.0) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.0[T, 512] = silu(f.0 · blk.0.ffn_gate.weight q4_k[512, 256]) ⊙ (f.0 · blk.0.ffn_up.weight q4_k[512, 256])
          linear       y.0[T, 256] = act.0 · blk.0.ffn_down.weight q4_k[256, 512]
          rms_norm     h.1[T, 256] = norm(x += y.0) ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
        layer 1:
          linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256] + blk.1.attn_q.bias f32[128]
                       k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256] + blk.1.attn_k.bias f32[64]
                       v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256] + blk.1.attn_v.bias f32[64]
          rope         q.1 = rope 0 of 4 heads of 32
          rope         k.1 = rope 0 of 2 heads of 32
          kv_append    cache.1 ← k.1, v.1
          attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
          select       a.1.asked[R, 128] = a.1[rows]
          select       x.asked[R, 256] = x[rows]
          linear       o.1.asked[R, 256] = a.1.asked · blk.1.attn_output.weight q8_0[256, 128]
          rms_norm     f.1.asked[R, 256] = norm(x.asked += o.1.asked) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.1.asked[R, 512] = silu(f.1.asked · blk.1.ffn_gate.weight q4_k[512, 256]) ⊙ (f.1.asked · blk.1.ffn_up.weight q4_k[512, 256])
          linear       y.1.asked[R, 256] = act.1.asked · blk.1.ffn_down.weight q4_k[256, 512]
          rms_norm     final[R, 256] = norm(x.asked += y.1.asked) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
    "#]],
    );
}
