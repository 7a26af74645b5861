// Q4_K as `vec.h` reads it: a unit is 32 bytes of qs, 32 values of one group and 32 of the next, so that a sub-scale is
// unpacked once for 32 values.
#pragma once

#include "quant/unit.h"

struct q4_k;
struct q4_k_wide {
    enum { BLOCK = 256, BYTES = 144, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 64, RUNS = 4, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = 0, HAS_MIN = 1, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 16> head, first, second;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        raw.head.load(block);
        raw.first.load(block + 16 + 32 * (unit % 4));
        raw.second.load(block + 32 + 32 * (unit % 4));
    }

    // Group `g` of the unit: 32 values times `scale`, of which `min` is taken away. High halves stay where they are, as
    // sixteen times their number.
    static QUANT_FN void group(const QUANT_LOCAL Raw& raw, u32 unit, int g, QUANT_LOCAL u32* first,
                               QUANT_LOCAL u32* second, QUANT_LOCAL float& scale, QUANT_LOCAL float& min) {
        u32 scales, mins;
        scales_mins(raw.head.a + 1, unit % 4, scales, mins);
        scale = float_of_f16(raw.head.a[0]) * (g == 0 ? 1.0f : 0.0625f) * float_of_byte(scales, g, 0);
        min = float_of_f16(raw.head.a[0] >> 16) * float_of_byte(mins, g, 0);
        const u32 mask = g == 0 ? 0x0f0f0f0fu : 0xf0f0f0f0u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            first[i] = raw.first.a[i] & mask;
            second[i] = raw.second.a[i] & mask;
        }
    }
};
