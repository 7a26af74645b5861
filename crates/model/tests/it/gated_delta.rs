//! Qwen3-Next and Qwen3.5: what the real ones cost, and what is refused, from headers without weights.

use crate::header::Header;
use model::plan::ValidPlan;
use model::plan::{Buf, DeltaHeads, Op, Plan, State};
use quant::WeightType::{F32, Q4_K};

/// Dimensions, of which Qwen publishes all in config.json.
#[derive(Clone, Copy)]
struct Shape {
    arch: &'static str,
    n_vocab: usize,
    d_model: usize,
    n_layer: usize,
    n_head: usize,
    n_kv: usize,
    d_head: usize,
    n_k: usize,
    n_v: usize,
    d_delta: usize,
    /// Experts, how many a token uses, their width; 0 experts is a dense model of that width.
    experts: (usize, usize, usize),
    /// Layers behind the last that predict further tokens.
    n_next: usize,
}

const QWEN3_NEXT_80B: Shape = Shape {
    arch: "qwen3next",
    n_vocab: 151_936,
    d_model: 2048,
    n_layer: 48,
    n_head: 16,
    n_kv: 2,
    d_head: 256,
    n_k: 16,
    n_v: 32,
    d_delta: 128,
    experts: (512, 10, 512),
    n_next: 0,
};

const QWEN36_35B: Shape =
    Shape { arch: "qwen35moe", n_vocab: 248_320, n_layer: 40, experts: (256, 8, 512), n_next: 1, ..QWEN3_NEXT_80B };

const QWEN35_397B: Shape = Shape {
    arch: "qwen35moe",
    n_vocab: 248_320,
    d_model: 4096,
    n_layer: 60,
    n_head: 32,
    n_v: 64,
    experts: (512, 10, 1024),
    ..QWEN3_NEXT_80B
};

const QWEN35_27B: Shape = Shape {
    arch: "qwen35",
    n_vocab: 248_320,
    d_model: 5120,
    n_layer: 64,
    n_head: 24,
    n_kv: 4,
    n_v: 48,
    experts: (0, 0, 17_408),
    ..QWEN3_NEXT_80B
};

const TINY: Shape = Shape {
    arch: "qwen35moe",
    n_vocab: 96,
    d_model: 256,
    n_layer: 8,
    n_head: 4,
    n_kv: 2,
    d_head: 64,
    n_k: 2,
    n_v: 4,
    d_delta: 64,
    experts: (8, 2, 256),
    n_next: 1,
};

impl Shape {
    /// The header as llama.cpp's converter writes it.
    fn header(&self) -> Header {
        let &Shape { arch, d_model, n_layer, n_head, n_kv, d_head, n_k, n_v, d_delta, .. } = self;
        let (n_expert, n_used, d_ff) = self.experts;
        let mut h = Header::empty(arch);
        for (key, n) in [
            ("block_count", n_layer + self.n_next),
            ("context_length", 262_144),
            ("embedding_length", d_model),
            ("attention.head_count", n_head),
            ("attention.head_count_kv", n_kv),
            ("attention.key_length", d_head),
            ("attention.value_length", d_head),
            ("rope.dimension_count", d_head / 4),
            ("ssm.conv_kernel", 4),
            ("ssm.state_size", d_delta),
            ("ssm.group_count", n_k),
            ("ssm.time_step_rank", n_v),
            ("ssm.inner_size", n_v * d_delta),
            ("nextn_predict_layers", self.n_next),
            ("feed_forward_length", d_ff),
        ] {
            h.set(&format!("{arch}.{key}"), n as u32);
        }
        if n_expert > 0 {
            for (key, n) in [
                ("expert_count", n_expert),
                ("expert_used_count", n_used),
                ("expert_feed_forward_length", d_ff),
                ("expert_shared_feed_forward_length", d_ff),
            ] {
                h.set(&format!("{arch}.{key}"), n as u32);
            }
        }
        h.set(&format!("{arch}.rope.freq_base"), 1e7f32);
        h.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);
        h.tensor("token_embd.weight", &[self.n_vocab, d_model], Q4_K);
        h.tensor("output.weight", &[self.n_vocab, d_model], Q4_K);
        h.tensor("output_norm.weight", &[d_model], F32);
        for i in 0..n_layer + self.n_next {
            let attention = i % 4 == 3 || i >= n_layer;
            let mut tensor = |name: &str, shape: &[usize], ty| {
                h.tensor(&format!("blk.{i}.{name}"), shape, ty);
            };
            tensor("attn_norm.weight", &[d_model], F32);
            tensor("post_attention_norm.weight", &[d_model], F32);
            if attention {
                tensor("attn_q.weight", &[2 * n_head * d_head, d_model], Q4_K);
                tensor("attn_k.weight", &[n_kv * d_head, d_model], Q4_K);
                tensor("attn_v.weight", &[n_kv * d_head, d_model], Q4_K);
                tensor("attn_output.weight", &[d_model, n_head * d_head], Q4_K);
                tensor("attn_q_norm.weight", &[d_head], F32);
                tensor("attn_k_norm.weight", &[d_head], F32);
            } else {
                let (k_row, v_row) = (n_k * d_delta, n_v * d_delta);
                tensor("attn_qkv.weight", &[2 * k_row + v_row, d_model], Q4_K);
                tensor("attn_gate.weight", &[v_row, d_model], Q4_K);
                tensor("ssm_conv1d.weight", &[2 * k_row + v_row, 4], F32);
                tensor("ssm_a", &[n_v], F32);
                tensor("ssm_dt.bias", &[n_v], F32);
                tensor("ssm_norm.weight", &[d_delta], F32);
                tensor("ssm_out.weight", &[d_model, v_row], Q4_K);
                if arch == "qwen3next" {
                    tensor("ssm_ba.weight", &[2 * n_v, d_model], Q4_K);
                } else {
                    tensor("ssm_alpha.weight", &[n_v, d_model], Q4_K);
                    tensor("ssm_beta.weight", &[n_v, d_model], Q4_K);
                }
            }
            if n_expert > 0 {
                tensor("ffn_gate_inp.weight", &[n_expert, d_model], F32);
                tensor("ffn_gate_inp_shexp.weight", &[d_model], F32);
                tensor("ffn_gate_exps.weight", &[n_expert, d_ff, d_model], Q4_K);
                tensor("ffn_up_exps.weight", &[n_expert, d_ff, d_model], Q4_K);
                tensor("ffn_down_exps.weight", &[n_expert, d_model, d_ff], Q4_K);
            }
            let suffix = if n_expert > 0 { "_shexp" } else { "" };
            tensor(&format!("ffn_gate{suffix}.weight"), &[d_ff, d_model], Q4_K);
            tensor(&format!("ffn_up{suffix}.weight"), &[d_ff, d_model], Q4_K);
            tensor(&format!("ffn_down{suffix}.weight"), &[d_model, d_ff], Q4_K);
            if i >= n_layer {
                tensor("nextn.eh_proj.weight", &[d_model, 2 * d_model], Q4_K);
                tensor("nextn.enorm.weight", &[d_model], F32);
                tensor("nextn.hnorm.weight", &[d_model], F32);
                tensor("nextn.shared_head_norm.weight", &[d_model], F32);
            }
        }
        h
    }
}

