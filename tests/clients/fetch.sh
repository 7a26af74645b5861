#!/usr/bin/env bash
# Fetches the clients of run.sh from the registries, into target/clients. Fails where one is not to be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
room=$PWD/target/clients
mkdir -p "$room"
for tool in python3 node npm "${CHROMIUM:-/usr/bin/chromium}"; do command -v "$tool"; done
node -e 'if (parseInt(process.versions.node) < 20) { console.error("the page wants Node.js 20"); process.exit(1); }'
pip() { "$room/$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}"; }
[ -x "$room/python/bin/pip" ] || python3 -m venv "$room/python"
pip python -r tests/clients/requirements.txt
# Frameworks in a room of their own: they ask for other versions of the clients.
[ -x "$room/frameworks/bin/pip" ] || python3 -m venv "$room/frameworks"
pip frameworks --no-compile -r tests/clients/frameworks.txt
cp tests/clients/*.mjs tests/clients/package.json "$room/"
for folder in "$room" web; do
  (cd "$folder" && npm install --no-audit --no-fund --no-package-lock --loglevel=error)
done
cargo fetch --quiet --locked --manifest-path tests/clients/rust/Cargo.toml
