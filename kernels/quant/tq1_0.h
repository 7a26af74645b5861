// TQ1_0: 256 values, x = d * (q - 1). A byte is a fraction of 256 with five digits of base three.
//   0  qs [48] | 48  qh [4] | 52  d f16
// Bytes 0 to 32 hold digit by digit 32 values each, those to 48 16 values each, those of qh four digits of four.
#pragma once

#include "quant/unit.h"

struct tq1_0 {
    enum { BLOCK = 256, BYTES = 54, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -1, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 2> qs[2];
        Words<2, 2> d;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.shift = misalignment<2>(block);
        // The last run of a block has its bytes in the last word of what it loads.
        raw.qs[0].load(block + (j < 5 ? 0 : 32));
        raw.qs[1].load(block + (j < 5 ? 16 : j < 7 ? 32 : 36));
        raw.d.load(block + 52);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 j = unit % 8;
        scale = float_of_f16(raw.d.get(0, raw.shift));
        min = 0.0f;
        const bool last = j == 7 && r == 1;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 v = last ? raw.qs[1].get(12, raw.shift) : raw.qs[r].get(4 * i, raw.shift);
            const u32 n = last ? i : j < 5 ? j : 2 * (j - 5) + r;
            const u32 power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
            const u32 even = (v & 0x00ff00ffu) * power & 0x00ff00ffu;
            const u32 odd = (v >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
            w[i] = (3 * even >> 8 & 0x00030003u) | (3 * odd & 0x03000300u);
        }
    }
};
