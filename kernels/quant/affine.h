// The affine types of MLX files: x = scale * q + bias, q of 2, 3, 4, 5, 6 or 8 bits, one scale and one bias a
// group of 32,
// 64 or 128 values.
// Plane q is a stream of bits in little-endian order; 32 values take 4 * BITS bytes, so that every unit begins at
// a word.
// Planes scales and biases have a number a group, f16 (SCALE 0), bf16 (1) or f32 (2).
//
// A module of one type sets AFFINE_BITS, AFFINE_GROUP and AFFINE_SCALE and gets the type `affine`.
#pragma once

#include "quant/unit.h"

template <int BITS, int GROUP, int SCALE> struct affine_of {
    enum { BLOCK = GROUP, BYTES = GROUP * BITS / 8, SCALE_BYTES = SCALE == 2 ? 4 : 2, BIAS_BYTES = SCALE_BYTES };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = 0, HAS_MIN = 1, WIDE = BITS == 8, SMALL = BITS < 8 };
    enum { ALIGN = BITS == 4 || BITS == 8 ? 16 : BITS % 2 == 0 ? 8 : 4 };
    struct Raw {
        Words<4 * BITS, ALIGN> q;
        u32 scale, bias;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        raw.q.load(row.q + (u64)unit * (4 * BITS));
        const u32 group = unit / (GROUP / 32);
        raw.scale = load_bits(row.scales, group);
        raw.bias = load_bits(row.biases, group);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        scale = number(raw.scale);
        min = number(raw.bias);
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = four(raw.q, 4 * r + i);
    }

    static QUANT_FN u32 load_bits(QUANT_PTR plane, u32 i) {
        Words<SCALE == 2 ? 4 : 2, SCALE == 2 ? 4 : 2> word;
        QUANT_PTR p = plane + (u64)i * SCALE_BYTES;
        word.load(p);
        return word.get(0, misalignment<SCALE == 2 ? 4 : 2>(p));
    }

    static QUANT_FN float number(u32 bits) {
        return SCALE == 0 ? float_of_f16(bits) : SCALE == 1 ? float_of_bf16(bits & 0xffffu) : float_of_bits(bits);
    }

    // Values 4 * i .. 4 * i + 4 of 32, a byte each.
    static QUANT_FN u32 four(const QUANT_LOCAL Words<4 * BITS, ALIGN>& q, int i) {
        if (BITS == 8) return q.a[i < BITS ? i : 0];
        const int bit = 4 * BITS * i, word = bit / 32, next = word + 1 < BITS ? word + 1 : word;
        const u32 field = funnel(q.a[word], q.a[next], bit % 32), mask = (1u << BITS) - 1;
        return (field & mask) | (field << (8 - BITS) & mask << 8) | (field << (16 - 2 * BITS) & mask << 16) |
               (field << (24 - 3 * BITS) & mask << 24);
    }
};

#ifdef AFFINE_BITS
typedef affine_of<AFFINE_BITS, AFFINE_GROUP, AFFINE_SCALE> affine;
#endif
