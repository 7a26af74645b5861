"""gemma3, gemma4, gptoss, qwen2: layers that see windows, which end inside, on and after pages."""
import numpy as np
import torch
from gguf import GGMLQuantizationType as T

from .files import answers, close_gguf, make, open_gguf, prompts, tensors, uncentred, write_folder
from .witness import original, randomize

BASE = dict(vocab_size=96, max_position_embeddings=4096, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None,
            pad_token_id=0)
WINDOWED, FULL = "sliding_attention", "full_attention"

# name: class, GGUF architecture, settings, quantized type besides bf16
MODELS = {
    # Three heads share one of keys and values; windows of one position more than a page.
    "gemma3": ("Gemma3", "gemma3", dict(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=32,
        query_pre_attn_scalar=32, intermediate_size=32, sliding_window=33, layer_types=[WINDOWED, FULL, WINDOWED],
        tie_word_embeddings=True,
        rope_parameters={FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                         WINDOWED: dict(rope_type="default", rope_theta=1e4)}), T.Q5_0),
    # Layers differ in head width and key-value heads; those that see everything have no projection for values.
    "gemma4": ("Gemma4", "gemma4", dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_global_key_value_heads=1, head_dim=32, global_head_dim=64, attention_k_eq_v=True, intermediate_size=64,
        sliding_window=17, layer_types=[WINDOWED, WINDOWED, FULL], hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32, final_logit_softcapping=5.0,
        tie_word_embeddings=True), T.Q4_1),
    "gptoss": ("GptOss", "gpt-oss", dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
        intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=31,
        layer_types=[WINDOWED, FULL], tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=512,
                             beta_fast=32.0, beta_slow=1.0, truncate=True)), T.MXFP4),
    # As many heads of keys and values as heads, biases on q, k and v; the first layer sees everything.
    "qwen2": ("Qwen2", "qwen2", dict(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, intermediate_size=64,
        use_sliding_window=True, sliding_window=64, max_window_layers=1, layer_types=[FULL, WINDOWED],
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), T.Q4_0),
}

# Names that depend on the model.
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2"}
NORMS = {"gemma3": GEMMA, "gemma4": GEMMA, "gptoss": {"post_attention_layernorm": "post_attention_norm"},
         "qwen2": {"post_attention_layernorm": "ffn_norm"}}
WHOLE = {"self_attn.sinks": "attn_sinks.weight", "layer_scalar": "layer_output_scale.weight",
         "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def special_values(name, model):
    d = model.config.hidden_size

    def special(key, p, r):
        if key.endswith("sinks"):
            return 2 * r
        if key.endswith("router.scale"):
            return (1 + 0.1 * r) * d**0.5
        if key.endswith("layer_scalar"):
            return (1 + 0.1 * r) * 0.7
        if name == "gemma4" and ("q_norm" in key or "k_norm" in key):
            # Scores are not scaled: these weights keep them small.
            return (1 + 0.1 * r) * p.shape[0] ** -0.25
        if name == "gemma3" and "norm" in key:
            # It adds the 1 itself.
            return (1 + 0.1 * r) * (30 / d**0.5 if key == "model.norm.weight" else 1.0) - 1
        return None
    return special


def windowed_tensors(name, model):
    """GGUF name -> values, slowest axis first."""
    def special(key, w, layer):
        kind = "bias" if key.endswith("bias") else "weight"
        if key in WHOLE:
            return {WHOLE[key]: w}
        if name == "gptoss" and "experts.gate_up_proj" in key:
            gate, up = (np.moveaxis(w[..., half::2], -1, 1) for half in (0, 1))
            return {f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up}
        if name == "gptoss" and "experts.down_proj" in key:
            return {f"ffn_down_exps.{kind}": np.moveaxis(w, -1, 1)}
        if key == "experts.gate_up_proj":
            return {"ffn_gate_up_exps.weight": w}
        return None

    out = tensors(model, special, NORMS[name])
    if name == "gemma3":
        out = uncentred(out)
    if name == "gemma4":
        # Unrotated pairs have a huge divisor.
        d = MODELS[name][2]["global_head_dim"]
        turning = d // 8
        out["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (d // 2 - turning), np.float32)
    return out


def write(path, name, model, dtype):
    arch, c, settings = MODELS[name][1], model.config, MODELS[name][2]
    windowed = [t == WINDOWED for t in c.layer_types]
    w = open_gguf(path, arch, c)
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
        n_kv = lambda s: settings["num_key_value_heads" if s else "num_global_key_value_heads"]
        w.add_head_count_kv([n_kv(s) for s in windowed])
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
    close_gguf(w, windowed_tensors(name, model), dtype)


def build(name):
    cls, _, settings, dtype = MODELS[name]
    seed = list(MODELS).index(name)
    torch.manual_seed(seed)
    model = original(cls, cls + "TextConfig" if cls.startswith("Gemma") else None, **BASE, **settings)
    randomize(model, special_values(name, model))
    # Folders of gpt-oss alternate rows of gate and up, which is refused.
    folder = None if name == "gptoss" else write_folder
    golden = answers(model, *prompts(seed, BASE["vocab_size"]))
    make(name, model, dtype, golden, lambda path, dtype: write(path, name, model, dtype), folder)
