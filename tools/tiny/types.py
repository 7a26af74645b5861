"""types: every weight type, and odd dimensions. Every weight is made in the block form that it has in the file, through
gguf-py's encoder where there is one, else as a random valid block (random codes and scales, the f16 factor set so that
the weights have the wanted spread)."""
import math
import zlib
from dataclasses import dataclass, field

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

from .archs import write_experts, write_heads
from .files import DATA, N_TOKENS, ORIGINAL, TOP, finish, permute, save
from .witness import go_on, original, run

# A seed is taken when no greedy step and no routing decision is closer than this: engines that round activations
# to 8 bits shall differ from the golden by rounding and not by another expert or another token.
MIN_MARGIN, MIN_ROUTER_GAP = 0.1, 0.02
MAX_FILE_BYTES = 300_000


@dataclass
class Model:
    """Dimensions of one file, and the weight type of each tensor."""

    arch: str
    n_vocab: int
    d_model: int
    n_layer: int
    n_head: int
    n_kv: int
    d_head: int
    d_ff: int
    # By tensor without `blk.` and `.weight`, most exact key first: "1.ffn_up", "ffn_up", "" for the rest.
    types: dict
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

MODELS = {
    "qwen3moe-blocks32": Model(
        "qwen3moe", 103, 64, 3, 5, 1, 32, 32,
        {"": T.Q8_0, "attn_q": T.Q5_0, "attn_k": T.Q5_1, "attn_output": T.Q4_1, "2.attn_output": T.IQ4_NL,
         "0.ffn_gate_exps": T.MXFP4, "0.ffn_up_exps": T.MXFP4, "0.ffn_down_exps": T.MXFP4,
         "1.ffn_gate_exps": T.Q4_0, "1.ffn_up_exps": T.Q4_1, "1.ffn_down_exps": T.Q5_0,
         "2.ffn_gate_exps": T.IQ4_NL, "2.ffn_up_exps": T.Q8_0, "2.ffn_down_exps": T.Q5_1},
        n_expert=7, n_used=3, theta=1e6),
    "qwen3moe-blocks256": Model(
        "qwen3moe", 100, 256, 2, 2, 1, 32, 32,
        {"": T.Q4_K, "output": T.Q6_K, "0.attn_q": T.Q5_K, "0.attn_k": T.Q3_K, "0.attn_v": T.Q6_K,
         "0.attn_output": T.Q4_0, "1.attn_q": T.IQ4_XS, "1.attn_k": T.Q2_K, "1.attn_output": T.IQ4_NL,
         "0.ffn_gate_exps": T.Q2_K, "0.ffn_up_exps": T.Q3_K, "0.ffn_down_exps": T.IQ4_NL,
         "1.ffn_gate_exps": T.IQ4_XS, "1.ffn_up_exps": T.Q5_K, "1.ffn_down_exps": T.Q8_0},
        n_expert=3, n_used=2, theta=1e5),
    "llama-blocks32": Model(
        "llama", 101, 64, 2, 2, 2, 48, 96,
        {"": T.Q8_0, "attn_q": T.Q4_0, "attn_k": T.Q4_1, "ffn_gate": T.Q5_0, "ffn_up": T.Q5_1, "ffn_down": T.MXFP4},
        bias=True, rope=LINEAR),
    "qwen3-float": Model(
        "qwen3", 102, 40, 2, 3, 3, 24, 56,
        {"": T.F32, "token_embd": T.F16, "attn_q": T.BF16, "1.attn_k": T.F16, "1.attn_output": T.BF16,
         "1.ffn_gate": T.F16, "1.ffn_up": T.BF16, "1.ffn_down": T.F16}, tied=True, theta=1e6),
}

# Bytes in a block, the bytes of its f16 factors, and the share of the second (subtracted) one that centres the values.
RANDOM_BLOCKS = {T.Q2_K: (84, 80, 82, 1.5), T.Q3_K: (110, 108, None, 0), T.Q4_K: (144, 0, 2, 7.5),
                 T.Q5_K: (176, 0, 2, 15.5), T.Q6_K: (210, 208, None, 0), T.IQ4_NL: (18, 0, None, 0),
                 T.IQ4_XS: (136, 0, None, 0)}


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
        linear = {"attn_q": (q, m.d_model), "attn_k": (kv, m.d_model), "attn_v": (kv, m.d_model),
                  "attn_output": (m.d_model, q)}
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


