#!/bin/sh
# Compiles `layers.cpp` and the kernels of steps of few sequences, for a Hopper GPU: OUT/layers and a cubin for each.
# usage: [KERNELS=folder] [FLAGS=-DTRACED] sh tools/cuda/layers.sh OUT && [TIMELINE=1] OUT/layers OUT NEW
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
kernels=${KERNELS:-$root/kernels}
out=$1
mkdir -p "$out"
q4='-DWEIGHT=q4_k -DWEIGHT_HEADER="quant/q4_k.h"' q6='-DWEIGHT=q6_k -DWEIGHT_HEADER="quant/q6_k.h"'
q6_b='-DWEIGHT_B=q6_k -DWEIGHT_HEADER_B="quant/q6_k.h"'
one() {
    name=$1 file=$2
    shift 2
    nvcc -cubin -std=c++17 -w --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a ${FLAGS:-} "$@" \
        -I "$kernels" -o "$out/$name.cubin" "$kernels/cuda/$file.cu" &
}
# shellcheck disable=SC2086
{
    nvcc -x cu -std=c++17 -O2 -arch=sm_90a -w -I "$kernels" -o "$out/layers" "$root/tools/cuda/layers.cpp" -lcuda &
    if [ -z "${NEW_ONLY:-}" ]; then
        one linear_pair linear_pair $q4 $q6_b
        one linear linear $q4
        one experts experts $q4
        one experts_down_q4 experts_down $q4
        one experts_down_q6 experts_down $q6
    fi
    one few_pair few_linear $q4 $q6_b
    one few_linear few_linear $q4
    one few_experts few_experts $q4 -DN_EXPERT=128
    one few_down_q4 few_down $q4 -DN_EXPERT=128
    one few_down_q6 few_down $q6 -DN_EXPERT=128
    one router router -DWEIGHT=f32 '-DWEIGHT_HEADER="quant/f32.h"' -DN_EXPERT=128
    one few_routed few_routed $q4 -DN_EXPERT=128
    one attend_long attend_long -DD=128 -DHEADS=8 -DWORKERS=8 -DK_BLOCKS=0 -DV_BLOCKS=0
    for heads in ${HEADS:-1 2 4}; do one attend$heads attend -DD=128 -DHEADS=$heads; done
}
wait
