#!/usr/bin/env bash
# Real clients against the real server: tests/clients/run.sh [path of the program]
# Needs python3 with venv, node with npm, and Chromium; what comes from the registries goes to target/clients.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=${1:-target/debug/moebius}
room=$PWD/target/clients
mkdir -p "$room"

[ -x "$room/python/bin/python" ] || python3 -m venv "$room/python"
"$room/python/bin/pip" install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
cp tests/clients/*.mjs tests/clients/package.json "$room/"
(cd "$room" && npm install --no-audit --no-fund --no-package-lock --loglevel=error)
cargo build --quiet --locked --manifest-path tests/clients/rust/Cargo.toml --target-dir "$room/rust"

# Port 0 lets the system choose; the server says which it got.
"$program" serve --port 0 >"$room/server.out" 2>"$room/server.log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
for _ in $(seq 200); do
  address=$(sed -n 's|.* on \(http://[^ ]*\)$|\1|p' "$room/server.out" | head -n 1)
  [ -n "$address" ] && break
  kill -0 $server 2>/dev/null || { cat "$room/server.log"; exit 1; }
  sleep 0.1
done
[ -n "$address" ] || { echo "the server did not say where it listens"; exit 1; }

"$room/python/bin/python" tests/clients/clients.py "$address"
(cd "$room" && node clients.mjs "$address")
"$room/rust/debug/client" "$address"
(cd "$room" && node page.mjs "$address")
