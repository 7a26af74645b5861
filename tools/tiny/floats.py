"""floats: a tiny mixture of experts in FP8 and one in NVFP4, as they are published, on weights decoded by the original
definitions, in torch:

- FP8: `weight` in E4M3 (torch.float8_e4m3fn) times `weight_scale_inv` of its block of 128 x 128, as DeepSeek-V3 was
  published (inference/kernel.py, `weight_dequant`).
- NVFP4: E2M1 codes, a scale in E4M3 for each 16 of a row, and an f32 for the matrix (NVIDIA's ModelOpt). The file holds
  them as llama.cpp's converter writes them: blocks, and a tensor `.scale` with an f32 for each expert. gguf-py decodes
  the blocks to the same numbers, bit by bit, which is asserted here."""
import json

import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from .archs import arch_tensors, rope, write_experts, write_heads
from .files import DATA, N_TOKENS, ORIGINAL, answers, finish, open_gguf, save
from .types import MIN_MARGIN
from .witness import is_plain, original, randomize

OUT = DATA / "floats"
MODELS = ("qwen3moe-fp8", "qwen3moe-nvfp4")
BLOCK, GROUP = 128, 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
SHARED = dict(vocab_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
              max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
              tie_word_embeddings=False, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
              num_experts_per_tok=2, rope_parameters=rope("default"))


def model(seed, **settings):
    torch.manual_seed(seed)
    width = settings["moe_intermediate_size"]
    return randomize(original("Qwen3Moe", **SHARED, intermediate_size=width, **settings), special_values)


def special_values(key, p, r):
    """Of matrices the same as elsewhere, rounded in another order, as the files of the tree have it."""
    if p.ndim == 1 or "embed_tokens" in key:
        return None
    return r * ((3 if "lm_head" in key else 2 if ".gate.weight" in key else 1) / p.shape[-1] ** 0.5)


def prompt(seed):
    return np.random.default_rng(seed).integers(0, SHARED["vocab_size"], N_TOKENS)


def is_coded(key):
    """Matrices of attention and experts; embedding, head and router stay as they are."""
    return "_proj" in key


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
    golden, margins = answers(made, prompt(seed))
    return made, parts, golden, margins.min()


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
    tensors = arch_tensors("qwen3moe", made)
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
                state[f"{layer}{ORIGINAL[part]}.weight"].copy_(torch.from_numpy(coded[f"{blk}{part}.weight"][2]))
            stacks = [coded[f"{blk}ffn_{part}_exps.weight"][2] for part in ("gate", "up", "down")]
            gate, up, down = map(torch.from_numpy, stacks)
            state[f"{layer}mlp.experts.gate_up_proj"].copy_(torch.cat([gate, up], 1))
            state[f"{layer}mlp.experts.down_proj"].copy_(down)
    golden, margins = answers(made, prompt(seed))
    return made, (tensors, coded), golden, margins.min()


def write_nvfp4(made, parts):
    tensors, coded = parts
    c = made.config
    w = open_gguf(OUT / "qwen3moe-nvfp4.gguf", "qwen3moe", c)
    write_heads(w, c)
    w.add_rope_dimension_count(c.head_dim)
    write_experts(w, c)
    for name, values in tensors.items():
        if name in coded:
            blocks, whole, _ = coded[name]
            w.add_tensor(name, blocks, raw_dtype=T.NVFP4)
            w.add_tensor(name.removesuffix("weight") + "scale", whole)
        elif is_plain(name, values):
            w.add_tensor(name, np.ascontiguousarray(values))
        else:
            w.add_tensor(name, quantize(np.ascontiguousarray(values), T.BF16), raw_dtype=T.BF16)
    finish(w)


def build(name):
    make, write = {"qwen3moe-fp8": (make_fp8, write_fp8), "qwen3moe-nvfp4": (make_nvfp4, write_nvfp4)}[name]
    OUT.mkdir(parents=True, exist_ok=True)
    for seed in range(100):
        made, parts, golden, margin = make(seed)
        if margin >= MIN_MARGIN and len(set(golden["greedy"].tolist())) >= 6:
            break
    else:
        raise SystemExit(f"{name}: no seed below 100 keeps its choices apart")
    write(made, parts)
    save(golden, OUT / f"{name}.golden.safetensors")
    print(f"{name:24} seed {seed:3}  std {golden['logits'].std():.2f}  margin {margin:.3f}", flush=True)
