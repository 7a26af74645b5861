//! DeepSeek's shapes and GLM's: printed plans of tiny ones, what the real ones cost, and what is refused, from headers
//! without weights.

use crate::header::Header;
use checkpoint::Checkpoint;
use expect_test::{Expect, expect};
use model::plan::cost::Kind;
use quant::WeightType::{BF16, F32, Q8_0};

/// Dimensions, all of them published in config.json.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    n_vocab: usize,
    d_model: usize,
    n_layer: usize,
    /// Layers behind the last that predict further tokens.
    n_next: usize,
    n_head: usize,
    attention: Attention,
    /// Width of the dense layers, and how many come first.
    dense: (usize, usize),
    /// Experts, how many a token uses, how many it shares, their width.
    experts: (usize, usize, usize, usize),
    /// Groups, and how many are open.
    groups: (usize, usize),
    sigmoid: bool,
    scale: f32,
}

#[derive(Clone, Copy)]
enum Attention {
    /// Widths of the query's latent (0 for none), of the latent, of a head's plain and rotated key, of its value.
    Latent([usize; 5]),
    /// Key-value heads, their width, QK-norm.
    Heads(usize, usize, bool),
}

const V3: Shape = Shape {
    name: "deepseek-v3",
    n_vocab: 129_280,
    d_model: 7168,
    n_layer: 61,
    n_next: 0,
    n_head: 128,
    attention: Attention::Latent([1536, 512, 128, 64, 128]),
    dense: (18_432, 3),
    experts: (256, 8, 1, 2048),
    groups: (8, 4),
    sigmoid: true,
    scale: 2.5,
};

const KIMI_K2: Shape = Shape {
    name: "kimi-k2",
    n_vocab: 163_840,
    n_head: 64,
    dense: (18_432, 1),
    experts: (384, 8, 1, 2048),
    groups: (1, 1),
    scale: 2.827,
    ..V3
};

const V2: Shape = Shape {
    name: "deepseek-v2",
    n_vocab: 102_400,
    d_model: 5120,
    n_layer: 60,
    dense: (12_288, 1),
    experts: (160, 6, 2, 1536),
    groups: (8, 3),
    sigmoid: false,
    scale: 16.0,
    ..V3
};

const V2_LITE: Shape = Shape {
    name: "deepseek-v2-lite",
    d_model: 2048,
    n_layer: 27,
    n_head: 16,
    attention: Attention::Latent([0, 512, 128, 64, 128]),
    dense: (10_944, 1),
    experts: (64, 6, 2, 1408),
    groups: (1, 1),
    scale: 1.0,
    ..V2
};

const GLM_45_AIR: Shape = Shape {
    name: "glm-4.5-air",
    n_vocab: 151_552,
    d_model: 4096,
    n_layer: 46,
    n_next: 1,
    n_head: 96,
    attention: Attention::Heads(8, 128, false),
    dense: (10_944, 1),
    experts: (128, 8, 1, 1408),
    groups: (1, 1),
    sigmoid: true,
    scale: 1.0,
};

const GLM_45: Shape = Shape {
    name: "glm-4.5",
    d_model: 5120,
    n_layer: 92,
    attention: Attention::Heads(8, 128, true),
    dense: (12_288, 3),
    experts: (160, 8, 1, 1536),
    scale: 2.5,
    ..GLM_45_AIR
};

