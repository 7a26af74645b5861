// MXFP4 as GGUF files hold it (OCP Microscaling Formats 1.0): 32 values, x = 2^(e - 127) * e2m1[q].
//   0  e u8 | 1  qs [16]
// Value `i` is the low half of byte `i` of qs for i < 16, else the high half of byte `i - 16`.
// The table is doubled and the scale halved, so that integers come out.
#pragma once

#include "quant/unit.h"

struct mxfp4 {
    enum { BLOCK = 32, BYTES = 17, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 1, OFFSET = 0, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<17, 1> block;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR p = row.q + (u64)unit * BYTES;
        raw.shift = misalignment<1>(p);
        raw.block.load(p);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        scale = e8m0_half(raw.block.get(0, raw.shift) & 255);
        min = 0.0f;
        const Table16 table = e2m1_table();
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = table.half(raw.block.get(1 + 4 * i, raw.shift), r);
    }
};
