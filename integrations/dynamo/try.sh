#!/usr/bin/env bash
# Dynamo's frontend and workers of Moebius on this machine, asked through HTTP: `try.sh [MODEL]`, by default with the
# built-in model. Builds the worker and gets the frontend from the Python registry unless they are there. Exit code 0
# says that all held.
#
# MOEBIUS_DYNAMO   a worker that is built already
# DYNAMO_PYTHON    a Python that has ai-dynamo 1.6.1
# TRY_PLANES       how processes find each other, ask and tell (default: file tcp zmq); "etcd nats nats" needs both
# TRY_MIGRATIONS   how often an answer may go on with another worker (default: 3)
# TRY_FLAGS        further flags of the workers
# TRY_FOLDER       where packages and logs go (default: target/try in this folder)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${TRY_FOLDER:-$here/target/try}
mkdir -p "$folder"

worker=${MOEBIUS_DYNAMO:-}
if [ -z "$worker" ]; then
  (cd "$here" && cargo build --release)
  worker=${CARGO_TARGET_DIR:-$here/target}/release/moebius-dynamo
fi

python=${DYNAMO_PYTHON:-$folder/venv/bin/python}
if ! "$python" -c 'import dynamo.frontend' 2>/dev/null; then
  [ -z "${DYNAMO_PYTHON:-}" ] || { echo "try.sh: $python has no ai-dynamo"; exit 2; }
  python3 -m venv "$folder/venv"
  pip="$folder/venv/bin/pip install --quiet"
  $pip ai-dynamo-runtime==1.6.1
  # Without its dependencies: the frontend needs a part of them, listed here.
  $pip --no-deps ai-dynamo==1.6.1
  $pip aiohttp certifi 'kubernetes<33' msgspec prometheus-client pyzmq 'redis<9' tqdm transformers zstandard
fi

exec python3 "$here/try.py" "$worker" "$python" "$folder" "$@"
