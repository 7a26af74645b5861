#!/usr/bin/env python3
"""What llama.cpp's converter writes of the image encoders in crates/conformance/tests/data/images, for
crates/moebius/tests/data/mmproj.json: keys, and type, shape and checksum (CRC-32) of every tensor.

    pip install torch==2.15.0 transformers==5.24.0 gguf==0.19.0 numpy==2.4.6 sentencepiece
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    tools/mmproj_listing.py llama_cpp_python-0.3.36/vendor/llama.cpp
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import zlib

import gguf

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ROOT / "crates/conformance/tests/data/images"
OUT = ROOT / "crates/moebius/tests/data/mmproj.json"
TYPES = ("bf16", "f16", "f32")


def listing(path):
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        tensor.name: f"{tensor.tensor_type.name} {[int(n) for n in reversed(tensor.shape)]} "
        f"{zlib.crc32(tensor.data.tobytes()):08x}"
        for tensor in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}


def main():
    converter = pathlib.Path(sys.argv[1]) / "convert_hf_to_gguf.py"
    listings = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in sorted(MODELS.iterdir()):
            for dtype in TYPES:
                out = pathlib.Path(folder) / "out.gguf"
                line = [sys.executable, converter, "--mmproj", "--outtype", dtype, "--outfile", out, model / "hf"]
                subprocess.run(line, check=True)
                listings[f"{model.name} {dtype}"] = listing(out)
    OUT.write_text(json.dumps(listings, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main()
