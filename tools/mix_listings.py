#!/usr/bin/env python3
"""Types that llama-quantize gives each matrix, for crates/moebius/tests/data/mixes.json.

    python3 -m venv v && v/bin/pip install gguf numpy
    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz     # llama.cpp v0.5.0
    v/bin/python tools/mix_listings.py package/bins/linux-x64 > crates/moebius/tests/data/mixes.json

Writes models of matrices of zeros, with the counts of layers, heads and experts that the rules ask for, and has
llama.cpp's library (`llama_model_quantize`) quantise them, with importances of 1 and, where it does not refuse that,
without. The listing has the types of every matrix by layer, equal ones counted: `ffn_down q4_k*4 iq2_s*28`.
"""
import argparse
import ctypes
import itertools
import json
import pathlib
import tempfile

import gguf
import numpy as np

# llama_ftype of the mixes.
MIXES = {"IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "Q2_K_S": 21, "Q2_K": 10,
         "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27, "Q3_K_M": 12, "TQ1_0": 36, "TQ2_0": 37, "Q4_K_M": 15}
ATTENTION = ["attn_q", "attn_k", "attn_v", "attn_output"]
DENSE = ATTENTION + ["ffn_gate", "ffn_up", "ffn_down"]
EXPERTS = ATTENTION + ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
SHARED = EXPERTS + ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]
FUSED = ["attn_qkv", "attn_output", "ffn_up", "ffn_down"]
MODELS = [
    {"arch": "llama", "n_layer": 32, "n_head": 32, "n_kv": 8, "n_expert": 0, "n_cols": 256, "tied": False, "in": DENSE},
    {"arch": "llama", "n_layer": 16, "n_head": 8, "n_kv": 8, "n_expert": 0, "n_cols": 256, "tied": True, "in": DENSE},
    {"arch": "llama", "n_layer": 80, "n_head": 64, "n_kv": 8, "n_expert": 0, "n_cols": 256, "tied": False, "in": DENSE},
    {"arch": "llama", "n_layer": 9, "n_head": 8, "n_kv": 2, "n_expert": 0, "n_cols": 288, "tied": False, "in": DENSE},
    {"arch": "llama", "n_layer": 32, "n_head": 32, "n_kv": 8, "n_expert": 8, "n_cols": 256, "tied": False,
     "in": EXPERTS},
    {"arch": "qwen2moe", "n_layer": 24, "n_head": 16, "n_kv": 16, "n_expert": 60, "n_cols": 256, "tied": False,
     "in": SHARED},
    {"arch": "qwen3moe", "n_layer": 48, "n_head": 32, "n_kv": 4, "n_expert": 128, "n_cols": 256, "tied": False,
     "in": EXPERTS},
    {"arch": "phi3", "n_layer": 32, "n_head": 32, "n_kv": 32, "n_expert": 0, "n_cols": 256, "tied": False, "in": FUSED},
]


class Params(ctypes.Structure):
    """llama_model_quantize_params."""
    _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int32), ("output_tensor_type", ctypes.c_int32),
                ("token_embedding_type", ctypes.c_int32), ("allow_requantize", ctypes.c_bool),
                ("quantize_output_tensor", ctypes.c_bool), ("only_copy", ctypes.c_bool), ("pure", ctypes.c_bool),
                ("keep_split", ctypes.c_bool), ("dry_run", ctypes.c_bool), ("imatrix", ctypes.c_void_p),
                ("kv_overrides", ctypes.c_void_p), ("tt_overrides", ctypes.c_void_p), ("prune_layers", ctypes.c_void_p)]


class Importances(ctypes.Structure):
    """llama_model_imatrix_data."""
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t)]


def names(model):
    layers = [f"blk.{layer}.{part}.weight" for layer in range(model["n_layer"]) for part in model["in"]]
    return ["token_embd.weight"] + ([] if model["tied"] else ["output.weight"]) + layers


def n_matrices(model, name):
    return max(model["n_expert"], 1) if "_exps" in name else 1


def write(model, path):
    writer = gguf.GGUFWriter(path, model["arch"])
    writer.add_block_count(model["n_layer"])
    writer.add_context_length(64)
    writer.add_embedding_length(model["n_cols"])
    writer.add_feed_forward_length(model["n_cols"])
    writer.add_head_count(model["n_head"])
    writer.add_head_count_kv(model["n_kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(model["n_cols"] // model["n_head"])
    if model["n_expert"]:
        writer.add_expert_count(model["n_expert"])
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(model["n_cols"])
    for name in names(model):
        shape = [1, model["n_cols"]] if n_matrices(model, name) == 1 else [n_matrices(model, name), 1, model["n_cols"]]
        # One row is a vector to ggml.
        shape[-2] = 2
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def listing(path):
    """Types by part of a layer."""
    parts = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.name.split(".")
        layer, part = (int(name[1]), name[2]) if name[0] == "blk" else (0, name[0])
        parts.setdefault(part, {})[layer] = tensor.tensor_type.name.lower()
    types = {part: [of[layer] for layer in sorted(of)] for part, of in parts.items()}
    runs = {part: [(kind, len(list(run))) for kind, run in itertools.groupby(of)] for part, of in types.items()}
    text = {part: " ".join(f"{kind}*{n}" for kind, n in of) for part, of in sorted(runs.items())}
    return ", ".join(f"{part} {of}" for part, of in text.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", type=pathlib.Path, help="folder of libllama and libggml")
    args = parser.parse_args()
    for name in ("libggml-base", "libggml-cpu-x64", "libggml", "libllama"):
        library = ctypes.CDLL(str(next(args.libraries.glob(f"{name}.*so"))), mode=ctypes.RTLD_GLOBAL)
    log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(log, None)
    library.llama_model_quantize_default_params.restype = Params
    library.llama_model_quantize.restype = ctypes.c_uint32
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    listings = []
    with tempfile.TemporaryDirectory() as room:
        source, out = pathlib.Path(room) / "in.gguf", pathlib.Path(room) / "out.gguf"
        for model in MODELS:
            write(model, source)
            ones = {name: np.ones(n_matrices(model, name) * model["n_cols"], np.float32) for name in names(model)}
            pointer = ctypes.POINTER(ctypes.c_float)
            entries = [Importances(name.encode(), one.ctypes.data_as(pointer), one.size) for name, one in ones.items()]
            importances = (Importances * (len(entries) + 1))(*entries, Importances(None, None, 0))
            files, refused = {}, []
            for with_importances, (mix, number) in itertools.product((True, False), MIXES.items()):
                params = library.llama_model_quantize_default_params()
                params.ftype, params.nthread = number, 2
                params.imatrix = ctypes.cast(importances, ctypes.c_void_p) if with_importances else None
                failed = library.llama_model_quantize(bytes(source), bytes(out), ctypes.byref(params))
                if failed:
                    refused.append(mix)
                else:
                    files[mix if with_importances else f"{mix} without"] = listing(out)
            listings.append((model, refused, files))
    print("[")
    for i, (model, refused, files) in enumerate(listings):
        lines = [*(f"{json.dumps(key)}: {json.dumps(of)}" for key, of in {**model, "refused": refused}.items()),
                 '"files": {\n' + ",\n".join(f"  {json.dumps(key)}: {json.dumps(of)}" for key, of in files.items())]
        print("{" + ",\n ".join(lines) + "}}" + ("," if i + 1 < len(listings) else ""))
    print("]")


if __name__ == "__main__":
    main()
