"""deepseekv2, deepseekv3, glm4moe: latent attention, shared experts, routers with groups and biases.

Files of latent attention differ: bf16 GGUF files hold the matrices of the heads in two tensors, quantized ones in one
tensor with the keys of files from before the latent cache, folders in one tensor."""
import copy
import json

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from safetensors.torch import load_file, save_file

from .files import answers, close_gguf, make, open_gguf, prompts, tensors, write_folder
from .witness import build as build_model
from .witness import is_plain, randomize, run

BASE = dict(vocab_size=96, hidden_size=32, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=None,
            eos_token_id=None, tie_word_embeddings=False, intermediate_size=64, moe_intermediate_size=32,
            first_k_dense_replace=1)


def yarn(mscale, factor):
    return dict(rope_type="yarn", rope_theta=10000.0, factor=factor,
                original_max_position_embeddings=4096 // int(factor), beta_fast=32.0, beta_slow=1.0, mscale=mscale,
                mscale_all_dim=mscale)


# name: class, GGUF architecture, settings, quantized type besides bf16
MODELS = {
    "deepseekv2": ("DeepseekV2", "deepseek2", dict(
        num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=32,
        qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=3,
        n_shared_experts=2, n_group=4, topk_group=2, topk_method="group_limited_greedy", norm_topk_prob=False,
        routed_scaling_factor=4.0, rope_parameters=yarn(0.707, 8.0)), T.Q8_0),
    "deepseekv3": ("DeepseekV3", "deepseek2", dict(
        num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=32, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=12, num_experts_per_tok=4,
        n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        num_nextn_predict_layers=1, rope_parameters=yarn(1.0, 16.0)), T.Q5_1),
    "glm4moe": ("Glm4Moe", "glm4moe", dict(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=32, attention_bias=True,
        use_qk_norm=True, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.5, num_nextn_predict_layers=1,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)), T.Q4_0),
}


def odd_heads(cls, settings):
    """The original model code. Configurations want heads that divide the model's width, the code does not care."""
    heads = {key: settings[key] for key in ("num_attention_heads", "num_key_value_heads")}
    even = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, cls + "Config")(**{**settings, **even})
    config.__dict__.update(heads)
    return build_model(cls, config)


def special_values(key, p, r):
    """Some biased scores fall below 0."""
    return r * 0.5 if key.endswith("e_score_correction_bias") else None


def latent_tensors(name, model, whole):
    """GGUF name -> values, slowest axis first."""
    c = model.config

    def special(key, w, layer):
        if key == "mlp.gate.e_score_correction_bias":
            return {"exp_probs_b.bias": w}
        if key != "self_attn.kv_b_proj.weight":
            return None
        if whole:
            return {"attn_kv_b.weight": w}
        heads = w.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        return {"attn_k_b.weight": heads[:, :c.qk_nope_head_dim].swapaxes(1, 2),
                "attn_v_b.weight": heads[:, c.qk_nope_head_dim:]}

    after = "post_attention_norm" if name == "glm4moe" else "ffn_norm"
    out = tensors(model, special, {"post_attention_layernorm": after})
    if nextn(name):
        # A layer that predicts further tokens: there to be left alone.
        last = f"blk.{c.num_hidden_layers}."
        out[last + "attn_norm.weight"] = np.ones(c.hidden_size, np.float32)
        out[last + "nextn.eh_proj.weight"] = np.ones((c.hidden_size, 2 * c.hidden_size), np.float32)
    return out


def nextn(name):
    return MODELS[name][2].get("num_nextn_predict_layers", 0)


