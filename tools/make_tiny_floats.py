#!/usr/bin/env python3
"""Makes crates/backend/tests/data/floats: a tiny mixture of experts in FP8 and one in NVFP4, as they are published, and
their exact logits (README.md there).

The witness is transformers (f32, eager attention, on the CPU) on weights decoded by the original definitions, in torch:

- FP8: `weight` in E4M3 (torch.float8_e4m3fn) times `weight_scale_inv` of its block of 128 x 128, as DeepSeek-V3 was
  published (inference/kernel.py, `weight_dequant`).
- NVFP4: E2M1 codes, a scale in E4M3 for each 16 of a row, and an f32 for the matrix (NVIDIA's ModelOpt). The file holds
  them as llama.cpp's converter writes them: blocks, and a tensor `.scale` with an f32 for each expert. gguf-py decodes
  the blocks to the same numbers, bit by bit, which is asserted here.

    pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 safetensors
    python tools/make_tiny_floats.py
"""
import json

import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import save_file

import make_tiny_models as tiny

OUT = tiny.DATA / "floats"
BLOCK, GROUP = 128, 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SHARED = dict(vocab_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
              max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
              tie_word_embeddings=False, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
              num_experts_per_tok=2, rope_parameters=tiny.ROPE("default"))


def model(seed, **settings):
    """A model whose activations stay O(1) and whose router is decisive; every weight exact in bf16."""
    torch.manual_seed(seed)
    made = tiny.original("Qwen3Moe", **SHARED, intermediate_size=settings["moe_intermediate_size"], **settings)
    with torch.no_grad():
        for key, p in made.named_parameters():
            r = torch.randn(p.shape)
            if p.ndim == 1:
                r = 1 + 0.1 * r
            elif "embed_tokens" not in key:
                r *= (3 if "lm_head" in key else 2 if ".gate.weight" in key else 1) / p.shape[-1] ** 0.5
            p.copy_(r.to(torch.bfloat16).float())
    return made


def is_coded(key):
    """Matrices of attention and experts; embedding, head and router stay as they are."""
    return "_proj" in key


def answers(made, seed):
    ids = np.random.default_rng(seed).integers(0, SHARED["vocab_size"], tiny.N_TOKENS)
    greedy, margins = tiny.go_on(made, ids)
    logits = tiny.run(made, ids)
    print(f"std {logits.std():.2f}  margin {margins.min():.3f}  {len(set(greedy.tolist()))} unlike tokens", flush=True)
    return {"tokens": ids.astype(np.int32), "logits": logits, "greedy": greedy}, margins.min()


