#!/usr/bin/env bash
# Packs the C library that cargo has built: header, shared and static library, a file for pkg-config, and an example,
# which is compiled against the packed files and run. `tools/c_archive.sh BUILT VERSION TARGET OUT`.
set -euo pipefail
built=$(realpath "$1") version=$2 target=$3
out=$(realpath "$4")
cd "$(dirname "$0")/.."
name=moebius-c-$version-$target
root=$out/$name
rm -rf "$root"
mkdir -p "$root/include" "$root/lib/pkgconfig" "$root/share/moebius"
cp crates/c/include/moebius.h "$root/include/"
cp crates/c/tests/program.c "$root/share/moebius/example.c"
cp LICENSE-APACHE LICENSE-MIT "$root/"
# On Windows programs link with a library that names the shared one.
find "$built" -maxdepth 1 \( -name 'libmoebius_c.*' -o -name 'moebius_c.*' \) ! -name '*.d' ! -name '*.rlib' \
  ! -name '*.pdb' ! -name '*.exp' -exec cp {} "$root/lib/" \;
# What a program that links the static library needs beside it.
case $target in
  *windows*) system='-lws2_32 -lbcrypt -lntdll -luserenv -lpsapi -lpdh -lpowrprof -ladvapi32 -lole32 -loleaut32' ;;
  *apple*) system='-framework Metal -framework Foundation -framework CoreGraphics -lobjc -liconv -lm' ;;
  *) system='-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc' ;;
esac
# Paths are relative to the file, so that the folder can lie anywhere.
cat >"$root/lib/pkgconfig/moebius.pc" <<PC
prefix=\${pcfiledir}/../..
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: moebius
Description: Models in C programs
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lmoebius_c
Libs.private: $system
PC
python3 tools/pack.py "$root"
# What was packed is what a user has: the example is built from the archive, linked in both ways, and run.
if [[ $target != *windows* && $target == "$(rustc -vV | sed -n 's/^host: //p')" ]]; then
  try=$(mktemp -d)
  trap 'rm -rf "$try"' EXIT
  tar -C "$try" -xzf "$out/$name.tar.gz"
  root=$try/$name
  flags=(-std=c11 -O1 -I "$root/include" "$root/share/moebius/example.c")
  cc "${flags[@]}" -o "$try/shared" -L "$root/lib" -lmoebius_c -lm "-Wl,-rpath,$root/lib"
  # shellcheck disable=SC2086 # the list is one of words
  cc "${flags[@]}" -o "$try/static" "$root/lib/libmoebius_c.a" $system
  if command -v pkg-config >/dev/null; then
    PKG_CONFIG_PATH=$root/lib/pkgconfig pkg-config --exact-version="$version" moebius
    # shellcheck disable=SC2046 # the same
    cc -std=c11 -O1 "$root/share/moebius/example.c" -o "$try/found" \
      $(PKG_CONFIG_PATH=$root/lib/pkgconfig pkg-config --cflags --libs moebius) -lm "-Wl,-rpath,$root/lib"
    "$try/found" >/dev/null
  fi
  "$try/shared" >"$try/shared.txt"
  "$try/static" >"$try/static.txt"
  cmp "$try/shared.txt" "$try/static.txt"
  head -c 200 "$try/shared.txt"
  echo
fi
