#!/usr/bin/env bash
# Fuzzes everything that reads what strangers write, for HOURS in all, every target the same time, one after the other:
#     tools/fuzz.sh 8 [SEED]
# Finds lie in target/fuzz, one file each; `target/release/fuzz TARGET --file PATH` runs one again. One that is mended
# belongs into crates/fuzz/corpus/TARGET.
set -euo pipefail
cd "$(dirname "$0")/.."
hours=${1:?usage: tools/fuzz.sh HOURS [SEED]}
seed=${2:-$(date +%Y%m%d)}
cargo build --release --locked -p moebius -p fuzz
seconds=$(awk "BEGIN { print int($hours * 3600 / 7) }")
exec target/release/fuzz all --seconds "$seconds" --seed "$seed"
