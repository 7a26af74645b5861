// F16: IEEE half, 1 sign, 5 exponent, 10 mantissa bits.
#pragma once

#include "quant/unit.h"

struct f16 {
    enum { BLOCK = 1, BYTES = 2, SCALE_BYTES = 0, BIAS_BYTES = 0, UNIT = 16, RUNS = 1, PAIRED = 0, IS_FLOAT = 1 };
    enum { WIDE = 0, SMALL = 0 };
    struct Raw {
        u32 a[8];
    };

    // A row need not be whole units: values behind its end are zero.
    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        load_floats<2>(row, unit, raw.a);
    }

    static QUANT_FN void values(const QUANT_LOCAL Raw& raw, u32, int, QUANT_LOCAL float* v) {
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = float_of_f16(raw.a[i / 2] >> (16 * (i % 2)));
    }
};
