#!/usr/bin/env python3
"""Makes crates/moebius/tests/data/packed: tiny folders with weights of 4 bits as GPTQ and AWQ publish them, and beside
each the same values as plain floats.

A weight is (code - zero) * scale, codes and zeros of 4 bits, a scale and a zero for each group of inputs and each
output. The layouts, with 8 codes in a 32-bit word from the lowest bits on:

- GPTQ: `qweight` [in / 8, out], words along the inputs; `qzeros` [groups, out / 8]; `scales` [groups, out]; `g_idx` [in],
  the group of each input (any order with desc_act). Zeros are stored less 1, modulo 16, in the first version of the
  format and as they are in the second. (AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `pack` and `forward`;
  GPTQModel, gptqmodel/utils/model.py, `convert_gptq_v1_to_v2_format`.)
- AWQ: `qweight` [in, out / 8], words along the outputs, in which outputs 0 2 4 6 1 3 5 7 follow one another; `qzeros` and
  `scales` as above, the zeros in that order. (AutoAWQ, awq/utils/packing_utils.py, `AWQ_ORDER`; awq/modules/linear/gemm.py,
  `from_linear`.)

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
        if self.method == "gptq":
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
        name: bf16(value) if value.dtype == np.float32 and floats == "BF16" else value for name, value in tensors.items()
    }
    if floats == "F32":
        save_file(data, folder / "model.safetensors")
        return
    blob = save(data)
    n = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + n])
    for info in header.values():
        info["dtype"] = "BF16" if info["dtype"] == "U16" else info["dtype"]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + n :])


def model(arch):
    base = {
        "model_type": arch, "vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": D_HEAD, "intermediate_size": D_FF, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": False,
    }
    attention = {"q": (HEADS * D_HEAD, D), "k": (KV * D_HEAD, D), "v": (KV * D_HEAD, D), "o": (D, HEADS * D_HEAD)}
    matrices = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    ffn, vectors = [(D_FF, D), (D_FF, D), (D, D_FF)], {"input_layernorm": D, "post_attention_layernorm": D}
    plain = {}
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
    return base | more, matrices, vectors, {router: (EXPERTS, D)}


FOLDERS = {
    "llama-gptq-act": ("llama", "gptq", 32, "gptq", True, False, True),
    "llama-gptq-v2": ("llama", "gptq", -1, "gptq_v2", False, False, False),
    "mixtral-gptq": ("mixtral", "gptq", 128, "gptq", False, True, False),
    "qwen3moe-awq": ("qwen3_moe", "awq", 32, "gemm", False, False, False),
    "llama-awq-64": ("llama", "awq", 64, "gemm", False, False, False),
}


def main():
    for seed, (name, (arch, method, group, version, desc_act, symmetric, exact)) in enumerate(FOLDERS.items()):
        packer = Packer(method, group, version, desc_act, symmetric, exact, seed)
        config, matrices, vectors, plain = model(arch)
        floats = lambda *shape: bf16_values(packer.rng, shape)
        shared = {"model.embed_tokens.weight": floats(VOCAB, D), "lm_head.weight": floats(VOCAB, D)}
        shared["model.norm.weight"] = floats(D)
        shared |= {f"model.layers.0.{key}.weight": floats(n) for key, n in vectors.items()}
        shared |= {f"model.layers.0.{key}.weight": floats(*shape) for key, shape in plain.items()}
        packed, dense = dict(shared), dict(shared)
        for module, shape in matrices.items():
            parts, weight = packer.matrix(*shape)
            packed |= {f"model.layers.0.{module}.{part}": value for part, value in parts.items()}
            dense[f"model.layers.0.{module}.weight"] = weight
        said = {"quant_method": method, "bits": 4, "group_size": group}
        if method == "gptq":
            said |= {"desc_act": desc_act, "sym": symmetric, "checkpoint_format": version}
        else:
            said |= {"version": version, "zero_point": True}
        write(OUT / name, config | {"quantization_config": said}, packed, "F32" if exact else "BF16")
        write(OUT / f"{name}-dense", config, dense, "F32" if exact else "BF16")


def bf16_values(rng, shape):
    values = rng.normal(0, 0.5, shape).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


if __name__ == "__main__":
    main()
