// Weights whose codes are multiplied where they lie in loaded words: a mask and a conversion, no shift. A code that
// begins at bit b of its word is 2^b times as large, so that x is divided by as much ahead, once for all rows of
// weights. These are powers of two: nothing is rounded, but numbers of x below 2^-98 may be lost.
//
// `InPlace<W>` of such a type holds a unit of 32 weights, in two runs as `run_index` has them, and has
//   load(row, unit)    loads and nothing else
//   places()           what four numbers of x that follow each other are multiplied with ahead
//   dot(x, total)      the unit times x, eight times four numbers that are, and sums of x that are not: of both runs,
//                      or of all eights where `Totals<W>` says so
// Where IS is 2, it holds a unit of the type, whose runs meet x one after the other, and in place of the last two has
//   run(r, x)          run r times x, four times four numbers as they are, without the scale
//   dot(sum, total)    the unit times x, from what all runs gave and the sum of x
// With HAS_DECODE it has `decode(row, unit, r, v)`, which takes run r as floats, for tiles.
#pragma once

#include "quant/unit.h"

// Other types: their codes are bytes once they are taken out, or they are floats.
template <class W> struct InPlace {
    enum { IS = 0, HAS_DECODE = 0 };
};

// How many numbers of x are added up to one of `total`.
template <class W> struct Totals {
    enum { OF = 16 };
};

inline float masked(uint w, uint mask) { return float(w & mask); }
inline float masked(ushort w, ushort mask) { return float(ushort(w & mask)); }

// Four codes, STEP bits from one to the next, the first one under `mask`, times four numbers.
template <int STEP> inline float four_codes(uint w, uint mask, float4 x) {
    return masked(w, mask) * x.x + masked(w, mask << STEP) * x.y + masked(w, mask << 2 * STEP) * x.z +
           masked(w, mask << 3 * STEP) * x.w;
}
// The same in both bytes of two halves of words.
inline float four_in_two(ushort a, ushort b, ushort mask, float4 x) {
    const ushort next = mask << 8;
    return masked(a, mask) * x.x + masked(a, next) * x.y + masked(b, mask) * x.z + masked(b, next) * x.w;
}
// Of each byte of four words what `mask` leaves of it.
inline float sixteen_bytes(const thread uint* w, uint mask, const thread float4* x) {
    return (four_codes<8>(w[0], mask, x[0]) + four_codes<8>(w[1], mask, x[1])) +
           (four_codes<8>(w[2], mask, x[2]) + four_codes<8>(w[3], mask, x[3]));
}
// What places() is where codes lie in bytes of words.
inline float4 byte_places() { return float4(1.0f, 1.0f / 256, 1.0f / 65536, 1.0f / 16777216); }

// Halves are read as they lie.
struct f16;
template <> struct InPlace<f16> {
    enum { IS = 0, HAS_DECODE = 1 };
    static inline void decode(const thread Row& row, uint unit, int, thread float* v) {
        device const half* from = (device const half*)row.q + 16 * unit;
        if (row.n % 8 == 0 && 16 * unit + 16 <= row.n) {
            for (uint i = 0; i < 4; i++) {
                const float4 four = float4(((device const half4*)from)[i]);
                v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
            }
            return;
        }
        for (uint i = 0; i < 16; i++) v[i] = 16 * unit + i < row.n ? float(from[i]) : 0.0f;
    }
};

struct q4_0;
template <> struct InPlace<q4_0> {
    enum { IS = 1, HAS_DECODE = 0 };
    half d;
    ushort w[8]; // blocks begin at a multiple of two bytes
    inline void load(const thread Row& row, uint unit) {
        device const ushort* p = (device const ushort*)(row.q + (ulong)unit * 18);
        d = as_type<half>(p[0]);
        for (int i = 0; i < 8; i++) w[i] = p[1 + i];
    }
    static inline float4 places() { return float4(1.0f, 1.0f / 256, 1.0f, 1.0f / 256); }
    inline float dot(const thread float4* x, const thread float* total) const {
        float low = four_in_two(w[0], w[1], 0x0f, x[0]), high = four_in_two(w[0], w[1], 0xf0, x[4]);
        for (int i = 1; i < 4; i++) {
            low += four_in_two(w[2 * i], w[2 * i + 1], 0x0f, x[i]);
            high += four_in_two(w[2 * i], w[2 * i + 1], 0xf0, x[4 + i]);
        }
        return float(d) * (low + 1.0f / 16 * high - 8.0f * (total[0] + total[1]));
    }
};

