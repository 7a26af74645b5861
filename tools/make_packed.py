#!/usr/bin/env python3
"""Makes crates/moebius/tests/data/packed: tiny folders with weights of 4 bits as GPTQ, AWQ and compressed-tensors
publish them, and of 8-bit floats as the last does, and beside each the same values as plain floats.

A weight is (code - zero) * scale, codes and zeros of 4 bits, a scale and a zero for each group of inputs and each
output. The layouts, with 8 codes in a 32-bit word from the lowest bits on:

- GPTQ: `qweight` [in / 8, out], words along the inputs; `qzeros` [groups, out / 8]; `scales` [groups, out]; `g_idx`
  [in], the group of each input (any order with desc_act). Zeros are stored less 1, modulo 16, in the first version of
  the format and as they are in the second. (AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `pack` and
  `forward`; GPTQModel, gptqmodel/utils/model.py, `convert_gptq_v1_to_v2_format`.)
- AWQ: `qweight` [in, out / 8], words along the outputs, in which outputs 0 2 4 6 1 3 5 7 follow one another; `qzeros`
  and `scales` as above, the zeros in that order. (AutoAWQ, awq/utils/packing_utils.py, `AWQ_ORDER`;
  awq/modules/linear/gemm.py, `from_linear`.)

- compressed-tensors, pack-quantized: `weight_packed` [out, in / 8], words along the inputs; `weight_scale` [out,
  groups]; unless symmetric `weight_zero_point` [out / 8, groups], words along the outputs; with actorder `weight_g_idx`
  [in]; `weight_shape`. Codes and zeros are signed and stored with 8 added. float-quantized: `weight` in E4M3,
  `weight_scale` [out, 1], [1], or one a block. (compressed-tensors 0.20.0, compressors/pack_quantized and
  naive_quantized.)

Every folder is unpacked again by those formulas and compared before it is written.

    pip install numpy==2.4.6 safetensors
    python tools/make_packed.py
"""
import json
import pathlib

import numpy as np
from safetensors.numpy import save, save_file

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/moebius/tests/data/packed"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
D, HEADS, KV, D_HEAD, D_FF, VOCAB, EXPERTS = 64, 2, 1, 32, 32, 32, 2


def words(codes):
    """8 codes of the last axis in a word, the first in its lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return (parts << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def codes_of(packed):
    """The way back."""
    parts = packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return parts.reshape(*packed.shape[:-1], -1).astype(np.int32)


class Packer:
    def __init__(self, method, group, version, desc_act, symmetric, exact, seed):
        self.method, self.group, self.version, self.desc_act = method, group, version, desc_act
        self.symmetric, self.exact = symmetric, exact
        self.rng = np.random.default_rng(seed)

    def matrix(self, n_out, n_in):
        """Tensors of a module, and the weight [out, in] in f32."""
        rng, group = self.rng, n_in if self.group == -1 else self.group
        n_groups = -(-n_in // group)
        codes = rng.integers(0, 16, (n_in, n_out))
        # Both ends of the range, whose zeros less 1 wrap.
        zeros = np.full((n_groups, n_out), 8) if self.symmetric else rng.integers(0, 16, (n_groups, n_out))
        scales = rng.uniform(0.005, 0.02, (n_groups, n_out)).astype(np.float16)
        if not self.exact:
            # Three bits of mantissa: the products are exact in bf16.
            scales = (scales.view(np.uint16) & np.uint16(0xFF00)).view(np.float16)
        of_input = np.arange(n_in) // group
        if self.desc_act:
            of_input = rng.permutation(of_input)
        dense = ((codes - zeros[of_input]).astype(np.float32) * scales[of_input].astype(np.float32)).T
        if self.method == "compressed":
            stored = lambda a: words(np.ascontiguousarray(a))
            parts = {"weight_packed": stored(codes.T), "weight_scale": bf16(scales.T.astype(np.float32))}
            parts["weight_shape"] = np.array([n_out, n_in], np.int64)
            if not self.symmetric:
                parts["weight_zero_point"] = stored(zeros).T
            if self.desc_act:
                parts["weight_g_idx"] = of_input.astype(np.int32)
            # As signed numbers, which is how the library has them.
            signed = codes_of(parts["weight_packed"]).T - 8
            signed_zeros = 0 if self.symmetric else codes_of(np.ascontiguousarray(parts["weight_zero_point"].T)) - 8
            back = signed, np.broadcast_to(signed_zeros, zeros.shape)
        elif self.method == "gptq":
            less = 1 if self.version == "gptq" else 0
            parts = {
                "qweight": words(np.ascontiguousarray(codes.T)).T,
                "qzeros": words((zeros - less) & 15),
                "scales": scales,
                "g_idx": of_input.astype(np.int32),
            }
            back = codes_of(np.ascontiguousarray(parts["qweight"].T)).T, (codes_of(parts["qzeros"]) + less) & 15
        else:
            order = lambda a: a.reshape(*a.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(a.shape)
            undo = lambda a: a.reshape(*a.shape[:-1], -1, 8)[..., np.argsort(AWQ_ORDER)].reshape(a.shape)
            parts = {"qweight": words(order(codes)), "qzeros": words(order(zeros)), "scales": scales}
            back = undo(codes_of(parts["qweight"])), undo(codes_of(parts["qzeros"]))
        again = (back[0] - back[1][of_input]).astype(np.float32) * scales[of_input].astype(np.float32)
        assert np.array_equal(again.T, dense)
        return {name: np.ascontiguousarray(part) for name, part in parts.items()}, np.ascontiguousarray(dense)


def e4m3(codes):
    """The values of 8-bit floats, of which none is NaN."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(codes >> 7, -size, size).astype(np.float32)


