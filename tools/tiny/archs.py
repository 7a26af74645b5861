"""llama, mixtral, qwen3, qwen3moe, qwen3next, qwen35: the settings of an architecture. Weights are exact in bf16; a
second file has the same model quantized."""
import numpy as np
import torch
from gguf import GGMLQuantizationType as T

from .files import N_LONG, N_TOKENS, answers, close_gguf, make, open_gguf, permute, tensors, uncentred
from .witness import original, randomize

BASE = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, max_position_embeddings=512, intermediate_size=96, rms_norm_eps=1e-5, bos_token_id=None,
            eos_token_id=None)


def rope(kind, **k):
    return {"rope_type": kind, "rope_theta": 10000.0, **k}


# name: transformers class, GGUF architecture, settings, quantized type besides bf16
MODELS = {
    "llama": ("Llama", "llama", dict(
        tie_word_embeddings=False, attention_bias=True,
        rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64)), T.Q5_1),
    "qwen3": ("Qwen3", "qwen3", dict(
        tie_word_embeddings=True,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128)), T.Q8_0),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", dict(
        tie_word_embeddings=False, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
        rope_parameters=rope("default")), T.Q4_0),
    "mixtral": ("Mixtral", "llama", dict(
        tie_word_embeddings=True, num_local_experts=5, num_experts_per_tok=2, intermediate_size=32,
        sliding_window=None, rope_parameters=rope("linear", factor=2.0)), T.Q4_1),
    "qwen3next": ("Qwen3Next", "qwen3next", dict(
        tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, norm_topk_prob=True, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
        linear_conv_kernel_dim=4, rope_parameters=rope("default", partial_rotary_factor=0.25)), T.Q8_0),
    # Heads of v as wide as a block: the order of heads in GGUF then changes nothing in how columns are rounded.
    "qwen35": ("Qwen3_5", "qwen35", dict(
        tie_word_embeddings=True, layer_types=["full_attention", "linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=3,
        rope_parameters=rope("default", partial_rotary_factor=0.25, mrope_section=[2, 1, 1],
                             mrope_interleaved=True)), T.Q8_0),
}

# What a layer of a file has, in order.
ORDER = ("input_layernorm", "linear_attn.", "post_attention_layernorm", "mlp.shared_expert.",
         "mlp.shared_expert_gate", "self_attn.", "mlp.gate.", "mlp.experts.", "mlp.")


def has_states(model):
    return hasattr(model.config, "linear_num_key_heads")


def special_values(model):
    """Decays, and norms that the original code stores as w - 1, get other values."""
    tied = model.config.tie_word_embeddings

    def special(key, p, r):
        if key.endswith("A_log"):
            return r
        if has_states(model) and key.endswith("norm.weight") and "linear_attn" not in key:
            is_last = key == "model.norm.weight" and tied
            return (1 + 0.1 * r) * 30 / p.shape[-1] ** 0.5 - 1 if is_last else 0.1 * r
        return None
    return special


def arch_tensors(name, model):
    """GGUF name -> values, slowest axis first."""
    arch, c = MODELS[name][1], model.config

    def special(key, w, layer):
        if key == "post_attention_layernorm.weight" and has_states(model):
            return {"post_attention_norm.weight": w}
        if key.startswith("linear_attn."):
            # All of them at once, with the first.
            linear = {k.removeprefix("linear_attn."): v for k, v in layer.items() if k.startswith("linear_attn.")}
            return delta_tensors(name, c, linear) if key == f"linear_attn.{next(iter(linear))}" else {}
        if key == "mlp.shared_expert_gate.weight":
            return {"ffn_gate_inp_shexp.weight": w[0]}
        if arch == "llama" and key.startswith(("self_attn.q_proj", "self_attn.k_proj")):
            n_head = c.num_attention_heads if "q_proj" in key else c.num_key_value_heads
            return {f"attn_{key[10]}.{key.split('.')[-1]}": permute(w, n_head)}
        return None

    place = lambda key: next(i for i, prefix in enumerate(ORDER) if key.startswith(prefix))
    found = tensors(model, special, {"post_attention_layernorm": "ffn_norm"}, place)
    return uncentred(found) if has_states(model) else found


