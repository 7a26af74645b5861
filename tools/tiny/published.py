"""minimax_m2, ernie4_5, dots1, olmoe, ..: families in the form in which their publishers store them.

A model is a folder `hf/`, with the keys of config.json as published and not as transformers saves them, and
`golden.safetensors`. Its GGUF file is what `moebius convert` makes of the folder: the test converts it.

    pip install torch==2.15.0 transformers==5.24.0 numpy==2.4.6 safetensors
    cd tools && python -m tiny.published [NAME]..
"""
import contextlib
import json
import re
import shutil
import sys
import tempfile
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.phimoe import modeling_phimoe

from .files import DATA, N_TOKENS, save
from .new import MIN_GAP, MIN_MARGIN, N_SEEDS, choices
from .witness import N_GREEDY

S, F, L = "sliding_attention", "full_attention", "linear_attention"
TOWER = re.compile(r"vision|visual|vit_large|multi_modal_projector|mm_projector")
N_VOCAB, D_MODEL, D_FF = 96, 32, 48


def base(model_type, cls, layers, heads, kv, d_head=None, tied=False, **more):
    config = dict(architectures=[cls], model_type=model_type, vocab_size=N_VOCAB, hidden_size=D_MODEL,
                  intermediate_size=D_FF, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                  hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=4096, tie_word_embeddings=tied,
                  bos_token_id=None, eos_token_id=None, pad_token_id=None, torch_dtype="bfloat16")
    return config | ({"head_dim": d_head} if d_head else {}) | more


def wrapped(model_type, cls, text, tower, **more):
    """A model that sees, around a text model; the tower is a tiny one, and none of its tensors are kept."""
    text = {key: value for key, value in text.items() if key != "architectures"}
    return dict(architectures=[cls], model_type=model_type, text_config=text, vision_config=tower,
                torch_dtype="bfloat16", tie_word_embeddings=text["tie_word_embeddings"], **more)


def yarn(factor, before, **more):
    return dict(rope_type="yarn", factor=float(factor), original_max_position_embeddings=before, beta_fast=32.0,
                beta_slow=1.0, **more)


def latent(**more):
    return dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, **more)


def experts(**more):
    return dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1, n_group=1,
                topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.8,
                scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=0, **more)


def indexer():
    return dict(index_topk=12, index_head_dim=20, index_n_heads=6, attention_bias=False, moe_layer_freq=1)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


QWEN_TOWER = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, in_channels=3, patch_size=4,
                  spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16, out_hidden_size=D_MODEL,
                  deepstack_visual_indexes=[0], hidden_act="gelu_pytorch_tanh")
QWEN_IDS = dict(image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
QWEN_ROPE = dict(rope_theta=5000000,
                 rope_scaling=dict(mrope_interleaved=True, mrope_section=[4, 2, 2], rope_type="default"))


def laguna(gating, heads, softcap):
    full = yarn(8, 32, attention_factor=1.1, rope_theta=500000.0, partial_rotary_factor=0.5)
    window = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0)
    return base("laguna", "LagunaForCausalLM", 3, heads[1], 2, 16, layer_types=[F, S, S],
                num_attention_heads_per_layer=[heads[1], heads[0], heads[0]], sliding_window=17,
                mlp_layer_types=["dense", "sparse", "sparse"], moe_intermediate_size=16,
                shared_expert_intermediate_size=24, num_experts=6, num_experts_per_tok=3,
                moe_routed_scaling_factor=2.5, moe_apply_router_weight_on_input=False,
                moe_router_logit_softcapping=softcap, gating=gating, attention_bias=False,
                rope_parameters={F: full, S: window}, partial_rotary_factor=0.5, norm_topk_prob=True)


PIXTRAL = dict(model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
               head_dim=8, image_size=28, patch_size=14, num_channels=3, hidden_act="silu", rope_theta=10000.0)
MISTRAL3 = dict(image_token_index=10, projector_hidden_act="gelu", vision_feature_layer=-1, spatial_merge_size=2,
                multimodal_projector_bias=False)
GRANITE = dict(attention_bias=False, mlp_bias=False, embedding_multiplier=12.0, residual_multiplier=0.22,
               attention_multiplier=0.0625, rope_scaling=None)


