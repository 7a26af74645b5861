// embed: out[r, :] = table[ids[r], :] * scale, the table of any type. A thread a unit of a row. Places of a token are
// ids too, of which the table takes one.
#include "cuda/args.h"
#include "cuda/common.h"
#include WEIGHT_HEADER

// grid (rows, ceil(units / 128)), block 128
KERNEL __launch_bounds__(128) embed(const __grid_constant__ Embed a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 unit = blockIdx.y * blockDim.x + threadIdx.x;
    if ((u64)unit * WEIGHT::UNIT >= a.d) return;
    const Row row = row_of<WEIGHT>(a.table.q, a.table.scales, a.table.biases, a.ids[(u64)blockIdx.x * a.stride], a.d);
    float* out = a.out + (u64)blockIdx.x * a.d;
    WEIGHT::Raw raw;
    WEIGHT::load(row, unit, raw);
#pragma unroll
    for (int r = 0; r < WEIGHT::RUNS; r++) {
        float v[16];
        decode_run<WEIGHT>(raw, unit, r, v);
        const u32 first = 16 * run_index<WEIGHT>(unit, r);
        if (a.d % 4 == 0 && first + 16 <= a.d) {
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                *(float4*)(out + first + i) =
                    make_float4(v[i] * a.scale, v[i + 1] * a.scale, v[i + 2] * a.scale, v[i + 3] * a.scale);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (first + i < a.d) out[first + i] = v[i] * a.scale;
            }
        }
    }
}
