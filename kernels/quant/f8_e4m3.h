// 8-bit floats with an f32 scale for each 128 values of a row: x = d * e4m3(q).
// Plane q has a byte a value, plane scales the d. E4M3: a sign, four bits of exponent with bias 7, three of mantissa,
// no infinities, NaN above all others.
#pragma once

#include "quant/unit.h"

struct f8_e4m3 {
    enum { BLOCK = 128, BYTES = 128, SCALE_BYTES = 4, BIAS_BYTES = 0, UNIT = 16, RUNS = 1, PAIRED = 0, IS_FLOAT = 1 };
    enum { WIDE = 0, SMALL = 0 };
    struct Raw {
        Words<16, 16> q;
        Words<4, 4> d;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        raw.q.load(row.q + (u64)unit * 16);
        raw.d.load(row.scales + (u64)(unit / 8) * 4);
    }

    static QUANT_FN void values(const QUANT_LOCAL Raw& raw, u32, int, QUANT_LOCAL float* v) {
        const float d = float_of_bits(raw.d.a[0]);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 code = raw.q.a[i / 4] >> (8 * (i % 4)) & 255, size = code & 127;
            const float x = size == 127 ? float_of_bits(0x7fc00000u) : float_of_ue4m3(size);
            v[i] = (code & 128 ? -x : x) * d;
        }
    }
};