def phi3(before):
    """Trained for `before` positions at first: up to there the short divisors count, and after it the long ones."""
    return base("phi3", "Phi3ForCausalLM", 2, 2, 1, partial_rotary_factor=0.75,
                original_max_position_embeddings=before, rope_theta=10000.0, sliding_window=17, attention_bias=False,
                rope_scaling=dict(type="longrope", short_factor=[1.05, 1.1, 1.3, 1.4, 1.6, 1.8],
                                  long_factor=[1.7, 1.9, 4.5, 7.1, 10.8, 16.0]))


def gemma4(model_type, layers, kinds, **more):
    text = base(model_type + "_text", None, layers, 4, 2, 16, tied=True, hidden_activation="gelu_pytorch_tanh",
                layer_types=kinds, global_head_dim=32, sliding_window=17, final_logit_softcapping=5.0,
                attention_bias=False, **more) | dict(pad_token_id=0)
    tower = dict(model_type="gemma4_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=16,
                 pooling_kernel_size=3, rope_parameters=dict(rope_type="default", rope_theta=100.0))
    if model_type == "gemma4_unified":
        tower = dict(model_type="gemma4_unified_vision", patch_size=4, pooling_kernel_size=3, mm_embed_dim=16,
                     mm_posemb_size=16, output_proj_dims=16)
    cls = "".join(part.title() for part in model_type.split("_")) + "ForConditionalGeneration"
    # No word of an answer may be one of these: the original code puts features of pictures in their place.
    marks = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id",
             "eoa_token_index")
    return wrapped(model_type, cls, {key: value for key, value in text.items() if key != "hidden_act"}, tower,
                   audio_config=None, **{mark: N_VOCAB + i for i, mark in enumerate(marks)})


def lfm2(model_type, cls, **more):
    config = base(model_type, cls, 3, 4, 2, tied=True, layer_types=["conv", F, "conv"], conv_L_cache=3, conv_bias=False,
                  norm_eps=1e-5, rope_theta=1000000.0, tie_embedding=True, **more)
    return without(config, "rms_norm_eps", "hidden_act")


def mamba(n_groups):
    return dict(mamba_d_conv=4, mamba_d_head=8, mamba_d_state=12, mamba_expand=2, mamba_n_groups=n_groups,
                mamba_n_heads=8, mamba_conv_bias=True, mamba_proj_bias=False, mamba_chunk_size=16)


def nemotron_h(pattern, **more):
    config = base("nemotron_h", "NemotronHForCausalLM", len(pattern), 4, 2, 16, hybrid_override_pattern=pattern,
                  mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=12, n_groups=2, conv_kernel=4, expand=2,
                  chunk_size=16, mamba_hidden_act="silu", mamba_proj_bias=False, mamba_ssm_cache_dtype="float32",
                  mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, norm_eps=1e-5, use_conv_bias=True, use_bias=False,
                  attention_bias=False, mlp_bias=False, time_step_min=0.001, time_step_max=0.1,
                  time_step_floor=0.0001, time_step_limit=[0.0, float("inf")], rope_theta=10000,
                  partial_rotary_factor=1.0, sliding_window=None, residual_in_fp32=False, **more)
    return without(config, "rms_norm_eps", "hidden_act")


