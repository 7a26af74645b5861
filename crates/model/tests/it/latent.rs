//! DeepSeek's shapes and GLM's: what the real ones cost, and what is refused, from headers without weights.

use crate::header::Header;
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

/// A tiny DeepSeek-V3.
pub fn deepseek_v3() -> Header {
    TINY_V3.header()
}

/// A tiny GLM-4.5.
pub fn glm() -> Header {
    TINY_GLM.header()
}

/// A tiny GLM-5, whose second layer sees what the first chose and has an indexer all the same.
pub fn glm5() -> Header {
    let mut h = TINY_V3.header().rename("glm-dsa");
    for (key, n) in [("head_count", 3u32), ("key_length", 48), ("top_k", 16)] {
        h.set(&format!("glm-dsa.attention.indexer.{key}"), n);
    }
    h.set("glm-dsa.attention.indexer.types", vec![true, false]);
    for layer in 0..2 {
        let mut tensor = |name: &str, shape: &[usize], dtype| {
            h.tensor(&format!("blk.{layer}.indexer.{name}"), shape, dtype);
        };
        tensor("attn_q_b.weight", &[3 * 48, 96], Q8_0);
        tensor("attn_k.weight", &[48, 128], Q8_0);
        tensor("proj.weight", &[3, 128], F32);
        tensor("k_norm.weight", &[48], F32);
        tensor("k_norm.bias", &[48], F32);
    }
    h
}

/// A tiny DeepSeek-V2 as in files from before the latent cache: both matrices of a head in one tensor, keys of plain
/// heads.
pub fn deepseek_v2_whole() -> Header {
    let shape = TINY_V2;
    let Attention::Latent([_, d_latent, d_nope, d_pe, d_v]) = shape.attention else { unreachable!() };
    let mut h = shape.header();
    for layer in 0..shape.n_layer {
        h.drop_tensor(&format!("blk.{layer}.attn_k_b.weight")).drop_tensor(&format!("blk.{layer}.attn_v_b.weight"));
        h.tensor(&format!("blk.{layer}.attn_kv_b.weight"), &[shape.n_head * (d_nope + d_v), d_latent], Q8_0);
    }
    h.unset("deepseek2.attention.key_length_mla").unset("deepseek2.attention.value_length_mla");
    h.set("deepseek2.attention.key_length", (d_nope + d_pe) as u32);
    h.set("deepseek2.attention.value_length", d_v as u32);
    h
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
        ("expert_gating_func", 3, "expert_gating_func: is 3, expected 1 (softmax) or 2 (sigmoid)"),
        ("expert_shared_count", 2, "blk.1.ffn_gate_shexp.weight: has shape [32, 128], expected [64, 128]"),
        ("leading_dense_block_count", 0, "blk.0.ffn_gate_inp.weight: is missing, expected [8, 128]"),
        ("leading_dense_block_count", 2, "blk.1.ffn_gate.weight: is missing, expected [256, 128]"),
        ("attention.kv_lora_rank", 32, "blk.0.attn_kv_a_mqa.weight: has shape [96, 128], expected [64, 128]"),
        ("attention.key_length_mla", 32, "rope.dimension_count: is 32 of heads of 32"),
        ("attention.q_lora_rank", 0, "blk.0.attn_q.weight: is missing, expected [128, 128]"),
        ("attention.head_count", 4096, "blk.0.attn_q_b.weight: has shape [128, 96], expected [262144, 96]"),
        ("rope.dimension_count", 33, "rope.dimension_count: is 33, expected an even number up to the head width 33"),
    ];
    for &(key, value, wanted) in cases {
        let mut header = TINY_V3.header();
        header.set(&format!("deepseek2.{key}"), value);
        let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{key} {value}: {error}");
    }
    let mut header = TINY_V3.header();
    header.set("deepseek2.attention.temperature_scale", 0.1f32);
    header.set("deepseek2.attention.temperature_length", 0u32);
    let error = crate::fused(&header.open()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("attention.temperature_length: is 0, expected 1 to"), "{error}");
}

/// Which layers choose, by what the file says or by the family; and what cannot be.
#[rustfmt::skip]
#[test]
fn layers_choose_or_see_what_an_earlier_one_chose() {
    let chooses = |spoil: fn(&mut Header)| {
        let mut header = glm5();
        spoil(&mut header);
        let plan = model::build(&header.open()).map_err(|error| error.to_string())?;
        Ok::<_, String>(plan.ops.iter().filter(|op| op.name() == "choose").count())
    };
    const TYPES: &str = "glm-dsa.attention.indexer.types";
    assert_eq!(chooses(|_| {}), Ok(1));
    assert_eq!(chooses(|h| { h.set(TYPES, vec![1u32, 1]); }), Ok(2));
    assert_eq!(chooses(|h| { h.unset(TYPES); }), Ok(2));
    // Early files of GLM-5.2 list no layers: of four one chooses, but all of the first three.
    assert_eq!(chooses(|h| { h.unset(TYPES).set("glm-dsa.context_length", 1u32 << 20); }), Ok(2));
    let refused: [(fn(&mut Header), &str); 6] = [
        (|h| { h.set(TYPES, vec![false, true]); }, "indexer.types: has no indexer in the first layer"),
        (|h| { h.set(TYPES, vec![true]); }, "indexer.types: has 1 layers, the model has 2"),
        (|h| { h.set("glm-dsa.attention.indexer.top_k", 0u32); }, "indexer.top_k: is 0, expected 1 to 65536"),
        (|h| { h.set("glm-dsa.attention.indexer.key_length", 16u32); }, "blk.0.indexer.attn_q_b.weight: has shape"),
        (|h| { h.drop_tensor("blk.0.indexer.k_norm.bias"); }, "blk.0.indexer.k_norm.bias: is missing, expected [48]"),
        (|h| { h.set("glm-dsa.attention.q_lora_rank", 0u32); }, "q_lora_rank: is missing, and positions are chosen"),
    ];
    for (spoil, wanted) in refused {
        let error = chooses(spoil).unwrap_err();
        assert!(error.contains(wanted), "{error}");
    }
}

/// A file says how queries grow, and after how many positions, or after the context before YaRN.
#[test]
fn queries_grow_with_the_position() {
    let growth = |length: Option<u32>| {
        let mut header = TINY_V3.header();
        header.set("deepseek2.attention.temperature_scale", 0.1f32);
        if let Some(n) = length {
            header.set("deepseek2.attention.temperature_length", n);
        }
        let plan = crate::fused(&header.open()).unwrap();
        plan.ropes.iter().find_map(|rope| rope.growth).unwrap()
    };
    assert_eq!((growth(Some(8)).step, growth(Some(8)).beta, growth(None).step), (8, 0.1, 4096));
    let found = [0, 7, 8, 24].map(|pos| growth(Some(8)).at(pos));
    for (found, wanted) in found.into_iter().zip([1.0, 1.0, 1.0 + 0.1 * 2f64.ln(), 1.0 + 0.1 * 4f64.ln()]) {
        assert!((found - wanted).abs() < 1e-7, "{found} {wanted}");
    }
}