/// A tiny Qwen3.5 with experts.
pub fn qwen35moe() -> Header {
    TINY.header()
}

/// A dense one of one layer.
pub fn qwen35() -> Header {
    Shape { arch: "qwen35", experts: (0, 0, 512), n_layer: 1, n_next: 0, ..TINY }.header()
}

/// A layer of Qwen3-Next as in the original files: one projection for q, k, v and the gate, one for rates and decays.
pub fn qwen3next() -> Header {
    let mut h = Shape { arch: "qwen3next", n_layer: 1, n_next: 0, ..TINY }.header();
    h.drop_tensor("blk.0.attn_qkv.weight").drop_tensor("blk.0.attn_gate.weight");
    h.tensor("blk.0.ssm_in.weight", &[768, 256], Q4_K);
    h
}

/// What a model must cost.
struct Cost {
    shape: Shape,
    /// Parameters, all and those that a token uses, in millions.
    params: (usize, usize),
    /// Bytes that a position takes in caches of f16.
    position: usize,
    /// Bytes of state for each sequence.
    sequence: usize,
}

/// By hand. A position: attention layers · key-value heads · two heads · 2 bytes. A sequence: delta layers · (3 rows of
/// the convolution + heads · 128 · 128) · 4 bytes. The parameters without those for further tokens; names of models
/// round them.
const COSTS: &[Cost] = &[
    Cost {
        shape: QWEN3_NEXT_80B,
        params: (79_674, 3_564),
        position: 12 * 2 * 512 * 2,
        sequence: 36 * (3 * 8192 + 32 * 16_384) * 4,
    },
    Cost {
        shape: QWEN36_35B,
        params: (34_661, 2_946),
        position: 10 * 2 * 512 * 2,
        sequence: 30 * (3 * 8192 + 32 * 16_384) * 4,
    },
    Cost {
        shape: QWEN35_397B,
        params: (396_346, 16_332),
        position: 15 * 2 * 512 * 2,
        sequence: 45 * (3 * 12_288 + 64 * 16_384) * 4,
    },
    Cost {
        shape: QWEN35_27B,
        params: (26_896, 25_625),
        position: 16 * 4 * 512 * 2,
        sequence: 48 * (3 * 10_240 + 48 * 16_384) * 4,
    },
];

#[test]
fn real_shapes_cost_what_they_must() {
    for Cost { shape, params, position, sequence } in COSTS {
        let Some(checkpoint) = shape.header().open_hollow(&format!("{}-{}", shape.arch, shape.d_model)) else {
            crate::fixtures::skip(format!("no file of the size of {} can be made here", shape.arch));
            continue;
        };
        let plan = crate::fused(&checkpoint).unwrap();
        let millions = |n: usize| (n + 500_000) / 1_000_000;
        assert_eq!((millions(plan.n_params()), millions(plan.active_params())), *params, "{}", shape.arch);
        assert_eq!(crate::sequence_bytes(&plan), (*position, 0, *sequence), "{}", shape.arch);
    }
}

