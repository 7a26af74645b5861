#!/usr/bin/env python3
"""Makes crates/backend/tests/data: tiny random models as GGUF files, and their exact logits (README.md there).

The witness is transformers (f32, eager attention, on the CPU), the code the models were published with: it shares nothing
with this project, and reads no GGUF file. Names, permutations and keys of the GGUF files are written here, as llama.cpp's
converters write them; the witness answers on the weights of the file, decoded by gguf-py.

`ARCHS` vary the architecture: weights exact in bf16, and the same model quantised. `TYPES` vary the weight types and the odd
dimensions: every weight is made in the block form that it has in the file, through gguf-py's encoder where there is one,
else as a random valid block (random codes and scales, the f16 factor set so that the weights have the wanted spread).

    pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 safetensors
    python tools/make_tiny_models.py

These versions give the same bytes again.
"""
import copy
import math
import os
import pathlib
import zlib
from dataclasses import dataclass, field

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "crates/backend/tests/data"
N_TOKENS, N_GREEDY = 40, 16

# --- shared by both kinds ---

# GGUF's name of a tensor of a layer, and the original code's.
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate"}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def original(cls, **settings):
    """The original model code with these settings."""
    config = getattr(transformers, cls + ("TextConfig" if cls.startswith("Qwen3_5") else "Config"))(**settings)
    config._attn_implementation = "eager"
    return getattr(transformers, cls + "ForCausalLM")(config).float().eval()


def run(model, ids):
    """Logits of every position, [n, n_vocab]."""
    with torch.no_grad():
        return model(torch.tensor([list(map(int, ids))]), use_cache=False).logits[0].numpy()


def go_on(model, ids):
    """The greedy tokens after `ids`, and by how much each was the best."""
    ids, margins = list(ids), []
    for _ in range(N_GREEDY):
        row = run(model, ids)[-1]
        margins.append(np.diff(np.sort(row)[-2:])[0])
        ids.append(int(row.argmax()))
    return np.array(ids[-N_GREEDY:], np.int32), np.array(margins, np.float32)


def permute(w, n_head, back=False):
    """Rows of q or k so that the pairs of a head, half a head apart in the original code, are neighbours as in
    GGUF's llama; or back."""
    half = w.shape[0] // n_head // 2
    return w.reshape(n_head, *((half, 2) if back else (2, half)), *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_heads(w, c):
    """The dimensions that every model has, but for those that the two kinds write in another order."""
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
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


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# --- ARCHS: the settings of an architecture ---

BASE = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=512, intermediate_size=96, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None)
ROPE = lambda kind, **k: {"rope_type": kind, "rope_theta": 10000.0, **k}

