#!/usr/bin/env bash
# Builds what a release hands out, into dist/: an archive with the program, its manual pages and completions, one with
# the C library, a wheel of the Python package, a list of the program's crates (CycloneDX), a Debian package where
# dpkg-deb is there, and their SHA-256 sums. `tools/release.sh [TARGET]`; without a target for this machine.
# `PROFILE=dev` tries the script with another of cargo's profiles; `RUNNER=wine` starts programs of another system.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-$(rustc -vV | sed -n 's/^host: //p')}
profile=${PROFILE:-dist}
host=$(rustc -vV | sed -n 's/^host: //p')
exe=
[[ $target != *windows* ]] || exe=.exe
packages=(-p moebius)
# A module for musl would need Python's own build for it.
[[ $target == *musl* ]] || packages+=(-p moebius-python)
# lld, which Rust links with on this platform, makes functions of the same code one.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C link-arg=-Wl,--icf=all"
# Together, so that both have the same features of the crates below them, which are compiled once.
cargo build --profile "$profile" --locked "${packages[@]}" --target "$target"
built=target/$target/$([ "$profile" = dev ] && echo debug || echo "$profile")
program=$built/moebius$exe
run=(${RUNNER:+"$RUNNER"} "$program")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
[ "$("${run[@]}" -V | cut -d' ' -f2)" = "$version" ]
name=moebius-$version-$target
rm -rf "dist/$name"
mkdir -p "dist/$name/completions"
mkdir "dist/$name/models"
cp "$program" LICENSE-APACHE LICENSE-MIT "dist/$name/"
# Every page that the README links to.
cp -r *.md docs "dist/$name/"
cp models/README.md "dist/$name/models/"
"${run[@]}" man "dist/$name/man"
for shell in bash zsh fish powershell elvish; do
  "${run[@]}" completions "$shell" >"dist/$name/completions/moebius.$shell"
done
# Kernels of the embedded model for machines with a driver and without NVRTC; a module depends on a model's weight types
# and dimensions, so no set serves all models.
if [[ $target == "$host" && $target == *linux* ]] && nvrtc=$(.ci/nvrtc); then
  for sm in 80 86 89 90 100 120; do
    LD_LIBRARY_PATH=$nvrtc "$program" plan --backend cuda --sm $sm --cubins "dist/$name/cuda"
  done
  du -sh "dist/$name/cuda"
fi
python3 tools/sbom.py "$target" >"dist/$name.cdx.json"
[[ $target != *linux-gnu ]] || ! command -v dpkg-deb >/dev/null || tools/deb.sh "dist/$name" "$version" "$target" dist
python3 tools/pack.py "dist/$name"
if [[ $target != *musl* ]]; then
  # Without the form for Rust programs, which keeps cargo from linking a library as one unit.
  cargo rustc --profile "$profile" --locked -p moebius-c --lib --crate-type cdylib,staticlib --target "$target"
  tools/c_archive.sh "$built" "$version" "$target" dist
  library=$(find "$built" -maxdepth 1 -name "libmoebius_python.so" -o -maxdepth 1 -name "libmoebius_python.dylib" \
    -o -maxdepth 1 -name "moebius_python.dll")
  python3 tools/wheel.py "$library" --out dist
fi
python3 tools/pack.py --sums dist
ls -l dist