MODELS = {
    "lfm2": lambda: lfm2("lfm2", "Lfm2ForCausalLM", block_ff_dim=80, block_auto_adjust_ff_dim=True,
                         block_ffn_dim_multiplier=1.0, block_multiple_of=16),
    "lfm2_moe": lambda: lfm2("lfm2_moe", "Lfm2MoeForCausalLM", moe_intermediate_size=16, num_dense_layers=1,
                             num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, use_expert_bias=True,
                             routed_scaling_factor=1.8),
    "nemotron_h": lambda: nemotron_h(
        "ME*", moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, n_routed_experts=6,
        n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5),
    "nemotron_h_latent": lambda: nemotron_h(
        "ME*", moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, n_routed_experts=6,
        n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_latent_size=24, moe_shared_expert_overlap=False),
    "nemotron_h_dense": lambda: nemotron_h("M-*"),
    "granitemoehybrid": lambda: base(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", 2, 4, 2, tied=True, intermediate_size=16,
        num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=24, layer_types=["mamba", "attention"],
        position_embedding_type="nope", normalization_function="rmsnorm", rope_theta=10000, logits_scaling=6.0,
        **mamba(1), **without(GRANITE, "mlp_bias")),
    "kimi_linear": lambda: without(base(
        "kimi_linear", "KimiLinearForCausalLM", 3, 4, 4, 12, model_max_length=4096, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, mla_use_nope=True,
        linear_attn_config=dict(full_attn_layers=[3], kda_layers=[1, 2], head_dim=12, num_heads=4,
                                short_conv_kernel_size=4),
        moe_intermediate_size=16, moe_layer_freq=1, moe_renormalize=True, moe_router_activation_func="sigmoid",
        num_expert_group=1, num_experts=6, num_experts_per_token=3, num_nextn_predict_layers=0, num_shared_experts=1,
        rope_scaling=None, rope_theta=10000.0, routed_scaling_factor=2.446, topk_group=1, use_grouped_topk=True),
        "max_position_embeddings"),
    "bailing_hybrid": lambda: base(
        "bailing_hybrid", "BailingHybridForCausalLM", 4, 4, 4, 12, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=16, num_shared_experts=1, moe_shared_expert_intermediate_size=16, n_group=3, topk_group=2,
        moe_router_enable_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=2.5, score_function="sigmoid",
        first_k_dense_replace=1, layer_group_size=2, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=12, num_nextn_predict_layers=0, rope_theta=6000000, rope_scaling=None,
        rope_interleave=True, short_conv_kernel_size=4, kda_safe_gate=True, kda_lower_bound=-5.0, no_kda_lora=True,
        gated_attention_proj_granularity_type="head_wise"),
    "phimoe": lambda: base(
        "phimoe", "PhiMoEForCausalLM", 2, 4, 2, intermediate_size=16, num_local_experts=6, num_experts_per_tok=2,
        attention_bias=True, lm_head_bias=True, sliding_window=4096, rope_theta=10000.0,
        original_max_position_embeddings=128, router_jitter_noise=0.05, input_jitter_noise=0.0,
        rope_scaling=dict(type="longrope", short_factor=[1.05, 1.3, 1.5, 1.8], long_factor=[1.7, 4.5, 9.0, 16.0],
                          short_mscale=1.25, long_mscale=1.25, original_max_position_embeddings=128)),
    "jamba": lambda: base(
        "jamba", "JambaForCausalLM", 4, 4, 2, rms_norm_eps=1e-6, attn_layer_offset=1, attn_layer_period=2,
        expert_layer_offset=1, expert_layer_period=2, num_experts=4, num_experts_per_tok=2, mamba_conv_bias=True,
        mamba_d_conv=4, mamba_d_state=12, mamba_dt_rank=6, mamba_expand=2, mamba_proj_bias=False, sliding_window=None,
        use_mamba_kernels=False),
    # A token sees the 12 positions that index heads rank best, 20 wide, of which the first 8 dims turn.
    "deepseek_v32": lambda: base(
        "deepseek_v32", "DeepseekV32ForCausalLM", 2, 4, 4, rope_theta=10000,
        rope_scaling=yarn(8, 16, mscale=1.0, mscale_all_dim=1.0, type="yarn"), **indexer(), **latent(),
        **experts() | dict(n_group=3, topk_group=2)),
    "glm_moe_dsa_shared": lambda: base(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", 3, 4, 4, rope_parameters=dict(rope_theta=1000000, rope_type="default"),
        rope_interleave=True, indexer_rope_interleave=True, indexer_types=["full", "shared", "full"],
        **indexer(), **latent(), **experts()),
    # Powers of two, by which a file's matrices can be multiplied in bf16.
    "falcon_h1": lambda: base(
        "falcon_h1", "FalconH1ForCausalLM", 2, 4, 2, 8, attention_bias=False, attention_in_multiplier=0.5,
        attention_out_multiplier=2.0, embedding_multiplier=4.0, key_multiplier=0.25, lm_head_multiplier=0.125,
        mamba_d_ssm=48, mamba_norm_before_gate=False, mamba_rms_norm=False, mamba_use_mlp=True, mlp_bias=False,
        mlp_multipliers=[0.5, 2.0], projectors_bias=False, rope_scaling=None, rope_theta=100000000000.0,
        ssm_in_multiplier=2.0, ssm_multipliers=[0.25, 0.5, 2.0, 0.125, 0.0625], ssm_out_multiplier=0.5,
        **mamba(1) | dict(mamba_n_heads=6)),
    "minimax": lambda: base(
        "minimax", "MiniMaxForCausalLM", 4, 4, 2, 12, intermediate_size=16, num_local_experts=6,
        num_experts_per_tok=3, layer_types=[L, L, F, L], block_size=16, rope_theta=1000000.0, sliding_window=None,
        full_attn_alpha_factor=1.75, full_attn_beta_factor=1.0, linear_attn_alpha_factor=1.75,
        linear_attn_beta_factor=1.0, mlp_alpha_factor=1.75, mlp_beta_factor=1.0, postnorm=True,
        output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0, attention_dropout=0.0),
    "minimax_m2": lambda: base(
        "minimax_m2", "MiniMaxM2ForCausalLM", 2, 4, 2, 16, intermediate_size=16, num_local_experts=6,
        num_experts_per_tok=3, rope_theta=5000000, rotary_dim=8, qk_norm_type="per_layer", use_qk_norm=True,
        scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0, use_mtp=False),
    "ernie4_5": lambda: base("ernie4_5", "Ernie4_5ForCausalLM", 2, 4, 2, 16, tied=True, use_bias=True,
                             rope_theta=500000.0, rope_scaling=None),
    "ernie4_5_moe": lambda: base(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", 3, 4, 2, tied=True, moe_intermediate_size=16, moe_num_experts=6,
        moe_k=3, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=2, moe_layer_interval=1,
        moe_capacity=[64, 64, 64], moe_gate="topk", moe_use_aux_free=True, use_bias=False, rope_theta=500000.0,
        rope_scaling=None),
    "dots1": lambda: base("dots1", "Dots1ForCausalLM", 2, 4, 4, 16, **experts() | dict(
        n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=2, scoring_func="noaux_tc",
        rope_theta=10000000, rope_scaling=None, attention_bias=False, sliding_window=None)),
    "olmoe": lambda: base("olmoe", "OlmoeForCausalLM", 2, 4, 4, intermediate_size=16, num_experts=6,
                          num_experts_per_tok=3, norm_topk_prob=False, clip_qkv=None, rope_theta=10000.0),
    "hunyuan_v1_moe": lambda: base(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", 2, 4, 2, 16, tied=True, intermediate_size=24, num_experts=5,
        moe_topk=[2] * 2, num_shared_expert=[1] * 2, moe_intermediate_size=[24] * 2, use_qk_norm=True, use_cla=False,
        use_mixed_mlp_moe=True, attention_bias=False, mlp_bias=False, attention_head_dim=16, rope_theta=10000.0,
        rope_scaling=dict(alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0,
                          type="dynamic"), norm_topk_prob=True),
    "hy_v3": lambda: base(
        "hy_v3", "HYV3ForCausalLM", 3, 4, 2, 16, num_experts=6, num_experts_per_tok=3, num_shared_experts=2,
        moe_intermediate_size=16, first_k_dense_replace=1, mlp_layer_types=["dense", "sparse", "sparse"],
        router_scaling_factor=2.826, enable_moe_fp32_combine=True, qk_norm=True, attention_bias=False,
        num_nextn_predict_layers=0, rope_parameters=dict(rope_type="default", rope_theta=11158840.0)),
    "qwen3_vl": lambda: wrapped(
        "qwen3_vl", "Qwen3VLForConditionalGeneration",
        base("qwen3_vl_text", None, 2, 4, 2, 16, tied=True, attention_bias=False, **QWEN_ROPE),
        QWEN_TOWER | dict(model_type="qwen3_vl"), **QWEN_IDS),
    "qwen3_vl_moe": lambda: wrapped(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
        base("qwen3_vl_moe_text", None, 2, 4, 2, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12,
             norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False, **QWEN_ROPE),
        QWEN_TOWER | dict(model_type="qwen3_vl_moe"), **QWEN_IDS),
    "glm4_moe_lite": lambda: base(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", 3, 3, 3, **latent(**experts()),
        mlp_layer_types=["dense", "sparse", "sparse"], attention_bias=False, partial_rotary_factor=1.0,
        rope_theta=1000000, rope_scaling=None, rope_interleave=True),
    "kimi_k25": lambda: wrapped(
        "kimi_k25", "KimiK25ForConditionalGeneration",
        base("kimi_k2", None, 2, 3, 3, **latent(**experts()), moe_layer_freq=1, attention_bias=False,
             rope_theta=50000.0, rope_scaling=yarn(8, 32, mscale=1.0, mscale_all_dim=1.0, type="yarn")),
        dict(model_type="kimi_k25_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
             num_attention_heads=2, patch_size=4, pos_emb_height=4, pos_emb_width=4, pos_emb_time=4),
        projection_hidden_size=16, image_token_id=5, video_token_id=6, vision_start_token_id=7,
        vision_end_token_id=8),
    "mistral4": lambda: wrapped(
        "mistral3", "Mistral3ForConditionalGeneration",
        base("mistral4", None, 2, 3, 3, **latent(**without(experts(), "scoring_func", "topk_method") | dict(
            first_k_dense_replace=0, routed_scaling_factor=1.0)), rope_interleave=True, attention_bias=False,
            rope_parameters=yarn(8, 12, mscale=1.0, mscale_all_dim=1.0, type="yarn", rope_theta=10000.0,
                                 max_position_embeddings=4096, llama_4_scaling_beta=0.1)),
        dict(model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             head_dim=8, image_size=28, patch_size=14, num_channels=3, hidden_act="silu", rope_theta=10000.0),
        image_token_index=10, projector_hidden_act="gelu", vision_feature_layer=-1, spatial_merge_size=2,
        multimodal_projector_bias=False),
    "afmoe": lambda: base(
        "afmoe", "AfmoeForCausalLM", 3, 4, 2, 16, moe_intermediate_size=16, num_dense_layers=1, num_experts=6,
        num_experts_per_tok=3, num_shared_experts=1, route_scale=2.448, route_norm=True, score_func="sigmoid",
        n_group=1, topk_group=1, global_attn_every_n_layers=3, layer_types=[S, S, F], sliding_window=17,
        mup_enabled=True, rope_theta=10000, rope_scaling=None, attention_bias=False),
    "mellum": lambda: base(
        "mellum", "MellumForCausalLM", 3, 4, 2, 16, layer_types=[S, F, S], mlp_layer_types=["sparse"] * 3,
        sliding_window=17, moe_intermediate_size=16, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
        attention_bias=False, rope_parameters={
            F: yarn(8, 32, rope_theta=500000.0), S: dict(rope_type="default", rope_theta=10000.0)}),
    "laguna": lambda: laguna(True, (6, 4), 0.0),
    "laguna_elementwise": lambda: laguna("per-element", (4, 4), 2.0),
    "step3p7": lambda: wrapped(
        "step3p7", "Step3p7ForConditionalGeneration",
        {key: value for key, value in base(
            "step3p5", None, 4, 4, None, 16, num_attention_groups=2, layer_types=[F, S, S, F],
            attention_other_setting=dict(attention_type=S, num_attention_heads=6, num_attention_groups=2, head_dim=16,
                                         true_head_dim=16),
            sliding_window=17, moe_layers_enum="2,3", moe_num_experts=6, moe_top_k=3, moe_intermediate_size=16,
            share_expert_dim=24, moe_router_activation="sigmoid", moe_router_scaling_factor=3.0,
            norm_expert_weight=True, use_moe_router_bias=True, need_fp32_gate=True, use_moe=True,
            use_head_wise_attn_gate=True, use_qk_norm=True, zero_centered=True,
            rope_theta=[5000000.0, 10000.0, 10000.0, 5000000.0], partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
            rope_scaling=dict(rope_type="llama3", factor=2.0, original_max_position_embeddings=128,
                              low_freq_factor=1.0, high_freq_factor=32.0), yarn_only_types=[F],
            swiglu_limits=[0.0, 0.0, 0.0, 1.0], swiglu_limits_shared=[0.0, 0.0, 0.0, 0.9],
            num_nextn_predict_layers=0).items() if key not in ("num_key_value_heads", "pad_token_id")},
        dict(width=16, layers=1, heads=2, image_size=28, patch_size=14, mlp_ratio=1.0, max_position_embeddings=4,
             hidden_act="quick_gelu", ls_init_value=0.1), image_token_id=5, projector_bias=False),
    "mimo_v2_flash": lambda: base(
        "mimo_v2_flash", "MiMoV2FlashForCausalLM", 3, 4, 1, 24, v_head_dim=16, hybrid_layer_pattern=[0, 1, 1],
        layer_types=[F, S, S], moe_layer_freq=[0, 1, 1], mlp_layer_types=["dense", "sparse", "sparse"],
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=24, swa_v_head_dim=16, sliding_window=16,
        sliding_window_size=16, attention_chunk_size=16, add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False, attention_value_scale=0.707, attention_bias=False, rope_theta=5000000,
        swa_rope_theta=10000, partial_rotary_factor=0.334, layernorm_epsilon=1e-5, rope_parameters={
            F: dict(rope_type="default", rope_theta=5000000.0, partial_rotary_factor=0.334),
            S: dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.334)},
        **experts() | dict(n_shared_experts=None, routed_scaling_factor=None)),
    "muse_glimmer": lambda: wrapped(
        "muse_glimmer", "MuseGlimmerForConditionalGeneration",
        {key: value for key, value in base(
            "muse_glimmer_text", None, 4, 4, 2, 16, hidden_activation="silu", sliding_window=17,
            layer_types=[S, S, S, F], layer_rope_theta=[500000.0, 500000.0, 500000.0, 0],
            rope_parameters=dict(rope_type="default", rope_theta=500000.0), final_logit_softcapping=20.0,
            qk_scale_factor=3.87, output_multiplier=0.19611613513818404, post_norm_eps=1e-8,
            attention_bias=False).items() if key != "hidden_act"},
        dict(model_type="muse_glimmer_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
             num_attention_heads=2, pos_emb_height=4, pos_emb_width=4, patch_size=4, max_position_embeddings=16),
        out_hidden_size=D_MODEL, projector_hidden_size=16, image_token_id=5, video_token_id=6),
    "smollm3": lambda: base("smollm3", "SmolLM3ForCausalLM", 3, 4, 2, tied=True, no_rope_layers=[1, 0, 1],
                            no_rope_layer_interval=2, layer_types=[F] * 3, use_sliding_window=False,
                            sliding_window=None, attention_bias=False, mlp_bias=False, rope_theta=5000000.0,
                            rope_scaling=None),
    "seed_oss": lambda: base("seed_oss", "SeedOssForCausalLM", 2, 4, 2, 16, attention_bias=True,
                             attention_out_bias=True, mlp_bias=False, rope_theta=10000000.0,
                             rope_scaling=dict(rope_type="default")),
    "olmo3": lambda: base("olmo3", "Olmo3ForCausalLM", 3, 4, 2, layer_types=[S, F, S], sliding_window=17,
                          rope_theta=500000, attention_bias=False,
                          rope_scaling=yarn(8, 32, attention_factor=1.2079441541679836)),
    "glm4": lambda: base("glm4", "Glm4ForCausalLM", 2, 4, 2, 16, attention_bias=True, partial_rotary_factor=0.5,
                         rope_theta=10000.0),
    "granite": lambda: base("granite", "GraniteForCausalLM", 2, 4, 2, tied=True, rope_theta=10000000.0,
                            logits_scaling=8.0, **GRANITE),
    "granitemoeshared": lambda: base(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", 2, 4, 2, tied=True, intermediate_size=16,
        num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=24, rope_theta=10000.0,
        logits_scaling=6.0, **GRANITE),
    "phi3": lambda: phi3(128),
    "phi3_long": lambda: phi3(32),
    "cohere2": lambda: {key: value for key, value in base(
        "cohere2", "Cohere2ForCausalLM", 3, 4, 2, 8, tied=True, layer_norm_eps=1e-5, logit_scale=0.25,
        sliding_window=17, sliding_window_pattern=3, layer_types=[S, S, F], rope_theta=50000, rope_scaling=None,
        attention_bias=False, use_parallel_block=True, use_qk_norm=False).items() if key != "rms_norm_eps"},
    "arcee": lambda: base("arcee", "ArceeForCausalLM", 2, 4, 2, 12, hidden_act="relu2", mlp_bias=False,
                          attention_bias=False, rope_theta=10000.0, rope_scaling=yarn(20, 32, mscale=1.0)),
    "ministral3": lambda: wrapped(
        "mistral3", "Mistral3ForConditionalGeneration",
        base("ministral3", None, 2, 4, 2, 16, sliding_window=None, rope_parameters=yarn(
            8, 12, mscale=1.0, mscale_all_dim=1.0, type="yarn", rope_theta=1000000.0, llama_4_scaling_beta=0.1)),
        PIXTRAL, **MISTRAL3),
    "gemma4_e2b": lambda: gemma4(
        "gemma4", 4, [S, F, S, F], num_key_value_heads=2, num_global_key_value_heads=None, num_kv_shared_layers=2,
        attention_k_eq_v=False, hidden_size_per_layer_input=8, vocab_size_per_layer_input=N_VOCAB,
        use_double_wide_mlp=True),
    "gemma4_unified": lambda: gemma4(
        "gemma4_unified", 3, [S, S, F], num_key_value_heads=2, num_global_key_value_heads=1,
        num_kv_shared_layers=0, attention_k_eq_v=True),
    "llama4": lambda: wrapped(
        "llama4", "Llama4ForConditionalGeneration",
        base("llama4_text", None, 4, 4, 2, 16, intermediate_size=16, intermediate_size_mlp=D_FF, num_local_experts=5,
             num_experts_per_tok=2, interleave_moe_layer_step=2, no_rope_layers=[1, 1, 1, 0],
             no_rope_layer_interval=4, attention_chunk_size=17, use_qk_norm=True, attn_temperature_tuning=True,
             floor_scale=8, attn_scale=0.1, rope_theta=500000.0, attention_bias=False,
             rope_scaling=dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
                               original_max_position_embeddings=128), moe_layers=[1, 3]),
        dict(model_type="llama4_vision_model", hidden_size=16, intermediate_size=64, num_hidden_layers=1,
             num_attention_heads=2, image_size=28, patch_size=14, vision_output_dim=16, projector_input_dim=16,
             projector_output_dim=16, pixel_shuffle_ratio=0.5, rope_theta=10000.0),
        image_token_index=5, boi_token_index=6, eoi_token_index=7),
}
# Classes that `architectures` calls by another name, and names of tensors that transformers saves under others.
CLASSES = {"kimi_k25": "Kimi_K25ForConditionalGeneration", "phimoe": "PhimoeForCausalLM"}
RENAMED = {"kimi_k25": [(r"^language_model\.model\.blocks\.", "language_model.model.layers.")],
           "kimi_linear": [(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.")]}


def text_config(config):
    return config.get("text_config", config)


def randomize(model, seed, embedding):
    """Activations of order 1, a decisive router, no norm weight of 1 and no bias of 0; every value exact in bf16."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if not p.is_floating_point() or re.search("inv_freq|embed_scale|rotary|slope_rate|_decay", name):
                continue
            r = torch.randn(p.shape, generator=random)
            if TOWER.search(name):
                p.zero_()
            elif name.endswith("sinks") or "sink_bias" in name:
                p.copy_(1 + r)
            elif name.endswith("dt_bias"):
                p.copy_(r - 1.0)
            elif name.endswith("A_log"):
                p.copy_(0.7 * r)
            elif "bias" in name.rsplit(".", 1)[-1]:
                p.copy_(0.2 * r)
            elif "embed_tokens_per_layer" in name:
                p.copy_(r / p.shape[-1] ** 0.5)
            elif "embed_tokens" in name:
                p.copy_(r * embedding)
            elif "lm_head" in name:
                p.copy_(r * 3 / p.shape[-1] ** 0.5)
            elif p.ndim == 1:
                p.add_(0.15 * r)  # norms, also those that are stored centred on zero
                if "gemma4" in model.config.model_type and name.endswith("k_norm.weight"):
                    p.mul_(0.5)  # scores are not scaled, and would hang on the rounding of a cache in f16
            elif re.search(r"(\bgate|router|\.wg|router\.gate)\.weight$", name):
                p.copy_(r * 2 / p.shape[-1] ** 0.5)
            else:
                # Llama 4's experts have their columns where others have their rows.
                turned = p.ndim == 3 and "Llama4" in type(model).__name__
                p.copy_(r / p.shape[-2 if turned else -1] ** 0.5)
            p.copy_(p.to(torch.bfloat16).to(p.dtype))


@contextlib.contextmanager
def shares(gaps):
    """Collects how close SparseMixer's choices were, and how close other experts were to the margin of a share."""
    plain = modeling_phimoe.sparsemixer

    def mixer(scores, jitter_eps, training, top_k=2):
        left = scores.float()
        for _ in range(top_k):
            best = left.max(-1, keepdim=True)
            first, second = left.sort(-1, descending=True).values[..., :2].unbind(-1)
            gaps.append(float((first - second).min() / scores.std()))
            apart = (best.values - left) / scores.abs().clamp(min=best.values) - 2 * jitter_eps
            gaps.append(float(apart.abs().min()))
            left = left.scatter(-1, best.indices, float("-inf"))
        return plain(scores, jitter_eps, training, top_k)

    modeling_phimoe.sparsemixer = mixer
    try:
        yield
    finally:
        modeling_phimoe.sparsemixer = plain


def run(model, ids):
    # Llama 4's whole model cannot do without an image.
    model = model.language_model if type(model).__name__.startswith("Llama4") else model
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(map(int, ids))]), use_cache=False).logits[0].float().numpy()


