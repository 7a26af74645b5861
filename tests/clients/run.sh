#!/usr/bin/env bash
# Real clients against the real server: tests/clients/run.sh [path of the program]
# Needs python3 with venv, node with npm, and Chromium (CHROMIUM names it); fetch.sh has the rest. Ends with 77 when
# something it needs is not there or cannot be fetched: then nothing was tested.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=${1:-target/release/moebius}
export CHROMIUM=${CHROMIUM:-/usr/bin/chromium}
room=$PWD/target/clients
mkdir -p "$room"

tests/clients/fetch.sh >"$room/fetch.log" 2>&1 || {
  tail -n 5 "$room/fetch.log"; echo "skipped: a client or the browser is not to be had"; exit 77; }
cargo build --quiet --locked --manifest-path tests/clients/rust/Cargo.toml --target-dir "$room/rust"

servers=
trap 'kill $servers 2>/dev/null; wait $servers 2>/dev/null || true' EXIT
# Starts a server with further arguments. Port 0 lets the system choose; `address` is what the server says it got.
start() {
  local name=$1
  shift
  "$program" serve --port 0 "$@" >"$room/$name.out" 2>"$room/$name.log" &
  local server=$!
  servers="$servers $server"
  for _ in $(seq 200); do
    address=$(sed -n 's|.* on \(http://[^ ]*\)$|\1|p' "$room/$name.out" | head -n 1)
    [ -n "$address" ] && return
    kill -0 $server 2>/dev/null || { cat "$room/$name.log"; exit 1; }
    sleep 0.1
  done
  echo "the server did not say where it listens"
  exit 1
}
start seeing --backend cpu -m crates/conformance/tests/data/images/qwen3_vl_moe/hf
export SEEING=$address
start server

failed=0
"$room/python/bin/python" tests/clients/clients.py "$address" || failed=1
"$room/frameworks/bin/python" tests/clients/frameworks.py "$address" || failed=1
(cd "$room" && node clients.mjs "$address") || failed=1
"$room/rust/debug/client" "$address" || failed=1
# A proxy before two servers. 77: there is none.
TRY_FOLDER=$room/proxy contrib/proxy/try.sh "$program" || [ $? = 77 ] || failed=1
# An answer that takes every core comes at once, before the browser gets to show its beginning.
start page --threads 1
(cd web && npm test --silent && npm run --silent test:browser -- "$address") || failed=1
exit $failed