def delta_tensors(name, c, linear):
    """A gated delta net, from its tensors in the original order. Rows of a fused projection are taken apart; Qwen3.5's
    heads of v are sorted so that head h goes with head h % n_k of k."""
    n_k, n_v = c.linear_num_key_heads, c.linear_num_value_heads
    d_k, d_v = c.linear_key_head_dim, c.linear_value_head_dim

    def heads(w, width=1, axis=0):
        if name != "qwen35":
            return w
        w = np.moveaxis(w, axis, 0)
        w = w.reshape(n_k, n_v // n_k, width, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)
        return np.moveaxis(w, 0, axis)

    out = {"ssm_a": heads(-np.exp(linear.pop("A_log"))), "ssm_dt.bias": heads(linear.pop("dt_bias")),
           "ssm_norm.weight": linear.pop("norm.weight"), "ssm_out.weight": heads(linear.pop("out_proj.weight"), d_v, 1)}
    if name == "qwen3next":
        rows = linear.pop("in_proj_qkvz.weight").reshape(n_k, -1, c.hidden_size)
        q, k, v, z = np.split(rows, np.cumsum([d_k, d_k, n_v // n_k * d_v]), axis=1)
        out["attn_qkv.weight"] = np.concatenate([w.reshape(-1, c.hidden_size) for w in (q, k, v)])
        out["attn_gate.weight"] = z.reshape(-1, c.hidden_size)
        out["ssm_ba.weight"] = linear.pop("in_proj_ba.weight")
    else:
        qk, v = np.split(linear.pop("in_proj_qkv.weight"), [2 * n_k * d_k])
        out["attn_qkv.weight"] = np.concatenate([qk, heads(v, d_v)])
        out["attn_gate.weight"] = heads(linear.pop("in_proj_z.weight"), d_v)
        out["ssm_alpha.weight"] = heads(linear.pop("in_proj_a.weight"))
        out["ssm_beta.weight"] = heads(linear.pop("in_proj_b.weight"))
    qk, v = np.split(linear.pop("conv1d.weight")[:, 0], [2 * n_k * d_k])
    out["ssm_conv1d.weight"] = np.concatenate([qk, heads(v, d_v)])
    assert not linear, linear.keys()
    return out


def write_heads(w, c):
    """Heads, norms and positions."""
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])


def write_experts(w, c):
    n_expert = getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None)
    if n_expert:
        w.add_expert_count(n_expert)
        w.add_expert_used_count(c.num_experts_per_tok)
        if hasattr(c, "moe_intermediate_size"):
            w.add_expert_feed_forward_length(c.moe_intermediate_size)
        if hasattr(c, "shared_expert_intermediate_size"):
            w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)


def write(path, name, model, dtype):
    arch, c = MODELS[name][1], model.config
    how = c.rope_parameters
    w = open_gguf(path, arch, c)
    write_heads(w, c)
    w.add_rope_dimension_count(int(c.head_dim * how.get("partial_rotary_factor", 1)))
    if "mrope_section" in how:
        w.add_rope_dimension_sections([*how["mrope_section"], 0])
    if has_states(model):
        w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        w.add_ssm_state_size(c.linear_key_head_dim)
        w.add_ssm_group_count(c.linear_num_key_heads)
        w.add_ssm_time_step_rank(c.linear_num_value_heads)
        w.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
    if how["rope_type"] in ("yarn", "linear"):
        w.add_string(f"{arch}.rope.scaling.type", how["rope_type"])
        w.add_rope_scaling_factor(how["factor"])
    if how["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(how["original_max_position_embeddings"])
    if how["rope_type"] == "llama3":
        plain = 1.0 / how["rope_theta"] ** (np.arange(0, c.head_dim, 2) / c.head_dim)
        divisors = plain / model.model.rotary_emb.inv_freq.double().numpy()
        w.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    write_experts(w, c)
    close_gguf(w, arch_tensors(name, model), dtype)


def build(name):
    cls, _, settings, dtype = MODELS[name]
    seed = list(MODELS).index(name)
    torch.manual_seed(seed)
    config = cls + "TextConfig" if cls == "Qwen3_5" else None
    model = original(cls, config, **{**BASE, **settings})
    randomize(model, special_values(model))
    draw = lambda seed, n: np.random.default_rng(seed).integers(0, BASE["vocab_size"], n)
    long = draw([seed, 1], N_LONG) if "layer_types" in settings else None
    golden = answers(model, draw(seed, N_TOKENS), long)
    make(name, model, dtype, golden, lambda path, dtype: write(path, name, model, dtype))
