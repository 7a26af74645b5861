//! What a file may not say: every case changes one thing of a good header, and the error names it and both numbers.

use crate::header::Header;
use crate::{latent, windowed};
use checkpoint::Value;
use quant::WeightType::{F32, Q4_K};

/// A change that makes a header bad, and what the error must say.
struct Case(fn() -> Header, fn(&mut Header), &'static str);

fn moe() -> Header {
    Header::qwen3moe(2)
}

fn dense() -> Header {
    Header::qwen3(2)
}

fn llama() -> Header {
    Header::llama(2)
}

fn mixtral() -> Header {
    Header::mixtral(2)
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case(moe, |h| { h.set("general.architecture", "mamba"); },
        "failed to build the plan of tiny.gguf: architecture mamba is unsupported (the nearest is jamba)"),
    Case(moe, |h| { h.set("general.architecture", "Qwen3-MoE2"); },
        "architecture Qwen3-MoE2 is unsupported (the nearest is qwen3moe); `moebius"),
    Case(moe, |h| { h.unset("general.architecture"); }, "failed to read tiny.gguf: key general.architecture: missing"),
    Case(moe, |h| { h.unset("qwen3moe.block_count"); }, "key qwen3moe.block_count: missing"),
    Case(moe, |h| { h.set("qwen3moe.block_count", 0u32); }, "key qwen3moe.block_count: is 0, expected 1 to 1024"),
    Case(moe, |h| { h.set("qwen3moe.block_count", 1025u32); }, "key qwen3moe.block_count: is 1025, expected 1 to 1024"),
    Case(moe, |h| { h.set("qwen3moe.block_count", 3u32); }, "tensor blk.2.attn_norm.weight: is missing, expected [256]"),
    Case(moe, |h| { h.set("qwen3moe.block_count", 1u32); }, "tensor blk.1.attn_norm.weight: f32 [256] is in the file"),
    Case(moe, |h| { h.set("qwen3moe.context_length", u64::MAX); }, "context_length: is 18446744073709551615, expected 1 to 16777216"),
    Case(moe, |h| { h.set("qwen3moe.embedding_length", u32::MAX); }, "embedding_length: is 4294967295, expected 1 to 1048576"),
    Case(moe, |h| { h.set("qwen3moe.embedding_length", 128u32); },
        "tensor token_embd.weight: has shape [96, 256], expected [96, 128]"),
    Case(moe, |h| { h.set("qwen3moe.attention.head_count_kv", 3u32); },
        "key qwen3moe.attention.head_count_kv: is 3, which does not divide qwen3moe.attention.head_count 4"),
    Case(moe, |h| { h.set("qwen3moe.attention.head_count", 8u32); },
        "tensor blk.0.attn_q.weight: has shape [128, 256], expected [256, 256]"),
    Case(moe, |h| { h.set("qwen3moe.attention.head_count", Value::F32(4.0)); }, "key qwen3moe.attention.head_count: found"),
    Case(moe, |h| { h.unset("qwen3moe.attention.key_length").set("qwen3moe.attention.head_count", 6u32); },
        "key qwen3moe.attention.key_length: is missing, and 6 heads cannot share a width of 256"),
    Case(moe, |h| { h.set("qwen3moe.attention.layer_norm_rms_epsilon", -1f32); }, "rms_epsilon: is -1, expected 0 to 1"),
    Case(moe, |h| { h.set("qwen3moe.attention.layer_norm_rms_epsilon", f32::NAN); }, "rms_epsilon: found"),
    Case(moe, |h| { h.set("qwen3moe.expert_count", 0u32); }, "key qwen3moe.expert_count: is missing or 0"),
    Case(moe, |h| { h.set("qwen3moe.expert_count", 1025u32); }, "key qwen3moe.expert_count: is 1025, expected 1 to 1024"),
    Case(moe, |h| { h.set("qwen3moe.expert_count", 9u32); }, "blk.0.ffn_gate_inp.weight: has shape [8, 256], expected [9, 256]"),
    Case(moe, |h| { h.set("qwen3moe.expert_used_count", 0u32); }, "expert_used_count: is 0, expected 1 to 32"),
    Case(moe, |h| { h.set("qwen3moe.expert_used_count", 33u32); }, "expert_used_count: is 33, expected 1 to 32"),
    Case(moe, |h| { h.set("qwen3moe.expert_used_count", 9u32); },
        "key qwen3moe.expert_used_count: is 9, qwen3moe.expert_count is 8"),
    Case(moe, |h| { h.set("qwen3moe.expert_gating_func", 2u32); }, "expert_gating_func: is 2, expected 1 (softmax)"),
    Case(moe, |h| { h.set("qwen3moe.expert_weights_scale", -2f32); }, "expert_weights_scale: is -2, expected 0 or more"),
    Case(moe, |h| { h.tensor("blk.1.ffn_down_exps.weight", &[8, 256, 512], Q4_K); },
        "tensor blk.1.ffn_down_exps.weight: has shape [8, 256, 512], expected [8, 256, 256]"),
    Case(moe, |h| { h.tensor("blk.1.ffn_up_shexp.weight", &[256, 256], Q4_K); },
        "tensor blk.1.ffn_up_shexp.weight: q4_k [256, 256] is in the file, qwen3moe has no use for it"),
    Case(moe, |h| { h.drop_tensor("token_embd.weight"); }, "tensor token_embd.weight: is missing"),
    Case(moe, |h| { h.tensor("token_embd.weight", &[256], Q4_K); }, "token_embd.weight: has shape [256], expected two axes"),
    Case(moe, |h| { h.set("qwen3moe.vocab_size", 97u32); }, "vocab_size: is 97, token_embd.weight has 96 rows"),
    Case(moe, |h| { h.tensor("output_norm.weight", &[256], Q4_K); }, "output_norm.weight: has type q4_k, expected f32, f16 or bf16"),
    Case(dense, |h| { h.drop_tensor("blk.1.attn_q_norm.weight"); }, "blk.1.attn_q_norm.weight: is missing, expected [32]"),
    Case(dense, |h| { h.set("qwen3.feed_forward_length", 0u32); }, "feed_forward_length: is 0, expected 1 to 1048576"),
    Case(dense, |h| { h.set("qwen3.rope.dimension_count", 33u32); }, "is 33, expected an even number up to the head width 32"),
    Case(dense, |h| { h.set("qwen3.rope.dimension_count", 34u32); }, "is 34, expected an even number up to the head width 32"),
    Case(dense, |h| { h.set("qwen3.rope.freq_base", 0f32); }, "key qwen3.rope.freq_base: is 0, expected more than 0"),
    Case(dense, |h| { h.set("qwen3.rope.scaling.type", "longrope"); },
        "key qwen3.rope.scaling.type: is longrope, expected one of none, linear, yarn"),
    Case(dense, |h| { h.set("qwen3.rope.scaling.factor", -4f32); }, "rope.scaling.factor: is -4, expected 0 or more"),
    Case(llama, |h| { h.tensor("rope_freqs.weight", &[15], F32); }, "rope_freqs.weight: is f32 [15], expected f32 [16]"),
    Case(llama, |h| { h.tensor("rope_freqs.weight", &[16], F32); }, "rope_freqs.weight: divides a frequency by 0"),
    Case(llama, |h| { h.tensor("blk.0.attn_q.bias", &[127], F32); }, "blk.0.attn_q.bias: has shape [127], expected [128]"),
    Case(llama, |h| { h.tensor("blk.0.attn_q_norm.weight", &[32], F32); }, "llama has no use for it"),
    Case(mixtral, |h| { h.tensor("blk.0.ffn_gate.0.weight", &[256, 256], Q4_K); }, "each expert in a tensor of its own"),
];

#[test]
fn a_bad_header_is_an_error_that_names_it() {
    for (i, Case(make, spoil, wanted)) in CASES.iter().enumerate() {
        let mut header = make();
        crate::fused(&header.open()).unwrap();
        spoil(&mut header);
        let error = match crate::fused(&header.open()) {
            Ok(_) => panic!("case {i}: no error, expected {wanted:?}"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(wanted), "case {i}: {error:?}, expected {wanted:?}");
    }
}

/// A number that is the same in all layers may be listed for each, as some converters do.
#[test]
fn equal_numbers_may_be_lists() {
    for make in [moe, dense, llama, mixtral] {
        let plan = |header: &Header| crate::fused(&header.open()).unwrap().to_string();
        let mut listed = make();
        let arch = listed.arch().to_string();
        for name in ["attention.head_count", "attention.head_count_kv", "feed_forward_length"] {
            let key = format!("{arch}.{name}");
            if let Some(n) = make().open().meta().opt_u32(&key).unwrap() {
                listed.set(&key, vec![n; 2]);
            }
        }
        assert_eq!(plan(&listed), plan(&make()), "{arch}");
    }
}

/// Whatever a key holds, the answer is a plan or an error that names the file or the plan, never a panic.
#[test]
fn no_value_of_a_key_brings_it_down() {
    const OPTIONAL: &[&str] = &[
        "vocab_size",
        "attention.scale",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "expert_weights_norm",
        "expert_weights_scale",
        "expert_gating_func",
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
    ];
    let values = || -> Vec<Value> {
        let ints = [0, 1, 2, 3, 7, 64, 4096, u64::from(u32::MAX), u64::MAX].map(Value::U64);
        let floats = [0.0, 1e-45, 1.0, 3.0, -1.0, f32::MAX, f32::INFINITY, f32::NAN].map(Value::F32);
        ints.into_iter().chain(floats).chain([Value::I32(-1), Value::Bool(false), "yarn".into()]).collect()
    };
    for make in [moe, llama, mixtral, windowed::gemma4, windowed::gpt_oss, latent::glm5] {
        let arch = make().arch().to_string();
        let keys = make().keys().chain(OPTIONAL.iter().map(|key| format!("{arch}.{key}"))).collect::<Vec<_>>();
        for key in keys {
            for (scaling, value) in values().into_iter().flat_map(|v| [("none", v.clone()), ("yarn", v)]) {
                let mut header = make();
                header.set(&format!("{arch}.rope.scaling.type"), scaling).set(&key, value);
                if let Err(error) = crate::fused(&header.open()) {
                    let error = error.to_string();
                    assert!(
                        error.contains("tiny.gguf") || error.starts_with("failed to validate the plan"),
                        "{key}: {error}"
                    );
                }
            }
        }
    }
}
