// MXFP4 in planes, as MLX files and the original gpt-oss hold it: 32 values, x = 2^(e - 127) * e2m1[q].
// Plane q has the codes, four bits each, in order; plane scales a byte e a block. The table is doubled and the scale
// halved, so that integers come out.
#pragma once

#include "quant/unit.h"

struct mxfp4_planar {
    enum { BLOCK = 32, BYTES = 16, SCALE_BYTES = 1, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 1, OFFSET = 0, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 16> qs;
        u32 e;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        raw.qs.load(row.q + (u64)unit * BYTES);
        raw.e = row.scales[unit];
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        scale = e8m0_half(raw.e);
        min = 0.0f;
        const Table16 table = e2m1_table();
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = table.four(raw.qs.a[2 * r + i / 2] >> (16 * (i % 2)));
    }
};
