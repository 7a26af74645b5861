#!/usr/bin/env python3
"""Makes the folders deepseekv2, deepseekv3 and glm4moe of crates/backend/tests/data, beside make_tiny_models.py, whose
witness and forms it shares: random models as GGUF files and HF folders, and the exact logits of the original model code.

Files of latent attention differ: bf16 GGUF files hold the matrices of the heads in two
tensors, quantised ones in one tensor with the keys of files from before the latent cache, folders in one tensor.

    python tools/make_tiny_latent.py
"""
import copy
import json

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from make_tiny_models import DATA, dequantised, finish, go_on, is_plain, run, write_folder

N_TOKENS, N_LONG, EVERY = 40, 1000, 100
BASE = dict(vocab_size=96, hidden_size=32, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
            tie_word_embeddings=False, intermediate_size=64, moe_intermediate_size=32, first_k_dense_replace=1)


def yarn(mscale, factor):
    return dict(rope_type="yarn", rope_theta=10000.0, factor=factor, original_max_position_embeddings=4096 // int(factor), beta_fast=32.0,
                beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale)


# name: class, GGUF architecture, settings, quantised type beside bf16
MODELS = {
    "deepseekv2": ("DeepseekV2", "deepseek2", dict(
        num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=24,
        qk_rope_head_dim=8, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", norm_topk_prob=False, routed_scaling_factor=4.0, rope_parameters=yarn(0.707, 8.0)), T.Q8_0),
    "deepseekv3": ("DeepseekV3", "deepseek2", dict(
        num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=1, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1, rope_parameters=yarn(1.0, 16.0)), T.Q5_1),
    "glm4moe": ("Glm4Moe", "glm4moe", dict(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=32, attention_bias=True, use_qk_norm=True,
        n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.5, num_nextn_predict_layers=1,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)), T.Q4_0),
}

NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
         "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.gate": "ffn_gate_inp",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
         "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp"}


def odd_heads(cls, settings):
    """The original model code. Configurations want heads that divide the model's width, the code does not care."""
    heads = {key: settings[key] for key in ("num_attention_heads", "num_key_value_heads")}
    config = getattr(transformers, cls + "Config")(**{**settings, "num_attention_heads": 2, "num_key_value_heads": 2})
    config._attn_implementation = "eager"
    config.__dict__.update(heads)
    return getattr(transformers, cls + "ForCausalLM")(config).float().eval()


def make(name, seed):
    """As make_tiny_models: activations stay O(1), the router is decisive, every weight is exact in bf16."""
    cls, _, settings, _ = MODELS[name]
    torch.manual_seed(seed)
    model = odd_heads(cls, {**BASE, **settings})
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, p in model.named_parameters():
            r = torch.randn(p.shape)
            if "embed_tokens" in key:
                p.copy_(r)
            elif p.ndim == 1:
                p.copy_((0.0 if key.endswith("bias") else 1.0) + 0.1 * r)
            else:
                p.copy_(r * (3 if "lm_head" in key else 2 if ".gate.weight" in key else 1) / p.shape[-1] ** 0.5)
            p.copy_(p.to(torch.bfloat16).float())
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                # Some biased scores fall below 0.
                buffer.copy_((torch.randn(buffer.shape) * 0.5).to(torch.bfloat16).float())
    return model