struct q4_1;
template <> struct InPlace<q4_1> {
    enum { IS = 1, HAS_DECODE = 0 };
    half2 d; // and the minimum
    uint w[4];
    inline void load(const thread Row& row, uint unit) {
        device const uint* p = (device const uint*)(row.q + (ulong)unit * 20);
        d = as_type<half2>(p[0]);
        for (int i = 0; i < 4; i++) w[i] = p[1 + i];
    }
    static inline float4 places() { return byte_places(); }
    inline float dot(const thread float4* x, const thread float* total) const {
        const float sum = sixteen_bytes(w, 0x0f, x) + 1.0f / 16 * sixteen_bytes(w, 0xf0, x + 4);
        return float(d.x) * sum + float(d.y) * (total[0] + total[1]);
    }
};

struct q5_0;
template <> struct InPlace<q5_0> {
    enum { IS = 1, HAS_DECODE = 0 };
    half d;
    ushort high[2], w[8];
    inline void load(const thread Row& row, uint unit) {
        device const ushort* p = (device const ushort*)(row.q + (ulong)unit * 22);
        d = as_type<half>(p[0]);
        for (int i = 0; i < 2; i++) high[i] = p[1 + i];
        for (int i = 0; i < 8; i++) w[i] = p[3 + i];
    }
    static inline float4 places() { return byte_places(); }
    inline float dot(const thread float4* x, const thread float* total) const {
        float sum = 0.0f;
        for (int i = 0; i < 4; i++) {
            const uint both = w[2 * i] | uint(w[2 * i + 1]) << 16;
            sum += four_codes<8>((both & 0x0f0f0f0f) | fifth_bits(high[0] >> 4 * i), 0xff, x[i]);
            sum += four_codes<8>((both >> 4 & 0x0f0f0f0f) | fifth_bits(high[1] >> 4 * i), 0xff, x[4 + i]);
        }
        return float(d) * (sum - 16.0f * (total[0] + total[1]));
    }
};

struct q8_0;
template <> struct InPlace<q8_0> {
    enum { IS = 1, HAS_DECODE = 1 };
    half d;
    char2 w[16];
    inline void load(const thread Row& row, uint unit) {
        device const uchar* p = row.q + (ulong)unit * 34;
        d = *(device const half*)p;
        for (int i = 0; i < 16; i++) w[i] = ((device const char2*)(p + 2))[i];
    }
    static inline float4 places() { return float4(1.0f); }
    inline float dot(const thread float4* x, const thread float*) const {
        float sum = 0.0f;
        for (int i = 0; i < 8; i++) {
            const char2 a = w[2 * i], b = w[2 * i + 1];
            sum += float(a.x) * x[i].x + float(a.y) * x[i].y + float(b.x) * x[i].z + float(b.y) * x[i].w;
        }
        return float(d) * sum;
    }
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        device const uchar* p = row.q + (ulong)unit * 34;
        const float scale = float(*(device const half*)p);
        for (int i = 0; i < 8; i++) {
            const char2 a = ((device const char2*)(p + 2 + 16 * r))[i];
            v[2 * i] = scale * float(a.x);
            v[2 * i + 1] = scale * float(a.y);
        }
    }
};

struct q4_k;
template <> struct InPlace<q4_k> {
    enum { IS = 1, HAS_DECODE = 0 };
    uint head[4], w[4];
    uint pair; // of groups of 32
    inline void load(const thread Row& row, uint unit) {
        device const uint4* block = (device const uint4*)(row.q + (ulong)(unit / 8) * 144);
        const uint4 a = block[0], b = block[1 + unit % 8];
        head[0] = a.x, head[1] = a.y, head[2] = a.z, head[3] = a.w;
        w[0] = b.x, w[1] = b.y, w[2] = b.z, w[3] = b.w;
        pair = unit % 8 / 2;
    }
    static inline float4 places() { return byte_places(); }
    // Of two scales and two minimums the second is 256 times as large, high halves of bytes are 16 times.
    inline float dot(const thread float4* x, const thread float* total) const {
        uint scales, mins;
        scales_mins(head + 1, pair, scales, mins);
        const half2 d = as_type<half2>(head[0]);
        const float low = sixteen_bytes(w, 0x0f, x), high = sixteen_bytes(w, 0xf0, x + 4);
        const float sum = masked(scales, 0xff) * low + masked(scales, 0xff00) * (high / 4096);
        const float least = masked(mins, 0xff) * total[0] + masked(mins, 0xff00) * (total[1] / 256);
        return float(d.x) * sum - float(d.y) * least;
    }
};

