//! Qwen3-Next and Qwen3.5: printed plans of a tiny one, and what the real ones cost, from headers without weights.

use crate::header::Header;
use expect_test::expect;
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
            }
        }
        h
    }
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
fn plans() {
    let tiny = TINY.header().open();
    expect![[r#"
        qwen35moe: n_vocab 96, d_model 256, n_ctx_train 262144
        224 ops, 186 buffers, 149 weights
        rope 0: half, 8 pairs, inv_freq 1.000000e0 .. 7.498942e-7, factor 1
        cache 0 to 1: 2 heads, k 64, v 64
        state conv: 6 of 1536 numbers
        state delta: 6 of 16384 numbers
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       qkv.0[T, 512] = h.0 · blk.0.attn_qkv.weight q4_k[512, 256]
          linear       z.0[T, 256] = h.0 · blk.0.attn_gate.weight q4_k[256, 256]
          linear       b.0[T, 4] = h.0 · blk.0.ssm_beta.weight q4_k[4, 256]
          linear       a.0[T, 4] = h.0 · blk.0.ssm_alpha.weight q4_k[4, 256]
          causal_conv  conv.0[T, 512] = silu(qkv.0 * blk.0.ssm_conv1d.weight f32[512, 4])
          split_heads  q.0[T, 128], k.0[T, 128], v.0[T, 256] = parts of 1 heads of conv.0
          head_norm    q.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        q.0 *= 0.015625
          head_norm    k.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        k.0 *= 0.125
          decay_beta   g.0[T, 4], beta.0[T, 4] = exp(blk.0.ssm_a f32[4] ⊙ softplus(a.0 + blk.0.ssm_dt.bias f32[4])), σ(b.0)
          delta_net    o.0[T, 256] = delta rule of q.0, k.0, v.0, decay g.0, rate beta.0, 4 heads of 64 by 64 on 2, tiled
          gated_norm   o.0 = norm of 4 heads of 64 ⊙ blk.0.ssm_norm.weight f32[64] ⊙ silu(z.0), eps 1e-6
          linear       y.0[T, 256] = o.0 · blk.0.ssm_out.weight q4_k[256, 256]
          add          x += y.0
          rms_norm     f.0[T, 256] = norm(x) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          linear       router.0[T, 8] = f.0 · blk.0.ffn_gate_inp.weight f32[8, 256]
          linear       share.0[T, 1] = f.0 · blk.0.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 8, renormalised
          experts      y.0[T·2, 256] = (silu(f.0 · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0 · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0, scratch hidden.0[T·2, 256]
          combine      x += weights.0 · y.0
          linear       gate.0[T, 256] = f.0 · blk.0.ffn_gate_shexp.weight q4_k[256, 256]
          linear       up.0[T, 256] = f.0 · blk.0.ffn_up_shexp.weight q4_k[256, 256]
          gated_act    act.0[T, 256] = silu(gate.0) ⊙ up.0
          linear       shared.0[T, 256] = act.0 · blk.0.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.0 ⊙= σ(share.0)
          add          x += shared.0
        layers 1 to 2 as layer 0
        layer 3:
          rms_norm     h.3[T, 256] = norm(x) ⊙ blk.3.attn_norm.weight f32[256], eps 1e-6
          linear       qg.3[T, 512] = h.3 · blk.3.attn_q.weight q4_k[512, 256]
          linear       k.3[T, 128] = h.3 · blk.3.attn_k.weight q4_k[128, 256]
          linear       v.3[T, 128] = h.3 · blk.3.attn_v.weight q4_k[128, 256]
          split_heads  q.3[T, 256], gate.3[T, 256] = parts of 4 heads of qg.3
          head_norm    q.3 = norm of 4 heads of 64 ⊙ blk.3.attn_q_norm.weight f32[64], eps 1e-6
          rope         q.3 = rope 0 of 4 heads of 64
          head_norm    k.3 = norm of 2 heads of 64 ⊙ blk.3.attn_k_norm.weight f32[64], eps 1e-6
          rope         k.3 = rope 0 of 2 heads of 64
          kv_append    cache.0 ← k.3, v.3
          attention    a.3[T, 256] = q.3 over cache.0, 4 heads, scale 0.125
          sigmoid_gate a.3 ⊙= σ(gate.3)
          linear       o.3[T, 256] = a.3 · blk.3.attn_output.weight q4_k[256, 256]
          add          x += o.3
          rms_norm     f.3[T, 256] = norm(x) ⊙ blk.3.ffn_norm.weight f32[256], eps 1e-6
          linear       router.3[T, 8] = f.3 · blk.3.ffn_gate_inp.weight f32[8, 256]
          linear       share.3[T, 1] = f.3 · blk.3.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.3 u32[T, 2], weights.3[T, 2] = softmax(router.3) best 2 of 8, renormalised
          experts      y.3[T·2, 256] = (silu(f.3 · blk.3.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.3 · blk.3.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.3.ffn_down_exps.weight q4_k[8, 256, 256], by ids.3, scratch hidden.3[T·2, 256]
          combine      x += weights.3 · y.3
          linear       gate.3[T, 256] = f.3 · blk.3.ffn_gate_shexp.weight q4_k[256, 256]
          linear       up.3[T, 256] = f.3 · blk.3.ffn_up_shexp.weight q4_k[256, 256]
          gated_act    act.3[T, 256] = silu(gate.3) ⊙ up.3
          linear       shared.3[T, 256] = act.3 · blk.3.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.3 ⊙= σ(share.3)
          add          x += shared.3
        layers 4 to 6 as layer 0
        layer 7 as layer 3
        select       last[R, 256] = x[rows]
        rms_norm     final[R, 256] = norm(last) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · output.weight q4_k[96, 256]
    "#]].assert_eq(&model::build(&tiny).unwrap().to_string());
    expect![[r#"
        qwen35moe: n_vocab 96, d_model 256, n_ctx_train 262144
        164 ops, 172 buffers, 149 weights
        rope 0: half, 8 pairs, inv_freq 1.000000e0 .. 7.498942e-7, factor 1
        cache 0 to 1: 2 heads, k 64, v 64
        state conv: 6 of 1536 numbers
        state delta: 6 of 16384 numbers
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       qkv.0[T, 512] = h.0 · blk.0.attn_qkv.weight q4_k[512, 256]
                       z.0[T, 256] = h.0 · blk.0.attn_gate.weight q4_k[256, 256]
                       b.0[T, 4] = h.0 · blk.0.ssm_beta.weight q4_k[4, 256]
                       a.0[T, 4] = h.0 · blk.0.ssm_alpha.weight q4_k[4, 256]
          causal_conv  conv.0[T, 512] = silu(qkv.0 * blk.0.ssm_conv1d.weight f32[512, 4])
          split_heads  q.0[T, 128], k.0[T, 128], v.0[T, 256] = parts of 1 heads of conv.0
          head_norm    q.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        q.0 *= 0.015625
          head_norm    k.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        k.0 *= 0.125
          decay_beta   g.0[T, 4], beta.0[T, 4] = exp(blk.0.ssm_a f32[4] ⊙ softplus(a.0 + blk.0.ssm_dt.bias f32[4])), σ(b.0)
          delta_net    o.0[T, 256] = delta rule of q.0, k.0, v.0, decay g.0, rate beta.0, 4 heads of 64 by 64 on 2, tiled
          gated_norm   o.0 = norm of 4 heads of 64 ⊙ blk.0.ssm_norm.weight f32[64] ⊙ silu(z.0), eps 1e-6
          linear       y.0[T, 256] = o.0 · blk.0.ssm_out.weight q4_k[256, 256]
          rms_norm     f.0[T, 256] = norm(x += y.0) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          linear       router.0[T, 8] = f.0 · blk.0.ffn_gate_inp.weight f32[8, 256]
                       share.0[T, 1] = f.0 · blk.0.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 8, renormalised
          experts      y.0[T·2, 256] = (silu(f.0 · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0 · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0, scratch hidden.0[T·2, 256]
          combine      x += weights.0 · y.0
          gated_linear act.0[T, 256] = silu(f.0 · blk.0.ffn_gate_shexp.weight q4_k[256, 256]) ⊙ (f.0 · blk.0.ffn_up_shexp.weight q4_k[256, 256])
          linear       shared.0[T, 256] = act.0 · blk.0.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.0 ⊙= σ(share.0)
          rms_norm     h.1[T, 256] = norm(x += shared.0) ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
        layer 1:
          linear       qkv.1[T, 512] = h.1 · blk.1.attn_qkv.weight q4_k[512, 256]
                       z.1[T, 256] = h.1 · blk.1.attn_gate.weight q4_k[256, 256]
                       b.1[T, 4] = h.1 · blk.1.ssm_beta.weight q4_k[4, 256]
                       a.1[T, 4] = h.1 · blk.1.ssm_alpha.weight q4_k[4, 256]
          causal_conv  conv.1[T, 512] = silu(qkv.1 * blk.1.ssm_conv1d.weight f32[512, 4])
          split_heads  q.1[T, 128], k.1[T, 128], v.1[T, 256] = parts of 1 heads of conv.1
          head_norm    q.1 = norm of 2 heads of 64, eps 1.5625e-8
          scale        q.1 *= 0.015625
          head_norm    k.1 = norm of 2 heads of 64, eps 1.5625e-8
          scale        k.1 *= 0.125
          decay_beta   g.1[T, 4], beta.1[T, 4] = exp(blk.1.ssm_a f32[4] ⊙ softplus(a.1 + blk.1.ssm_dt.bias f32[4])), σ(b.1)
          delta_net    o.1[T, 256] = delta rule of q.1, k.1, v.1, decay g.1, rate beta.1, 4 heads of 64 by 64 on 2, tiled
          gated_norm   o.1 = norm of 4 heads of 64 ⊙ blk.1.ssm_norm.weight f32[64] ⊙ silu(z.1), eps 1e-6
          linear       y.1[T, 256] = o.1 · blk.1.ssm_out.weight q4_k[256, 256]
          rms_norm     f.1[T, 256] = norm(x += y.1) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
          linear       router.1[T, 8] = f.1 · blk.1.ffn_gate_inp.weight f32[8, 256]
                       share.1[T, 1] = f.1 · blk.1.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.1 u32[T, 2], weights.1[T, 2] = softmax(router.1) best 2 of 8, renormalised
          experts      y.1[T·2, 256] = (silu(f.1 · blk.1.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.1 · blk.1.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.1.ffn_down_exps.weight q4_k[8, 256, 256], by ids.1, scratch hidden.1[T·2, 256]
          combine      x += weights.1 · y.1
          gated_linear act.1[T, 256] = silu(f.1 · blk.1.ffn_gate_shexp.weight q4_k[256, 256]) ⊙ (f.1 · blk.1.ffn_up_shexp.weight q4_k[256, 256])
          linear       shared.1[T, 256] = act.1 · blk.1.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.1 ⊙= σ(share.1)
          rms_norm     h.2[T, 256] = norm(x += shared.1) ⊙ blk.2.attn_norm.weight f32[256], eps 1e-6
        layer 2 as layer 1
        layer 3:
          linear       qg.3[T, 512] = h.3 · blk.3.attn_q.weight q4_k[512, 256]
                       k.3[T, 128] = h.3 · blk.3.attn_k.weight q4_k[128, 256]
                       v.3[T, 128] = h.3 · blk.3.attn_v.weight q4_k[128, 256]
          split_heads  q.3[T, 256], gate.3[T, 256] = parts of 4 heads of qg.3
          head_norm    q.3 = norm of 4 heads of 64 ⊙ blk.3.attn_q_norm.weight f32[64], eps 1e-6
          rope         q.3 = rope 0 of 4 heads of 64
          head_norm    k.3 = norm of 2 heads of 64 ⊙ blk.3.attn_k_norm.weight f32[64], eps 1e-6
          rope         k.3 = rope 0 of 2 heads of 64
          kv_append    cache.0 ← k.3, v.3
          attention    a.3[T, 256] = q.3 over cache.0, 4 heads, scale 0.125
          sigmoid_gate a.3 ⊙= σ(gate.3)
          linear       o.3[T, 256] = a.3 · blk.3.attn_output.weight q4_k[256, 256]
          rms_norm     f.3[T, 256] = norm(x += o.3) ⊙ blk.3.ffn_norm.weight f32[256], eps 1e-6
          linear       router.3[T, 8] = f.3 · blk.3.ffn_gate_inp.weight f32[8, 256]
                       share.3[T, 1] = f.3 · blk.3.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.3 u32[T, 2], weights.3[T, 2] = softmax(router.3) best 2 of 8, renormalised
          experts      y.3[T·2, 256] = (silu(f.3 · blk.3.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.3 · blk.3.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.3.ffn_down_exps.weight q4_k[8, 256, 256], by ids.3, scratch hidden.3[T·2, 256]
          combine      x += weights.3 · y.3
          gated_linear act.3[T, 256] = silu(f.3 · blk.3.ffn_gate_shexp.weight q4_k[256, 256]) ⊙ (f.3 · blk.3.ffn_up_shexp.weight q4_k[256, 256])
          linear       shared.3[T, 256] = act.3 · blk.3.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.3 ⊙= σ(share.3)
          rms_norm     h.4[T, 256] = norm(x += shared.3) ⊙ blk.4.attn_norm.weight f32[256], eps 1e-6
        layers 4 to 6 as layer 1
        layer 7:
          linear       qg.7[T, 512] = h.7 · blk.7.attn_q.weight q4_k[512, 256]
                       k.7[T, 128] = h.7 · blk.7.attn_k.weight q4_k[128, 256]
                       v.7[T, 128] = h.7 · blk.7.attn_v.weight q4_k[128, 256]
          split_heads  q.7[T, 256], gate.7[T, 256] = parts of 4 heads of qg.7
          head_norm    q.7 = norm of 4 heads of 64 ⊙ blk.7.attn_q_norm.weight f32[64], eps 1e-6
          rope         q.7 = rope 0 of 4 heads of 64
          head_norm    k.7 = norm of 2 heads of 64 ⊙ blk.7.attn_k_norm.weight f32[64], eps 1e-6
          rope         k.7 = rope 0 of 2 heads of 64
          kv_append    cache.1 ← k.7, v.7
          attention    a.7[T, 256] = q.7 over cache.1, 4 heads, scale 0.125
          select       a.7.asked[R, 256] = a.7[rows]
          select       gate.7.asked[R, 256] = gate.7[rows]
          select       x.asked[R, 256] = x[rows]
          sigmoid_gate a.7.asked ⊙= σ(gate.7.asked)
          linear       o.7.asked[R, 256] = a.7.asked · blk.7.attn_output.weight q4_k[256, 256]
          rms_norm     f.7.asked[R, 256] = norm(x.asked += o.7.asked) ⊙ blk.7.ffn_norm.weight f32[256], eps 1e-6
          linear       router.7.asked[R, 8] = f.7.asked · blk.7.ffn_gate_inp.weight f32[8, 256]
                       share.7.asked[R, 1] = f.7.asked · blk.7.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.7.asked u32[R, 2], weights.7.asked[R, 2] = softmax(router.7.asked) best 2 of 8, renormalised
          experts      y.7.asked[R·2, 256] = (silu(f.7.asked · blk.7.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.7.asked · blk.7.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.7.ffn_down_exps.weight q4_k[8, 256, 256], by ids.7.asked, scratch hidden.7.asked[R·2, 256]
          combine      x.asked += weights.7.asked · y.7.asked
          gated_linear act.7.asked[R, 256] = silu(f.7.asked · blk.7.ffn_gate_shexp.weight q4_k[256, 256]) ⊙ (f.7.asked · blk.7.ffn_up_shexp.weight q4_k[256, 256])
          linear       shared.7.asked[R, 256] = act.7.asked · blk.7.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.7.asked ⊙= σ(share.7.asked)
          rms_norm     final[R, 256] = norm(x.asked += shared.7.asked) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · output.weight q4_k[96, 256]
    "#]].assert_eq(&crate::fused(&tiny).unwrap().to_string());
    // As in the original files: one projection for q, k, v and the gate, one for rates and decays.
    let next = Shape { arch: "qwen3next", n_layer: 1, n_next: 0, ..TINY };
    let mut header = next.header();
    header.drop_tensor("blk.0.attn_qkv.weight").drop_tensor("blk.0.attn_gate.weight");
    header.tensor("blk.0.ssm_in.weight", &[768, 256], Q4_K);
    expect![[r#"
        qwen3next: n_vocab 96, d_model 256, n_ctx_train 262144
        33 ops, 33 buffers, 20 weights
        rope 0: half, 8 pairs, inv_freq 1.000000e0 .. 7.498942e-7, factor 1
        state conv: 1 of 1536 numbers
        state delta: 1 of 16384 numbers
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       qkvz.0[T, 768] = h.0 · blk.0.ssm_in.weight q4_k[768, 256]
          split_heads  mixed.q.0[T, 128], mixed.k.0[T, 128], mixed.v.0[T, 256], z.0[T, 256] = parts of 2 heads of qkvz.0
          join_heads   qkv.0[T, 512] = 1 heads of mixed.q.0 ‖ mixed.k.0 ‖ mixed.v.0
          linear       ba.0[T, 8] = h.0 · blk.0.ssm_ba.weight q4_k[8, 256]
          split_heads  b.0[T, 4], a.0[T, 4] = parts of 2 heads of ba.0
          causal_conv  conv.0[T, 512] = silu(qkv.0 * blk.0.ssm_conv1d.weight f32[512, 4])
          split_heads  q.0[T, 128], k.0[T, 128], v.0[T, 256] = parts of 1 heads of conv.0
          head_norm    q.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        q.0 *= 0.015625
          head_norm    k.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        k.0 *= 0.125
          decay_beta   g.0[T, 4], beta.0[T, 4] = exp(blk.0.ssm_a f32[4] ⊙ softplus(a.0 + blk.0.ssm_dt.bias f32[4])), σ(b.0)
          delta_net    o.0[T, 256] = delta rule of q.0, k.0, v.0, decay g.0, rate beta.0, 4 heads of 64 by 64 on 2, grouped
          gated_norm   o.0 = norm of 4 heads of 64 ⊙ blk.0.ssm_norm.weight f32[64] ⊙ silu(z.0), eps 1e-6
          linear       y.0[T, 256] = o.0 · blk.0.ssm_out.weight q4_k[256, 256]
          add          x += y.0
          rms_norm     f.0[T, 256] = norm(x) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          linear       router.0[T, 8] = f.0 · blk.0.ffn_gate_inp.weight f32[8, 256]
          linear       share.0[T, 1] = f.0 · blk.0.ffn_gate_inp_shexp.weight f32[1, 256]
          route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 8, renormalised
          experts      y.0[T·2, 256] = (silu(f.0 · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0 · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0, scratch hidden.0[T·2, 256]
          combine      x += weights.0 · y.0
          linear       gate.0[T, 256] = f.0 · blk.0.ffn_gate_shexp.weight q4_k[256, 256]
          linear       up.0[T, 256] = f.0 · blk.0.ffn_up_shexp.weight q4_k[256, 256]
          gated_act    act.0[T, 256] = silu(gate.0) ⊙ up.0
          linear       shared.0[T, 256] = act.0 · blk.0.ffn_down_shexp.weight q4_k[256, 256]
          sigmoid_gate shared.0 ⊙= σ(share.0)
          add          x += shared.0
        select       last[R, 256] = x[rows]
        rms_norm     final[R, 256] = norm(last) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · output.weight q4_k[96, 256]
    "#]].assert_eq(&model::build(&header.open()).unwrap().to_string());
    let dense = Shape { arch: "qwen35", experts: (0, 0, 512), ..next };
    expect![[r#"
        qwen35: n_vocab 96, d_model 256, n_ctx_train 262144
        21 ops, 22 buffers, 17 weights
        rope 0: half, 8 pairs, inv_freq 1.000000e0 .. 7.498942e-7, factor 1
        state conv: 1 of 1536 numbers
        state delta: 1 of 16384 numbers
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       qkv.0[T, 512] = h.0 · blk.0.attn_qkv.weight q4_k[512, 256]
                       z.0[T, 256] = h.0 · blk.0.attn_gate.weight q4_k[256, 256]
                       b.0[T, 4] = h.0 · blk.0.ssm_beta.weight q4_k[4, 256]
                       a.0[T, 4] = h.0 · blk.0.ssm_alpha.weight q4_k[4, 256]
          causal_conv  conv.0[T, 512] = silu(qkv.0 * blk.0.ssm_conv1d.weight f32[512, 4])
          split_heads  q.0[T, 128], k.0[T, 128], v.0[T, 256] = parts of 1 heads of conv.0
          head_norm    q.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        q.0 *= 0.015625
          head_norm    k.0 = norm of 2 heads of 64, eps 1.5625e-8
          scale        k.0 *= 0.125
          decay_beta   g.0[T, 4], beta.0[T, 4] = exp(blk.0.ssm_a f32[4] ⊙ softplus(a.0 + blk.0.ssm_dt.bias f32[4])), σ(b.0)
          delta_net    o.0[T, 256] = delta rule of q.0, k.0, v.0, decay g.0, rate beta.0, 4 heads of 64 by 64 on 2, tiled
          select       o.0.asked[R, 256] = o.0[rows]
          select       z.0.asked[R, 256] = z.0[rows]
          select       x.asked[R, 256] = x[rows]
          gated_norm   o.0.asked = norm of 4 heads of 64 ⊙ blk.0.ssm_norm.weight f32[64] ⊙ silu(z.0.asked), eps 1e-6
          linear       y.0.asked[R, 256] = o.0.asked · blk.0.ssm_out.weight q4_k[256, 256]
          rms_norm     f.0.asked[R, 256] = norm(x.asked += y.0.asked) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          gated_linear act.0.asked[R, 512] = silu(f.0.asked · blk.0.ffn_gate.weight q4_k[512, 256]) ⊙ (f.0.asked · blk.0.ffn_up.weight q4_k[512, 256])
          linear       shared.0.asked[R, 256] = act.0.asked · blk.0.ffn_down.weight q4_k[256, 512]
          rms_norm     final[R, 256] = norm(x.asked += shared.0.asked) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · output.weight q4_k[96, 256]
    "#]].assert_eq(&crate::fused(&dense.header().open()).unwrap().to_string());
}

#[test]
fn contradictions_are_refused() {
    let cases: &[(&str, u32, &str)] = &[
        ("nextn_predict_layers", 9, "nextn_predict_layers: is 9, the model has 9 layers with those"),
        ("ssm.time_step_rank", 5, "ssm.time_step_rank: is 5, qwen35moe.ssm.group_count 2 does not divide it"),
        ("ssm.inner_size", 258, "ssm.inner_size: is 258, 4 heads of up to 4096 wanted"),
        ("ssm.inner_size", 512, "blk.0.attn_qkv.weight: has shape [512, 256], [768, 256] wanted"),
        ("ssm.state_size", 32, "blk.0.attn_qkv.weight: has shape [512, 256], [384, 256] wanted"),
        ("ssm.conv_kernel", 3, "blk.0.ssm_conv1d.weight: has shape [512, 4], [512, 3] wanted"),
        ("ssm.conv_kernel", 65, "ssm.conv_kernel: is 65, 1 to 64 wanted"),
        ("ssm.group_count", 0, "ssm.group_count: is 0, 1 to 4096 wanted"),
        ("rope.dimension_count", 66, "rope.dimension_count: is 66, an even number up to the head width 64 wanted"),
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
    Broken("causal_conv", |p, i| if let Op::CausalConv { w, .. } = p.ops[i] { p.weights[w.0 as usize].shape = vec![512, 1] }, "w is 1 wide, 2 or more wanted"),
    Broken("causal_conv", |p, i| if let Op::CausalConv { w, .. } = p.ops[i] { p.weights[w.0 as usize].shape = vec![512] }, "w has shape [512], two axes wanted"),
    Broken("causal_conv", |p, _| p.states[0].n = 7, "state 0 (conv) has 7 numbers, [3, 512, 1] wanted"),
    Broken("causal_conv", |p, i| if let Op::CausalConv { state, .. } = &mut p.ops[i] { *state = State(1) }, "state 1 (delta) has 16384 numbers, [3, 512, 1] wanted"),
    Broken("delta_net", |p, i| if let Op::DeltaNet { state, .. } = &mut p.ops[i] { *state = State(0) }, "updates state 0, which an earlier op updates"),
    Broken("delta_net", |p, i| heads(p, i).n_v_head = 3, "3 heads of v cannot share 2 of k"),
    Broken("delta_net", |p, i| heads(p, i).n_k_head = 0, "4 heads of v cannot share 0 of k"),
    Broken("delta_net", |p, i| heads(p, i).d_k = 63, "q.0 has width 128, 2 heads of 63 wanted"),
    Broken("delta_net", |p, i| heads(p, i).d_v = usize::MAX, "v.0 has width 256, 4 heads of 18446744073709551615 wanted"),
    Broken("decay_beta", |p, i| { let x = find(p, "x"); if let Op::DecayBeta { b, .. } = &mut p.ops[i] { *b = x } }, "x is F32 [Tokens, 256], F32 [Tokens, 4] wanted"),
    Broken("gated_norm", |p, i| if let Op::GatedNorm { n_head, .. } = &mut p.ops[i] { *n_head = 3 }, "o.0 has width 256, 3 heads of 64 wanted"),
    Broken("gated_norm", |p, i| if let Op::GatedNorm { eps, .. } = &mut p.ops[i] { *eps = f32::NAN }, "eps is NaN"),
    Broken("sigmoid_gate", |p, i| { let router = find(p, "router.0"); if let Op::SigmoidGate { gate, .. } = &mut p.ops[i] { *gate = router } }, "router.0 is F32 [Tokens, 8], F32 [Tokens, 256] wanted"),
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
        assert!(error.contains(wanted), "{name}: {error:?}, {wanted:?} wanted");
    }
}