# name: transformers class, GGUF architecture, settings, quantised type beside bf16
ARCHS = {
    "llama": ("Llama", "llama", dict(
        tie_word_embeddings=False, attention_bias=True,
        rope_parameters=ROPE("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64)), T.Q5_1),
    "qwen3": ("Qwen3", "qwen3", dict(
        tie_word_embeddings=True,
        rope_parameters=ROPE("yarn", factor=4.0, original_max_position_embeddings=128)), T.Q8_0),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", dict(
        tie_word_embeddings=False, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
        rope_parameters=ROPE("default")), T.Q4_0),
    "mixtral": ("Mixtral", "llama", dict(
        tie_word_embeddings=True, num_local_experts=5, num_experts_per_tok=2, intermediate_size=32, sliding_window=None,
        rope_parameters=ROPE("linear", factor=2.0)), T.Q4_1),
    "qwen3next": ("Qwen3Next", "qwen3next", dict(
        tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        norm_topk_prob=True, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=16, linear_conv_kernel_dim=4,
        rope_parameters=ROPE("default", partial_rotary_factor=0.25)), T.Q8_0),
    # Heads of v as wide as a block: the order of heads in GGUF then changes nothing in how columns are rounded.
    "qwen35": ("Qwen3_5", "qwen35", dict(
        tie_word_embeddings=True, layer_types=["full_attention", "linear_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=3,
        rope_parameters=ROPE("default", partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)), T.Q8_0),
}


def is_centred(name, key):
    """Norms that the original code stores as w - 1."""
    return name in ("qwen3next", "qwen35") and key.endswith("norm.weight") and "linear_attn" not in key


def make_arch(name, seed):
    """A model whose activations stay O(1) and whose router is decisive; every weight exact in bf16."""
    cls, _, settings, _ = ARCHS[name]
    torch.manual_seed(seed)
    model = original(cls, **{**BASE, **settings})
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for key, p in model.named_parameters():
            r = torch.randn(p.shape)
            if "embed_tokens" in key:
                p.copy_(r * (0.1 if tied else 1.0))
            elif "lm_head" in key:
                p.copy_(r * 3 / p.shape[-1] ** 0.5)
            elif key == "model.norm.weight" and tied:
                p.copy_((1 + 0.1 * r) * 30 / p.shape[-1] ** 0.5 - int(is_centred(name, key)))
            elif key.endswith("A_log"):
                p.copy_(r)
            elif is_centred(name, key):
                p.copy_(0.1 * r)
            elif p.ndim == 1:
                p.copy_((0.0 if key.endswith("bias") else 1.0) + 0.1 * r)
            elif ".gate.weight" in key:
                p.copy_(r * 2 / p.shape[-1] ** 0.5)
            else:
                p.copy_(r / p.shape[-1] ** 0.5)
            p.copy_(p.to(torch.bfloat16).float())
    return model


def arch_tensors(name, model):
    """GGUF name -> values, slowest axis first."""
    arch, c = ARCHS[name][1], model.config
    state = {k: v.float().numpy() for k, v in model.state_dict().items()}
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not c.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    ours = {theirs: name for name, theirs in NAMES.items()}
    for i in range(c.num_hidden_layers):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in state.items() if k.startswith(f"model.layers.{i}.")}
        blk = f"blk.{i}."
        out[blk + "attn_norm.weight"] = layer.pop("input_layernorm.weight")
        linear = {k.removeprefix("linear_attn."): layer.pop(k) for k in list(layer) if k.startswith("linear_attn.")}
        out |= {blk + k: v for k, v in delta_tensors(name, c, linear).items()}
        after = "post_attention_norm" if "layer_types" in ARCHS[name][2] else "ffn_norm"
        out[f"{blk}{after}.weight"] = layer.pop("post_attention_layernorm.weight")
        for part in ("gate", "up", "down"):
            if f"mlp.shared_expert.{part}_proj.weight" in layer:
                out[f"{blk}ffn_{part}_shexp.weight"] = layer.pop(f"mlp.shared_expert.{part}_proj.weight")
        if "mlp.shared_expert_gate.weight" in layer:
            out[blk + "ffn_gate_inp_shexp.weight"] = layer.pop("mlp.shared_expert_gate.weight")[0]
        for key in [k for k in layer if k.startswith("self_attn.")]:
            _, part, kind = key.split(".")
            w = layer.pop(key)
            if arch == "llama" and part in ("q_proj", "k_proj"):
                w = permute(w, c.num_attention_heads if part == "q_proj" else c.num_key_value_heads)
            out[f"{blk}{ours['self_attn.' + part]}.{kind}"] = w
        experts = {k.split("experts.")[1]: layer.pop(k) for k in list(layer) if "experts." in k}
        if experts:
            (gate,) = [layer.pop(k) for k in list(layer) if k.endswith(".gate.weight")]
            out[blk + "ffn_gate_inp.weight"] = gate
            both = experts.pop("gate_up_proj")
            half = both.shape[1] // 2
            out[blk + "ffn_gate_exps.weight"], out[blk + "ffn_up_exps.weight"] = both[:, :half], both[:, half:]
            out[blk + "ffn_down_exps.weight"] = experts.pop("down_proj")
            assert not experts, experts.keys()
        else:
            for part in ("gate", "up", "down"):
                out[f"{blk}ffn_{part}.weight"] = layer.pop(f"mlp.{part}_proj.weight")
        assert not layer, layer.keys()
    return {k: v + 1 if k.endswith("norm.weight") and name in ("qwen3next", "qwen35") and "ssm" not in k else v for k, v in out.items()}


def delta_tensors(name, c, linear):
    """A gated delta net, from its tensors in the original order. Rows of a fused projection are taken apart; Qwen3.5's heads of
    v are sorted so that head h goes with head h % n_k of k."""
    if not linear:
        return {}
    n_k, n_v, d_k, d_v = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    tile = name == "qwen35"

    def heads(w, width=1, axis=0):
        if not tile:
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
        out["ssm_alpha.weight"], out["ssm_beta.weight"] = heads(linear.pop("in_proj_a.weight")), heads(linear.pop("in_proj_b.weight"))
    qk, v = np.split(linear.pop("conv1d.weight")[:, 0], [2 * n_k * d_k])
    out["ssm_conv1d.weight"] = np.concatenate([qk, heads(v, d_v)])
    assert not linear, linear.keys()
    return out


def is_plain(key, w):
    """Norms, biases, routers and convolutions stay f32."""
    return w.ndim == 1 or any(part in key for part in ("gate_inp", ".gate.weight", "shared_expert_gate", "conv1d"))


def write_arch(path, name, model, dtype):
    arch, c = ARCHS[name][1], model.config
    rope = c.rope_parameters
    w = GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    write_heads(w, c)
    w.add_rope_dimension_count(int(c.head_dim * rope.get("partial_rotary_factor", 1)))
    if "mrope_section" in rope:
        w.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "linear_num_key_heads" in ARCHS[name][2]:
        w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        w.add_ssm_state_size(c.linear_key_head_dim)
        w.add_ssm_group_count(c.linear_num_key_heads)
        w.add_ssm_time_step_rank(c.linear_num_value_heads)
        w.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
    if rope["rope_type"] in ("yarn", "linear"):
        w.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, c.head_dim, 2) / c.head_dim)
        divisors = plain / model.model.rotary_emb.inv_freq.double().numpy()
        w.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    write_experts(w, c)
    for key, value in arch_tensors(name, model).items():
        value = np.ascontiguousarray(value)
        if is_plain(key, value):
            w.add_tensor(key, value)
        else:
            w.add_tensor(key, quantize(value, dtype), raw_dtype=dtype)
    finish(w)


