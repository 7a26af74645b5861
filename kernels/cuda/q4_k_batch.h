// Q4_K as `batch.h` reads it: a unit is 32 bytes of qs, 32 values of one group and 32 of the next, so that a block's
// head is loaded once for 64 values, and a sub-scale is unpacked once for 32.
#pragma once

#include "quant/unit.h"

struct q4_k;
struct q4_k_batch {
    enum { BLOCK = 256, BYTES = 144, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 64, RUNS = 4, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = 0, HAS_MIN = 1, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 16> head, qs[2];
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        raw.head.load(block);
        raw.qs[0].load(block + 16 + 32 * (unit % 4));
        raw.qs[1].load(block + 32 + 32 * (unit % 4));
    }

    // A block in shared memory.
    static QUANT_FN void load_staged(QUANT_PTR block, u32 unit, QUANT_LOCAL Raw& raw) {
        const auto four = [](QUANT_PTR p, u32 (&to)[4]) {
            const uint4 v = *(const uint4*)p;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        };
        four(block, raw.head.a);
        four(block + 16 + 32 * unit, raw.qs[0].a);
        four(block + 32 + 32 * unit, raw.qs[1].a);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        u32 scales, mins;
        scales_mins(raw.head.a + 1, unit % 4, scales, mins);
        scale = float_of_f16(raw.head.a[0]) * float_of_byte(scales, r / 2, 0);
        min = -(float_of_f16(raw.head.a[0] >> 16) * float_of_byte(mins, r / 2, 0));
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = raw.qs[r % 2].a[i] >> (4 * (r / 2)) & 0x0f0f0f0fu;
    }
};
