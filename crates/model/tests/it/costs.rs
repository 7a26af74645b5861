//! What a plan says it costs, against sums by hand.

use crate::header::Header;
use model::plan::cost::Kind;
use model::plan::memory::{place, unshared_bytes};
use quant::WeightType;

#[test]
fn bytes_by_kind_and_by_token() {
    let row = |t: WeightType, n| t.row_bytes(n).unwrap();
    let (q4, q6, q8) = (row(WeightType::Q4_K, 256), row(WeightType::Q6_K, 256), row(WeightType::Q8_0, 128));
    // Layer 1 has a q6_k attn_v.
    let attention = 2 * (128 * q4 + 64 * q4 + 256 * q8 + 2 * 32 * 4) + 64 * q4 + 64 * q6;
    let experts = 2 * 3 * 8 * 256 * q4;
    let (router, norm) = (2 * 8 * 256 * 4, 5 * 256 * 4);

    for plan in [model::build, crate::fused].map(|build| build(&Header::qwen3moe(2).open()).unwrap()) {
        let wanted = [
            (Kind::Embed, 96 * q4),
            (Kind::Attention, attention),
            (Kind::Router, router),
            (Kind::Experts, experts),
            (Kind::Output, 96 * q6),
            (Kind::Norm, norm),
        ];
        assert_eq!(plan.weight_bytes(), wanted);
        assert_eq!(plan.bytes_per_token(), q4 + attention + router + experts / 4 + 96 * q6 + norm);
        assert_eq!(crate::sequence_bytes(&plan), (2 * 2 * 64 * 2, 0, 0));
    }
}

#[test]
fn a_tied_table_counts_once_in_space_and_whole_in_traffic() {
    let plan = crate::fused(&Header::qwen3(1).open()).unwrap();
    let q4 = WeightType::Q4_K.row_bytes(256).unwrap();
    let all: usize = plan.weight_bytes().iter().map(|(_, bytes)| bytes).sum();
    assert!(plan.weight_bytes().iter().all(|(kind, _)| *kind != Kind::Output));
    assert_eq!(plan.bytes_per_token(), all + q4);
    assert_eq!(plan.active_params(), plan.n_params() + 256);
    let ffn = plan.weight_bytes().iter().find(|(kind, _)| *kind == Kind::FeedForward).unwrap().1;
    assert_eq!(ffn, 2 * 512 * q4 + 256 * 2 * q4);
}

/// Layers reuse each other's memory: the arena of 6 layers is as large as that of 2.
#[test]
fn the_arena_does_not_grow_with_layers() {
    let arena = |n_layer| place(&crate::fused(&Header::qwen3moe(n_layer).open()).unwrap(), 64, 4);
    assert_eq!(arena(6).bytes, arena(2).bytes);
    assert!(unshared_bytes(&arena(6)) > 4 * arena(6).bytes);
}
