#!/usr/bin/env python3
"""Makes crates/quant/tests/data/golden_affine.bin: rows of MLX's quantised types and their values as MLX decodes them.

Needs mlx and numpy (pip install "mlx[cpu]" numpy). Run at the project root:  python3 tools/golden_affine.py

File, little endian: for each type  u32 bits, u32 values a group, u32 type of the scales (0: f16, 1: bf16, 2: f32,
3: e8m0, which is mxfp4), u32 values; then the bytes of the words, of the scales, of the biases (none for mxfp4), then
the values' f32 bits. Ends at the end of the file.

Rows: one that `mx.quantize` made, and one of random words with random scales. MLX decodes in the type of the scales;
here it is given the same scales as f32, so that only the products round (those of f32 scales are made exact).
"""

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np

BITS = [2, 3, 4, 5, 6, 8]
GROUPS = [32, 64, 128]
SCALES = [mx.float16, mx.bfloat16, mx.float32]
N = 128


def raw(x: mx.array) -> bytes:
    """The bytes of an array as a file holds them."""
    return np.array(x.view(mx.uint8)).tobytes()


def write(f, bits: int, group: int, kind: int, w: mx.array, scales: mx.array, biases: mx.array | None, x: mx.array):
    f.write(struct.pack("<4I", bits, group, kind, x.size))
    f.write(raw(w) + raw(scales) + (b"" if biases is None else raw(biases)) + raw(x))


def affine(f, rng: np.random.Generator, bits: int, group: int, kind: int) -> None:
    dtype = SCALES[kind]
    x = mx.array(rng.normal(0, 0.02, (1, N)).astype(np.float32))
    # Scales of few bits: f32 products of them are exact, so that it does not matter whether MLX fuses the addition.
    w, scales, biases = mx.quantize(x.astype(mx.bfloat16 if kind == 2 else dtype), group_size=group, bits=bits)
    words = mx.array(rng.integers(0, 2**32, w.shape, dtype=np.uint32))
    few = lambda: mx.array((rng.integers(-128, 128, scales.shape) / 4096).astype(np.float32))
    for w, scales, biases in [(w, scales, biases), (words, few(), few())]:
        scales, biases = scales.astype(dtype), biases.astype(dtype)
        y = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
        write(f, bits, group, kind, w, scales, biases, y)


def mxfp4(f, rng: np.random.Generator) -> None:
    x = mx.array(rng.normal(0, 0.02, (1, N)).astype(np.float32))
    w, scales = mx.quantize(x, group_size=32, bits=4, mode="mxfp4")
    words = mx.array(rng.integers(0, 2**32, w.shape, dtype=np.uint32))
    exponents = mx.array(np.array([[2, 90, 127, 140]], np.uint8))
    for w, scales in [(w, scales), (words, exponents)]:
        y = mx.dequantize(w, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
        # Minus zero, code 8, is zero in the engine.
        write(f, 4, 32, 3, w, scales, None, y + 0.0)


def main() -> None:
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(20260101)
    out = Path("crates/quant/tests/data/golden_affine.bin")
    with open(out, "wb") as f:
        for bits in BITS:
            for group in GROUPS:
                for kind in range(len(SCALES)):
                    affine(f, rng, bits, group, kind)
        mxfp4(f, rng)
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
