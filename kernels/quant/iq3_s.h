// IQ3_S: 256 values, x = (d * (2 * s + 1)) * q for each 32-group.
//   0  d f16 | 2  qs [64]: low bits of entries of four values | 66  qh [8]: eight high bits | 74  signs [32]
//   106  scales [4]: two halves
#pragma once

#include "quant/grid.h"

struct iq3_s {
    enum { BLOCK = 256, BYTES = 110, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 1, OFFSET = 0, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<2, 2> d;
        Words<8, 2> qs;
        Words<4, 2> signs;
        Words<1, 1> high, scale;
        u32 shift, qs_shift, byte_shift, scale_shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.shift = misalignment<2>(block);
        raw.qs_shift = misalignment<2>(block + 2);
        raw.byte_shift = misalignment<1>(block + 66 + j);
        raw.scale_shift = misalignment<1>(block + 106 + j / 2);
        raw.d.load(block);
        raw.qs.load(block + 2 + 8 * j);
        raw.signs.load(block + 74 + 4 * j);
        raw.high.load(block + 66 + j);
        raw.scale.load(block + 106 + j / 2);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 s = raw.scale.get(0, raw.scale_shift) >> (4 * (unit % 2)) & 15;
        scale = float_of_f16(raw.d.get(0, raw.shift)) * (float)(2 * s + 1);
        min = 0.0f;
        const u32 high = raw.high.get(0, raw.byte_shift) >> (4 * r), low = raw.qs.get(4 * r, raw.qs_shift);
        const u32 signs = raw.signs.get(0, raw.qs_shift) >> (16 * r);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 code = iq3_s_codes[(high >> i & 1) << 8 | (low >> (8 * i) & 255)];
            w[i] = with_signs(0x01010101u + 2 * spread3(code), signs >> (4 * i));
        }
    }
};
