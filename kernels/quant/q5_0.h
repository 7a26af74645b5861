// Q5_0: 32 values, x = d * (q - 16).
//   0  d f16 | 2  qh u32 | 6  qs [16]
// Value `i` is the low half of byte `i` of qs for i < 16, else the high half of byte `i - 16`.
// Bit `i` of qh is bit 4 of value `i`.
#pragma once

#include "quant/unit.h"

struct q5_0 {
    enum { BLOCK = 32, BYTES = 22, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -16, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<22, 2> block;
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
        const u32 qh = raw.block.get(2, raw.shift) >> (16 * r);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = (raw.block.get(6 + 4 * i, raw.shift) >> (4 * r) & 0x0f0f0f0fu) | fifth_bits(qh >> (4 * i));
        }
    }
};
