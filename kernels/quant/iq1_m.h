// IQ1_M: 256 values, x = (d / 8 * (2 * s + 1)) * (8 * entry + 1 or - 1), s for each 16-group, the sign for eight
// values.
//   0  qs [32]: low bits of entries | 32  qh [16]: twice three high bits and the minus sign
//   48  scales u16 [4]: four times s, four bits of the f16 d
#pragma once

#include "quant/grid.h"

struct iq1_m {
    enum { BLOCK = 256, BYTES = 56, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -9, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<4, 4> qs;
        Words<2, 2> high;
        Words<8, 8> scales;
        u32 high_shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.high_shift = misalignment<2>(block + 32 + 2 * j);
        raw.qs.load(block + 4 * j);
        raw.high.load(block + 32 + 2 * j);
        raw.scales.load(block + 48);
    }

    // Entry `k` of a unit's four: eight values plus one, two bits each.
    static QUANT_FN u32 entry(u32 low, u32 high, int k) {
        return iq1_codes[(high >> (4 * k) & 7) << 8 | (low >> (8 * k) & 255)];
    }
    // The scale of a block, four bits of which lie in each half of words `a` and `b`.
    static QUANT_FN float block_scale(u32 a, u32 b) {
        return float_of_f16((a >> 12 & 0xf) | (a >> 24 & 0xf0) | (b >> 4 & 0xf00) | (b >> 16 & 0xf000));
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 high = raw.high.get(0, raw.high_shift) & 0xffff, low = raw.qs.a[0];
        const u32 a = raw.scales.a[0], b = raw.scales.a[1], j = unit % 8;
        const u32 s = (j < 4 ? a : b) >> (16 * (j / 2 % 2) + 6 * (j % 2) + 3 * r) & 7;
        scale = block_scale(a, b) * 0.125f * (float)(2 * s + 1);
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const int k = 2 * r + i / 2;
            const u32 code = entry(low, high, k);
            const u32 plus = high >> (4 * k + 3) & 1 ? 0 : 0x02020202u;
            w[i] = 8 * spread2(code) + plus;
            w[i + 1] = 8 * spread2(code >> 8) + plus;
        }
    }
};