def scale(model, tokens, tied):
    """Brings the logits to a standard deviation of about 3, by a power of two."""
    factor = 2.0 ** round(float(np.log2(3 / run(model, tokens).std())))
    last = [name for name, _ in model.named_parameters()
            if name.endswith("norm.weight") and not re.search(r"layers\.|per_layer", name) and not TOWER.search(name)]
    with torch.no_grad():
        (model.get_parameter(last[-1]) if tied else model.get_output_embeddings().weight).mul_(factor)


def load(cls, folder):
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def build(name):
    """Makes a folder; what is saved last is the text model's alone, and the answers are those with the tower."""
    config = MODELS[name]()
    tied = config["tie_word_embeddings"]
    cls = getattr(transformers, CLASSES.get(name) or config["architectures"][0])
    path = DATA / "published" / name
    shutil.rmtree(path, ignore_errors=True)
    (path / "hf").mkdir(parents=True)
    embedding = (0.06 if tied else 1.0) / (D_MODEL ** 0.5 if config.get("mup_enabled") else 1)
    for attempt in range(N_SEEDS):
        seed = attempt * 1000 + zlib.crc32(name.encode()) % 1000
        tokens = np.random.default_rng(seed).integers(12, N_VOCAB, N_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            write_config(folder, config)
            torch.manual_seed(seed)
            plain = transformers.AutoConfig.from_pretrained(folder)
            plain._attn_implementation = "eager"
            model = cls(plain).float().eval()
            randomize(model, seed, embedding)
            if tied:
                model.tie_weights()
            scale(model, tokens, tied)
            model.to(torch.bfloat16).save_pretrained(folder)
            write_config(folder, config)
            weights = load_file(f"{folder}/model.safetensors")
            # transformers saves constants that its loader knows as well.
            weights = {key: w for key, w in weights.items() if not re.search("slope_rate$|_decay$", key)}
            for old, new in RENAMED.get(name, []):
                weights = {re.sub(old, new, key): w for key, w in weights.items()}
            if name == "qwen3_vl_moe":  # published transposed
                weights = {key: w.transpose(1, 2).contiguous() if ".experts." in key else w
                           for key, w in weights.items()}
            save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
            model = load(cls, folder)  # only what was saved counts
        gaps, margins = [1.0], []
        with choices(gaps), shares(gaps):
            logits, ids = run(model, tokens), list(map(int, tokens))
            while len(margins) < N_GREEDY and min(margins + [1]) > MIN_MARGIN and min(gaps) > MIN_GAP:
                row = run(model, ids)[-1]
                ids.append(int(row.argmax()))
                margins.append(np.diff(np.sort(row)[-2:])[0])
        if len(margins) == N_GREEDY and min(margins) > MIN_MARGIN and min(gaps) > MIN_GAP:
            break
    else:
        raise SystemExit(f"{name}: no seed below {N_SEEDS} keeps its choices apart")
    assert np.isfinite(logits).all() and 0.7 < logits.std() < 12, logits.std()
    write_config(path / "hf", config)
    kept = {key: w for key, w in weights.items() if not TOWER.search(key)}
    save_file(kept, path / "hf/model.safetensors", {"format": "pt"})
    (path / "hf/model.safetensors").chmod(0o644)
    save({"tokens": tokens.astype(np.int32), "logits": logits, "greedy": np.array(ids[N_TOKENS:], np.int32),
          "greedy_margin": np.array(margins, np.float32)}, path / "golden.safetensors")
    size = (path / "hf/model.safetensors").stat().st_size
    print(f"{name}: {size / 1e3:.0f} kB, deviation {logits.std():.2f}, seed {seed}", flush=True)


def write_config(folder, config):
    with open(f"{folder}/config.json", "w") as file:
        file.write(json.dumps(config, indent=1) + "\n")


def main(names):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if unknown := set(names) - set(MODELS):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    for name in names or MODELS:
        build(name)


if __name__ == "__main__":
    main(sys.argv[1:])