class Floats:
    """Matrices of 8-bit floats; `scales` says what has one: `row`, `matrix`, or a block of so many rows and columns."""

    def __init__(self, scales, seed):
        self.scales, self.exact, self.rng = scales, False, np.random.default_rng(seed)

    def matrix(self, n_out, n_in):
        codes = self.rng.integers(0, 120, (n_out, n_in)) | self.rng.integers(0, 2, (n_out, n_in)) << 7
        block = {"row": (1, n_in), "matrix": (n_out, n_in)}.get(self.scales, self.scales)
        n = -(-n_out // block[0]), -(-n_in // block[1])
        # Two bits of mantissa: the products are exact in bf16.
        scales = self.rng.uniform(1e-4, 1e-3, n).astype(np.float32)
        scales = (scales.view(np.uint32) & np.uint32(0xFFE00000)).view(np.float32)
        spread = scales.repeat(block[0], 0)[:n_out].repeat(block[1], 1)[:, :n_in]
        stored = scales[0] if self.scales == "matrix" else scales
        return {"weight": codes.astype(np.uint8), "weight_scale": bf16(stored)}, e4m3(codes) * spread


def bf16(values):
    """The bytes of bf16; the values must be exact in it."""
    bits = values.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not exact in bf16"
    return (bits >> 16).astype(np.uint16)


def write(folder, config, tensors, floats):
    """`floats` says how the plain ones are stored: numpy's safetensors know no bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    data = {
        name: bf16(value) if value.dtype == np.float32 and floats == "BF16" else value
        for name, value in tensors.items()
    }
    if floats == "F32":
        save_file(data, folder / "model.safetensors")
        return
    blob = save(data)
    n = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + n])
    for info in header.values():
        info["dtype"] = {"U16": "BF16", "U8": "F8_E4M3"}.get(info["dtype"], info["dtype"])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + n :])


def model(arch, width):
    base = {
        "model_type": arch, "vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D_HEAD, "intermediate_size": D_FF,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": False,
    }
    n_q, n_kv = HEADS * D_HEAD, KV * D_HEAD
    attention = {"q": (n_q, width), "k": (n_kv, width), "v": (n_kv, width), "o": (width, n_q)}
    matrices = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    ffn = [(D_FF, width), (D_FF, width), (width, D_FF)]
    vectors, plain = {"input_layernorm": width, "post_attention_layernorm": width}, {}
    if arch == "llama":
        return base | {"architectures": ["LlamaForCausalLM"]}, matrices | {
            f"mlp.{name}_proj": shape for name, shape in zip(("gate", "up", "down"), ffn)
        }, vectors, plain
    if arch == "mixtral":
        more = {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS, "num_experts_per_tok": 1}
        stem, names, router = "block_sparse_moe.experts", ("w1", "w3", "w2"), "block_sparse_moe.gate"
    else:
        more = {
            "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "num_experts_per_tok": 1,
            "moe_intermediate_size": D_FF, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }
        stem, names, router = "mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate"
        vectors |= {"self_attn.q_norm": D_HEAD, "self_attn.k_norm": D_HEAD}
    for i in range(EXPERTS):
        matrices |= {f"{stem}.{i}.{name}": shape for name, shape in zip(names, ffn)}
    return base | more, matrices, vectors, {router: (EXPERTS, width)}


FOLDERS = {
    "llama-gptq-act": ("llama", "gptq", 32, "gptq", True, False, True),
    "llama-gptq-v2": ("llama", "gptq", -1, "gptq_v2", False, False, False),
    "mixtral-gptq": ("mixtral", "gptq", 128, "gptq", False, True, False),
    "qwen3moe-awq": ("qwen3_moe", "awq", 32, "gemm", False, False, False),
    "llama-awq-64": ("llama", "awq", 64, "gemm", False, False, False),
    "qwen3moe-compressed": ("qwen3_moe", "compressed", 32, "pack-quantized", False, True, False),
    "llama-compressed-zeros": ("llama", "compressed", -1, "pack-quantized", False, False, False),
    "llama-compressed-act": ("llama", "compressed", 32, "pack-quantized", True, False, False),
}
# With the width of the model: rows of 128 run as 8-bit floats, others are unpacked.
FLOATS = {
    "llama-compressed-fp8": ("llama", "row", 128),
    "llama-compressed-fp8-whole": ("llama", "matrix", D),
    "qwen3moe-compressed-fp8-block": ("qwen3_moe", (32, 32), D),
}


def compressed(config_format, weights):
    """What the config says of the weights of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": config_format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }


def folder(name, arch, width, packer, said):
    config, matrices, vectors, plain = model(arch, width)
    floats = lambda *shape: bf16_values(packer.rng, shape)
    shared = {"model.embed_tokens.weight": floats(VOCAB, width), "lm_head.weight": floats(VOCAB, width)}
    shared["model.norm.weight"] = floats(width)
    shared |= {f"model.layers.0.{key}.weight": floats(n) for key, n in vectors.items()}
    shared |= {f"model.layers.0.{key}.weight": floats(*shape) for key, shape in plain.items()}
    packed, dense = dict(shared), dict(shared)
    for module, shape in matrices.items():
        parts, weight = packer.matrix(*shape)
        packed |= {f"model.layers.0.{module}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}
        dense[f"model.layers.0.{module}.weight"] = weight
    write(OUT / name, config | {"quantization_config": said}, packed, "F32" if packer.exact else "BF16")
    write(OUT / f"{name}-dense", config, dense, "F32" if packer.exact else "BF16")


def main():
    for seed, (name, (arch, method, group, version, desc_act, symmetric, exact)) in enumerate(FOLDERS.items()):
        packer = Packer(method, group, version, desc_act, symmetric, exact, seed)
        said = {"quant_method": method, "bits": 4, "group_size": group}
        if method == "compressed":
            weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False}
            weights |= {"strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group}
            said = compressed(version, weights | {"actorder": "group" if desc_act else None})
        elif method == "gptq":
            said |= {"desc_act": desc_act, "sym": symmetric, "checkpoint_format": version}
        else:
            said |= {"version": version, "zero_point": True}
        folder(name, arch, D, packer, said)
    for seed, (name, (arch, scales, width)) in enumerate(FLOATS.items(), len(FOLDERS)):
        block = None if isinstance(scales, str) else list(scales)
        strategy = {"row": "channel", "matrix": "tensor"}.get(scales, "block")
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "block_structure": block}
        folder(name, arch, width, Floats(scales, seed), compressed("float-quantized", weights))


def bf16_values(rng, shape):
    values = rng.normal(0, 0.5, shape).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


if __name__ == "__main__":
    main()