#[test]
fn contradictions_are_refused() {
    let cases: &[(&str, u32, &str)] = &[
        ("nextn_predict_layers", 9, "nextn_predict_layers: is 9, the model has 9 layers with those"),
        ("ssm.time_step_rank", 5, "ssm.time_step_rank: is 5, qwen35moe.ssm.group_count 2 does not divide it"),
        ("ssm.inner_size", 258, "ssm.inner_size: is 258, expected 4 heads of up to 4096"),
        ("ssm.inner_size", 512, "blk.0.attn_qkv.weight: has shape [512, 256], expected [768, 256]"),
        ("ssm.state_size", 32, "blk.0.attn_qkv.weight: has shape [512, 256], expected [384, 256]"),
        ("ssm.conv_kernel", 3, "blk.0.ssm_conv1d.weight: has shape [512, 4], expected [512, 3]"),
        ("ssm.conv_kernel", 65, "ssm.conv_kernel: is 65, expected 1 to 64"),
        ("ssm.group_count", 0, "ssm.group_count: is 0, expected 1 to 4096"),
        ("rope.dimension_count", 66, "rope.dimension_count: is 66, expected an even number up to the head width 64"),
    ];
    for &(key, value, wanted) in cases {
        let mut header = TINY.header();
        header.set(&format!("qwen35moe.{key}"), value);
        let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{key} {value}: {error}");
    }
}

/// Breaks the first op of that name, in the plain plan of the tiny model.
struct Broken(&'static str, fn(&mut Plan, usize), &'static str);

#[rustfmt::skip]
const BROKEN: &[Broken] = &[
    Broken("causal_conv", |p, i| if let Op::CausalConv { w, .. } = p.ops[i] { p.weights[w.0 as usize].shape = vec![512, 1] }, "w is 1 wide, expected 2 or more"),
    Broken("causal_conv", |p, i| if let Op::CausalConv { w, .. } = p.ops[i] { p.weights[w.0 as usize].shape = vec![512] }, "w has shape [512], expected two axes"),
    Broken("causal_conv", |p, _| p.states[0].n = 7, "state 0 (conv) has 7 numbers, expected [3, 512, 1]"),
    Broken("causal_conv", |p, i| if let Op::CausalConv { state, .. } = &mut p.ops[i] { *state = State(1) }, "state 1 (delta) has 16384 numbers, expected [3, 512, 1]"),
    Broken("delta_net", |p, i| if let Op::DeltaNet { state, .. } = &mut p.ops[i] { *state = State(0) }, "updates state 0, which an earlier op updates"),
    Broken("delta_net", |p, i| heads(p, i).n_v_head = 3, "3 heads of v cannot share 2 of k"),
    Broken("delta_net", |p, i| heads(p, i).n_k_head = 0, "4 heads of v cannot share 0 of k"),
    Broken("delta_net", |p, i| heads(p, i).d_k = 63, "q.0 has width 128, expected 2 heads of 63"),
    Broken("delta_net", |p, i| heads(p, i).d_v = usize::MAX, "v.0 has width 256, expected 4 heads of 18446744073709551615"),
    Broken("decay_beta", |p, i| if let Op::DecayBeta { bound, .. } = &mut p.ops[i] { *bound = Some(1.0) },
        "bounds decays by Some(1.0), expected less than 0"),
    Broken("decay_beta", |p, i| { let x = find(p, "x"); if let Op::DecayBeta { b, .. } = &mut p.ops[i] { *b = Some(x) } }, "4 decays cannot be those of 256 heads"),
    Broken("gated_norm", |p, i| if let Op::GatedNorm { n_head, .. } = &mut p.ops[i] { *n_head = 3 }, "o.0 has width 256, expected 3 heads of 64"),
    Broken("gated_norm", |p, i| if let Op::GatedNorm { eps, .. } = &mut p.ops[i] { *eps = f32::NAN }, "eps is NaN"),
    Broken("gate_by", |p, i| { let qkv = find(p, "qkv.0"); if let Op::GateBy { gate, .. } = &mut p.ops[i] { *gate = qkv } }, "qkv.0 is F32 [Tokens, 512], expected F32 [Tokens, 256]"),
];

fn heads(plan: &mut Plan, i: usize) -> &mut DeltaHeads {
    match &mut plan.ops[i] {
        Op::DeltaNet { heads, .. } => heads,
        other => panic!("{}", other.name()),
    }
}

fn find(plan: &Plan, name: &str) -> Buf {
    Buf(plan.bufs.iter().position(|buf| buf.name == name).unwrap() as u32)
}

#[test]
fn broken_plans_are_refused() {
    let good = model::build(&TINY.header().open()).unwrap();
    for Broken(name, spoil, wanted) in BROKEN {
        let mut plan = good.clone().into_plan();
        let at = plan.ops.iter().position(|op| op.name() == *name).unwrap();
        spoil(&mut plan, at);
        let error = ValidPlan::new(plan).unwrap_err().to_string();
        assert!(error.contains(wanted), "{name}: {error:?}, expected {wanted:?}");
    }
}
