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
        // The table is doubled.
        const float half = raw.d == 127 ? 0.0f : float_of_ue4m3(raw.d & 127) * 0.5f;
        const Table16 table = e2m1_table();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 codes = table.half(raw.qs.a[i % 2], i / 2);
#pragma unroll
            for (int j = 0; j < 4; j++) v[4 * i + j] = float_of_byte(codes ^ 0x80808080u, j, -128) * half;
        }
    }
};