def write_folder(folder, model):
    """The model as its publishers would store it: config.json and bf16 safetensors."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def dequantised(model, dtype):
    """Rounds the weights in place as the file does. Rows are rounded one by one, so their order does not matter."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            if not is_plain(key, p):
                back = dequantize(quantize(p.numpy(), dtype), dtype)
                p.copy_(torch.from_numpy(back.reshape(p.shape)))


def build_archs():
    for seed, (name, (_, _, _, dtype)) in enumerate(ARCHS.items()):
        folder = DATA / name
        folder.mkdir(parents=True, exist_ok=True)
        model = make_arch(name, seed)
        tokens = np.random.default_rng(seed).integers(0, BASE["vocab_size"], N_TOKENS)
        golden = {"tokens": tokens.astype(np.int32), "logits": run(model, tokens)}
        golden["greedy"], margins = go_on(model, tokens)
        if "layer_types" in ARCHS[name][2]:
            far = np.random.default_rng([seed, 1]).integers(0, BASE["vocab_size"], 1000)
            golden |= {"long_tokens": far.astype(np.int32), "long_logits": np.ascontiguousarray(run(model, far)[99::100])}
        write_arch(folder / "model-bf16.gguf", name, model, T.BF16)
        write_folder(folder / "hf", model)
        kind = dtype.name.lower()
        write_arch(folder / f"model-{kind}.gguf", name, model, dtype)
        dequantised(model, dtype)
        golden[f"logits_{kind}"] = run(model, tokens)
        save_file(golden, folder / "golden.safetensors")
        print(f"{name:24} std {golden['logits'].std():.2f}  margin {margins.min():.3f}", flush=True)


# --- TYPES: every weight type, and odd dimensions ---

# A seed is taken when no greedy step and no routing decision is closer than this: engines that round activations
# to 8 bits shall differ from the golden by rounding and not by another expert or another token.
MIN_MARGIN, MIN_ROUTER_GAP = 0.1, 0.02
MAX_FILE_BYTES, MAX_TOTAL_BYTES = 300_000, 700_000


@dataclass
class Model:
    """Dimensions of one file, and the weight type of each tensor."""

    stem: str
    arch: str
    n_vocab: int
    d_model: int
    n_layer: int
    n_head: int
    n_kv: int
    d_head: int
    d_ff: int
    types: dict  # tensor name without `blk.` and `.weight`, most exact key first: "1.ffn_up", "ffn_up", "" for the rest
    n_expert: int = 0
    n_used: int = 0
    tied: bool = False
    bias: bool = False
    theta: float = 10000.0
    rope: dict = field(default_factory=lambda: {"rope_type": "default"})

    def type_of(self, name):
        parts = name.removesuffix(".weight").removeprefix("blk.")
        return next(self.types[key] for key in (parts, parts.split(".")[-1], "") if key in self.types)


LINEAR = {"rope_type": "linear", "factor": 4.0}

