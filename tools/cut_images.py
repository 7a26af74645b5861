#!/usr/bin/env python3
"""Cuts models that see, with their golden arrays, to what the tree's tests read, in files of at most 300 kB.

    tools/cut_images.py FOLDER

FOLDER has a folder a model: `hf/` (published form, random weights), `images/`, `golden.safetensors` (what the original
code made of them) and `card.json`. What comes out is in crates/conformance/tests/data/images. Weights are kept to the
bit, in several files with an index. Needs nothing but Python.
"""

import json
import pathlib
import shutil
import struct
import sys

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/conformance/tests/data/images"
MAX_BYTES = 290_000

#: Images that are left out, whose arrays are large or whose pixels depend on the decoder.
LEFT_OUT = ("wide", "jpeg")
#: Images of each model whose pixels are kept; prompts with golden logits.
MODELS = {"qwen3_vl_moe": (["odd", "rgba"], ["one", "two"]), "gemma4": (["odd"], ["one"])}


def read(path):
    """The tensors of a safetensors file: `{name: (dtype, shape, bytes)}`."""
    file = path.read_bytes()
    (length,) = struct.unpack("<Q", file[:8])
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def write(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
    if len(file) > 300_000:
        raise SystemExit(f"{path} would have {len(file)} bytes")
    path.write_bytes(file)


def is_kept(name, images, pixels, prompts):
    """Whether tests read an array, `KIND.OF` or the tokens of a text."""
    kind, _, of = name.partition(".")
    if kind == "pixel_values":
        return of in pixels
    if kind == "features" or kind.startswith("deepstack_"):
        return of in images
    return name == "tokens" or kind in ("tokens", "position_ids", "logits") and of in prompts


def weights(source, folder):
    """The weights in several files and their index."""
    parts, size = [{}], 0
    for name, tensor in sorted(read(source / "model.safetensors").items()):
        # A header has some 150 bytes a tensor.
        size += len(tensor[2]) + 150
        if size > MAX_BYTES and parts[-1]:
            parts.append({})
            size = len(tensor[2]) + 150
        parts[-1][name] = tensor
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    for name, part in zip(names, parts):
        write(folder / name, part)
    where = {tensor: name for name, part in zip(names, parts) for tensor in part}
    total = sum(len(data) for part in parts for _, _, data in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def cut(source, name):
    pixels, prompts = MODELS[name]
    images = sorted(file.stem for file in (source / "images").iterdir() if file.stem not in LEFT_OUT)
    out = OUT / name
    shutil.rmtree(out, ignore_errors=True)
    (out / "hf").mkdir(parents=True)
    (out / "images").mkdir()
    for file in sorted((source / "hf").iterdir()):
        if file.suffix != ".safetensors":
            (out / "hf" / file.name).write_bytes(file.read_bytes())
    weights(source / "hf", out / "hf")
    for image in images:
        (out / "images" / f"{image}.png").write_bytes((source / "images" / f"{image}.png").read_bytes())
    golden = read(source / "golden.safetensors")
    write(out / "golden.safetensors", {of: golden[of] for of in sorted(golden) if is_kept(of, images, pixels, prompts)})
    card = json.loads((source / "card.json").read_text())
    short = {"name": card["name"], "prompts": {of: card["prompts"][of] for of in prompts}, "versions": card["versions"]}
    (out / "card.json").write_text(json.dumps(short, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for model in MODELS:
        cut(pathlib.Path(sys.argv[1]) / model, model)
