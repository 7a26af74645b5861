#!/usr/bin/env python3
"""GGUF of an image encoder with random weights in the exact shape of Qwen3.5's and Qwen3-VL's (27 layers of 1,152), as
llama.cpp's converter writes it.

  make_mmproj.py --out mmproj.gguf [--width 2048] [--type F16] [--deepstack 8,16,24] [--image photo.png]

For speed and memory only. --width is that of the text model, e.g. of `make_shape.py --model qwen35-35b`; --deepstack
names layers whose features are added in the text model (Qwen3-VL). --image also writes noise of 1,024 x 1,024 pixels.
Needs: pip install 'gguf>=0.18' numpy.
"""
import argparse
import struct
import zlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

D, D_FF, HEADS, PATCH, MERGE, SIDE = 1152, 4304, 16, 16, 2, 48


def tensors(args, tapped):
    """Name, shape, and whether it is a matrix of --type."""
    for end in ("", ".1"):
        yield f"v.patch_embd.weight{end}", (D, 3, PATCH, PATCH), False
    yield "v.patch_embd.bias", (D,), False
    yield "v.position_embd.weight", (SIDE * SIDE, D), False
    parts = {"attn_qkv": (3 * D, D), "attn_out": (D, D), "ffn_up": (D_FF, D), "ffn_down": (D, D_FF)}
    for i in range(args.layers):
        for name in ("ln1", "ln2"):
            yield f"v.blk.{i}.{name}.weight", (D,), False
            yield f"v.blk.{i}.{name}.bias", (D,), False
        for name, shape in parts.items():
            yield f"v.blk.{i}.{name}.weight", shape, True
            yield f"v.blk.{i}.{name}.bias", shape[:1], False
    wide = D * MERGE * MERGE
    for i in tapped:
        yield f"v.deepstack.{i}.norm.weight", (wide,), False
        yield f"v.deepstack.{i}.norm.bias", (wide,), False
        for name, shape in (("fc1", (wide, wide)), ("fc2", (args.width, wide))):
            yield f"v.deepstack.{i}.{name}.weight", shape, True
            yield f"v.deepstack.{i}.{name}.bias", shape[:1], False
    yield "v.post_ln.weight", (D,), False
    yield "v.post_ln.bias", (D,), False
    for name, shape in (("mm.0", (wide, wide)), ("mm.2", (args.width, wide))):
        yield f"{name}.weight", shape, True
        yield f"{name}.bias", shape[:1], False


def values(name, shape, rng):
    if name.endswith(".bias"):
        return 0.02 * rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return (1 + 0.05 * rng.standard_normal(shape)).astype(np.float32)
    std = 0.1 if "position" in name else 1 / np.prod(shape[1:]) ** 0.5
    return std * rng.standard_normal(shape, dtype=np.float32)


def write_noise(path, rng):
    pixels = rng.integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1024, 1024, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)))
        file.write(chunk(b"IEND", b""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--type", default="F16", choices=["F32", "F16", "BF16", "Q8_0"])
    parser.add_argument("--deepstack", default="")
    parser.add_argument("--image")
    args = parser.parse_args()
    tapped = [int(i) for i in args.deepstack.split(",") if i]
    w = gguf.GGUFWriter(args.out, "clip")
    w.add_name("Qwen3.5 image encoder shape, random")
    w.add_type("mmproj")
    w.add_bool("clip.has_vision_encoder", True)
    w.add_bool("clip.use_gelu", True)
    w.add_string("clip.projector_type", "qwen3vl_merger")
    counts = {
        "projection_dim": args.width, "patch_size": PATCH, "embedding_length": D, "feed_forward_length": D_FF,
        "image_size": SIDE * PATCH, "block_count": args.layers, "attention.head_count": HEADS,
        "spatial_merge_size": MERGE,
    }
    for name, n in counts.items():
        w.add_uint32(f"clip.vision.{name}", n)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    w.add_array("clip.vision.image_mean", [0.5] * 3)
    w.add_array("clip.vision.image_std", [0.5] * 3)
    w.add_array("clip.vision.is_deepstack_layers", [i in tapped for i in range(args.layers)])
    rng = np.random.default_rng(1)
    for name, shape, is_matrix in tensors(args, tapped):
        x = values(name, shape, rng)
        kind = T[args.type] if is_matrix else T.F32
        if "patch_embd.weight" in name and args.type != "F32":
            kind = T.F16
        # Rows that blocks do not divide stay F16, as llama.cpp's tools leave them.
        if kind == T.Q8_0 and shape[-1] % 32:
            kind = T.F16
        data = x if kind == T.F32 else x.astype(np.float16) if kind == T.F16 else gguf.quants.quantize(x, kind)
        w.add_tensor(name, data, raw_dtype=None if kind in (T.F32, T.F16) else kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    if args.image:
        write_noise(args.image, rng)


if __name__ == "__main__":
    main()
