#!/usr/bin/env python3
"""What mlx-lm makes of folders that `moebius convert --to mlx` wrote: logits beside those of a golden file or of
Moebius, and tokens beside those of the GGUF file's vocabulary.

    pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 tokenizers safetensors
    tools/mlx_agree.py logits FOLDER GOLDEN.safetensors [ARRAY]   # rms error over the standard deviation, worst row
    tools/mlx_agree.py tokens FOLDER MODEL.gguf --moebius PATH    # random texts through both

Logits are computed in f32: weights are cast, and quantised ones keep their codes. mlx-lm rounds Gemma 3's scale of the
embedding to bf16 whatever the type; `--exact-scale` undoes that, so that the rest can be compared.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path


def logits(args):
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import load_model
    from safetensors.numpy import load_file

    mx.set_default_device(mx.cpu)
    golden = load_file(args.golden)
    model, config = load_model(Path(args.folder))
    model.update(
        tree_map_with_path(
            lambda _, x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x,
            model.parameters(),
        )
    )
    if args.exact_scale:
        from mlx_lm.models import gemma3_text

        width = config["hidden_size"]
        exact, array = width**0.5, mx.array
        # The model rounds its factor by asking for an array of bf16.
        gemma3_text.mx = type("Mx", (), {"__getattr__": lambda _, name: getattr(mx, name)})()
        gemma3_text.mx.array = lambda x, *rest: array(x) if x == exact else array(x, *rest)
    worst = []
    for tokens, name, step in [("tokens", args.array, 1), ("long_tokens", "long_logits", 100)]:
        if tokens not in golden or name not in golden or (step > 1 and args.array != "logits"):
            continue
        ids = mx.array(golden[tokens].astype(np.int32))[None]
        out = np.array(model(ids)[0].astype(mx.float32))
        wanted = golden[name]
        rows = out if step == 1 else out[step - 1 :: step]
        rows = rows[: len(wanted)]
        off = np.sqrt(((rows - wanted) ** 2).mean(axis=1)) / wanted.std()
        total = np.sqrt(((rows - wanted) ** 2).mean()) / wanted.std()
        worst.append(f"{name} {total:.2e} (row {off.max():.2e}) of {len(rows)}")
    if args.rows:
        print(off)
    print(f"{args.folder}: {', '.join(worst)}")


def texts(seed):
    rng = random.Random(seed)
    words = ["the", "Hello", " world", "don't", "1234", "\n", "\n\n", "  ", "    ", "\t", "日本語", "é", "ßß", "🦙"]
    words += ["<s>", "</s>", "fox", "ing", "▁", "aaaa", "ab" * 7, "<0x0A>", ".", "...", "(", "def f(x):", "нещо"]
    words += ["\u200d", "x" * 40, " a"]
    alphabet = "abcdefghijklmnopqrstuvwxyz    ABC.,;!?'\n0123456789éü"
    for _ in range(30):
        yield "".join(rng.choice(words) + rng.choice(["", "", " "]) for _ in range(300))
        yield "".join(rng.choice(alphabet) for _ in range(1000))


def tokens(args):
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(Path(args.folder) / "tokenizer.json"))
    samples = list(texts(args.seed))
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for text in samples:
            path = Path(folder) / "text"
            path.write_text(text, encoding="utf-8", newline="")
            run = [args.moebius, "tokenize", "-m", args.gguf, "-f", str(path), "--json"]
            run += ["--add-special", "--parse-special"]
            ours = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
            found = theirs.encode(text).ids
            if found != ours:
                differ += 1
                if differ <= 5:
                    at = next((i for i, pair in enumerate(zip(found, ours)) if pair[0] != pair[1]), 0)
                    print(f"  at {at}: {found[at : at + 8]} for {ours[at : at + 8]}")
    if args.rows:
        print(off)
    print(f"{args.folder}: {differ} of {len(samples)} texts differ")
    sys.exit(differ > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("logits")
    one.add_argument("folder")
    one.add_argument("golden")
    one.add_argument("array", nargs="?", default="logits")
    one.add_argument("--exact-scale", action="store_true")
    one.add_argument("--rows", action="store_true")
    one.set_defaults(run=logits)
    two = commands.add_parser("tokens")
    two.add_argument("folder")
    two.add_argument("gguf")
    two.add_argument("--moebius", default="target/release/moebius")
    two.add_argument("--seed", type=int, default=1)
    two.set_defaults(run=tokens)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
