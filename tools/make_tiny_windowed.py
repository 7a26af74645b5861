#!/usr/bin/env python3
"""Makes the folders gemma3, gemma4, gptoss and qwen2 of crates/backend/tests/data, beside make_tiny_models.py, whose witness and
forms it shares: random models whose layers see windows that end inside, on and behind pages, as GGUF files and HF folders, and
the exact logits of the original model code.

    python tools/make_tiny_windowed.py [NAME]...
"""
import sys

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from make_tiny_models import DATA, finish, go_on, run, write_folder

N_TOKENS, N_LONG, EVERY = 40, 1000, 100
BASE = dict(vocab_size=96, max_position_embeddings=4096, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None, pad_token_id=0)
WINDOWED, FULL = "sliding_attention", "full_attention"

# name: class, GGUF architecture, settings, quantised type beside bf16
MODELS = {
    # Three heads share one of keys and values; windows of one position more than a page.
    "gemma3": ("Gemma3", "gemma3", dict(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32,
        intermediate_size=32, sliding_window=33, layer_types=[WINDOWED, FULL, WINDOWED], tie_word_embeddings=True,
        rope_parameters={FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6), WINDOWED: dict(rope_type="default", rope_theta=1e4)}),
        T.Q5_0),
    # Layers differ in head width and key-value heads; those that see everything have no projection for values.
    "gemma4": ("Gemma4", "gemma4", dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=32,
        global_head_dim=64, attention_k_eq_v=True, intermediate_size=64, sliding_window=17, layer_types=[WINDOWED, WINDOWED, FULL],
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32,
        final_logit_softcapping=5.0, tie_word_embeddings=True), T.Q4_1),
    "gptoss": ("GptOss", "gpt-oss", dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=32,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=31, layer_types=[WINDOWED, FULL], tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=512, beta_fast=32.0,
                             beta_slow=1.0, truncate=True)), T.MXFP4),
    # As many heads of keys and values as heads, biases on q, k and v; the first layer sees everything.
    "qwen2": ("Qwen2", "qwen2", dict(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, intermediate_size=64, use_sliding_window=True,
        sliding_window=64, max_window_layers=1, layer_types=[FULL, WINDOWED], tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e6)), T.Q4_0),
}

# The original code's name of a tensor of a layer, and GGUF's.
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp"}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2"}
NORMS = {"gemma3": GEMMA, "gemma4": GEMMA, "gptoss": {"post_attention_layernorm": "post_attention_norm"},
         "qwen2": {"post_attention_layernorm": "ffn_norm"}}
WHOLE = {"self_attn.sinks": "attn_sinks.weight", "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
         "router.per_expert_scale": "ffn_down_exps.scale"}


def make(name, seed):
    """As make_tiny_models: activations stay O(1), the router is decisive, every weight is exact in bf16."""
    cls, _, settings, _ = MODELS[name]
    torch.manual_seed(seed)
    model = text_model(cls, settings)
    d, tied = model.config.hidden_size, model.config.tie_word_embeddings
    with torch.no_grad():
        for key, p in list(model.named_parameters()) + [b for b in model.named_buffers() if b[0].endswith("layer_scalar")]:
            r = torch.randn(p.shape)
            centre = 0.0 if key.endswith("bias") or "_bias" in key else 1.0
            if "embed_tokens" in key:
                p.copy_(r * (0.1 if tied else 1.0))
            elif "lm_head" in key:
                p.copy_(r * 3 / d**0.5)
            elif key.endswith("sinks"):
                p.copy_(2 * r)
            elif p.ndim == 1 or key.endswith("_bias"):
                scale = 30 / d**0.5 if key == "model.norm.weight" and tied else d**0.5 if key.endswith("router.scale") else 1.0
                scale = 0.7 if key.endswith("layer_scalar") else scale
                if name == "gemma4" and ("q_norm" in key or "k_norm" in key):
                    # Scores are not scaled: these weights keep them small.
                    scale = p.shape[0] ** -0.25
                # Gemma 3 adds the 1 itself.
                p.copy_((centre + 0.1 * r) * scale - (1.0 if name == "gemma3" and "norm" in key else 0.0))
            elif "router" in key:
                p.copy_(r * 2 / d**0.5)
            else:
                # Matrices of gpt-oss's experts are transposed.
                p.copy_(r / p.shape[-2 if name == "gptoss" and "experts" in key else -1] ** 0.5)
            p.copy_(p.to(torch.bfloat16).float())
    return model


def text_model(cls, settings):
    """The original code of the text alone."""
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig"}.get(cls, cls + "Config"))(
        **BASE, **settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, cls + "ForCausalLM")(config).float().eval()
    if any("experts" in key for key, _ in model.named_parameters()):
        model.set_experts_implementation("eager")
    return model


