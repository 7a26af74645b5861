// embed: out[t, :] = table[ids[t * stride + first], :] * scale: tokens, or one axis of their places. A thread a unit of
// a row.
// Compiled for the type of the table: WEIGHT, PLANES.
// grid (ceil(units / 64), T), 64 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

struct Embed {
    uint d;
    float scale;
    uint stride; // from an index to the next one
    uint first;
};

kernel void embed(PLANE_PARAMS(w, 0, 1, 2), device const uint* ids [[buffer(3)]], device float* out [[buffer(4)]],
                  constant Embed& a [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
                  uint thread_idx [[thread_index_in_threadgroup]]) {
    const uint unit = group.x * 64 + thread_idx;
    if (unit * WEIGHT::UNIT >= a.d) return;
    const Row row = ROW_OF(WEIGHT, w, ids[(ulong)group.y * a.stride + a.first], a.d);
    device float* to = out + (ulong)group.y * a.d;
    WEIGHT::Raw raw;
    WEIGHT::load(row, unit, raw);
    for (int r = 0; r < WEIGHT::RUNS; r++) {
        float v[16];
        decode_run<WEIGHT>(raw, unit, r, v);
        const uint first = 16 * run_index<WEIGHT>(unit, r);
        for (uint i = 0; i < 16; i++) {
            if (first + i < a.d) to[first + i] = v[i] * a.scale;
        }
    }
}
