#!/usr/bin/env python3
"""Makes crates/conformance/tests/data/routers.safetensors: the choices of the routers of the original model code.

The witness is transformers: each router module runs on 10,000 rows of logits, given to it through an identity matrix. The
logits are a hash of row and expert on a grid of eighths, so that ties are frequent and the test can make them again; torch
leaves ties open, so `topk` is replaced by a stable sort, which gives them to the lower id. A seed is taken when no two
different numbers that a choice depends on are closer than f32 rounding.

For each router NAME: `NAME.ids` u16 [10000], a digest of the ids in order; `NAME.sums` f32 [625], sums over 16 rows of
weights times one plus their slot; `NAME.seed`, and `NAME.bias` and `NAME.expert_scale` where it has them.

    pip install torch==2.15.0 transformers==5.23.0 numpy==2.4.6 safetensors
    python tools/router_golden.py
"""
import pathlib

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import DeepseekV2Config, DeepseekV3Config, Gemma4TextConfig, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/conformance/tests/data/routers.safetensors"
N_ROWS = 10_000
ROUNDING = 3e-7


def mix(x):
    """splitmix64."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hashes(seed, n_rows, n_expert):
    row, expert = np.arange(n_rows, dtype=np.uint64)[:, None], np.arange(n_expert, dtype=np.uint64)
    return mix((np.uint64(seed) << np.uint64(32)) + (row << np.uint64(10)) + expert) >> np.uint64(40)


def logits(seed, n_expert):
    return ((hashes(seed, N_ROWS, n_expert) % np.uint64(129)).astype(np.float32) / 8 - np.float32(8) + np.float32(1 / 32)).astype(np.float32)


def stable_topk(x, k, dim=-1, largest=True, sorted=True):
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def qwen(n_expert, k, norm):
    return Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=n_expert, num_experts_per_tok=k, hidden_size=n_expert, num_attention_heads=1, norm_topk_prob=norm))


def deepseek_v2(n_expert, k, **how):
    return DeepseekV2TopkRouter(DeepseekV2Config(n_routed_experts=n_expert, num_experts_per_tok=k, hidden_size=n_expert, num_attention_heads=1,
                                                 routed_scaling_factor=16.0, **how))


def deepseek_v3(n_expert, k, n_group, topk_group, norm=True):
    return DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=n_expert, num_experts_per_tok=k, hidden_size=n_expert, num_attention_heads=1, n_group=n_group,
                                                 topk_group=topk_group, norm_topk_prob=norm, routed_scaling_factor=2.5))


def glm(n_expert, k):
    return Glm4MoeTopkRouter(Glm4MoeConfig(n_routed_experts=n_expert, num_experts_per_tok=k, hidden_size=n_expert, num_attention_heads=1, routed_scaling_factor=1.5))


def gpt_oss(n_expert, k):
    return GptOssTopKRouter(GptOssConfig(num_local_experts=n_expert, num_experts_per_tok=k, hidden_size=n_expert, num_attention_heads=1))


def gemma(n_expert, k):
    router = Gemma4TextRouter(Gemma4TextConfig(num_experts=n_expert, top_k_experts=k, hidden_size=n_expert, num_attention_heads=1, enable_moe_block=True))
    router.norm, router.scalar_root_size = torch.nn.Identity(), 1.0  # its own norm is another op
    return router


# name: the module, number of experts. The same table is in crates/backend/src/router_cases.rs.
ROUTERS = {
    "qwen3moe": (lambda: qwen(32, 4, True), 32),
    "qwen3moe_plain": (lambda: qwen(33, 5, False), 33),
    "deepseek_v2_lite": (lambda: deepseek_v2(64, 6, topk_method="greedy"), 64),
    "deepseek_v2": (lambda: deepseek_v2(48, 6, topk_method="group_limited_greedy", n_group=8, topk_group=3), 48),
    "deepseek_v3": (lambda: deepseek_v3(64, 8, 8, 4), 64),
    "deepseek_v3_plain": (lambda: deepseek_v3(36, 3, 3, 1, norm=False), 36),
    "glm4moe": (lambda: glm(40, 8), 40),
    "gpt_oss": (lambda: gpt_oss(32, 4), 32),
    "gemma4": (lambda: gemma(24, 8), 24),
}


def close_call(router, x, bias):
    """Whether two different numbers that the choice depends on are within rounding of each other in some row."""
    if bias is None:
        return False
    choice = torch.sigmoid(x).double() + bias.double()
    groups = choice.view(N_ROWS, router.num_group, -1)
    worth = stable_topk(groups, 2)[0].sum(-1)
    for numbers in (choice, worth):
        gaps = torch.sort(numbers, -1).values.diff(dim=-1)
        if ((gaps > 0) & (gaps < ROUNDING)).any():
            return True
    return False


def run(name, make, n_expert):
    for seed in range(1, 200):
        x = torch.from_numpy(logits(seed, n_expert))
        router, arrays = make(), {}
        eye = torch.eye(n_expert)
        (router.proj if hasattr(router, "proj") else router).weight = torch.nn.Parameter(eye)
        bias = getattr(router, "e_score_correction_bias", None)
        own = hashes(seed + 1000, 1, n_expert)[0]
        if bias is not None:
            # Some scores fall below 0, so that masking closed groups with 0 would be seen.
            bias.copy_(torch.from_numpy((np.float32([-613, -411, -200, -97, 33, 150, 277, 391])[own % np.uint64(8)] / 1024)))
            arrays["bias"] = bias.numpy()
        if hasattr(router, "per_expert_scale"):
            scale = torch.from_numpy((1 + (own % np.uint64(7)).astype(np.float32) / 8).astype(np.float32))
            router.per_expert_scale = torch.nn.Parameter(scale)
            arrays["expert_scale"] = scale.numpy()
        if not close_call(router, x, bias):
            break
    else:
        raise SystemExit(f"{name}: no seed without a close call")
    with torch.no_grad():
        _, weights, ids = router(x)
    ids, weights = ids.numpy().astype(np.uint64), weights.float().numpy()
    digest = np.zeros(N_ROWS, np.uint64)
    for slot in range(ids.shape[1]):
        digest = (digest * np.uint64(1031) + ids[:, slot] + np.uint64(1)) % np.uint64(65521)
    slots = np.arange(1, ids.shape[1] + 1)
    sums = (weights.astype(np.float64) * slots).reshape(N_ROWS // 16, -1).sum(1)
    ties = (np.diff(np.sort(x.numpy(), 1), axis=1) == 0).any(1).mean()
    print(f"{name:20} seed {seed:3}  rows with equal logits {ties:.0%}")
    arrays |= {"ids": digest.astype(np.uint16), "sums": sums.astype(np.float32), "seed": np.array([seed], np.uint32)}
    return {f"{name}.{key}": value for key, value in arrays.items()}


def main():
    torch.topk = stable_topk
    torch.Tensor.topk = stable_topk
    torch.set_num_threads(1)
    arrays = {}
    for name, (make, n_expert) in ROUTERS.items():
        arrays |= run(name, make, n_expert)
    save_file(arrays, OUT)
    print(OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
