#!/usr/bin/env bash
# Packs a folder of a release as a Debian package: `tools/deb.sh FOLDER VERSION TARGET OUT`, where FOLDER is what
# tools/release.sh puts into an archive. The package needs no more than the C library of the machine that built it, and
# neither starts a service nor changes a file of /etc. Requires dpkg-deb.
set -euo pipefail
folder=$(realpath "$1") version=$2 target=$3
out=$(realpath "$4")
cd "$(dirname "$0")/.."
case $target in
  x86_64-*-gnu) architecture=amd64 ;;
  aarch64-*-gnu) architecture=arm64 ;;
  *) echo "tools/deb.sh: Debian has no architecture $target" >&2; exit 1 ;;
esac
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
share=$root/usr/share
put() { install -D -m "$1" "$2" "$3"; }
# The program finds kernels that were compiled ahead next to its file, through links.
put 755 "$folder/moebius" "$root/usr/lib/moebius/moebius"
mkdir -p "$root/usr/bin" "$share/doc/moebius"
ln -s ../lib/moebius/moebius "$root/usr/bin/moebius"
[ ! -d "$folder/cuda" ] || cp -r "$folder/cuda" "$root/usr/lib/moebius/"
for page in "$folder"/man/*.1; do
  gzip -9nc "$page" | put 644 /dev/stdin "$share/man/man1/$(basename "$page").gz"
done
put 644 "$folder/completions/moebius.bash" "$share/bash-completion/completions/moebius"
put 644 "$folder/completions/moebius.zsh" "$share/zsh/vendor-completions/_moebius"
put 644 "$folder/completions/moebius.fish" "$share/fish/vendor_completions.d/moebius.fish"
cp -r "$folder"/docs "$folder"/*.md "$share/doc/moebius/"
for unit in moebius.service moebius.socket; do
  sed 's|/usr/local/bin/|/usr/bin/|g' contrib/$unit | put 644 /dev/stdin "$root/usr/lib/systemd/system/$unit"
done
{
  echo 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/'
  echo 'Upstream-Name: moebius'
  printf '\nFiles: *\nCopyright: the authors of Moebius\nLicense: Expat or Apache-2.0\n'
  printf '\nLicense: Expat\n'
  sed 's/^$/./; s/^/ /' "$folder/LICENSE-MIT"
  printf '\nLicense: Apache-2.0\n The text is in /usr/share/common-licenses/Apache-2.0.\n'
} >"$share/doc/moebius/copyright"
# The oldest C library that has all functions which the program needs.
libc=$(grep -aoE 'GLIBC_2\.[0-9]+' "$folder/moebius" | sort -uV | tail -n 1)
mkdir -p "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<C
Package: moebius
Version: $version
Architecture: $architecture
Maintainer: Moebius <moebius@localhost>
Installed-Size: $(du -sk --apparent-size "$root" | cut -f1)
Depends: libc6 (>= ${libc#GLIBC_}), libgcc-s1
Suggests: libcuda1
Section: science
Priority: optional
Description: inference engine for mixture-of-experts language models
 Runs GGUF files and MLX folders on CPUs and NVIDIA GPUs, with the experts that
 do not fit in memory read from disk. One program to run, chat, serve, quantize
 and measure; a small model is part of it.
C
chmod -R u=rwX,go=rX "$root"
dpkg-deb --build --root-owner-group -Zxz "$root" "$out/moebius_${version}_$architecture.deb"