def write_types(name, m, c, weights, path):
    w = GGUFWriter(path, m.arch)
    w.add_name(f"tiny {name} random")
    w.add_context_length(4096)
    w.add_embedding_length(m.d_model)
    w.add_block_count(m.n_layer)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
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
    for tensor, (kind, data, _) in weights.items():
        w.add_tensor(tensor, data, raw_dtype=kind)
    finish(w)


def settings(m):
    """Class and settings of the original code."""
    common = dict(vocab_size=m.n_vocab, hidden_size=m.d_model, num_hidden_layers=m.n_layer,
                  num_attention_heads=m.n_head, num_key_value_heads=m.n_kv, head_dim=m.d_head,
                  max_position_embeddings=4096, tie_word_embeddings=m.tied, rms_norm_eps=1e-6,
                  intermediate_size=m.d_ff, rope_parameters={**m.rope, "rope_theta": m.theta}, bos_token_id=None,
                  eos_token_id=m.n_vocab - 1, pad_token_id=None)
    if m.arch == "llama":
        return "Llama", dict(**common, attention_bias=m.bias, mlp_bias=m.bias)
    if m.arch == "qwen3":
        return "Qwen3", common
    return "Qwen3Moe", dict(**common, moe_intermediate_size=m.d_ff, num_experts=m.n_expert,
                            num_experts_per_tok=m.n_used, norm_topk_prob=True, decoder_sparse_step=1,
                            mlp_only_layers=[])


def state(m, weights):
    """The same weights under the names of the original code."""
    x = {name: values for name, (_, _, values) in weights.items()}
    out = {}
    for name, v in x.items():
        if name in TOP:
            out[TOP[name]] = v
        elif name.startswith("blk."):
            _, layer, stem, suffix = name.split(".")
            if stem in ORIGINAL:
                if m.arch == "llama" and stem in ("attn_q", "attn_k"):
                    v = permute(v, v.shape[0] // m.d_head, back=True)
                out[f"model.layers.{layer}.{ORIGINAL[stem]}.{suffix}"] = v
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
        missing, unexpected = self.model.load_state_dict(state(m, weights), strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if m.tied else set()), (missing, unexpected)
        self.model.tie_weights()
        self.router_gap = math.inf
        for layer in self.model.model.layers if m.n_expert else []:
            layer.mlp.gate.register_forward_pre_hook(
                lambda gate, args: self.note(args[0].reshape(-1, m.d_model) @ gate.weight.T, m.n_used))

    def note(self, logits, n_used):
        best = logits.sort(-1, descending=True).values
        self.router_gap = min(self.router_gap, (best[:, n_used - 1] - best[:, n_used]).min().item())


def build(name):
    m = MODELS[name]
    for seed in range(1000):
        rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        weights = type_tensors(m, rng)
        witness = Witness(m, weights)
        ids = rng.integers(0, m.n_vocab - 1, N_TOKENS)
        logits = run(witness.model, ids)
        greedy, margins = go_on(witness.model, ids)
        gap, margin = witness.router_gap, margins.min()
        if margin >= MIN_MARGIN and gap >= MIN_ROUTER_GAP and len(set(greedy.tolist())) >= 8:
            break
    else:
        raise SystemExit(f"{name}: no seed below 1000 keeps its choices apart")
    folder = DATA / "types"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.gguf"
    write_types(name, m, witness.model.config, weights, path)
    arrays = {"tokens": ids.astype(np.int32), "logits": logits, "greedy": greedy, "greedy_margin": margins}
    save(arrays, folder / f"{name}.golden.safetensors")
    size = path.stat().st_size
    assert size < MAX_FILE_BYTES, (path, size)
    print(f"{name:24} seed {seed:3}  {size:7} bytes  std {logits.std():.2f}  margin {margin:.3f}  router gap {gap:.3f}",
          flush=True)
