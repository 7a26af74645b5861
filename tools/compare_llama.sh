#!/usr/bin/env bash
# Moebius beside llama.cpp on this machine, measured in turn: A B A B, medians.
# Usage: LLAMA_BENCH=path/to/llama-bench tools/compare_llama.sh MODEL.gguf [ROUNDS] [N_PROMPT] [N_GEN]
# Both run with all cores. llama.cpp is measured with its weight repacking off and on; compare with the better one.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?a GGUF file} rounds=${2:-5} n_prompt=${3:-512} n_gen=${4:-64}
: "${LLAMA_BENCH:?set LLAMA_BENCH to a llama-bench binary}"
cargo build --release --quiet --bin moebius
threads=$(nproc)
results=$(mktemp)
trap 'rm -f "$results"' EXIT
for round in $(seq "$rounds"); do
  target/release/moebius bench -m "$model" -p "$n_prompt" -n "$n_gen" -t "$threads" -r 1 -o jsonl | sed 's/^/moebius /' >>"$results"
  for repack in 0 1; do
    "$LLAMA_BENCH" -m "$model" -p "$n_prompt" -n "$n_gen" -t "$threads" -r 1 --repack "$repack" -o jsonl 2>/dev/null | sed "s/^/llama.cpp-repack-$repack /" >>"$results"
  done
  echo "round $round of $rounds done" >&2
done
python3 - "$results" <<'PY'
import collections, json, statistics, sys
speeds = collections.defaultdict(list)
for line in open(sys.argv[1]):
    name, row = line.split(" ", 1)
    row = json.loads(row)
    test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    speeds[test, name].append(row["tokens_per_second"] if name == "moebius" else row["avg_ts"])
print("| test | engine | median tok/s | min | max | ratio to the better llama.cpp |\n|---|---|---:|---:|---:|---:|")
for test in dict.fromkeys(t for t, _ in speeds):
    medians = {n: statistics.median(v) for (t, n), v in speeds.items() if t == test}
    best = max((v for n, v in medians.items() if n != "moebius"), default=float("nan"))
    for name, median in medians.items():
        v = speeds[test, name]
        print(f"| {test} | {name} | {median:.1f} | {min(v):.1f} | {max(v):.1f} | {median / best:.2f} |")
PY
