// IQ1_S: 256 values, x = (d / 8 * (2 * s + 1)) * (8 * entry + 1 or - 1) for each 32-group.
//   0  d f16 | 2  qs [32]: low bits of entries | 34  qh u16 [8]: four times three high bits, s, the minus sign
#pragma once

#include "quant/grid.h"

struct iq1_s {
    enum { BLOCK = 256, BYTES = 50, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -9, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<2, 2> d;
        Words<4, 2> qs;
        Words<2, 2> high;
        u32 shift, qs_shift, high_shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.shift = misalignment<2>(block);
        raw.qs_shift = misalignment<2>(block + 2);
        raw.high_shift = misalignment<2>(block + 34 + 2 * j);
        raw.d.load(block);
        raw.qs.load(block + 2 + 4 * j);
        raw.high.load(block + 34 + 2 * j);
    }

    // Entry `k` of a unit's four: eight values plus one, two bits each.
    static QUANT_FN u32 entry(u32 low, u32 high, int k) {
        return iq1_codes[(high >> (3 * k) & 7) << 8 | (low >> (8 * k) & 255)];
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 high = raw.high.get(0, raw.high_shift) & 0xffff, low = raw.qs.get(0, raw.qs_shift);
        scale = float_of_f16(raw.d.get(0, raw.shift)) * 0.125f * (float)(2 * (high >> 12 & 7) + 1);
        min = 0.0f;
        const u32 plus = high >> 15 ? 0 : 0x02020202u;
        #pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 code = entry(low, high, 2 * r + i / 2);
            w[i] = 8 * spread2(code) + plus;
            w[i + 1] = 8 * spread2(code >> 8) + plus;
        }
    }
};
