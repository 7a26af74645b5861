#!/usr/bin/env bash
# Decode while another program takes one core, beside the same without it: Moebius and llama.cpp in turn.
# Usage: LLAMA_BENCH=path/to/llama-bench tools/contention.sh MODEL.gguf [ROUNDS] [N_GEN]
# Both run with all cores. With n threads on n cores and one busy program a fair share is n / (n + 1) of the time.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?a GGUF file} rounds=${2:-3} n_gen=${3:-32}
: "${LLAMA_BENCH:?set LLAMA_BENCH to a llama-bench binary}"
moebius=${MOEBIUS:-target/release/moebius}
[ -x "$moebius" ] || cargo build --release --quiet --bin moebius
threads=$(nproc)
results=$(mktemp)
busy=
stop() { [ -z "$busy" ] || kill "$busy" 2>/dev/null || true; busy=; }
trap 'stop; rm -f "$results"' EXIT
measure() {
  "$moebius" bench -m "$model" -p 0 -n "$n_gen" -t "$threads" -r 1 -o jsonl 2>/dev/null | sed "s/^/$1 moebius /" >>"$results"
  "$LLAMA_BENCH" -m "$model" -p 0 -n "$n_gen" -t "$threads" -r 1 -o jsonl 2>/dev/null | sed "s/^/$1 llama.cpp /" >>"$results"
}
for round in $(seq "$rounds"); do
  measure alone
  (while :; do :; done) & busy=$!
  measure contended
  stop
  echo "round $round of $rounds done" >&2
done
python3 - "$results" <<'PY'
import collections, json, statistics, sys
speeds = collections.defaultdict(list)
for line in open(sys.argv[1]):
    how, name, row = line.split(" ", 2)
    row = json.loads(row)
    speeds[name, how].append(row["tokens_per_second"] if name == "moebius" else row["avg_ts"])
print("| engine | alone tok/s | beside a busy program | share kept |\n|---|---:|---:|---:|")
for name in dict.fromkeys(n for n, _ in speeds):
    alone, contended = (statistics.median(speeds[name, how]) for how in ("alone", "contended"))
    print(f"| {name} | {alone:.1f} | {contended:.1f} | {contended / alone:.2f} |")
PY