// Types whose codes are places in a table, low halves of sixteen bytes `w` and then the high ones. `Of` has `w`, `at`,
// a number of the table, and `scale()`, what all are multiplied with.
template <class Of> struct FromTable {
    enum { IS = 1, HAS_DECODE = 1 };
    static inline float4 places() { return float4(1.0f); }
    inline float dot(const thread float4* x, const thread float*) const {
        const thread Of& of = *(const thread Of*)this;
        float low = 0.0f, high = 0.0f;
        for (int i = 0; i < 4; i++) {
            const uchar a = of.w[4 * i], b = of.w[4 * i + 1], c = of.w[4 * i + 2], d = of.w[4 * i + 3];
            const float4 y = x[i], z = x[4 + i];
            low += Of::at(a & 15) * y.x + Of::at(b & 15) * y.y + Of::at(c & 15) * y.z + Of::at(d & 15) * y.w;
            high += Of::at(a >> 4) * z.x + Of::at(b >> 4) * z.y + Of::at(c >> 4) * z.z + Of::at(d >> 4) * z.w;
        }
        return of.scale() * (low + high);
    }
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        Of of;
        of.load(row, unit);
        const float scale = of.scale();
        for (uint i = 0; i < 16; i++) v[i] = scale * Of::at(of.w[i] >> (4 * r) & 15);
    }
};

struct mxfp4;
constant float e2m1_values[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                                  -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};
template <> struct InPlace<mxfp4> : FromTable<InPlace<mxfp4>> {
    uchar e, w[16];
    inline void load(const thread Row& row, uint unit) {
        device const uchar* p = row.q + (ulong)unit * 17;
        e = p[0];
        for (int i = 0; i < 16; i++) w[i] = p[1 + i];
    }
    inline float scale() const { return e8m0_half(e); }
    static inline float at(uint code) { return e2m1_values[code]; }
};

// MLX's: codes follow each other in words.
struct mxfp4_planar;
template <> struct InPlace<mxfp4_planar> {
    enum { IS = 1, HAS_DECODE = 1 };
    uint e, w[4];
    inline void load(const thread Row& row, uint unit) {
        const uint4 all = *(device const uint4*)(row.q + (ulong)unit * 16);
        w[0] = all.x, w[1] = all.y, w[2] = all.z, w[3] = all.w;
        e = row.scales[unit];
    }
    static inline float4 places() { return float4(1.0f); }
    // Four codes from bit `from` on.
    static inline float4 four(uint w, uint from) {
        const uint a = w >> from;
        return float4(e2m1_values[a & 15], e2m1_values[a >> 4 & 15], e2m1_values[a >> 8 & 15],
                      e2m1_values[a >> 12 & 15]);
    }
    inline float dot(const thread float4* x, const thread float*) const {
        float4 sum = float4(0.0f);
        for (int i = 0; i < 8; i++) sum += four(w[i / 2], 16 * (i % 2)) * x[i];
        return e8m0_half(e) * ((sum.x + sum.y) + (sum.z + sum.w));
    }
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        const uint2 half_unit = *(device const uint2*)(row.q + (ulong)unit * 16 + 8 * r);
        const float scale = e8m0_half(row.scales[unit]);
        for (int i = 0; i < 4; i++) {
            const float4 y = scale * four(i < 2 ? half_unit.x : half_unit.y, 16 * (i % 2));
            v[4 * i] = y.x, v[4 * i + 1] = y.y, v[4 * i + 2] = y.z, v[4 * i + 3] = y.w;
        }
    }
};

constant float iq4_values[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                 1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};
struct iq4_nl;
template <> struct InPlace<iq4_nl> : FromTable<InPlace<iq4_nl>> {
    half d;
    uchar w[16];
    inline void load(const thread Row& row, uint unit) {
        device const uchar* p = row.q + (ulong)unit * 18;
        d = *(device const half*)p;
        for (int i = 0; i < 16; i++) w[i] = p[2 + i];
    }
    inline float scale() const { return float(d); }
    static inline float at(uint code) { return iq4_values[code]; }
};

