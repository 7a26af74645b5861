#!/bin/sh
# Runs the kernels that read weights on this machine, emulated, for the types given, or all, wide attention and the
# delta rule in tiles: compares with double.
# usage: sh tools/cuda/host/run.sh [q4_k ...]; affine types as affine:BITS:GROUP:SCALE
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir -p "$out/src/cuda"
for file in "$root"/kernels/cuda/*.cu; do
    # Shared memory is one block's at a time.
    sed -e 's/extern __shared__/extern/' -e 's/__shared__/static/' "$file" >"$out/src/cuda/${file##*/}"
done
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
        ${CXX:-c++} -std=c++17 -O1 -w -I "$root/tools/cuda/host" -I "$out/src" -I "$root/kernels" $flags \
            -DPRODUCT="${program#*:}" -o "$out/program" "$root/tools/cuda/${program%:*}.cpp"
        "$out/program"
    done
done
for kind in 0:8 0:32 0:72 0:80 0:128 0:256 1:64 1:128 1:256; do
    echo "attention, wide:width $kind"
    ${CXX:-c++} -std=c++17 -O1 -w -I "$root/tools/cuda/host" -I "$out/src" -I "$root/kernels" -DWIDE="${kind%:*}" \
        -DD_K="${kind#*:}" -o "$out/program" "$root/tools/cuda/attention.cpp"
    "$out/program"
done
for d_k in 64 128; do
    echo "delta rule, $d_k"
    ${CXX:-c++} -std=c++17 -O1 -w -I "$root/tools/cuda/host" -I "$out/src" -I "$root/kernels" -DD_K=$d_k \
        -o "$out/program" "$root/tools/cuda/delta.cpp"
    "$out/program"
done
