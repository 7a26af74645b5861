#!/usr/bin/env python3
"""Makes crates/quant/tests/data/golden_blocks.bin: blocks of every weight type and their values as gguf-py decodes them.

Needs numpy and gguf (pip install gguf). Run at the project root:  python3 tools/golden_blocks.py

File, little endian: for each type  u32 ggml id, u32 n blocks, u32 values a block, u32 bytes a block,
then the blocks' bytes, then the values' f32 bits. Ends at the end of the file.

Blocks: all bits zero, all bits one with scale 1, extremes with scale -1, special scales (smallest and largest
subnormal, largest finite, inf, NaN, -0), and random bits with plausible and with random scales.
"""

import struct
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

# type -> byte offsets of its f16 scales (MXFP4, NVFP4: none, their scales are bytes)
SCALES = {
    T.F32: [], T.F16: [], T.BF16: [],
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [],
    T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0], T.IQ3_XXS: [0], T.IQ3_S: [0], T.IQ1_S: [0], T.IQ1_M: [],
    T.TQ1_0: [52], T.TQ2_0: [64],
    T.NVFP4: [],
}
SPECIAL = [0x0001, 0x03FF, 0x8001, 0x7BFF, 0xFBFF, 0x8000, 0x7C00, 0xFC00, 0x7E00]


def with_scales(block: np.ndarray, offsets: list[int], bits: list[int]) -> np.ndarray:
    block = block.copy()
    for at, b in zip(offsets, bits):
        block[at : at + 2] = np.frombuffer(struct.pack("<H", b), np.uint8)
    return block


def blocks_of(t: T, rng: np.random.Generator) -> np.ndarray:
    size = GGML_QUANT_SIZES[t][1]
    if t in (T.F32, T.BF16):
        return rng.integers(0, 256, (256, size), dtype=np.uint8)
    if t == T.F16:  # every 127th half, and the special ones
        every = np.arange(0, 65536, 127, dtype=np.uint16)
        return np.concatenate([every, np.array(SPECIAL, np.uint16)]).view(np.uint8).reshape(-1, 2)
    if t == T.MXFP4:
        out = rng.integers(0, 256, (24, size), dtype=np.uint8)
        out[:12, 0] = [0, 1, 2, 3, 126, 127, 128, 129, 252, 253, 254, 255]
        return out
    if t == T.NVFP4:  # every scale
        out = rng.integers(0, 256, (64, size), dtype=np.uint8)
        out[:, :4] = np.arange(256).reshape(64, 4)
        return out
    if t == T.IQ1_M:  # its scale's bits lie in four places; their random ones are infinite or NaN now and then
        return np.concatenate([np.zeros((1, size), np.uint8), rng.integers(0, 256, (7, size), dtype=np.uint8)])
    at = SCALES[t]
    zero, ones = np.zeros(size, np.uint8), np.full(size, 255, np.uint8)
    random = lambda: rng.integers(0, 256, size, dtype=np.uint8)
    out = [zero, with_scales(ones, at, [0x3C00, 0x3C00]), with_scales(zero, at, [0xBC00, 0xBC00])]
    # Super-blocks are long; fewer of them keep the file small.
    special, n_random = (SPECIAL, 6) if size < 64 else ([0x8001, 0xFBFF, 0x7C00], 2)
    out += [with_scales(random(), at, [s, 0x3400]) for s in special]
    out += [with_scales(random(), at, [0x2345, s]) for s in special[:2]] if len(at) == 2 else []
    out += [with_scales(random(), at, list(rng.integers(0x0C00, 0x2400, 2))) for _ in range(n_random)]
    return np.stack(out)


def main() -> None:
    rng = np.random.default_rng(20260101)
    out = Path("crates/quant/tests/data/golden_blocks.bin")
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "wb") as f, np.errstate(all="ignore"):
        for t in SCALES:
            block_len, size = GGML_QUANT_SIZES[t]
            blocks = blocks_of(t, rng)
            values = np.ascontiguousarray(quants.dequantize(blocks, t), np.float32)
            assert values.size == len(blocks) * block_len
            f.write(struct.pack("<4I", t, len(blocks), block_len, size))
            f.write(blocks.tobytes())
            f.write(values.tobytes())
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
