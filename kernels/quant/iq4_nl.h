// IQ4_NL: 32 values, x = d * table[q].
//   0  d f16 | 2  qs [16]
// Value `i` is the low half of byte `i` of qs for i < 16, else the high half of byte `i - 16`.
#pragma once

#include "quant/unit.h"

struct iq4_nl {
    enum { BLOCK = 32, BYTES = 18, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 1, OFFSET = 0, HAS_MIN = 0, WIDE = 0, SMALL = 0 };
    struct Raw {
        Words<18, 2> block;
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
        const Table16 table = iq4_table();
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = table.half(raw.block.get(2 + 4 * i, raw.shift), r);
    }
};