struct iq4_xs;
template <> struct InPlace<iq4_xs> : FromTable<InPlace<iq4_xs>> {
    half d;
    uint six; // bits of the scale
    uchar w[16];
    inline void load(const thread Row& row, uint unit) {
        device const uchar* p = row.q + (ulong)(unit / 8) * 136;
        const uint j = unit % 8;
        d = *(device const half*)p;
        const uint high = *(device const ushort*)(p + 2) >> (2 * j) & 3;
        six = (p[4 + j / 2] >> (4 * (j % 2)) & 15) | high << 4;
        for (int i = 0; i < 16; i++) w[i] = p[8 + 16 * j + i];
    }
    inline float scale() const { return float(d) * float(int(six) - 32); }
    static inline float at(uint code) { return iq4_values[code]; }
};

// Of a unit of 64 a tile takes one run, so that it loads that only.
struct q6_k;
template <> struct InPlace<q6_k> {
    enum { IS = 0, HAS_DECODE = 1 };
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        device const uchar* block = row.q + (ulong)(unit / 4) * 210;
        const uint part = unit % 4 / 2, odd = unit % 2;
        device const ushort* low = (device const ushort*)(block + 64 * part + 16 * odd + 32 * (r % 2));
        device const ushort* high = (device const ushort*)(block + 128 + 16 * (unit % 4));
        const char by = (char)block[192 + 8 * part + 2 * r + odd];
        const float scale = float(*(device const half*)(block + 208)) * float(by);
        const float next = scale / 256, least = -32.0f * scale;
        for (uint i = 0; i < 8; i++) {
            const uint both = (low[i] >> 4 * (r / 2) & 0x0f0f) | (high[i] >> 2 * r & 0x0303) << 4;
            v[2 * i] = fma(masked(both, 0xff), scale, least);
            v[2 * i + 1] = fma(masked(both, 0xff00), next, least);
        }
    }
};

// Of each byte of sixteen two bits for a run. Bytes of odd places are made smaller in their sum, which costs less than
// in each number of x where there is a run for each two bits.
struct tq2_0;
template <> struct InPlace<tq2_0> {
    enum { IS = 2, HAS_DECODE = 0 };
    half d;
    ushort w[8];
    inline void load(const thread Row& row, uint unit) {
        device const uchar* block = row.q + (ulong)(unit / 4) * 66;
        device const ushort* p = (device const ushort*)(block + 16 * (unit % 4));
        d = *(device const half*)(block + 64);
        for (int i = 0; i < 8; i++) w[i] = p[i];
    }
    inline float run(int r, const thread float4* x) const {
        const ushort mask = 3 << 2 * r, next = mask << 8;
        float even = masked(w[0], mask) * x[0].x + masked(w[1], mask) * x[0].z;
        float odd = masked(w[0], next) * x[0].y + masked(w[1], next) * x[0].w;
#pragma unroll
        for (int i = 1; i < 4; i++) {
            even += masked(w[2 * i], mask) * x[i].x + masked(w[2 * i + 1], mask) * x[i].z;
            odd += masked(w[2 * i], next) * x[i].y + masked(w[2 * i + 1], next) * x[i].w;
        }
        return 1.0f / (1 << 2 * r) * (even + 1.0f / 256 * odd);
    }
    inline float dot(float sum, float total) const { return float(d) * (sum - total); }
};

