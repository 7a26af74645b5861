// Q8_0: 32 values, x = d * q, q signed.
//   0  d f16 | 2  q [32]
#pragma once

#include "quant/unit.h"

struct q8_0 {
    enum { BLOCK = 32, BYTES = 34, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 1, OFFSET = 0, HAS_MIN = 0, WIDE = 1, SMALL = 0 };
    struct Raw {
        Words<34, 2> block;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR p = row.q + (u64)unit * BYTES;
        raw.shift = misalignment<2>(p);
        raw.block.load(p);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        scale = float_of_f16(raw.block.get(0, raw.shift));
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = raw.block.get(2 + 16 * r + 4 * i, raw.shift);
    }
};