def write(path, name, model, dtype):
    arch, c = MODELS[name][1], model.config
    rope = c.rope_parameters
    whole = dtype != T.BF16
    w = open_gguf(path, arch, c, nextn(name))
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_expert_count(c.n_routed_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_leading_dense_block_count(c.first_k_dense_replace)
    w.add_expert_weights_scale(c.routed_scaling_factor)
    w.add_expert_group_count(c.n_group)
    w.add_expert_group_used_count(c.topk_group)
    if nextn(name):
        w.add_nextn_predict_layers(nextn(name))
    if c.norm_topk_prob:
        w.add_expert_weights_norm(True)
    if name != "deepseekv2":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "glm4moe":
        w.add_head_count_kv(c.num_key_value_heads)
        w.add_key_length(c.head_dim)
        w.add_value_length(c.head_dim)
        w.add_rope_dimension_count(int(c.head_dim * rope["partial_rotary_factor"]))
    else:
        d_k, d_v = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
        w.add_head_count_kv(c.num_attention_heads if whole else 1)
        w.add_key_length(d_k if whole else c.kv_lora_rank + c.qk_rope_head_dim)
        w.add_value_length(d_v if whole else c.kv_lora_rank)
        if not whole:
            w.add_key_length_mla(d_k)
            w.add_value_length_mla(d_v)
        w.add_kv_lora_rank(c.kv_lora_rank)
        if c.q_lora_rank:
            w.add_q_lora_rank(c.q_lora_rank)
        w.add_rope_dimension_count(c.qk_rope_head_dim)
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    close_gguf(w, latent_tensors(name, model, whole), dtype)


def write_hf(folder, name, model):
    """The model as its publishers would store it, with a layer after the last where they leave one."""
    heads = {key: getattr(model.config, key) for key in ("num_attention_heads", "num_key_value_heads")}
    model.config.__dict__.update(num_attention_heads=2, num_key_value_heads=2)
    write_folder(folder, model)
    model.config.__dict__.update(heads)
    config = json.loads((folder / "config.json").read_text()) | heads
    if nextn(name):
        path = folder / "model.safetensors"
        norm = torch.ones(model.config.hidden_size, dtype=torch.bfloat16)
        last = {f"model.layers.{model.config.num_hidden_layers}.enorm.weight": norm}
        save_file(load_file(path) | last, path, metadata={"format": "pt"})
        config["num_nextn_predict_layers"] = nextn(name)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def affine(w):
    """MLX's 8-bit affine form in groups of 32: words, scales, biases, and their values."""
    groups = w.reshape(*w.shape[:-1], -1, 32)
    low, high = groups.min(-1), groups.max(-1)
    half = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16)
    scales, biases = half(np.maximum(high - low, 1e-6) / 255), half(low)
    scale, bias = (x.float().numpy()[..., None] for x in (scales, biases))
    q = np.clip(np.rint((groups - bias) / scale), 0, 255).astype(np.uint8)
    words = torch.from_numpy(q.reshape(w.shape).view(np.uint32).view(np.int32).copy()).view(torch.uint32)
    return words, scales, biases, (q.astype(np.float32) * scale + bias).reshape(w.shape)


def write_mlx(folder, model):
    """A folder as mlx-lm writes it, all matrices affine but the router, `kv_b_proj` whole; rounds the model's weights
    alike."""
    out = {}

    def put(name, w):
        *parts, values = affine(w)
        out.update(zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts))
        return torch.from_numpy(values)

    with torch.no_grad():
        for key, p in model.named_parameters():
            if is_plain(key, p):
                out[key] = p.to(torch.bfloat16)
            elif key.endswith(".experts.gate_up_proj"):
                half, base = p.shape[1] // 2, key.replace(".experts.gate_up_proj", ".switch_mlp.")
                gate, up = p[:, :half].numpy(), p[:, half:].numpy()
                p.copy_(torch.cat([put(base + "gate_proj", gate), put(base + "up_proj", up)], 1))
            else:
                name = key.replace(".experts.down_proj", ".switch_mlp.down_proj").removesuffix(".weight")
                p.copy_(put(name, p.numpy()))
    folder.mkdir(exist_ok=True)
    save_file(out, folder / "model.safetensors", metadata={"format": "mlx"})
    config = json.loads((folder.parent / "hf/config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def build(name):
    cls, _, settings, dtype = MODELS[name]
    seed = list(MODELS).index(name)
    torch.manual_seed(seed)
    model = randomize(odd_heads(cls, {**BASE, **settings}), special_values)
    tokens, long = prompts(seed, BASE["vocab_size"])

    def mlx(path):
        if name != "deepseekv2":
            return {}
        rounded = copy.deepcopy(model)
        write_mlx(path / "mlx-8bit", rounded)
        return {"logits_mlx": run(rounded, tokens)}

    make(name, model, dtype, answers(model, tokens, long), lambda path, dtype: write(path, name, model, dtype),
         lambda folder, model: write_hf(folder, name, model), mlx)