def fp8_of(w):
    """Codes and scales of a matrix, and the numbers that they stand for."""
    rows, columns = w.shape
    scales = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    codes, back = torch.zeros_like(w).to(torch.float8_e4m3fn), torch.zeros_like(w)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = w[at].abs().max() / 448
            codes[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
            back[at] = codes[at].float() * scales[i, j]
    return codes, scales, back


def make_fp8(seed):
    made = model(seed, hidden_size=256, moe_intermediate_size=BLOCK, num_experts=3)
    parts = {}
    with torch.no_grad():
        for key, p in made.named_parameters():
            if not is_coded(key):
                parts[key] = p.to(torch.bfloat16)
                continue
            stack = p.data if p.ndim == 3 else p.data[None]
            for i, matrix in enumerate(stack):
                # Published files have a matrix for each expert, gate and up apart.
                half = matrix.shape[0] // 2
                pieces = {key: matrix}
                if p.ndim == 3:
                    stem, name = key.split("experts.")
                    pieces = {f"{stem}experts.{i}.down_proj.weight": matrix}
                    if name == "gate_up_proj":
                        halves = ("gate_proj", matrix[:half]), ("up_proj", matrix[half:])
                        pieces = {f"{stem}experts.{i}.{name}.weight": values for name, values in halves}
                for name, values in pieces.items():
                    codes, scales, back = fp8_of(values)
                    parts[name], parts[f"{name}_scale_inv"] = codes, scales
                    values.copy_(back)
    golden, margin = answers(made, seed)
    return made, parts, golden, margin


def write_fp8(made, parts):
    folder = OUT / "qwen3moe-fp8"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads(made.config.to_json_string(use_diff=False))
    sizes = ["hidden_size", "intermediate_size", "moe_intermediate_size"]
    kept = [*SHARED, *sizes, "model_type", "hidden_act"]
    config = {key: config[key] for key in kept if config.get(key) is not None}
    config |= {"num_experts": made.config.num_experts, "architectures": ["Qwen3MoeForCausalLM"],
               "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def nvfp4_of(w):
    """Codes [rows, columns], scales [rows, columns / 16] and f32 of a matrix, and the numbers that they stand for."""
    whole = w.abs().max() / (6 * 448)
    runs = w.reshape(w.shape[0], -1, GROUP)
    scales = (runs.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    each = scales.float()[..., None] * whole
    codes = ((runs / each)[..., None] - E2M1).abs().argmin(-1)
    # In the order of the definition: a code times its scale, and that times the matrix's.
    back = E2M1[codes] * scales.float()[..., None] * whole
    return codes.reshape(w.shape), scales, whole, back.reshape(w.shape)


def nvfp4_blocks(codes, scales):
    """As in GGUF files: of 64 numbers four scales, then for each 16 eight bytes, number i low and number i + 8 high."""
    rows = codes.shape[0]
    codes = codes.numpy().astype(np.uint8).reshape(rows, -1, 4, 2, GROUP // 2)
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(rows, -1, 32)
    scales = scales.view(torch.uint8).numpy().reshape(rows, -1, 4)
    return np.concatenate([scales, packed], -1).reshape(rows, -1)


def make_nvfp4(seed):
    made = model(seed, hidden_size=128, moe_intermediate_size=64, num_experts=4)
    coded = {}
    tensors = tiny.arch_tensors("qwen3moe", made)
    for name, values in tensors.items():
        if "attn_" not in name and "_exps" not in name or values.ndim < 2:
            continue
        stack = torch.from_numpy(np.ascontiguousarray(values)).reshape(-1, *values.shape[-2:])
        found = [nvfp4_of(matrix) for matrix in stack]
        blocks = np.stack([nvfp4_blocks(codes, scales) for codes, scales, _, _ in found])
        whole = np.array([f[2] for f in found], np.float32)
        back = np.stack([f[3].numpy() for f in found])
        theirs = dequantize(blocks, T.NVFP4).reshape(back.shape) * whole[:, None, None]
        assert np.array_equal(theirs, back), name
        coded[name] = (blocks.reshape(*values.shape[:-1], -1), whole, back.reshape(values.shape))
    state = made.state_dict()
    with torch.no_grad():
        for i in range(SHARED["num_hidden_layers"]):
            layer, blk = f"model.layers.{i}.", f"blk.{i}."
            for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
                state[f"{layer}{tiny.NAMES[part]}.weight"].copy_(torch.from_numpy(coded[f"{blk}{part}.weight"][2]))
            stacks = [coded[f"{blk}ffn_{part}_exps.weight"][2] for part in ("gate", "up", "down")]
            gate, up, down = map(torch.from_numpy, stacks)
            state[f"{layer}mlp.experts.gate_up_proj"].copy_(torch.cat([gate, up], 1))
            state[f"{layer}mlp.experts.down_proj"].copy_(down)
    golden, margin = answers(made, seed)
    return made, (tensors, coded), golden, margin


def write_nvfp4(made, parts):
    tensors, coded = parts
    c = made.config
    w = GGUFWriter(OUT / "qwen3moe-nvfp4.gguf", "qwen3moe")
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    tiny.write_heads(w, c)
    w.add_rope_dimension_count(c.head_dim)
    tiny.write_experts(w, c)
    for name, values in tensors.items():
        if name in coded:
            blocks, whole, _ = coded[name]
            w.add_tensor(name, blocks, raw_dtype=T.NVFP4)
            w.add_tensor(name.removesuffix("weight") + "scale", whole)
        elif tiny.is_plain(name, values):
            w.add_tensor(name, np.ascontiguousarray(values))
        else:
            w.add_tensor(name, tiny.quantize(np.ascontiguousarray(values), T.BF16), raw_dtype=T.BF16)
    tiny.finish(w)


def main():
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    kinds = [("qwen3moe-fp8", make_fp8, write_fp8), ("qwen3moe-nvfp4", make_nvfp4, write_nvfp4)]
    for name, make, write in kinds:
        for seed in range(100):
            made, parts, golden, margin = make(seed)
            if margin >= tiny.MIN_MARGIN and len(set(golden["greedy"].tolist())) >= 6:
                break
        else:
            raise SystemExit(f"{name}: no seed below 100 keeps its choices apart")
        write(made, parts)
        tiny.save_file(golden, OUT / f"{name}.golden.safetensors")
        (OUT / f"{name}.golden.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
