#!/usr/bin/env python3
"""KL to the original of Moebius's quants and of ggml's, with the same importances and the same mix: rows of a table.

    python3 -m venv v && v/bin/pip install gguf numpy xllamacpp
    v/bin/python tools/kl_table.py MODEL.gguf CALIBRATE.txt MEASURE.txt --types Q4_K_M,Q3_K_M,Q2_K,IQ4_XS

`moebius imatrix` sums up CALIBRATE.txt, `moebius quantize` writes each type, and every quantised matrix of a copy is
encoded anew by ggml (`ggml_quantize_chunk`, called expert by expert, which is what llama-quantize does); `moebius
compare` measures both on MEASURE.txt. ggml gets the importances as llama-quantize reads them: mean squares, and 1 for
experts that no token reached.

Models are handed out quantised more often than not. Their weights lie on a grid that encoders of the same type find
again, so they get noise of half their type's error first: the model with noise is the original of the table.

With --caches the table is of KV cache types against f16, by depth, on one text:

    v/bin/python tools/kl_table.py MODEL.gguf MEASURE.txt --caches q8_0 q4_0 k=q8_0,v=q4_0 --depths 512 2048

Each row names the text's token at which the KL is worst, its window (from 1 on) and the tokens before it there.
"""
import argparse
import ctypes
import importlib.util
import json
import pathlib
import shutil
import subprocess

import gguf
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLAIN = ("F32", "F16", "BF16")
# Noise by type, relative to the root mean square of 32 weights.
NOISE = {"Q4_0": 0.09, "Q4_1": 0.08, "Q4_K": 0.08, "Q5_0": 0.045, "Q5_1": 0.04, "Q5_K": 0.04, "Q6_K": 0.02,
         "Q8_0": 0.006}


def call(program, *args):
    run = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(map(str, args))}: {run.stderr.strip()}")
    return run.stdout