def tensors(name, model, whole):
    """GGUF name -> values, slowest axis first."""
    c = model.config
    state = {k: v.float().numpy() for k, v in model.state_dict().items()}
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"],
           "output.weight": state["lm_head.weight"]}
    for i in range(c.num_hidden_layers):
        blk, prefix = f"blk.{i}.", f"model.layers.{i}."
        for key, w in ((k.removeprefix(prefix), v) for k, v in state.items() if k.startswith(prefix)):
            module, _, kind = key.rpartition(".")
            if key == "mlp.gate.e_score_correction_bias":
                out[blk + "exp_probs_b.bias"] = w
            elif key == "mlp.experts.gate_up_proj":
                half = w.shape[1] // 2
                out[blk + "ffn_gate_exps.weight"], out[blk + "ffn_up_exps.weight"] = w[:, :half], w[:, half:]
            elif key == "mlp.experts.down_proj":
                out[blk + "ffn_down_exps.weight"] = w
            elif module == "post_attention_layernorm":
                out[blk + ("post_attention_norm" if name == "glm4moe" else "ffn_norm") + ".weight"] = w
            elif module == "self_attn.kv_b_proj" and whole:
                out[blk + "attn_kv_b.weight"] = w
            elif module == "self_attn.kv_b_proj":
                heads = w.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
                out[blk + "attn_k_b.weight"] = heads[:, : c.qk_nope_head_dim].swapaxes(1, 2)
                out[blk + "attn_v_b.weight"] = heads[:, c.qk_nope_head_dim :]
            else:
                out[f"{blk}{NAMES[module]}.{kind}"] = w
    if nextn(name):
        # A layer that predicts further tokens: there to be left alone.
        last = f"blk.{c.num_hidden_layers}."
        out[last + "attn_norm.weight"] = np.ones(c.hidden_size, np.float32)
        out[last + "nextn.eh_proj.weight"] = np.ones((c.hidden_size, 2 * c.hidden_size), np.float32)
    return out


def nextn(name):
    return MODELS[name][2].get("num_nextn_predict_layers", 0)


def write(path, name, model, dtype, whole):
    arch, c = MODELS[name][1], model.config
    rope = c.rope_parameters
    w = GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers + nextn(name))
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
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
    for key, value in tensors(name, model, whole).items():
        value = np.ascontiguousarray(value)
        if is_plain(key, value):
            w.add_tensor(key, value)
        else:
            w.add_tensor(key, quantize(value, dtype), raw_dtype=dtype)
    finish(w)


def write_hf(folder, name, model):
    """The model as its publishers would store it, with a layer behind the last where they leave one."""
    heads = {key: getattr(model.config, key) for key in ("num_attention_heads", "num_key_value_heads")}
    model.config.__dict__.update(num_attention_heads=2, num_key_value_heads=2)
    write_folder(folder, model)
    model.config.__dict__.update(heads)
    config = json.loads((folder / "config.json").read_text()) | heads
    if nextn(name):
        path = folder / "model.safetensors"
        weights = load_torch(path)
        norm = torch.ones(model.config.hidden_size, dtype=torch.bfloat16)
        save_torch(weights | {f"model.layers.{model.config.num_hidden_layers}.enorm.weight": norm}, path, metadata={"format": "pt"})
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
    """A folder as mlx-lm writes it, all matrices affine but the router, `kv_b_proj` whole; rounds the model's weights alike."""
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
    save_torch(out, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder.parent / "hf/config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main():
    torch.set_num_threads(2)
    for seed, (name, (_, _, _, dtype)) in enumerate(MODELS.items()):
        folder = DATA / name
        folder.mkdir(parents=True, exist_ok=True)
        model = make(name, seed)
        random = np.random.default_rng(seed)
        tokens, long = (random.integers(0, BASE["vocab_size"], n) for n in (N_TOKENS, N_LONG))
        golden = {"tokens": tokens.astype(np.int32), "logits": run(model, tokens), "long_tokens": long.astype(np.int32),
                  "long_logits": np.ascontiguousarray(run(model, long)[EVERY - 1 :: EVERY])}
        golden["greedy"], margins = go_on(model, tokens)
        write(folder / "model-bf16.gguf", name, model, T.BF16, whole=False)
        write_hf(folder / "hf", name, model)
        kind = dtype.name.lower()
        write(folder / f"model-{kind}.gguf", name, model, dtype, whole=True)
        if name == "deepseekv2":
            rounded = copy.deepcopy(model)
            write_mlx(folder / "mlx-8bit", rounded)
            golden["logits_mlx"] = run(rounded, tokens)
        dequantised(model, dtype)
        golden[f"logits_{kind}"] = run(model, tokens)
        save_file(golden, folder / "golden.safetensors")
        for path in (folder / "golden.safetensors", folder / "hf/model.safetensors"):
            path.chmod(0o644)
        print(f"{name:12} std {golden['logits'].std():.2f}  margin {margins.min():.3f}", flush=True)


if __name__ == "__main__":
    main()
