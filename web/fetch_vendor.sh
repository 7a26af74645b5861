#!/usr/bin/env bash
# Fetches the page's libraries into web/vendor: web/fetch_vendor.sh
# Needs npm and tar. Versions and digests are pinned; `git diff` must be empty afterwards.
set -euo pipefail
cd "$(dirname "$0")"
vendor=vendor
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

# package, version, digest of the archive
take() {
  (cd "$room" && npm pack --silent "$1@$2" >archive.name)
  local archive="$room/$(cat "$room/archive.name")"
  local digest
  digest=sha512-$(openssl dgst -sha512 -binary "$archive" | base64 -w0)
  [ "$digest" = "$3" ] || { echo "$1@$2 is not what it was"; exit 1; }
  mkdir -p "$room/$4" && tar xzf "$archive" -C "$room/$4" --strip-components=1
}
take katex 0.19.1 \
  sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA== katex
take @highlightjs/cdn-assets 11.12.0 \
  sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw== highlight

rm -rf "$vendor" && mkdir -p "$vendor/katex-0.19.1/fonts" "$vendor/highlight-11.12.0"
cp "$room/katex/dist/katex.min.js" "$room/katex/LICENSE" "$vendor/katex-0.19.1/"
cp "$room"/katex/dist/fonts/*.woff2 "$vendor/katex-0.19.1/fonts/"
# Every browser that runs the page reads woff2: the other forms of each font go.
sed -E 's/,url\(fonts\/[A-Za-z0-9_-]+\.(woff|ttf)\) format\("[a-z]+"\)//g' "$room/katex/dist/katex-swap.min.css" \
  >"$vendor/katex-0.19.1/katex.min.css"
# Its some 35 common languages in one module.
cp "$room/highlight/es/highlight.min.js" "$room/highlight/LICENSE" "$vendor/highlight-11.12.0/"
find "$vendor" -type f -exec chmod 644 {} +
du -bc "$vendor"/*/* "$vendor"/katex-*/fonts/* | tail -n 1
