// NVFP4: 64 values in four runs of 16, x = ue4m3(d) * e2m1(q).
//   0  d [4] | 4  qs [32]
// Byte i of a run's eight holds value i in its low half and value i + 8 in its high half. The scale is E4M3 without a
// sign, in which 0x7f is 0; code 8, minus zero, is zero.
#pragma once

#include "quant/unit.h"

struct nvfp4 {
    enum { BLOCK = 64, BYTES = 36, SCALE_BYTES = 0, BIAS_BYTES = 0, UNIT = 16, RUNS = 1, PAIRED = 0, IS_FLOAT = 1 };
    enum { WIDE = 0, SMALL = 0 };
    struct Raw {
        Words<8, 4> qs;
        u32 d;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        raw.d = block[unit % 4];
        raw.qs.load(block + 4 + unit % 4 * 8);
    }

    static QUANT_FN void values(const QUANT_LOCAL Raw& raw, u32, int, QUANT_LOCAL float* v) {
        // A half of the bits of the scale is 2^-8 of it.
        const float d = raw.d == 127 ? 0.0f : float_of_f16((raw.d & 127) << 7) * 256.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 code = raw.qs.a[i / 4 % 2] >> (8 * (i % 4) + 4 * (i / 8)) & 15;
            // A half of the bits of E2M1 is 2^-14 of the number.
            const u32 half = code == 8 ? 0 : (code & 7) << 9 | (code & 8) << 12;
            v[i] = float_of_f16(half) * 16384.0f * d;
        }
    }
};
