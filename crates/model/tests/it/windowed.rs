//! Gemma 3, Gemma 4, gpt-oss and Qwen2: what the real ones cost, from headers without weights, and what a file may say
//! of its windows.

use crate::header::Header;
use checkpoint::Value;
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
pub fn gemma3(n_layer: u32) -> Header {
    let mut h = Header::qwen3(n_layer).rename("gemma3");
    h.set("gemma3.attention.sliding_window", 512u32).set("gemma3.rope.freq_base", 1e6f32);
    for i in 0..n_layer {
        h.tensor(&format!("blk.{i}.post_attention_norm.weight"), &[256], F32);
        h.tensor(&format!("blk.{i}.post_ffw_norm.weight"), &[256], F32);
    }
    h
}

/// A tiny Qwen2, with biases on q, k and v.
pub fn qwen2(n_layer: u32) -> Header {
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
            (Err(error), Err(text)) => assert!(error.to_string().contains(text), "case {i}: {error}, expected {text}"),
            (found, _) => panic!("case {i}: {:?}, expected {wanted:?}", found.map(|plan| plan.to_string())),
        }
    }
}

#[test]
fn what_is_not_supported_is_refused() {
    let refused = |change: fn(&mut Header), wanted: &str| {
        let mut header = gemma4();
        change(&mut header);
        let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}, expected {wanted}");
    };
    refused(
        |h| {
            h.set("gemma4.embedding_length_per_layer_input", 256u32);
        },
        "per_layer_token_embd.weight: is missing, expected [",
    );
    refused(
        |h| {
            h.set("gemma4.attention.shared_kv_layers", 2u32);
        },
        "key gemma4.attention.shared_kv_layers: is 2 of 3 layers, which leaves a kind of them without a cache",
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

/// A published folder without these keys of its config.
fn without(name: &str, keys: &[&str]) -> model::plan::ValidPlan {
    let remove = |config: &mut serde_json::Value| {
        for key in keys {
            let inner = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut *config };
            inner.as_object_mut().unwrap().remove(*key).unwrap();
        }
    };
    crate::changed(name, remove).unwrap()
}

/// What config.json does not say of the rotary embedding is as in the models' own code.
#[test]
fn folders_that_say_nothing_of_their_rope() {
    // Whose folder has no `rope_parameters`.
    let plan = without("gemma4_unified", &[]);
    let turning = |i: usize| if i < 4 { 1e6f64.powf(-(i as f64) / 16.0) } else { 0.0 };
    assert!(plan.ropes[0].inv_freq.iter().enumerate().all(|(i, freq)| (freq - turning(i)).abs() < 1e-15));
    assert_eq!(without("glm4", &["partial_rotary_factor", "rope_theta"]).ropes, without("glm4", &[]).ropes);
    assert_eq!(without("olmo3", &["rope_theta"]).ropes, without("olmo3", &[]).ropes);
    let base = |plan: model::plan::ValidPlan| {
        let n = plan.ropes[0].inv_freq.len() as f64;
        plan.ropes[0].inv_freq[1].powf(-n).round()
    };
    assert_eq!(base(without("smollm3", &[])), 5e6);
    assert_eq!(base(without("smollm3", &["rope_theta"])), 2e6);
}

/// The context that a program is compiled for decides which of Phi's two lists of divisors counts.
#[test]
fn long_contexts_have_their_own_ropes() {
    let plan = without("phi3", &[]);
    let (short, long) = (plan.ropes_for(128), plan.ropes_for(129));
    assert_eq!((short[0].inv_freq[0], long[0].inv_freq[0]), (1.0 / f64::from(1.05f32), 1.0 / f64::from(1.7f32)));
    assert_eq!(short[0].factor, long[0].factor);
    let mut broken = model::plan::Plan::clone(&plan);
    broken.long_ropes.as_mut().unwrap().ropes[0].inv_freq.pop();
    let error = model::plan::ValidPlan::new(broken).unwrap_err().to_string();
    assert!(error.contains("ropes beyond 128 positions are of another form"), "{error}");
}
