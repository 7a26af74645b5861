#!/bin/sh
# Runs the kernels that read weights on this machine, emulated, for the types given, or all, wide and sparse attention
# and the delta rule in tiles: compares with double. With `--check` nothing is run, and the compiler sees types alone.
# usage: sh tools/cuda/host/run.sh [--check] [q4_k ...]; affine types as affine:BITS:GROUP:SCALE
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir -p "$out/src/cuda"
for file in "$root"/kernels/cuda/*.cu; do
    # Shared memory is one block's at a time.
    sed -e 's/extern __shared__/extern/' -e 's/__shared__/static/' "$file" >"$out/src/cuda/${file##*/}"
done
check=
[ "${1:-}" != --check ] || { check=-fsyntax-only; shift; }
# A program of tools/cuda with these flags.
run() {
    name=$1
    shift
    ${CXX:-c++} -std=c++17 -O1 -w $check -I "$root/tools/cuda/host" -I "$out/src" -I "$root/kernels" "$@" \
        -o "$out/program" "$root/tools/cuda/$name.cpp"
    [ -n "$check" ] || "$out/program"
}
[ $# -gt 0 ] || set -- f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4 mxfp4_planar \
    nvfp4 nvfp4_scaled f8_e4m3 affine:2:32:0 affine:3:64:1 affine:4:64:0 affine:5:32:1 affine:6:128:0 affine:8:64:0
for type in "$@"; do
    flags="-DWEIGHT_HEADER=\"quant/$type.h\" -DWEIGHT=$type"
    case $type in affine:*)
        IFS=: read -r _ bits group scale <<EOF
$type
EOF
        flags="-DWEIGHT_HEADER=\"quant/affine.h\" -DWEIGHT=affine -DAFFINE_BITS=$bits"
        flags="$flags -DAFFINE_GROUP=$group -DAFFINE_SCALE=$scale" ;;
    esac
    echo "$type"
    # `batch` has no kernels for f32.
    for program in products few latent:0 latent:1 $([ "$type" = f32 ] || echo batch); do
        # shellcheck disable=SC2086
        run "${program%:*}" $flags -DPRODUCT="${program#*:}"
    done
done
for kind in 0:8 0:32 0:72 0:80 0:128 0:256 1:64 1:128 1:256; do
    echo "attention, wide:width $kind"
    run attention -DWIDE="${kind%:*}" -DD_K="${kind#*:}"
done
for d_k in 64 128; do
    echo "delta rule, $d_k"
    run delta -DD_K=$d_k
done
echo "sparse attention"
run sparse -DD=128 -DD_K=576 -DD_V=512 -DV_IN_K=1 -DHEADS=8 -DKV_F16=1
run sparse -DD=32 -DD_K=64 -DD_V=32 -DV_IN_K=1 -DHEADS=5 -DKV_F16=1
run sparse -DD=64 -DK_BLOCKS=1 -DD_K=96 -DD_V=96 -DV_IN_K=1 -DHEADS=8 -DKV_F16=1
run sparse -DD=20 -DD_K=24 -DD_V=24 -DV_IN_K=0 -DHEADS=2 -DKV_F16=0