TYPES = [
    Model("qwen3moe-blocks32", "qwen3moe", 103, 64, 3, 5, 1, 32, 32,
          {"": T.Q8_0, "attn_q": T.Q5_0, "attn_k": T.Q5_1, "attn_output": T.Q4_1, "2.attn_output": T.IQ4_NL,
           "0.ffn_gate_exps": T.MXFP4, "0.ffn_up_exps": T.MXFP4, "0.ffn_down_exps": T.MXFP4,
           "1.ffn_gate_exps": T.Q4_0, "1.ffn_up_exps": T.Q4_1, "1.ffn_down_exps": T.Q5_0,
           "2.ffn_gate_exps": T.IQ4_NL, "2.ffn_up_exps": T.Q8_0, "2.ffn_down_exps": T.Q5_1}, n_expert=7, n_used=3, theta=1e6),
    Model("qwen3moe-blocks256", "qwen3moe", 100, 256, 2, 2, 1, 32, 32,
          {"": T.Q4_K, "output": T.Q6_K, "0.attn_q": T.Q5_K, "0.attn_k": T.Q3_K, "0.attn_v": T.Q6_K, "0.attn_output": T.Q4_0,
           "1.attn_q": T.IQ4_XS, "1.attn_k": T.Q2_K, "1.attn_output": T.IQ4_NL,
           "0.ffn_gate_exps": T.Q2_K, "0.ffn_up_exps": T.Q3_K, "0.ffn_down_exps": T.IQ4_NL,
           "1.ffn_gate_exps": T.IQ4_XS, "1.ffn_up_exps": T.Q5_K, "1.ffn_down_exps": T.Q8_0}, n_expert=3, n_used=2, theta=1e5),
    Model("llama-blocks32", "llama", 101, 64, 2, 2, 2, 48, 96,
          {"": T.Q8_0, "attn_q": T.Q4_0, "attn_k": T.Q4_1, "ffn_gate": T.Q5_0, "ffn_up": T.Q5_1, "ffn_down": T.MXFP4}, bias=True, rope=LINEAR),
    Model("qwen3-float", "qwen3", 102, 40, 2, 3, 3, 24, 56,
          {"": T.F32, "token_embd": T.F16, "attn_q": T.BF16, "1.attn_k": T.F16, "1.attn_output": T.BF16, "1.ffn_gate": T.F16,
           "1.ffn_up": T.BF16, "1.ffn_down": T.F16}, tied=True, theta=1e6),
]

# Bytes in a block, the bytes of its f16 factors, and the share of the second (subtracted) one that centres the values.
RANDOM_BLOCKS = {T.Q2_K: (84, 80, 82, 1.5), T.Q3_K: (110, 108, None, 0), T.Q4_K: (144, 0, 2, 7.5), T.Q5_K: (176, 0, 2, 15.5),
                 T.Q6_K: (210, 208, None, 0), T.IQ4_NL: (18, 0, None, 0), T.IQ4_XS: (136, 0, None, 0)}


def f16_bytes(x):
    return np.asarray(x, np.float16).reshape(-1, 1).view(np.uint8)