class Ggml:
    """ggml's encoders, out of the library of xllamacpp."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.encode = self.library.ggml_quantize_chunk
        self.encode.restype = ctypes.c_size_t
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self.encode.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]

    def matrix(self, kind, weights, importance):
        """Blocks of a matrix `[rows, cols]`, with the importance of its columns, or None."""
        weights = np.ascontiguousarray(weights, np.float32)
        rows, cols = weights.shape
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.zeros(rows * cols // n_block * n_bytes, np.uint8)
        at = None
        if importance is not None:
            importance = np.ascontiguousarray(importance, np.float32)
            at = importance.ctypes.data
        written = self.encode(int(kind), weights.ctypes.data, out.ctypes.data, 0, rows, cols, at)
        assert written == out.size, (kind, written, out.size)
        return out


def with_noise(program, model, path):
    """A copy of the model in F32, whose weights lie on no grid."""
    call(program, "quantize", model, path, "--type", "F32", "--allow-requantize")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(model).tensors}
    rng = np.random.default_rng(7)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if kinds[tensor.name] in PLAIN:
            continue
        blocks = tensor.data.reshape(-1, 32)
        rms = np.sqrt((blocks.astype(np.float64) ** 2).mean(1, keepdims=True))
        noise = rng.normal(0, 1, blocks.shape) * rms * NOISE[kinds[tensor.name]]
        tensor.data[...] = (blocks + noise).astype(np.float32).reshape(tensor.data.shape)


def importances(path):
    """Mean squares of columns, `[n_mat, cols]`, by matrix."""
    tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    means = {}
    for name in tensors:
        if name.endswith(".in_sum2"):
            counts = tensors[name.removesuffix("in_sum2") + "counts"].reshape(-1, 1)
            sums = tensors[name].reshape(len(counts), -1)
            means[name.removesuffix(".in_sum2")] = np.where(counts > 0, sums / np.maximum(counts, 1), 1)
    return means


def encoded_by_ggml(ggml, original, ours, path, means):
    """A copy of our file whose quantised matrices ggml has encoded."""
    shutil.copy(ours, path)
    sources = {t.name: t for t in gguf.GGUFReader(original).tensors}
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        source = sources[tensor.name]
        if tensor.tensor_type.name in PLAIN or source.tensor_type == tensor.tensor_type:
            continue
        weights = gguf.dequantize(source.data, source.tensor_type)
        weights = weights.reshape(-1, *weights.shape[-2:])
        columns = means.get(tensor.name)
        parts = (ggml.matrix(tensor.tensor_type, matrix, None if columns is None else columns[i])
                 for i, matrix in enumerate(weights))
        tensor.data[...] = np.concatenate(list(parts)).reshape(tensor.data.shape)


def compare(args, base, other, *flags, depth=512):
    """What `moebius compare` finds, and cells of it: mean KL, same top token, worst token."""
    found = json.loads(call(args.moebius, "compare", "-m", base, "-m", other, "-f", args.texts[-1], "-c", depth,
                            "--chunks", args.chunks, "-t", args.threads, "--json", *flags))
    worst = found["worst"]
    token = "the end" if worst["token"] is None else f"`{json.dumps(worst['token'], ensure_ascii=False)}`"
    return (f"{found['kl_mean']['value']:.4f} ± {found['kl_mean']['error']:.4f}",
            f"{100 * found['same_top']['value']:.1f} %",
            f"{found['kl_max']:.3g} at {token} ({worst['window']}: {worst['position']})")


def caches(args):
    """The table of cache types. Weights become BF16 first, so that no activation is rounded to 8 bits."""
    original = args.room / f"{args.model.stem}-bf16.gguf"
    if not original.exists():
        call(args.moebius, "quantize", args.model, original, "--type", "BF16", "--allow-requantize")
    print("| depth | cache | KL mean | same top token | worst token |\n|---:|---|---:|---:|---|", flush=True)
    for depth in args.depths:
        for kind in args.caches:
            cells = compare(args, original, original, "--other-cache-type", kind, depth=depth)
            print(f"| {depth:,} | {kind} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("texts", type=pathlib.Path, nargs="+",
                        help="a text for the importances and another for the KL; of caches that alone")
    parser.add_argument("--types", default="Q4_K_M,Q3_K_M,Q2_K,IQ4_XS")
    parser.add_argument("--chunks", type=int, default=24, help="windows that are measured")
    parser.add_argument("--caches", nargs="+", help="the table of these KV cache types")
    parser.add_argument("--depths", type=int, nargs="+", default=[512], help="tokens of a window, of caches")
    parser.add_argument("--calibrate-chunks", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-imatrix", action="store_true", help="the table without importances")
    parser.add_argument("--moebius", default=ROOT / "target" / "release" / "moebius")
    parser.add_argument("--ggml", type=pathlib.Path, help="xllamacpp's library; the installed one when left out")
    parser.add_argument("--room", type=pathlib.Path, default=ROOT / "target" / "kl", help="folder for the files")
    args = parser.parse_args()
    if len(args.texts) != (1 if args.caches else 2):
        parser.error("caches take one text, types take two")
    args.room.mkdir(parents=True, exist_ok=True)
    if args.caches:
        return caches(args)
    if args.ggml is None:
        args.ggml = next(pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("*.so"))
    ggml, program = Ggml(args.ggml), args.moebius
    original = args.model
    if any(t.tensor_type.name not in PLAIN for t in gguf.GGUFReader(original).tensors):
        original = args.room / f"{args.model.stem}-noise.gguf"
        if not original.exists():
            with_noise(program, args.model, original)
    imatrix, means = args.room / f"{args.model.stem}.imatrix.gguf", {}
    if not args.no_imatrix:
        call(program, "imatrix", "-m", original, "-f", args.texts[0], "-o", imatrix,
             "--chunks", args.calibrate_chunks, "-t", args.threads)
        means = importances(imatrix)
    print("| type | bits a weight | Moebius | ggml | same top token | | worst token of Moebius | of ggml |\n"
          "|---|---:|---:|---:|---:|---:|---|---|", flush=True)
    for kind in args.types.split(","):
        ours, theirs = args.room / "moebius.gguf", args.room / "ggml.gguf"
        with_means = [] if args.no_imatrix else ["--imatrix", imatrix]
        said = json.loads(call(program, "quantize", original, ours, "--type", kind, *with_means, "--json"))
        encoded_by_ggml(ggml, original, ours, theirs, means)
        pairs = zip(*(compare(args, original, quant) for quant in (ours, theirs)))
        cells = " | ".join(cell for pair in pairs for cell in pair)
        print(f"| {kind} | {said['bits_per_weight']:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