impl Shape {
    fn arch(&self) -> &'static str {
        if matches!(self.attention, Attention::Latent(_)) { "deepseek2" } else { "glm4moe" }
    }

    /// The header as llama.cpp's converter writes it, all matrices in Q8_0.
    fn header(&self) -> Header {
        let (arch, d) = (self.arch(), self.d_model);
        let (d_ff, n_dense) = self.dense;
        let (n_expert, n_used, n_shared, d_expert) = self.experts;
        let mut h = Header::empty(arch);
        let mut keys = vec![
            ("block_count", self.n_layer + self.n_next),
            ("context_length", 163_840),
            ("embedding_length", d),
            ("feed_forward_length", d_ff),
            ("attention.head_count", self.n_head),
            ("expert_count", n_expert),
            ("expert_used_count", n_used),
            ("expert_shared_count", n_shared),
            ("expert_feed_forward_length", d_expert),
            ("expert_group_count", self.groups.0),
            ("expert_group_used_count", self.groups.1),
            ("expert_gating_func", if self.sigmoid { 2 } else { 1 }),
            ("leading_dense_block_count", n_dense),
            ("nextn_predict_layers", self.n_next),
        ];
        match self.attention {
            Attention::Latent([d_q, d_latent, d_nope, d_pe, d_v]) => keys.extend([
                ("attention.head_count_kv", 1),
                ("attention.key_length", d_latent + d_pe),
                ("attention.value_length", d_latent),
                ("attention.key_length_mla", d_nope + d_pe),
                ("attention.value_length_mla", d_v),
                ("attention.q_lora_rank", d_q),
                ("attention.kv_lora_rank", d_latent),
                ("rope.dimension_count", d_pe),
                ("rope.scaling.original_context_length", 4096),
            ]),
            Attention::Heads(n_kv, d_head, _) => keys.extend([
                ("attention.head_count_kv", n_kv),
                ("attention.key_length", d_head),
                ("attention.value_length", d_head),
                ("rope.dimension_count", d_head / 2),
            ]),
        }
        for (key, n) in keys {
            h.set(&format!("{arch}.{key}"), n as u32);
        }
        let mut floats = vec![
            ("expert_weights_scale", self.scale),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("rope.freq_base", 1e4),
        ];
        if arch == "deepseek2" {
            h.set("deepseek2.rope.scaling.type", "yarn");
            floats.extend([("rope.scaling.factor", 40.0), ("rope.scaling.yarn_log_multiplier", 0.1)]);
        }
        for (key, x) in floats {
            h.set(&format!("{arch}.{key}"), x);
        }
        if self.sigmoid {
            h.set(&format!("{arch}.expert_weights_norm"), true);
        }
        h.tensor("token_embd.weight", &[self.n_vocab, d], Q8_0);
        h.tensor("output_norm.weight", &[d], F32);
        h.tensor("output.weight", &[self.n_vocab, d], Q8_0);
        (0..self.n_layer).for_each(|layer| self.layer(&mut h, layer));
        if self.n_next > 0 {
            h.tensor(&format!("blk.{}.nextn.eh_proj.weight", self.n_layer), &[d, 2 * d], Q8_0);
        }
        h
    }

    fn layer(&self, h: &mut Header, layer: usize) {
        let (d, n_head) = (self.d_model, self.n_head);
        let (d_ff, n_dense) = self.dense;
        let (n_expert, _, n_shared, d_expert) = self.experts;
        let vector = |h: &mut Header, name: &str, n| {
            h.tensor(&format!("blk.{layer}.{name}"), &[n], F32);
        };
        let tensor = |h: &mut Header, name: &str, shape: &[usize]| {
            // Rows that blocks of 32 do not divide stay bf16.
            let dtype = if shape[shape.len() - 1].is_multiple_of(32) { Q8_0 } else { BF16 };
            h.tensor(&format!("blk.{layer}.{name}.weight"), shape, dtype);
        };
        vector(h, "attn_norm.weight", d);
        vector(h, if self.arch() == "glm4moe" { "post_attention_norm.weight" } else { "ffn_norm.weight" }, d);
        match self.attention {
            Attention::Latent([d_q, d_latent, d_nope, d_pe, d_v]) => {
                let width = n_head * (d_nope + d_pe);
                if d_q > 0 {
                    tensor(h, "attn_q_a", &[d_q, d]);
                    vector(h, "attn_q_a_norm.weight", d_q);
                    tensor(h, "attn_q_b", &[width, d_q]);
                } else {
                    tensor(h, "attn_q", &[width, d]);
                }
                tensor(h, "attn_kv_a_mqa", &[d_latent + d_pe, d]);
                vector(h, "attn_kv_a_norm.weight", d_latent);
                tensor(h, "attn_k_b", &[n_head, d_latent, d_nope]);
                tensor(h, "attn_v_b", &[n_head, d_v, d_latent]);
                tensor(h, "attn_output", &[d, n_head * d_v]);
            }
            Attention::Heads(n_kv, d_head, qk_norm) => {
                for (name, n) in [("attn_q", n_head), ("attn_k", n_kv), ("attn_v", n_kv)] {
                    tensor(h, name, &[n * d_head, d]);
                    vector(h, &format!("{name}.bias"), n * d_head);
                }
                if qk_norm {
                    vector(h, "attn_q_norm.weight", d_head);
                    vector(h, "attn_k_norm.weight", d_head);
                }
                tensor(h, "attn_output", &[d, n_head * d_head]);
            }
        }
        if layer < n_dense {
            tensor(h, "ffn_gate", &[d_ff, d]);
            tensor(h, "ffn_up", &[d_ff, d]);
            tensor(h, "ffn_down", &[d, d_ff]);
            return;
        }
        h.tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), &[n_expert, d], F32);
        if self.sigmoid {
            vector(h, "exp_probs_b.bias", n_expert);
        }
        tensor(h, "ffn_gate_exps", &[n_expert, d_expert, d]);
        tensor(h, "ffn_up_exps", &[n_expert, d_expert, d]);
        tensor(h, "ffn_down_exps", &[n_expert, d, d_expert]);
        tensor(h, "ffn_gate_shexp", &[n_shared * d_expert, d]);
        tensor(h, "ffn_up_shexp", &[n_shared * d_expert, d]);
        tensor(h, "ffn_down_shexp", &[d, n_shared * d_expert]);
    }
}