def random_blocks(rng, kind, shape, std):
    n_values, _ = gguf.GGML_QUANT_SIZES[kind]
    n_bytes, d_at, min_at, share = RANDOM_BLOCKS[kind]
    n = math.prod(shape) // n_values
    blocks = rng.integers(0, 256, (n, n_bytes), np.uint8)

    def factors(d):
        blocks[:, d_at:d_at + 2] = f16_bytes(d)
        if min_at is not None:
            blocks[:, min_at:min_at + 2] = f16_bytes(d * share)

    factors(np.full(n, 2.0**-6))
    factors(2.0**-6 * std / dequantize(blocks, kind).std() * rng.uniform(0.7, 1.3, n))
    return blocks.reshape(*shape[:-1], shape[-1] // n_values * n_bytes)


def encode(rng, kind, shape, std):
    """Random weights of a type: the bytes of the file, and their f32 values."""
    assert shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0, (kind, shape)
    if kind in RANDOM_BLOCKS:
        data = random_blocks(rng, kind, shape, std)
    else:
        x = (rng.standard_normal(shape) * std).astype(np.float32)
        data = {T.F32: lambda: x, T.F16: lambda: x.astype(np.float16)}.get(kind, lambda: quantize(x, kind))()
    values = dequantize(data, kind).astype(np.float32) if kind not in (T.F32, T.F16) else data.astype(np.float32)
    assert values.shape == tuple(shape) and np.isfinite(values).all()
    return np.ascontiguousarray(data), values


def type_tensors(m, rng):
    """name -> (type, data in the file, f32 values), in GGUF's names and layout."""
    out = {}

    def put(name, *shape, std=None, kind=None):
        kind = m.type_of(name) if kind is None else kind
        out[name] = (kind, *encode(rng, kind, shape, shape[-1] ** -0.5 if std is None else std))

    def norm(name, n, scale=1.0):
        x = ((1 + 0.1 * rng.standard_normal(n)) * scale).astype(np.float32)
        out[name] = (T.F32, x, x)

    # A tied table is also the output: small rows, and a last norm that makes up for it.
    put("token_embd.weight", m.n_vocab, m.d_model, std=0.06 if m.tied else 1.0)
    norm("output_norm.weight", m.d_model, 3 / (0.06 * m.d_model**0.5) if m.tied else 1.0)
    if not m.tied:
        put("output.weight", m.n_vocab, m.d_model, std=3 * m.d_model**-0.5)
    for layer in range(m.n_layer):
        b = f"blk.{layer}."
        norm(b + "attn_norm.weight", m.d_model)
        norm(b + "ffn_norm.weight", m.d_model)
        if m.arch != "llama":
            norm(b + "attn_q_norm.weight", m.d_head)
            norm(b + "attn_k_norm.weight", m.d_head)
        q, kv = m.n_head * m.d_head, m.n_kv * m.d_head
        linear = {"attn_q": (q, m.d_model), "attn_k": (kv, m.d_model), "attn_v": (kv, m.d_model), "attn_output": (m.d_model, q)}
        if m.n_expert:
            put(b + "ffn_gate_inp.weight", m.n_expert, m.d_model, std=2 * m.d_model**-0.5, kind=T.F32)
            put(b + "ffn_gate_exps.weight", m.n_expert, m.d_ff, m.d_model)
            put(b + "ffn_up_exps.weight", m.n_expert, m.d_ff, m.d_model)
            put(b + "ffn_down_exps.weight", m.n_expert, m.d_model, m.d_ff, std=2 * m.d_ff**-0.5)
        else:
            linear |= {"ffn_gate": (m.d_ff, m.d_model), "ffn_up": (m.d_ff, m.d_model), "ffn_down": (m.d_model, m.d_ff)}
        for name, shape in linear.items():
            put(f"{b}{name}.weight", *shape)
            if m.bias:
                put(f"{b}{name}.bias", shape[0], std=0.2, kind=T.F32)
    return out


def tokenizer(n_vocab):
    """A byte-level vocabulary of printable ASCII, space, newline and a few merges; the end of text comes last."""
    merges = ["Ġ t", "h e", "Ġt he", "Ġ a", "i n", "n d"][:n_vocab - 97]
    tokens = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"] + [a.replace(" ", "") for a in merges] + ["<|endoftext|>"]
    assert len(tokens) == n_vocab, (len(tokens), n_vocab)
    return tokens, merges


def write_types(m, c, weights, path):
    w = GGUFWriter(path, m.arch)
    w.add_name(f"tiny {m.stem} random")
    w.add_context_length(4096)
    w.add_embedding_length(m.d_model)
    w.add_block_count(m.n_layer)
    write_heads(w, c)
    w.add_vocab_size(m.n_vocab)
    if m.arch == "llama":
        w.add_rope_dimension_count(m.d_head)
    write_experts(w, c)
    if m.rope["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(m.rope["factor"])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tokens, merges = tokenizer(m.n_vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types([1] * (m.n_vocab - 1) + [3])
    w.add_token_merges(merges)
    w.add_eos_token_id(m.n_vocab - 1)
    w.add_add_bos_token(False)
    for name, (kind, data, _) in weights.items():
        w.add_tensor(name, data, raw_dtype=kind)
    finish(w)


def settings(m):
    """Class and settings of the original code."""
    common = dict(vocab_size=m.n_vocab, hidden_size=m.d_model, num_hidden_layers=m.n_layer, num_attention_heads=m.n_head,
                  num_key_value_heads=m.n_kv, head_dim=m.d_head, max_position_embeddings=4096, tie_word_embeddings=m.tied, rms_norm_eps=1e-6,
                  intermediate_size=m.d_ff, rope_parameters={**m.rope, "rope_theta": m.theta}, bos_token_id=None,
                  eos_token_id=m.n_vocab - 1, pad_token_id=None)
    if m.arch == "llama":
        return "Llama", dict(**common, attention_bias=m.bias, mlp_bias=m.bias)
    if m.arch == "qwen3":
        return "Qwen3", common
    return "Qwen3Moe", dict(**common, moe_intermediate_size=m.d_ff, num_experts=m.n_expert, num_experts_per_tok=m.n_used,
                            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


def state(m, weights):
    """The same weights under the names of the original code."""
    x = {name: values for name, (_, _, values) in weights.items()}
    out = {}
    for name, v in x.items():
        if name in TOP:
            out[TOP[name]] = v
        elif name.startswith("blk."):
            _, layer, stem, suffix = name.split(".")
            if stem in NAMES:
                if m.arch == "llama" and stem in ("attn_q", "attn_k"):
                    v = permute(v, v.shape[0] // m.d_head, back=True)
                out[f"model.layers.{layer}.{NAMES[stem]}.{suffix}"] = v
    for layer in range(m.n_layer if m.n_expert else 0):
        b, mlp = f"blk.{layer}.ffn_", f"model.layers.{layer}.mlp.experts."
        out[mlp + "gate_up_proj"] = np.concatenate([x[b + "gate_exps.weight"], x[b + "up_exps.weight"]], 1)
        out[mlp + "down_proj"] = x[b + "down_exps.weight"]
    return {name: torch.from_numpy(np.array(v)) for name, v in out.items()}


class Witness:
    """The original model code on the weights of a file; it also notes how close the router's choices were."""

    def __init__(self, m, weights):
        cls, how = settings(m)
        self.model = original(cls, **how)
        if m.n_expert:
            self.model.set_experts_implementation("eager")
        missing, unexpected = self.model.load_state_dict(state(m, weights), strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if m.tied else set()), (missing, unexpected)
        self.model.tie_weights()
        self.router_gap = math.inf
        for layer in self.model.model.layers if m.n_expert else []:
            layer.mlp.gate.register_forward_pre_hook(lambda gate, args: self.note(args[0].reshape(-1, m.d_model) @ gate.weight.T, m.n_used))

    def note(self, logits, n_used):
        best = logits.sort(-1, descending=True).values
        self.router_gap = min(self.router_gap, (best[:, n_used - 1] - best[:, n_used]).min().item())


def golden(m, witness, rng):
    ids = list(rng.integers(0, m.n_vocab - 1, N_TOKENS))
    logits = run(witness.model, ids)
    greedy, margin = go_on(witness.model, ids)
    return {"tokens": np.array(ids, np.int32), "logits": logits.astype(np.float32), "greedy": greedy, "greedy_margin": margin}


def build_types(m, folder):
    for seed in range(1000):
        rng = np.random.default_rng([zlib.crc32(m.stem.encode()), seed])
        weights = type_tensors(m, rng)
        witness = Witness(m, weights)
        arrays, gap = golden(m, witness, rng), witness.router_gap
        margin, distinct = arrays["greedy_margin"].min(), len(set(arrays["greedy"].tolist()))
        if margin >= MIN_MARGIN and gap >= MIN_ROUTER_GAP and distinct >= 8:
            break
    else:
        raise SystemExit(f"{m.stem}: no seed below 1000 keeps its choices apart")
    path = f"{folder}/{m.stem}.gguf"
    write_types(m, witness.model.config, weights, path)
    answer = f"{folder}/{m.stem}.golden.safetensors"
    save_file(arrays, answer)
    os.chmod(answer, 0o644)
    assert os.path.getsize(path) < MAX_FILE_BYTES, (path, os.path.getsize(path))
    print(f"{m.stem:24} seed {seed:3}  {os.path.getsize(path):7} bytes  std {arrays['logits'].std():.2f}  margin {margin:.3f}  router gap {gap:.3f}", flush=True)
    return {kind for kind, _, _ in weights.values()}, os.path.getsize(path) + os.path.getsize(answer)


def main():
    # The last bits of a sum depend on the number of threads.
    torch.set_num_threads(2)
    build_archs()
    torch.set_num_threads(1)
    folder = DATA / "types"
    folder.mkdir(parents=True, exist_ok=True)
    kinds, sizes = zip(*(build_types(m, folder) for m in TYPES))
    wanted = {T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4, *RANDOM_BLOCKS}
    assert set().union(*kinds) == wanted, wanted ^ set().union(*kinds)
    assert sum(sizes) < MAX_TOTAL_BYTES, sizes


if __name__ == "__main__":
    main()
