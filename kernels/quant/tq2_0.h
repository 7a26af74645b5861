// TQ2_0: 256 values, x = d * (q - 1).
//   0  qs [64] | 64  d f16
// Two bits a value, which lie as in Q2_K: a unit is 16 bytes of qs.
#pragma once

#include "quant/unit.h"

struct tq2_0 {
    enum { BLOCK = 256, BYTES = 66, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 64, RUNS = 4, PAIRED = 1, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -1, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 2> qs;
        Words<2, 2> d;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        raw.shift = misalignment<2>(block);
        raw.qs.load(block + 16 * (unit % 4));
        raw.d.load(block + 64);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        scale = float_of_f16(raw.d.get(0, raw.shift));
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = raw.qs.get(4 * i, raw.shift) >> (2 * r) & 0x03030303u;
    }
};
