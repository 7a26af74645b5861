#!/bin/sh
# Runs the kernels that read weights on this machine's GPU, for every type against sums in double; measures those of
# BENCH. Affine types are affine:BITS:GROUP:SCALE.
# usage: [ARCH=90a] [BENCH="q4_k q6_k"] sh tools/cuda/products.sh OUT [type ...]
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
shift
mkdir -p "$out/bin"
[ $# -gt 0 ] || set -- q4_k q6_k q8_0 bf16 f32 f16 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q5_k iq4_nl iq4_xs mxfp4 mxfp4_planar \
    nvfp4 nvfp4_scaled f8_e4m3 affine:2:32:0 affine:3:64:1 affine:4:64:0 affine:5:32:1 affine:6:128:0 affine:8:64:0
for type in "$@"; do
    (
        flags="-DWEIGHT_HEADER=\"quant/$type.h\" -DWEIGHT=$type"
        case $type in affine:*)
            IFS=: read -r _ bits group scale <<EOF
$type
EOF
            flags="-DWEIGHT_HEADER=\"quant/affine.h\" -DWEIGHT=affine -DAFFINE_BITS=$bits"
        flags="$flags -DAFFINE_GROUP=$group -DAFFINE_SCALE=$scale" ;;
        esac
        # shellcheck disable=SC2086
        nvcc -x cu -std=c++17 -O3 -w --expt-relaxed-constexpr "-gencode=arch=compute_${ARCH:-90a},code=sm_${ARCH:-90a}" $flags \
            -I "$root/tools/cuda" -I "$root/kernels" -o "$out/bin/$type" "$root/tools/cuda/products.cpp" >"$out/bin/$type.log" 2>&1 || cat "$out/bin/$type.log"
    ) &
done
wait
for type in "$@"; do
    echo "$type"
    case " ${BENCH:-} " in
        *" $type "*) timeout 120 "$out/bin/$type" bench ;;
        *) timeout 60 "$out/bin/$type" | grep -E "TOO|nan" ;;
    esac
done