// IQ1: entries of eight codes of two bits, for -1, 0 and 1, to all of which an eighth is added or taken from. `W` is
// the type, whose table is there only with its header.
template <class W> struct InPlaceIq1 {
    enum { IS = 1, HAS_DECODE = 0 };
    static inline float4 places() { return float4(1.0f, 1.0f / 4, 1.0f / 16, 1.0f / 64); }
    static inline float eight(uint codes, const thread float4* x) {
        return four_codes<2>(codes, 3, x[0]) + 1.0f / 256 * four_codes<2>(codes, 3 << 8, x[1]);
    }
    // What a code of 0 stands for, by its sign.
    static inline float least(uint is_minus) { return is_minus != 0 ? -1.125f : -0.875f; }
};
template <class W> struct InPlaceIq1S : InPlaceIq1<W> {
    typedef InPlaceIq1<W> Base;
    half d;
    ushort high;
    Words<4, 2> low;
    inline void load(const thread Row& row, uint unit) {
        device const uchar* block = row.q + (ulong)(unit / 8) * 50;
        const uint j = unit % 8;
        d = *(device const half*)block;
        low.load(block + 2 + 4 * j);
        high = *(device const ushort*)(block + 34 + 2 * j);
    }
    inline float dot(const thread float4* x, const thread float* total) const {
        float sum = Base::least(high & 0x8000) * (total[0] + total[1]);
        for (int k = 0; k < 4; k++) sum += Base::eight(W::entry(low.a[0], high, k), x + 2 * k);
        return float(d) * float(2 * (high >> 12 & 7) + 1) * sum;
    }
};
// Of each eight a sign of its own.
template <class W> struct InPlaceIq1M : InPlaceIq1<W> {
    typedef InPlaceIq1<W> Base;
    uint a, b, low, high, place;
    inline void load(const thread Row& row, uint unit) {
        device const uchar* block = row.q + (ulong)(unit / 8) * 56;
        const uint2 scales = *(device const uint2*)(block + 48);
        a = scales.x, b = scales.y;
        place = unit % 8;
        low = *(device const uint*)(block + 4 * place);
        high = *(device const ushort*)(block + 32 + 2 * place);
    }
    inline float dot(const thread float4* x, const thread float* total) const {
        const uint six = (place < 4 ? a : b) >> (16 * (place / 2 % 2) + 6 * (place % 2));
        float sums[2];
        for (int r = 0; r < 2; r++) {
            sums[r] = 0.0f;
            for (int k = 2 * r; k < 2 * r + 2; k++) {
                sums[r] += Base::least(high >> (4 * k) & 8) * total[k] + Base::eight(W::entry(low, high, k), x + 2 * k);
            }
        }
        return W::block_scale(a, b) * (float(2 * (six & 7) + 1) * sums[0] + float(2 * (six >> 3 & 7) + 1) * sums[1]);
    }
};
struct iq1_s;
template <> struct InPlace<iq1_s> : InPlaceIq1S<iq1_s> {};
struct iq1_m;
template <> struct Totals<iq1_m> {
    enum { OF = 8 };
};
template <> struct InPlace<iq1_m> : InPlaceIq1M<iq1_m> {};

#ifdef AFFINE_BITS
// MLX's codes of 2, 4 or 8 bits follow each other in words.
template <int BITS, int GROUP, int SCALE> struct InPlaceAffine {
    enum { IS = 1, HAS_DECODE = 0 };
    typedef affine_of<BITS, GROUP, SCALE> W;
    uint w[BITS];
    uint scale, bias;
    inline void load(const thread Row& row, uint unit) {
        typename W::Raw raw;
        W::load(row, unit, raw);
        for (int i = 0; i < BITS; i++) w[i] = raw.q.a[i];
        scale = raw.scale, bias = raw.bias;
    }
    static inline float4 places() {
        const float step = 1.0f / (1 << BITS);
        return float4(1.0f, step, step * step, step * step * step);
    }
    // Sums of fours of codes that begin at one bit of their words, then those of all bits.
    inline float dot(const thread float4* x, const thread float* total) const {
        const uint mask = (1 << BITS) - 1;
        float sum = 0.0f, place = 1.0f;
        for (int four = 0; four < 8 / BITS; four++) {
            float of_four = four_codes<BITS>(w[0], mask << 4 * BITS * four, x[four]);
            for (int i = 1; i < BITS; i++) {
                of_four += four_codes<BITS>(w[i], mask << 4 * BITS * four, x[8 / BITS * i + four]);
            }
            sum = four == 0 ? of_four : sum + place * of_four;
            place *= 1.0f / (1 << 2 * BITS) / (1 << 2 * BITS);
        }
        return W::number(scale) * sum + W::number(bias) * (total[0] + total[1]);
    }
};
template <int GROUP, int SCALE> struct InPlace<affine_of<2, GROUP, SCALE>> : InPlaceAffine<2, GROUP, SCALE> {};
template <int GROUP, int SCALE> struct InPlace<affine_of<4, GROUP, SCALE>> : InPlaceAffine<4, GROUP, SCALE> {};
template <int GROUP, int SCALE> struct InPlace<affine_of<8, GROUP, SCALE>> : InPlaceAffine<8, GROUP, SCALE> {};
#endif
