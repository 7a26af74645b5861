#!/usr/bin/env bash
# What no change has time for on the simulated Apple GPU: every op of the sample and the golden logits of every file of
# the tree (and of ../shared/fixtures, where that is) in all six orders of threads, which must give the same bits.
# Takes hours of two cores; arguments are handed to `cargo test`. MOEBIUS_PART=2/9 runs the third of nine parts of each
# op's cases, so that it can be done in several goes.
set -euo pipefail
cd "$(dirname "$0")/.."
export MOEBIUS_NO_SKIP=1 MOEBIUS_SCHEDULES=all
MOEBIUS_BACKEND=metal cargo test -p conformance --test it "$@" -- ops::every_backend ops::kernel
MOEBIUS_WIDE=1 cargo test -p conformance --test it "$@" -- --nocapture metal::golden::golden_logits
