// NVFP4 whose matrix has a scale besides: x = (ue4m3(d) * e2m1(q)) * scale.
// Plane q has blocks of NVFP4, plane scales an f32 for each.
#pragma once

#include "quant/nvfp4.h"

struct nvfp4_scaled {
    enum { BLOCK = 64, BYTES = 36, SCALE_BYTES = 4, BIAS_BYTES = 0, UNIT = 16, RUNS = 1, PAIRED = 0, IS_FLOAT = 1 };
    enum { WIDE = 0, SMALL = 0 };
    struct Raw {
        nvfp4::Raw block;
        Words<4, 4> scale;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        nvfp4::load(row, unit, raw.block);
        raw.scale.load(row.scales + (u64)(unit / 4) * 4);
    }

    static QUANT_FN void values(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL float* v) {
        nvfp4::values(raw.block, unit, r, v);
        const float scale = float_of_bits(raw.scale.a[0]);
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] *= scale;
    }
};
