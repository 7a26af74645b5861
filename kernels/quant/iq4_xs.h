// IQ4_XS: 256 values, x = (d * (sc[j] - 32)) * table[q] for each 32-group j.
//   0  d f16 | 2  scales_h u16 | 4  scales_l [4] | 8  qs [128]
// The low four bits of scale j are half j % 2 of byte j / 2 of scales_l, its high two bits 2j, 2j + 1 of scales_h.
// A group
// takes 16 bytes of qs: value `i` is the low half of byte `i` for i < 16, else the high half of byte `i - 16`.
#pragma once

#include "quant/unit.h"

struct iq4_xs {
    enum { BLOCK = 256, BYTES = 136, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 1, OFFSET = 0, HAS_MIN = 0, WIDE = 0, SMALL = 0 };
    struct Raw {
        Words<8, 8> head;
        Words<16, 8> qs;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        raw.head.load(block);
        raw.qs.load(block + 8 + 16 * (unit % 8));
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 j = unit % 8;
        const u32 sc = (raw.head.a[1] >> (4 * j) & 15) | (raw.head.a[0] >> (16 + 2 * j) & 3) << 4;
        scale = float_of_f16(raw.head.a[0]) * (float)((i32)sc - 32);
        min = 0.0f;
        const Table16 table = iq4_table();
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = table.half(raw.qs.a[i], r);
    }
};