/// Model, parameters in all and for a token, bytes that a position takes in caches of f16.
///
/// By hand: a position is layers · 576 · 2 bytes for latents, layers · 8 heads · 256 · 2 bytes for plain heads.
/// Parameters without those for further tokens; the names of the models round them.
const COSTS: &[(Shape, usize, usize, usize)] = &[
    (V3, 671_026_419_200, 36_625_625_600, 61 * 576 * 2),
    (KIMI_K2, 1_026_408_232_448, 31_687_102_976, 61 * 576 * 2),
    (V2, 235_741_434_880, 20_851_517_440, 60 * 576 * 2),
    (V2_LITE, 15_706_484_224, 2_451_437_056, 27 * 576 * 2),
    (GLM_45_AIR, 106_852_251_264, 12_803_376_768, 46 * 8 * 256 * 2),
    (GLM_45, 352_797_829_024, 32_856_325_024, 92 * 8 * 256 * 2),
];

#[test]
fn real_shapes_cost_what_they_must() {
    for &(shape, params, active, position) in COSTS {
        let Some(checkpoint) = shape.header().open_hollow(shape.name) else {
            crate::fixtures::skip(format!("no file of the size of {} can be made here", shape.name));
            continue;
        };
        let plan = crate::fused(&checkpoint).unwrap();
        assert_eq!((plan.n_params(), plan.active_params()), (params, active), "{}", shape.name);
        assert_eq!(crate::sequence_bytes(&plan), (position, 0, 0), "{}", shape.name);
    }
}

#[test]
fn every_matrix_of_latent_attention_counts_as_attention() {
    let plan = crate::fused(&TINY_V2.header().open()).unwrap();
    let q8 = |values: usize| values / 32 * 34;
    let attention = 2 * (q8(3 * 56 * 128) + q8(96 * 128) + 64 * 4 + q8(128 * 96));
    let matrices = 2 * (3 * 64 * 24 * 2 + q8(3 * 32 * 64)); // rows of 24 are bf16
    let found = plan.weight_bytes().into_iter().find(|(kind, _)| *kind == Kind::Attention).unwrap().1;
    assert_eq!(found, attention + matrices);
}

const TINY_V2: Shape = Shape {
    name: "tiny-v2",
    n_vocab: 96,
    d_model: 128,
    n_layer: 2,
    n_head: 3,
    attention: Attention::Latent([0, 64, 24, 32, 32]),
    dense: (256, 1),
    experts: (8, 3, 2, 32),
    groups: (4, 2),
    ..V2
};

const TINY_V3: Shape = Shape {
    name: "tiny-v3",
    n_vocab: 96,
    d_model: 128,
    n_layer: 2,
    n_head: 2,
    attention: Attention::Latent([96, 64, 32, 32, 64]),
    dense: (256, 1),
    experts: (8, 3, 1, 32),
    groups: (4, 2),
    ..V3
};

const TINY_GLM: Shape = Shape {
    name: "tiny-glm",
    n_vocab: 96,
    d_model: 128,
    n_layer: 2,
    n_head: 4,
    attention: Attention::Heads(2, 32, true),
    dense: (256, 1),
    experts: (8, 3, 1, 32),
    ..GLM_45
};

/// As in files from before the latent cache: both matrices of a head in one tensor, keys of plain heads.
fn legacy(shape: Shape) -> Checkpoint {
    let Attention::Latent([_, d_latent, d_nope, d_pe, d_v]) = shape.attention else { unreachable!() };
    let mut h = shape.header();
    for layer in 0..shape.n_layer {
        h.drop_tensor(&format!("blk.{layer}.attn_k_b.weight")).drop_tensor(&format!("blk.{layer}.attn_v_b.weight"));
        h.tensor(&format!("blk.{layer}.attn_kv_b.weight"), &[shape.n_head * (d_nope + d_v), d_latent], Q8_0);
    }
    h.unset("deepseek2.attention.key_length_mla").unset("deepseek2.attention.value_length_mla");
    h.set("deepseek2.attention.key_length", (d_nope + d_pe) as u32);
    h.set("deepseek2.attention.value_length", d_v as u32);
    h.open()
}

/// Some converters wrote the matrices of a head in both forms.
#[test]
fn the_whole_matrix_is_not_read_beside_its_parts() {
    let Attention::Latent([_, d_latent, d_nope, _, d_v]) = TINY_V3.attention else { unreachable!() };
    let mut h = TINY_V3.header();
    for layer in 0..TINY_V3.n_layer {
        let rows = TINY_V3.n_head * (d_nope + d_v);
        h.tensor(&format!("blk.{layer}.attn_kv_b.weight"), &[rows, d_latent], Q8_0);
    }
    let plans = [h.open(), TINY_V3.header().open()].map(|checkpoint| crate::fused(&checkpoint).unwrap());
    assert_eq!(plans[0], plans[1]);
}

fn fused(checkpoint: &Checkpoint, expected: Expect) {
    expected.assert_eq(&crate::fused(checkpoint).unwrap().to_string());
}

