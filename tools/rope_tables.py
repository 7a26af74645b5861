#!/usr/bin/env python3
"""Writes rotary tables of stretched contexts by transformers' own code, for the tests of `crates/model`.

    python3 tools/rope_tables.py > crates/model/tests/data/rope_tables.json

Requires transformers and numpy. `modeling_rope_utils` computes on tensors; here its functions run on arrays of 64-bit
numbers in their place, so that tables can be compared closely at large positions.
"""

import json
import types

import numpy as np
import transformers.modeling_rope_utils as rope


class Array(np.ndarray):
    """An array with the few methods of a tensor that the functions call."""

    def to(self, **_):
        return self.astype(np.float64)


def arange(*args, **_):
    return np.arange(*args).astype(np.float64).view(Array)


rope.torch = types.SimpleNamespace(
    arange=arange, clamp=np.clip, float=np.float64, float32=np.float64, int64=np.int64, Tensor=Array, where=np.where
)

POSITIONS = [1, 4095, 32768, 131071, 262143]


def case(name, function, d_head, base, n_ctx, seq_len=None, **parameters):
    config = types.SimpleNamespace(
        head_dim=d_head,
        hidden_size=d_head,
        num_attention_heads=1,
        max_position_embeddings=n_ctx,
        rope_parameters={"rope_theta": base, "rope_type": name, **parameters},
        standardize_rope_params=lambda: None,
    )
    inv_freq, factor = function(config, seq_len=seq_len)
    angles = np.outer(POSITIONS, np.asarray(inv_freq))
    return {
        "rule": name,
        "d_head": d_head,
        "base": base,
        "n_ctx": n_ctx,
        "factor": parameters["factor"],
        "n_ctx_orig": parameters.get("original_max_position_embeddings"),
        "inv_freq": np.asarray(inv_freq).tolist(),
        "attention_factor": float(factor),
        "positions": POSITIONS,
        "cos": np.cos(angles).tolist(),
        "sin": np.sin(angles).tolist(),
    }


def main():
    yarn, linear = rope._compute_yarn_parameters, rope._compute_linear_scaling_rope_parameters
    dynamic = rope._compute_dynamic_ntk_parameters
    orig = "original_max_position_embeddings"
    cases = [
        case("yarn", yarn, 32, 1e6, 32768, factor=4.0, **{orig: 32768}),
        case("yarn", yarn, 32, 1e4, 4096, factor=64.0, **{orig: 4096}),
        case("yarn", yarn, 32, 5e6, 40960, factor=8.0, **{orig: 32768}),
        case("linear", linear, 32, 1e4, 65536, factor=4.0),
        case("linear", linear, 32, 1e6, 32768, factor=8.0),
        case("dynamic", dynamic, 32, 1e4, 32768, seq_len=65536, factor=2.0),
        case("dynamic", dynamic, 32, 1e6, 4096, seq_len=6144, factor=1.5),
        case("dynamic", dynamic, 32, 5e5, 32768, seq_len=262144, factor=8.0),
    ]
    print("[" + ",\n".join(json.dumps(case) for case in cases) + "]")


main()
