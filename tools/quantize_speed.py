#!/usr/bin/env python3
"""How long `moebius quantize` and llama-quantize take, from start to exit, reading and writing included: a table.

    python3 tools/quantize_speed.py MODEL-f16.gguf --llama llama-quantize --types Q4_K_M,TQ2_0
    python3 tools/quantize_speed.py MODEL-f16.gguf --llama llama-quantize --types IQ2_XXS --imatrix imatrix.gguf

Both write the same mix with as many threads, in turn, and the first round is not counted; figures are medians of the
others, ratios those of the rounds. MODEL is of F32, F16 or BF16. Run nothing else meanwhile.
"""
import argparse
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def seconds(command, out):
    out.unlink(missing_ok=True)
    start = time.monotonic()
    run = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    took = time.monotonic() - start
    if run.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{run.stdout[-2000:]}")
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--types", default="Q4_K_M,Q6_K,Q3_K_M,IQ4_XS,TQ2_0")
    parser.add_argument("--imatrix", type=pathlib.Path, help="importances for both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--moebius", default=ROOT / "target" / "release" / "moebius")
    parser.add_argument("--llama", default="llama-quantize", help="the program")
    args = parser.parse_args()
    with_sums = ["--imatrix", args.imatrix] if args.imatrix else []
    print("| type | bytes, both | Moebius s | llama-quantize s | Moebius / llama-quantize |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = pathlib.Path(folder) / "ours.gguf", pathlib.Path(folder) / "theirs.gguf"
        for kind in args.types.split(","):
            a = [args.moebius, "quantize", args.model, ours, "--type", kind, "-t", args.threads, *with_sums]
            b = [args.llama, *with_sums, args.model, theirs, kind, args.threads]
            rounds = [(seconds(a, ours), seconds(b, theirs)) for _ in range(args.rounds + 1)][1:]
            sizes = f"{ours.stat().st_size}, {theirs.stat().st_size}"
            mine, other = (statistics.median(one) for one in zip(*rounds))
            ratio = statistics.median(x / y for x, y in rounds)
            print(f"| {kind} | {sizes} | {mine:.2f} | {other:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