#[test]
fn plans() {
    expect![[r#"
        deepseek2: n_vocab 96, d_model 128, n_ctx_train 163840
        56 ops, 51 buffers, 34 weights
        rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 4.445699e-6, factor 1
        cache 0 to 1: 1 heads, k 96, v the first 64 of k
        embed        x[T, 128] = token_embd.weight q8_0[96, 128][id]
        layer 0:
          rms_norm     h.0[T, 128] = norm(x) ⊙ blk.0.attn_norm.weight f32[128], eps 1e-6
          linear       q.0[T, 96] = h.0 · blk.0.attn_q_a.weight q8_0[96, 128]
          linear       kv.0[T, 96] = h.0 · blk.0.attn_kv_a_mqa.weight q8_0[96, 128]
          rms_norm     q_norm.0[T, 96] = norm(q.0) ⊙ blk.0.attn_q_a_norm.weight f32[96], eps 1e-6
          linear       q_heads.0[T, 128] = q_norm.0 · blk.0.attn_q_b.weight q8_0[128, 96]
          split_heads  q_nope.0[T, 64], q_pe.0[T, 64] = parts of 2 heads of q_heads.0
          split_heads  c.0[T, 64], k_pe.0[T, 32] = parts of 1 heads of kv.0
          rms_norm     latent.0[T, 64] = norm(c.0) ⊙ blk.0.attn_kv_a_norm.weight f32[64], eps 1e-6
          rope         q_pe.0 = rope 0 of 2 heads of 32
          rope         k_pe.0 = rope 0 of 1 heads of 32
          head_linear  q_latent.0[T, 128] = q_nope.0 · blk.0.attn_k_b.weight q8_0[2, 64, 32] by head
          join_heads   qs.0[T, 192] = 2 heads of q_latent.0 ‖ q_pe.0
          join_heads   k.0[T, 96] = 1 heads of latent.0 ‖ k_pe.0
          kv_append    cache.0 ← k.0
          attention    o_latent.0[T, 128] = qs.0 over cache.0, 2 heads, scale 0.23423177
          head_linear  a.0[T, 128] = o_latent.0 · blk.0.attn_v_b.weight q8_0[2, 64, 64] by head
          linear       o.0[T, 128] = a.0 · blk.0.attn_output.weight q8_0[128, 128]
          add          x += o.0
          rms_norm     f.0[T, 128] = norm(x) ⊙ blk.0.ffn_norm.weight f32[128], eps 1e-6
          linear       gate.0[T, 256] = f.0 · blk.0.ffn_gate.weight q8_0[256, 128]
          linear       up.0[T, 256] = f.0 · blk.0.ffn_up.weight q8_0[256, 128]
          gated_act    act.0[T, 256] = silu(gate.0) ⊙ up.0
          linear       y.0[T, 128] = act.0 · blk.0.ffn_down.weight q8_0[128, 256]
          add          x += y.0
        layer 1:
          rms_norm     h.1[T, 128] = norm(x) ⊙ blk.1.attn_norm.weight f32[128], eps 1e-6
          linear       q.1[T, 96] = h.1 · blk.1.attn_q_a.weight q8_0[96, 128]
          linear       kv.1[T, 96] = h.1 · blk.1.attn_kv_a_mqa.weight q8_0[96, 128]
          rms_norm     q_norm.1[T, 96] = norm(q.1) ⊙ blk.1.attn_q_a_norm.weight f32[96], eps 1e-6
          linear       q_heads.1[T, 128] = q_norm.1 · blk.1.attn_q_b.weight q8_0[128, 96]
          split_heads  q_nope.1[T, 64], q_pe.1[T, 64] = parts of 2 heads of q_heads.1
          split_heads  c.1[T, 64], k_pe.1[T, 32] = parts of 1 heads of kv.1
          rms_norm     latent.1[T, 64] = norm(c.1) ⊙ blk.1.attn_kv_a_norm.weight f32[64], eps 1e-6
          rope         q_pe.1 = rope 0 of 2 heads of 32
          rope         k_pe.1 = rope 0 of 1 heads of 32
          head_linear  q_latent.1[T, 128] = q_nope.1 · blk.1.attn_k_b.weight q8_0[2, 64, 32] by head
          join_heads   qs.1[T, 192] = 2 heads of q_latent.1 ‖ q_pe.1
          join_heads   k.1[T, 96] = 1 heads of latent.1 ‖ k_pe.1
          kv_append    cache.1 ← k.1
          attention    o_latent.1[T, 128] = qs.1 over cache.1, 2 heads, scale 0.23423177
          head_linear  a.1[T, 128] = o_latent.1 · blk.1.attn_v_b.weight q8_0[2, 64, 64] by head
          linear       o.1[T, 128] = a.1 · blk.1.attn_output.weight q8_0[128, 128]
          add          x += o.1
          rms_norm     f.1[T, 128] = norm(x) ⊙ blk.1.ffn_norm.weight f32[128], eps 1e-6
          linear       router.1[T, 8] = f.1 · blk.1.ffn_gate_inp.weight f32[8, 128]
          route        ids.1 u32[T, 3], weights.1[T, 3] = σ(router.1) best 3 of 8 by + blk.1.exp_probs_b.bias f32[8] in 2 of 4 groups by their two best, renormalised · 2.5
          experts      y.1[T·3, 128] = (silu(f.1 · blk.1.ffn_gate_exps.weight q8_0[8, 32, 128]) ⊙ (f.1 · blk.1.ffn_up_exps.weight q8_0[8, 32, 128])) · blk.1.ffn_down_exps.weight q8_0[8, 128, 32], by ids.1, scratch hidden.1[T·3, 32]
          linear       gate.1[T, 32] = f.1 · blk.1.ffn_gate_shexp.weight q8_0[32, 128]
          linear       up.1[T, 32] = f.1 · blk.1.ffn_up_shexp.weight q8_0[32, 128]
          gated_act    act.1[T, 32] = silu(gate.1) ⊙ up.1
          linear       shared.1[T, 128] = act.1 · blk.1.ffn_down_shexp.weight q8_0[128, 32]
          add          x += shared.1
          combine      x += weights.1 · y.1
        select       last[R, 128] = x[rows]
        rms_norm     final[R, 128] = norm(last) ⊙ output_norm.weight f32[128], eps 1e-6
        linear       logits[R, 96] = final · output.weight q8_0[96, 128]
    "#]].assert_eq(&model::build(&TINY_V3.header().open()).unwrap().to_string());
    fused(
        &TINY_V3.header().open(),
        expect![[r#"
            deepseek2: n_vocab 96, d_model 128, n_ctx_train 163840
            47 ops, 48 buffers, 34 weights
            rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 4.445699e-6, factor 1
            cache 0 to 1: 1 heads, k 96, v the first 64 of k
            embed        x[T, 128] = token_embd.weight q8_0[96, 128][id]
            layer 0:
              rms_norm     h.0[T, 128] = norm(x) ⊙ blk.0.attn_norm.weight f32[128], eps 1e-6
              linear       q.0[T, 96] = h.0 · blk.0.attn_q_a.weight q8_0[96, 128]
                           kv.0[T, 96] = h.0 · blk.0.attn_kv_a_mqa.weight q8_0[96, 128]
              rms_norm     q_norm.0[T, 96] = norm(q.0) ⊙ blk.0.attn_q_a_norm.weight f32[96], eps 1e-6
              linear       q_heads.0[T, 128] = q_norm.0 · blk.0.attn_q_b.weight q8_0[128, 96]
              split_heads  q_nope.0[T, 64], q_pe.0[T, 64] = parts of 2 heads of q_heads.0
              split_heads  c.0[T, 64], k_pe.0[T, 32] = parts of 1 heads of kv.0
              rms_norm     latent.0[T, 64] = norm(c.0) ⊙ blk.0.attn_kv_a_norm.weight f32[64], eps 1e-6
              rope         q_pe.0 = rope 0 of 2 heads of 32
              rope         k_pe.0 = rope 0 of 1 heads of 32
              head_linear  q_latent.0[T, 128] = q_nope.0 · blk.0.attn_k_b.weight q8_0[2, 64, 32] by head
              join_heads   qs.0[T, 192] = 2 heads of q_latent.0 ‖ q_pe.0
              join_heads   k.0[T, 96] = 1 heads of latent.0 ‖ k_pe.0
              kv_append    cache.0 ← k.0
              attention    o_latent.0[T, 128] = qs.0 over cache.0, 2 heads, scale 0.23423177
              head_linear  a.0[T, 128] = o_latent.0 · blk.0.attn_v_b.weight q8_0[2, 64, 64] by head
              linear       o.0[T, 128] = a.0 · blk.0.attn_output.weight q8_0[128, 128]
              rms_norm     f.0[T, 128] = norm(x += o.0) ⊙ blk.0.ffn_norm.weight f32[128], eps 1e-6
              gated_linear act.0[T, 256] = silu(f.0 · blk.0.ffn_gate.weight q8_0[256, 128]) ⊙ (f.0 · blk.0.ffn_up.weight q8_0[256, 128])
              linear       y.0[T, 128] = act.0 · blk.0.ffn_down.weight q8_0[128, 256]
              rms_norm     h.1[T, 128] = norm(x += y.0) ⊙ blk.1.attn_norm.weight f32[128], eps 1e-6
            layer 1:
              linear       q.1[T, 96] = h.1 · blk.1.attn_q_a.weight q8_0[96, 128]
                           kv.1[T, 96] = h.1 · blk.1.attn_kv_a_mqa.weight q8_0[96, 128]
              rms_norm     q_norm.1[T, 96] = norm(q.1) ⊙ blk.1.attn_q_a_norm.weight f32[96], eps 1e-6
              linear       q_heads.1[T, 128] = q_norm.1 · blk.1.attn_q_b.weight q8_0[128, 96]
              split_heads  q_nope.1[T, 64], q_pe.1[T, 64] = parts of 2 heads of q_heads.1
              split_heads  c.1[T, 64], k_pe.1[T, 32] = parts of 1 heads of kv.1
              rms_norm     latent.1[T, 64] = norm(c.1) ⊙ blk.1.attn_kv_a_norm.weight f32[64], eps 1e-6
              rope         q_pe.1 = rope 0 of 2 heads of 32
              rope         k_pe.1 = rope 0 of 1 heads of 32
              head_linear  q_latent.1[T, 128] = q_nope.1 · blk.1.attn_k_b.weight q8_0[2, 64, 32] by head
              join_heads   qs.1[T, 192] = 2 heads of q_latent.1 ‖ q_pe.1
              join_heads   k.1[T, 96] = 1 heads of latent.1 ‖ k_pe.1
              kv_append    cache.1 ← k.1
              attention    o_latent.1[T, 128] = qs.1 over cache.1, 2 heads, scale 0.23423177
              select       o_latent.1.asked[R, 128] = o_latent.1[rows]
              select       x.asked[R, 128] = x[rows]
              head_linear  a.1.asked[R, 128] = o_latent.1.asked · blk.1.attn_v_b.weight q8_0[2, 64, 64] by head
              linear       o.1.asked[R, 128] = a.1.asked · blk.1.attn_output.weight q8_0[128, 128]
              rms_norm     f.1.asked[R, 128] = norm(x.asked += o.1.asked) ⊙ blk.1.ffn_norm.weight f32[128], eps 1e-6
              linear       router.1.asked[R, 8] = f.1.asked · blk.1.ffn_gate_inp.weight f32[8, 128]
              route        ids.1.asked u32[R, 3], weights.1.asked[R, 3] = σ(router.1.asked) best 3 of 8 by + blk.1.exp_probs_b.bias f32[8] in 2 of 4 groups by their two best, renormalised · 2.5
              experts      y.1.asked[R·3, 128] = (silu(f.1.asked · blk.1.ffn_gate_exps.weight q8_0[8, 32, 128]) ⊙ (f.1.asked · blk.1.ffn_up_exps.weight q8_0[8, 32, 128])) · blk.1.ffn_down_exps.weight q8_0[8, 128, 32], by ids.1.asked, scratch hidden.1.asked[R·3, 32]
              gated_linear act.1.asked[R, 32] = silu(f.1.asked · blk.1.ffn_gate_shexp.weight q8_0[32, 128]) ⊙ (f.1.asked · blk.1.ffn_up_shexp.weight q8_0[32, 128])
              linear       shared.1.asked[R, 128] = act.1.asked · blk.1.ffn_down_shexp.weight q8_0[128, 32]
              add          x.asked += shared.1.asked
              combine      x.asked += weights.1.asked · y.1.asked; final[R, 128] = norm ⊙ output_norm.weight f32[128], eps 1e-6
            linear       logits[R, 96] = final · output.weight q8_0[96, 128]
        "#]],
    );
    fused(
        &legacy(TINY_V2),
        expect![[r#"
            deepseek2: n_vocab 96, d_model 128, n_ctx_train 163840
            43 ops, 44 buffers, 29 weights
            rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 4.445699e-6, factor 1
            cache 0 to 1: 1 heads, k 96, v the first 64 of k
            embed        x[T, 128] = token_embd.weight q8_0[96, 128][id]
            layer 0:
              rms_norm     h.0[T, 128] = norm(x) ⊙ blk.0.attn_norm.weight f32[128], eps 1e-6
              linear       q.0[T, 168] = h.0 · blk.0.attn_q.weight q8_0[168, 128]
                           kv.0[T, 96] = h.0 · blk.0.attn_kv_a_mqa.weight q8_0[96, 128]
              split_heads  q_nope.0[T, 72], q_pe.0[T, 96] = parts of 3 heads of q.0
              split_heads  c.0[T, 64], k_pe.0[T, 32] = parts of 1 heads of kv.0
              rms_norm     latent.0[T, 64] = norm(c.0) ⊙ blk.0.attn_kv_a_norm.weight f32[64], eps 1e-6
              rope         q_pe.0 = rope 0 of 3 heads of 32
              rope         k_pe.0 = rope 0 of 1 heads of 32
              head_linear  q_latent.0[T, 192] = q_nope.0 · blk.0.attn_kv_b.weight[0/2] q8_0[3, 24, 64]ᵀ by head
              join_heads   qs.0[T, 288] = 3 heads of q_latent.0 ‖ q_pe.0
              join_heads   k.0[T, 96] = 1 heads of latent.0 ‖ k_pe.0
              kv_append    cache.0 ← k.0
              attention    o_latent.0[T, 192] = qs.0 over cache.0, 3 heads, scale 0.2504043
              head_linear  a.0[T, 96] = o_latent.0 · blk.0.attn_kv_b.weight[1/2] q8_0[3, 32, 64] by head
              linear       o.0[T, 128] = a.0 · blk.0.attn_output.weight q8_0[128, 96]
              rms_norm     f.0[T, 128] = norm(x += o.0) ⊙ blk.0.ffn_norm.weight f32[128], eps 1e-6
              gated_linear act.0[T, 256] = silu(f.0 · blk.0.ffn_gate.weight q8_0[256, 128]) ⊙ (f.0 · blk.0.ffn_up.weight q8_0[256, 128])
              linear       y.0[T, 128] = act.0 · blk.0.ffn_down.weight q8_0[128, 256]
              rms_norm     h.1[T, 128] = norm(x += y.0) ⊙ blk.1.attn_norm.weight f32[128], eps 1e-6
            layer 1:
              linear       q.1[T, 168] = h.1 · blk.1.attn_q.weight q8_0[168, 128]
                           kv.1[T, 96] = h.1 · blk.1.attn_kv_a_mqa.weight q8_0[96, 128]
              split_heads  q_nope.1[T, 72], q_pe.1[T, 96] = parts of 3 heads of q.1
              split_heads  c.1[T, 64], k_pe.1[T, 32] = parts of 1 heads of kv.1
              rms_norm     latent.1[T, 64] = norm(c.1) ⊙ blk.1.attn_kv_a_norm.weight f32[64], eps 1e-6
              rope         q_pe.1 = rope 0 of 3 heads of 32
              rope         k_pe.1 = rope 0 of 1 heads of 32
              head_linear  q_latent.1[T, 192] = q_nope.1 · blk.1.attn_kv_b.weight[0/2] q8_0[3, 24, 64]ᵀ by head
              join_heads   qs.1[T, 288] = 3 heads of q_latent.1 ‖ q_pe.1
              join_heads   k.1[T, 96] = 1 heads of latent.1 ‖ k_pe.1
              kv_append    cache.1 ← k.1
              attention    o_latent.1[T, 192] = qs.1 over cache.1, 3 heads, scale 0.2504043
              select       o_latent.1.asked[R, 192] = o_latent.1[rows]
              select       x.asked[R, 128] = x[rows]
              head_linear  a.1.asked[R, 96] = o_latent.1.asked · blk.1.attn_kv_b.weight[1/2] q8_0[3, 32, 64] by head
              linear       o.1.asked[R, 128] = a.1.asked · blk.1.attn_output.weight q8_0[128, 96]
              rms_norm     f.1.asked[R, 128] = norm(x.asked += o.1.asked) ⊙ blk.1.ffn_norm.weight f32[128], eps 1e-6
              linear       router.1.asked[R, 8] = f.1.asked · blk.1.ffn_gate_inp.weight f32[8, 128]
              route        ids.1.asked u32[R, 3], weights.1.asked[R, 3] = softmax(router.1.asked) best 3 of 8 in 2 of 4 groups by their best · 16
              experts      y.1.asked[R·3, 128] = (silu(f.1.asked · blk.1.ffn_gate_exps.weight q8_0[8, 32, 128]) ⊙ (f.1.asked · blk.1.ffn_up_exps.weight q8_0[8, 32, 128])) · blk.1.ffn_down_exps.weight q8_0[8, 128, 32], by ids.1.asked, scratch hidden.1.asked[R·3, 32]
              gated_linear act.1.asked[R, 64] = silu(f.1.asked · blk.1.ffn_gate_shexp.weight q8_0[64, 128]) ⊙ (f.1.asked · blk.1.ffn_up_shexp.weight q8_0[64, 128])
              linear       shared.1.asked[R, 128] = act.1.asked · blk.1.ffn_down_shexp.weight q8_0[128, 64]
              add          x.asked += shared.1.asked
              combine      x.asked += weights.1.asked · y.1.asked; final[R, 128] = norm ⊙ output_norm.weight f32[128], eps 1e-6
            linear       logits[R, 96] = final · output.weight q8_0[96, 128]
        "#]],
    );
    fused(
        &TINY_GLM.header().open(),
        expect![[r#"
        glm4moe: n_vocab 96, d_model 128, n_ctx_train 163840
        33 ops, 28 buffers, 36 weights
        rope 0: half, 8 pairs, inv_freq 1.000000e0 .. 3.162278e-4, factor 1
        cache 0 to 1: 2 heads, k 32, v 32
        embed        x[T, 128] = token_embd.weight q8_0[96, 128][id]
        layer 0:
          rms_norm     h.0[T, 128] = norm(x) ⊙ blk.0.attn_norm.weight f32[128], eps 1e-6
          linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q8_0[128, 128] + blk.0.attn_q.bias f32[128]
                       k.0[T, 64] = h.0 · blk.0.attn_k.weight q8_0[64, 128] + blk.0.attn_k.bias f32[64]
                       v.0[T, 64] = h.0 · blk.0.attn_v.weight q8_0[64, 128] + blk.0.attn_v.bias f32[64]
          head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.0 = rope 0 of 4 heads of 32
          rope         k.0 = rope 0 of 2 heads of 32
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
          linear       o.0[T, 128] = a.0 · blk.0.attn_output.weight q8_0[128, 128]
          rms_norm     f.0[T, 128] = norm(x += o.0) ⊙ blk.0.ffn_norm.weight f32[128], eps 1e-6
          gated_linear act.0[T, 256] = silu(f.0 · blk.0.ffn_gate.weight q8_0[256, 128]) ⊙ (f.0 · blk.0.ffn_up.weight q8_0[256, 128])
          linear       y.0[T, 128] = act.0 · blk.0.ffn_down.weight q8_0[128, 256]
          rms_norm     h.1[T, 128] = norm(x += y.0) ⊙ blk.1.attn_norm.weight f32[128], eps 1e-6
        layer 1:
          linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q8_0[128, 128] + blk.1.attn_q.bias f32[128]
                       k.1[T, 64] = h.1 · blk.1.attn_k.weight q8_0[64, 128] + blk.1.attn_k.bias f32[64]
                       v.1[T, 64] = h.1 · blk.1.attn_v.weight q8_0[64, 128] + blk.1.attn_v.bias f32[64]
          head_norm    q.1 = norm of 4 heads of 32 ⊙ blk.1.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.1 = norm of 2 heads of 32 ⊙ blk.1.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.1 = rope 0 of 4 heads of 32
          rope         k.1 = rope 0 of 2 heads of 32
          kv_append    cache.1 ← k.1, v.1
          attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
          select       a.1.asked[R, 128] = a.1[rows]
          select       x.asked[R, 128] = x[rows]
          linear       o.1.asked[R, 128] = a.1.asked · blk.1.attn_output.weight q8_0[128, 128]
          rms_norm     f.1.asked[R, 128] = norm(x.asked += o.1.asked) ⊙ blk.1.ffn_norm.weight f32[128], eps 1e-6
          linear       router.1.asked[R, 8] = f.1.asked · blk.1.ffn_gate_inp.weight f32[8, 128]
          route        ids.1.asked u32[R, 3], weights.1.asked[R, 3] = σ(router.1.asked) best 3 of 8 by + blk.1.exp_probs_b.bias f32[8], renormalised · 2.5
          experts      y.1.asked[R·3, 128] = (silu(f.1.asked · blk.1.ffn_gate_exps.weight q8_0[8, 32, 128]) ⊙ (f.1.asked · blk.1.ffn_up_exps.weight q8_0[8, 32, 128])) · blk.1.ffn_down_exps.weight q8_0[8, 128, 32], by ids.1.asked, scratch hidden.1.asked[R·3, 32]
          gated_linear act.1.asked[R, 32] = silu(f.1.asked · blk.1.ffn_gate_shexp.weight q8_0[32, 128]) ⊙ (f.1.asked · blk.1.ffn_up_shexp.weight q8_0[32, 128])
          linear       shared.1.asked[R, 128] = act.1.asked · blk.1.ffn_down_shexp.weight q8_0[128, 32]
          add          x.asked += shared.1.asked
          combine      x.asked += weights.1.asked · y.1.asked; final[R, 128] = norm ⊙ output_norm.weight f32[128], eps 1e-6
        linear       logits[R, 96] = final · output.weight q8_0[96, 128]
    "#]],
    );
}

/// The factor on the scores, `mscale² / √(d_nope + d_pe)`, and none on cosine and sine, where both mscales are alike.
#[test]
fn yarn_goes_into_the_scores() {
    let plan = crate::fused(&TINY_V3.header().open()).unwrap();
    let scale = plan.ops.iter().find_map(|op| match op {
        model::plan::Op::Attention { scale, .. } => Some(*scale),
        _ => None,
    });
    let mscale = 0.1 * 40f64.ln() + 1.0;
    assert!((f64::from(scale.unwrap()) - mscale * mscale / 8.0).abs() < 1e-7);
    assert_eq!(plan.ropes[0].factor, 1.0);
}

#[test]
fn contradictions_are_refused() {
    let cases: &[(&str, u32, &str)] = &[
        ("nextn_predict_layers", 2, "nextn_predict_layers: is 2, the model has 2 layers with those"),
        ("expert_group_count", 3, "expert_group_count: is 3, which does not divide 8 experts"),
        ("expert_group_count", 8, "8 groups of 1 experts have no two best"),
        ("expert_gating_func", 3, "expert_gating_func: is 3, 1 (softmax) or 2 (sigmoid) wanted"),
        ("expert_shared_count", 2, "blk.1.ffn_gate_shexp.weight: has shape [32, 128], [64, 128] wanted"),
        ("leading_dense_block_count", 0, "blk.0.ffn_gate_inp.weight: is missing, [8, 128] wanted"),
        ("leading_dense_block_count", 2, "blk.1.ffn_gate.weight: is missing, [256, 128] wanted"),
        ("attention.kv_lora_rank", 32, "blk.0.attn_kv_a_mqa.weight: has shape [96, 128], [64, 128] wanted"),
        ("attention.key_length_mla", 32, "rope.dimension_count: is 32 of heads of 32"),
        ("attention.q_lora_rank", 0, "blk.0.attn_q.weight: is missing, [128, 128] wanted"),
        ("attention.head_count", 4096, "blk.0.attn_q_b.weight: has shape [128, 96], [262144, 96] wanted"),
        ("rope.dimension_count", 33, "rope.dimension_count: is 33, an even number up to the head width 33 wanted"),
    ];
    for &(key, value, wanted) in cases {
        let mut header = TINY_V3.header();
        header.set(&format!("deepseek2.{key}"), value);
        let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{key} {value}: {error}");
    }
    let mut header = TINY_V3.header();
    header.set("deepseek2.attention.temperature_scale", 0.1f32);
    let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("attention.temperature_scale: is 0.1"), "{error}");
}
