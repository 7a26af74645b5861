//! GGUF's names for tensors that folders call otherwise, keep in one tensor an expert, or fuse.

use checkpoint::gguf::Writer;
use model::names::{Alias, Names};
use model::plan::Source;
use quant::WeightType::{self, F16, F32, Q8_0};

const OWN: &[Alias] = &[("ffn_norm", &["pre_feedforward_layernorm"]), ("ssm_a", &["linear_attn.A_log"])];

#[rustfmt::skip]
const TENSORS: &[(&str, &[usize], WeightType)] = &[
    ("blk.0.attn_q.weight",                                 &[6, 32],    Q8_0),
    ("blk.0.ffn_gate_up_exps.weight",                       &[3, 8, 32], Q8_0),
    ("model.embed_tokens.weight",                           &[9, 32],    F16),
    ("lm_head.weight",                                      &[9, 32],    F16),
    ("language_model.model.layers.1.self_attn.q_proj.bias", &[6],        F32),
    ("model.layers.1.input_layernorm.weight",               &[32],       F16),
    ("model.layers.1.post_attention_layernorm.weight",      &[32],       F16),
    ("model.layers.1.pre_feedforward_layernorm.weight",     &[32],       F16),
    ("model.layers.1.linear_attn.A_log",                    &[1, 4],     F32),
    ("model.layers.1.mlp.gate.e_score_correction_bias",     &[4],        F32),
    ("model.layers.1.mlp.experts.gate_up_proj",             &[2, 8, 32], F16),
    ("model.layers.1.mlp.experts.0.down_proj.weight",       &[32, 4],    F16),
    ("model.layers.1.mlp.experts.1.down_proj.weight",       &[32, 4],    F16),
    ("model.layers.2.mlp.experts.0.down_proj.weight",       &[32, 4],    F16),
    ("model.layers.2.mlp.experts.1.down_proj.weight",       &[32, 4],    F32),
    ("model.layers.3.mlp.switch_mlp.up_proj.weight",        &[2, 4, 32], Q8_0),
];

/// A name, its expected shape, and its place (`tensor`, or `tensor@row` for each slab) or the error's text.
#[rustfmt::skip]
const CASES: &[(&str, &[usize], Result<&str, &str>)] = &[
    ("blk.0.attn_q.weight", &[6, 32], Ok("blk.0.attn_q.weight")),
    ("blk.0.attn_q.weight", &[1, 6, 32], Ok("blk.0.attn_q.weight")),
    ("blk.0.attn_q.weight", &[6, 64], Err("blk.0.attn_q.weight: has shape [6, 32], expected [6, 64]")),
    ("blk.0.attn_k.weight", &[6, 64], Err("blk.0.attn_k.weight: is missing, expected [6, 64]")),
    ("blk.0.ffn_gate_exps.weight", &[3, 4, 32], Ok("blk.0.ffn_gate_up_exps.weight@0 blk.0.ffn_gate_up_exps.weight@8 blk.0.ffn_gate_up_exps.weight@16")),
    ("blk.0.ffn_up_exps.weight", &[3, 4, 32], Ok("blk.0.ffn_gate_up_exps.weight@4 blk.0.ffn_gate_up_exps.weight@12 blk.0.ffn_gate_up_exps.weight@20")),
    ("blk.0.ffn_up_exps.weight", &[3, 8, 32], Err("blk.0.ffn_gate_up_exps.weight: has shape [3, 8, 32], expected [3, 16, 32]")),
    ("token_embd.weight", &[9, 32], Ok("model.embed_tokens.weight")),
    ("output.weight", &[9, 32], Ok("lm_head.weight")),
    ("output_norm.weight", &[32], Err("output_norm.weight: is missing")),
    ("blk.1.attn_q.bias", &[6], Ok("language_model.model.layers.1.self_attn.q_proj.bias")),
    ("blk.1.attn_q.weight", &[6, 32], Err("is missing")),
    ("blk.1.attn_norm.weight", &[32], Ok("model.layers.1.input_layernorm.weight")),
    ("blk.1.ffn_norm.weight", &[32], Ok("model.layers.1.pre_feedforward_layernorm.weight")),
    ("blk.1.ssm_a", &[4], Ok("model.layers.1.linear_attn.A_log")),
    ("blk.1.exp_probs_b.bias", &[4], Ok("model.layers.1.mlp.gate.e_score_correction_bias")),
    ("blk.1.exp_probs_b.weight", &[4], Err("is missing")),
    ("blk.1.ffn_up_exps.weight", &[2, 4, 32], Ok("model.layers.1.mlp.experts.gate_up_proj@4 model.layers.1.mlp.experts.gate_up_proj@12")),
    ("blk.1.ffn_down_exps.weight", &[2, 32, 4], Ok("model.layers.1.mlp.experts.0.down_proj.weight@0 model.layers.1.mlp.experts.1.down_proj.weight@0")),
    ("blk.1.ffn_down_exps.weight", &[3, 32, 4], Err("model.layers.1.mlp.experts.2.down_proj.weight: is missing, expected [32, 4]")),
    ("blk.1.ffn_down_exps.weight", &[2, 32, 8], Err("model.layers.1.mlp.experts.0.down_proj.weight: has shape [32, 4], expected [32, 8]")),
    ("blk.2.ffn_down_exps.weight", &[2, 32, 4], Err("model.layers.2.mlp.experts.1.down_proj.weight: has type f32, expert 0 has f16")),
    ("blk.3.ffn_up_exps.weight", &[2, 4, 32], Ok("model.layers.3.mlp.switch_mlp.up_proj.weight")),
];

#[test]
fn weights_are_found_wherever_they_lie() {
    let mut writer = Writer::new();
    for &(name, shape, dtype) in TENSORS {
        let rows: usize = shape[..shape.len() - 1].iter().product();
        writer.tensor(name, shape, dtype, vec![0; rows * dtype.row_bytes(shape[shape.len() - 1]).unwrap()]);
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes).unwrap();
    let checkpoint = checkpoint::from_bytes("names.gguf", bytes).unwrap();
    let names = Names::new(&checkpoint, OWN);
    for &(name, shape, wanted) in CASES {
        let found = names.find(name, shape).map(|found| match found.source {
            Source::Tensor(tensor) => tensor,
            Source::Slabs(slabs) => {
                slabs.iter().map(|s| format!("{}@{}", s.tensor, s.first_row)).collect::<Vec<_>>().join(" ")
            }
        });
        match (found, wanted) {
            (Ok(found), Ok(wanted)) => assert_eq!(found, wanted, "{name}"),
            (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{name}: {error}"),
            (found, _) => panic!("{name} {shape:?}: {found:?}, expected {wanted:?}"),
        }
    }
}
