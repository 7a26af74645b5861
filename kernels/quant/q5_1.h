// Q5_1: 32 values, x = d * q + m.
//   0  d f16 | 2  m f16 | 4  qh u32 | 8  qs [16]
// Value `i` is the low half of byte `i` of qs for i < 16, else the high half of byte `i - 16`.
// Bit `i` of qh is bit 4 of value `i`.
#pragma once

#include "quant/unit.h"

struct q5_1 {
    enum { BLOCK = 32, BYTES = 24, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = 0, HAS_MIN = 1, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<24, 8> block;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR p = row.q + (u64)unit * BYTES;
        raw.shift = misalignment<8>(p);
        raw.block.load(p);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        scale = float_of_f16(raw.block.get(0, 0));
        min = float_of_f16(raw.block.get(2, 0));
        const u32 qh = raw.block.get(4, 0) >> (16 * r);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = (raw.block.get(8 + 4 * i, 0) >> (4 * r) & 0x0f0f0f0fu) | fifth_bits(qh >> (4 * i));
        }
    }
};