def tensors(name, model):
    """GGUF name -> values, slowest axis first."""
    c = model.config
    state = {k: v.float().numpy() for k, v in model.state_dict().items()}
    one = 1.0 if name == "gemma3" else 0.0
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"] + np.float32(one)}
    if not c.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    names = NAMES | NORMS[name]
    for i in range(c.num_hidden_layers):
        blk, prefix = f"blk.{i}.", f"model.layers.{i}."
        for key, w in ((k.removeprefix(prefix), v) for k, v in state.items() if k.startswith(prefix)):
            module, _, kind = key.rpartition(".")
            if key in WHOLE:
                out[blk + WHOLE[key]] = w
            elif name == "gptoss" and "experts.gate_up_proj" in key:
                gate, up = (np.moveaxis(w[..., half::2], -1, 1) for half in (0, 1))
                kind = "bias" if key.endswith("bias") else "weight"
                out[f"{blk}ffn_gate_exps.{kind}"], out[f"{blk}ffn_up_exps.{kind}"] = gate, up
            elif name == "gptoss" and "experts.down_proj" in key:
                out[blk + "ffn_down_exps." + ("bias" if key.endswith("bias") else "weight")] = np.moveaxis(w, -1, 1)
            elif key == "experts.gate_up_proj":
                out[blk + "ffn_gate_up_exps.weight"] = w
            elif key == "experts.down_proj":
                out[blk + "ffn_down_exps.weight"] = w
            else:
                out[f"{blk}{names[module]}.{kind}"] = w + np.float32(one if "norm" in module else 0.0)
    if name == "gemma4":
        # Unrotated pairs have a huge divisor.
        d = MODELS[name][2]["global_head_dim"]
        turning = d // 8
        out["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (d // 2 - turning), np.float32)
    return out


def is_plain(key, w):
    """Norms, biases, sinks, scales and routers stay f32."""
    return w.ndim == 1 or "gate_inp" in key or key.endswith(".bias")


def write(path, name, model, dtype):
    arch, c, settings = MODELS[name][1], model.config, MODELS[name][2]
    windowed = [t == WINDOWED for t in c.layer_types]
    w = GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_sliding_window(settings["sliding_window"])
    if name != "gptoss":
        # Its readers know that every second layer sees everything.
        w.add_sliding_window_pattern(windowed)
    rope = c.rope_parameters
    d_head = settings.get("head_dim", c.hidden_size // c.num_attention_heads)
    d_full = settings.get("global_head_dim", d_head)
    w.add_key_length(d_full)
    w.add_value_length(d_full)
    if arch.startswith("gemma"):
        w.add_rope_freq_base(rope[FULL]["rope_theta"])
        w.add_rope_freq_base_swa(rope[WINDOWED]["rope_theta"])
        rope = rope[FULL]
    else:
        w.add_rope_freq_base(rope["rope_theta"])
    if name == "gemma4":
        w.add_head_count_kv([settings["num_key_value_heads" if s else "num_global_key_value_heads"] for s in windowed])
        w.add_key_length_swa(d_head)
        w.add_value_length_swa(d_head)
        w.add_rope_dimension_count(d_full)
        w.add_rope_dimension_count_swa(d_head)
        w.add_final_logit_softcapping(c.final_logit_softcapping)
        w.add_expert_count(c.num_experts)
        w.add_expert_used_count(c.top_k_experts)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    else:
        w.add_head_count_kv(c.num_key_value_heads)
    if name == "gptoss":
        w.add_expert_count(c.num_local_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.intermediate_size)
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, value in tensors(name, model).items():
        value = np.ascontiguousarray(value)
        if is_plain(key, value):
            w.add_tensor(key, value)
        else:
            w.add_tensor(key, quantize(value, dtype), raw_dtype=dtype)
    finish(w)


def dequantised(name, model, dtype):
    """Rounds the weights in place as the file does, row by row."""
    back = lambda w: dequantize(quantize(np.ascontiguousarray(w), dtype), dtype)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 1 or "router" in key or key.endswith("_bias"):
                continue
            transposed = name == "gptoss" and "experts" in key
            w = p.numpy()
            w = back(np.swapaxes(w, -1, -2)).reshape(np.swapaxes(w, -1, -2).shape) if transposed else back(w).reshape(w.shape)
            p.copy_(torch.from_numpy(np.ascontiguousarray(np.swapaxes(w, -1, -2) if transposed else w)))


def main():
    torch.set_num_threads(2)
    for seed, (name, (_, _, _, dtype)) in enumerate(MODELS.items()):
        if name not in (sys.argv[1:] or MODELS):
            continue
        folder = DATA / name
        folder.mkdir(parents=True, exist_ok=True)
        model = make(name, seed)
        random = np.random.default_rng(seed)
        tokens, long = (random.integers(0, BASE["vocab_size"], n) for n in (N_TOKENS, N_LONG))
        golden = {"tokens": tokens.astype(np.int32), "logits": run(model, tokens), "long_tokens": long.astype(np.int32),
                  "long_logits": np.ascontiguousarray(run(model, long)[EVERY - 1 :: EVERY])}
        golden["greedy"], margins = go_on(model, tokens)
        write(folder / "model-bf16.gguf", name, model, T.BF16)
        if name != "gptoss":
            # Its folders keep gate and up in turn, row by row, which is refused.
            write_folder(folder / "hf", model)
        kind = dtype.name.lower()
        write(folder / f"model-{kind}.gguf", name, model, dtype)
        dequantised(name, model, dtype)
        golden[f"logits_{kind}"] = run(model, tokens)
        save_file(golden, folder / "golden.safetensors")
        for path in folder.rglob("*.safetensors"):
            path.chmod(0o644)
        print(f"{name:12} std {golden['logits'].std():.2f}  margin {margins.min():.3f}", flush=True)


if __name__ == "__main__":
    main()
