//! Printed plans of the architectures, from headers made here: plain as the architecture wrote it, and fused.

use crate::header::Header;
use checkpoint::Checkpoint;
use expect_test::{Expect, expect};

fn plain_and_fused(checkpoint: &Checkpoint, plain: Expect, fused: Expect) {
    plain.assert_eq(&model::build(checkpoint).unwrap().to_string());
    fused.assert_eq(&crate::fused(checkpoint).unwrap().to_string());
}

#[test]
fn qwen3moe() {
    plain_and_fused(
        &Header::qwen3moe(6).open(),
        expect![[r#"
            qwen3moe: n_vocab 96, d_model 256, n_ctx_train 4096
            106 ops, 76 buffers, 75 weights
            rope 0: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
            cache 0 to 5: 2 heads, k 32, v 32
            embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
            layer 0:
              rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
              linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
              linear       k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
              linear       v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
              head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.0 = rope 0 of 4 heads of 32
              rope         k.0 = rope 0 of 2 heads of 32
              kv_append    cache.0 ← k.0, v.0
              attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
              linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
              add          x += o.0
              rms_norm     f.0[T, 256] = norm(x) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
              linear       router.0[T, 8] = f.0 · blk.0.ffn_gate_inp.weight f32[8, 256]
              route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 8, renormalised
              experts      y.0[T·2, 256] = (silu(f.0 · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0 · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0, scratch hidden.0[T·2, 256]
              combine      x += weights.0 · y.0
            layer 1:
              rms_norm     h.1[T, 256] = norm(x) ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
              linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256]
              linear       k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
              linear       v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
              head_norm    q.1 = norm of 4 heads of 32 ⊙ blk.1.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.1 = norm of 2 heads of 32 ⊙ blk.1.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.1 = rope 0 of 4 heads of 32
              rope         k.1 = rope 0 of 2 heads of 32
              kv_append    cache.1 ← k.1, v.1
              attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
              linear       o.1[T, 256] = a.1 · blk.1.attn_output.weight q8_0[256, 128]
              add          x += o.1
              rms_norm     f.1[T, 256] = norm(x) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
              linear       router.1[T, 8] = f.1 · blk.1.ffn_gate_inp.weight f32[8, 256]
              route        ids.1 u32[T, 2], weights.1[T, 2] = softmax(router.1) best 2 of 8, renormalised
              experts      y.1[T·2, 256] = (silu(f.1 · blk.1.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.1 · blk.1.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.1.ffn_down_exps.weight q4_k[8, 256, 256], by ids.1, scratch hidden.1[T·2, 256]
              combine      x += weights.1 · y.1
            layers 2 to 4 as layer 0
            layer 5 as layer 1
            select       last[R, 256] = x[rows]
            rms_norm     final[R, 256] = norm(last) ⊙ output_norm.weight f32[256], eps 1e-6
            linear       logits[R, 96] = final · output.weight q6_k[96, 256]
        "#]],
        expect![[r#"
            qwen3moe: n_vocab 96, d_model 256, n_ctx_train 4096
            83 ops, 77 buffers, 75 weights
            rope 0: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
            cache 0 to 5: 2 heads, k 32, v 32
            embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
            layer 0:
              rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
              linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
                           k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
                           v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
              head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.0 = rope 0 of 4 heads of 32
              rope         k.0 = rope 0 of 2 heads of 32
              kv_append    cache.0 ← k.0, v.0
              attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
              linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
              rms_norm     f.0[T, 256] = norm(x += o.0) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
              linear       router.0[T, 8] = f.0 · blk.0.ffn_gate_inp.weight f32[8, 256]
              route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 8, renormalised
              experts      y.0[T·2, 256] = (silu(f.0 · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0 · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0, scratch hidden.0[T·2, 256]
              combine      x += weights.0 · y.0; h.1[T, 256] = norm ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
            layer 1:
              linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256]
                           k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
                           v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
              head_norm    q.1 = norm of 4 heads of 32 ⊙ blk.1.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.1 = norm of 2 heads of 32 ⊙ blk.1.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.1 = rope 0 of 4 heads of 32
              rope         k.1 = rope 0 of 2 heads of 32
              kv_append    cache.1 ← k.1, v.1
              attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
              linear       o.1[T, 256] = a.1 · blk.1.attn_output.weight q8_0[256, 128]
              rms_norm     f.1[T, 256] = norm(x += o.1) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
              linear       router.1[T, 8] = f.1 · blk.1.ffn_gate_inp.weight f32[8, 256]
              route        ids.1 u32[T, 2], weights.1[T, 2] = softmax(router.1) best 2 of 8, renormalised
              experts      y.1[T·2, 256] = (silu(f.1 · blk.1.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.1 · blk.1.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.1.ffn_down_exps.weight q4_k[8, 256, 256], by ids.1, scratch hidden.1[T·2, 256]
              combine      x += weights.1 · y.1; h.2[T, 256] = norm ⊙ blk.2.attn_norm.weight f32[256], eps 1e-6
            layer 2:
              linear       q.2[T, 128] = h.2 · blk.2.attn_q.weight q4_k[128, 256]
                           k.2[T, 64] = h.2 · blk.2.attn_k.weight q4_k[64, 256]
                           v.2[T, 64] = h.2 · blk.2.attn_v.weight q4_k[64, 256]
              head_norm    q.2 = norm of 4 heads of 32 ⊙ blk.2.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.2 = norm of 2 heads of 32 ⊙ blk.2.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.2 = rope 0 of 4 heads of 32
              rope         k.2 = rope 0 of 2 heads of 32
              kv_append    cache.2 ← k.2, v.2
              attention    a.2[T, 128] = q.2 over cache.2, 4 heads, scale 0.17677669
              linear       o.2[T, 256] = a.2 · blk.2.attn_output.weight q8_0[256, 128]
              rms_norm     f.2[T, 256] = norm(x += o.2) ⊙ blk.2.ffn_norm.weight f32[256], eps 1e-6
              linear       router.2[T, 8] = f.2 · blk.2.ffn_gate_inp.weight f32[8, 256]
              route        ids.2 u32[T, 2], weights.2[T, 2] = softmax(router.2) best 2 of 8, renormalised
              experts      y.2[T·2, 256] = (silu(f.2 · blk.2.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.2 · blk.2.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.2.ffn_down_exps.weight q4_k[8, 256, 256], by ids.2, scratch hidden.2[T·2, 256]
              combine      x += weights.2 · y.2; h.3[T, 256] = norm ⊙ blk.3.attn_norm.weight f32[256], eps 1e-6
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
              select       a.5.asked[R, 128] = a.5[rows]
              select       x.asked[R, 256] = x[rows]
              linear       o.5.asked[R, 256] = a.5.asked · blk.5.attn_output.weight q8_0[256, 128]
              rms_norm     f.5.asked[R, 256] = norm(x.asked += o.5.asked) ⊙ blk.5.ffn_norm.weight f32[256], eps 1e-6
              linear       router.5.asked[R, 8] = f.5.asked · blk.5.ffn_gate_inp.weight f32[8, 256]
              route        ids.5.asked u32[R, 2], weights.5.asked[R, 2] = softmax(router.5.asked) best 2 of 8, renormalised
              experts      y.5.asked[R·2, 256] = (silu(f.5.asked · blk.5.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.5.asked · blk.5.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.5.ffn_down_exps.weight q4_k[8, 256, 256], by ids.5.asked, scratch hidden.5.asked[R·2, 256]
              combine      x.asked += weights.5.asked · y.5.asked; final[R, 256] = norm ⊙ output_norm.weight f32[256], eps 1e-6
            linear       logits[R, 96] = final · output.weight q6_k[96, 256]
        "#]],
    );
}

#[test]
fn qwen3() {
    plain_and_fused(
        &Header::qwen3(3).open(),
        expect![[r#"
        qwen3: n_vocab 96, d_model 256, n_ctx_train 4096
        58 ops, 37 buffers, 35 weights
        rope 0: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
        cache 0 to 2: 2 heads, k 32, v 32
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
          linear       k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
          linear       v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
          head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.0 = rope 0 of 4 heads of 32
          rope         k.0 = rope 0 of 2 heads of 32
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
          linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
          add          x += o.0
          rms_norm     f.0[T, 256] = norm(x) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          linear       gate.0[T, 512] = f.0 · blk.0.ffn_gate.weight q4_k[512, 256]
          linear       up.0[T, 512] = f.0 · blk.0.ffn_up.weight q4_k[512, 256]
          gated_act    act.0[T, 512] = silu(gate.0) ⊙ up.0
          linear       y.0[T, 256] = act.0 · blk.0.ffn_down.weight q4_k[256, 512]
          add          x += y.0
        layer 1:
          rms_norm     h.1[T, 256] = norm(x) ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
          linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256]
          linear       k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
          linear       v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
          head_norm    q.1 = norm of 4 heads of 32 ⊙ blk.1.attn_q_norm.weight f32[32], eps 1e-6
          head_norm    k.1 = norm of 2 heads of 32 ⊙ blk.1.attn_k_norm.weight f32[32], eps 1e-6
          rope         q.1 = rope 0 of 4 heads of 32
          rope         k.1 = rope 0 of 2 heads of 32
          kv_append    cache.1 ← k.1, v.1
          attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
          linear       o.1[T, 256] = a.1 · blk.1.attn_output.weight q8_0[256, 128]
          add          x += o.1
          rms_norm     f.1[T, 256] = norm(x) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
          linear       gate.1[T, 512] = f.1 · blk.1.ffn_gate.weight q4_k[512, 256]
          linear       up.1[T, 512] = f.1 · blk.1.ffn_up.weight q4_k[512, 256]
          gated_act    act.1[T, 512] = silu(gate.1) ⊙ up.1
          linear       y.1[T, 256] = act.1 · blk.1.ffn_down.weight q4_k[256, 512]
          add          x += y.1
        layer 2 as layer 0
        select       last[R, 256] = x[rows]
        rms_norm     final[R, 256] = norm(last) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
    "#]],
        expect![[r#"
            qwen3: n_vocab 96, d_model 256, n_ctx_train 4096
            41 ops, 32 buffers, 35 weights
            rope 0: half, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
            cache 0 to 2: 2 heads, k 32, v 32
            embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
            layer 0:
              rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
              linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
                           k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
                           v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
              head_norm    q.0 = norm of 4 heads of 32 ⊙ blk.0.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.0 = norm of 2 heads of 32 ⊙ blk.0.attn_k_norm.weight f32[32], eps 1e-6
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
              linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256]
                           k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
                           v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
              head_norm    q.1 = norm of 4 heads of 32 ⊙ blk.1.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.1 = norm of 2 heads of 32 ⊙ blk.1.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.1 = rope 0 of 4 heads of 32
              rope         k.1 = rope 0 of 2 heads of 32
              kv_append    cache.1 ← k.1, v.1
              attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
              linear       o.1[T, 256] = a.1 · blk.1.attn_output.weight q8_0[256, 128]
              rms_norm     f.1[T, 256] = norm(x += o.1) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
              gated_linear act.1[T, 512] = silu(f.1 · blk.1.ffn_gate.weight q4_k[512, 256]) ⊙ (f.1 · blk.1.ffn_up.weight q4_k[512, 256])
              linear       y.1[T, 256] = act.1 · blk.1.ffn_down.weight q4_k[256, 512]
              rms_norm     h.2[T, 256] = norm(x += y.1) ⊙ blk.2.attn_norm.weight f32[256], eps 1e-6
            layer 2:
              linear       q.2[T, 128] = h.2 · blk.2.attn_q.weight q4_k[128, 256]
                           k.2[T, 64] = h.2 · blk.2.attn_k.weight q4_k[64, 256]
                           v.2[T, 64] = h.2 · blk.2.attn_v.weight q4_k[64, 256]
              head_norm    q.2 = norm of 4 heads of 32 ⊙ blk.2.attn_q_norm.weight f32[32], eps 1e-6
              head_norm    k.2 = norm of 2 heads of 32 ⊙ blk.2.attn_k_norm.weight f32[32], eps 1e-6
              rope         q.2 = rope 0 of 4 heads of 32
              rope         k.2 = rope 0 of 2 heads of 32
              kv_append    cache.2 ← k.2, v.2
              attention    a.2[T, 128] = q.2 over cache.2, 4 heads, scale 0.17677669
              select       a.2.asked[R, 128] = a.2[rows]
              select       x.asked[R, 256] = x[rows]
              linear       o.2.asked[R, 256] = a.2.asked · blk.2.attn_output.weight q8_0[256, 128]
              rms_norm     f.2.asked[R, 256] = norm(x.asked += o.2.asked) ⊙ blk.2.ffn_norm.weight f32[256], eps 1e-6
              gated_linear act.2.asked[R, 512] = silu(f.2.asked · blk.2.ffn_gate.weight q4_k[512, 256]) ⊙ (f.2.asked · blk.2.ffn_up.weight q4_k[512, 256])
              linear       y.2.asked[R, 256] = act.2.asked · blk.2.ffn_down.weight q4_k[256, 512]
              rms_norm     final[R, 256] = norm(x.asked += y.2.asked) ⊙ output_norm.weight f32[256], eps 1e-6
            linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
        "#]],
    );
}

#[test]
fn llama() {
    plain_and_fused(
        &Header::llama(2).open(),
        expect![[r#"
        llama: n_vocab 96, d_model 256, n_ctx_train 4096
        36 ops, 26 buffers, 22 weights
        rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
        cache 0 to 1: 2 heads, k 32, v 32
        embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
        layer 0:
          rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
          linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256] + blk.0.attn_q.bias f32[128]
          linear       k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
          linear       v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
          rope         q.0 = rope 0 of 4 heads of 32
          rope         k.0 = rope 0 of 2 heads of 32
          kv_append    cache.0 ← k.0, v.0
          attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
          linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
          add          x += o.0
          rms_norm     f.0[T, 256] = norm(x) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
          linear       gate.0[T, 512] = f.0 · blk.0.ffn_gate.weight q4_k[512, 256]
          linear       up.0[T, 512] = f.0 · blk.0.ffn_up.weight q4_k[512, 256]
          gated_act    act.0[T, 512] = silu(gate.0) ⊙ up.0
          linear       y.0[T, 256] = act.0 · blk.0.ffn_down.weight q4_k[256, 512]
          add          x += y.0
        layer 1:
          rms_norm     h.1[T, 256] = norm(x) ⊙ blk.1.attn_norm.weight f32[256], eps 1e-6
          linear       q.1[T, 128] = h.1 · blk.1.attn_q.weight q4_k[128, 256] + blk.1.attn_q.bias f32[128]
          linear       k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
          linear       v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
          rope         q.1 = rope 0 of 4 heads of 32
          rope         k.1 = rope 0 of 2 heads of 32
          kv_append    cache.1 ← k.1, v.1
          attention    a.1[T, 128] = q.1 over cache.1, 4 heads, scale 0.17677669
          linear       o.1[T, 256] = a.1 · blk.1.attn_output.weight q8_0[256, 128]
          add          x += o.1
          rms_norm     f.1[T, 256] = norm(x) ⊙ blk.1.ffn_norm.weight f32[256], eps 1e-6
          linear       gate.1[T, 512] = f.1 · blk.1.ffn_gate.weight q4_k[512, 256]
          linear       up.1[T, 512] = f.1 · blk.1.ffn_up.weight q4_k[512, 256]
          gated_act    act.1[T, 512] = silu(gate.1) ⊙ up.1
          linear       y.1[T, 256] = act.1 · blk.1.ffn_down.weight q4_k[256, 512]
          add          x += y.1
        select       last[R, 256] = x[rows]
        rms_norm     final[R, 256] = norm(last) ⊙ output_norm.weight f32[256], eps 1e-6
        linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
    "#]],
        expect![[r#"
            llama: n_vocab 96, d_model 256, n_ctx_train 4096
            25 ops, 23 buffers, 22 weights
            rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
            cache 0 to 1: 2 heads, k 32, v 32
            embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
            layer 0:
              rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
              linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256] + blk.0.attn_q.bias f32[128]
                           k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
                           v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
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
                           k.1[T, 64] = h.1 · blk.1.attn_k.weight q4_k[64, 256]
                           v.1[T, 64] = h.1 · blk.1.attn_v.weight q6_k[64, 256]
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

#[test]
fn mixtral() {
    plain_and_fused(
        &Header::mixtral(1).open(),
        expect![[r#"
            llama: n_vocab 96, d_model 256, n_ctx_train 4096
            19 ops, 16 buffers, 12 weights
            rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
            cache 0: 2 heads, k 32, v 32
            embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
            layer 0:
              rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
              linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
              linear       k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
              linear       v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
              rope         q.0 = rope 0 of 4 heads of 32
              rope         k.0 = rope 0 of 2 heads of 32
              kv_append    cache.0 ← k.0, v.0
              attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
              linear       o.0[T, 256] = a.0 · blk.0.attn_output.weight q8_0[256, 128]
              add          x += o.0
              rms_norm     f.0[T, 256] = norm(x) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
              linear       router.0[T, 8] = f.0 · blk.0.ffn_gate_inp.weight f32[8, 256]
              route        ids.0 u32[T, 2], weights.0[T, 2] = softmax(router.0) best 2 of 8, renormalised
              experts      y.0[T·2, 256] = (silu(f.0 · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0 · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0, scratch hidden.0[T·2, 256]
              combine      x += weights.0 · y.0
            select       last[R, 256] = x[rows]
            rms_norm     final[R, 256] = norm(last) ⊙ output_norm.weight f32[256], eps 1e-6
            linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
        "#]],
        expect![[r#"
            llama: n_vocab 96, d_model 256, n_ctx_train 4096
            16 ops, 17 buffers, 12 weights
            rope 0: interleaved, 16 pairs, inv_freq 1.000000e0 .. 1.778279e-4, factor 1
            cache 0: 2 heads, k 32, v 32
            embed        x[T, 256] = token_embd.weight q4_k[96, 256][id]
            layer 0:
              rms_norm     h.0[T, 256] = norm(x) ⊙ blk.0.attn_norm.weight f32[256], eps 1e-6
              linear       q.0[T, 128] = h.0 · blk.0.attn_q.weight q4_k[128, 256]
                           k.0[T, 64] = h.0 · blk.0.attn_k.weight q4_k[64, 256]
                           v.0[T, 64] = h.0 · blk.0.attn_v.weight q4_k[64, 256]
              rope         q.0 = rope 0 of 4 heads of 32
              rope         k.0 = rope 0 of 2 heads of 32
              kv_append    cache.0 ← k.0, v.0
              attention    a.0[T, 128] = q.0 over cache.0, 4 heads, scale 0.17677669
              select       a.0.asked[R, 128] = a.0[rows]
              select       x.asked[R, 256] = x[rows]
              linear       o.0.asked[R, 256] = a.0.asked · blk.0.attn_output.weight q8_0[256, 128]
              rms_norm     f.0.asked[R, 256] = norm(x.asked += o.0.asked) ⊙ blk.0.ffn_norm.weight f32[256], eps 1e-6
              linear       router.0.asked[R, 8] = f.0.asked · blk.0.ffn_gate_inp.weight f32[8, 256]
              route        ids.0.asked u32[R, 2], weights.0.asked[R, 2] = softmax(router.0.asked) best 2 of 8, renormalised
              experts      y.0.asked[R·2, 256] = (silu(f.0.asked · blk.0.ffn_gate_exps.weight q4_k[8, 256, 256]) ⊙ (f.0.asked · blk.0.ffn_up_exps.weight q4_k[8, 256, 256])) · blk.0.ffn_down_exps.weight q4_k[8, 256, 256], by ids.0.asked, scratch hidden.0.asked[R·2, 256]
              combine      x.asked += weights.0.asked · y.0.asked; final[R, 256] = norm ⊙ output_norm.weight f32[256], eps 1e-6
            linear       logits[R, 96] = final · token_embd.weight q4_k[96, 256]
        "#]],
    );
}
