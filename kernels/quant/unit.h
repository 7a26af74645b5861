// What the headers of weight types share: how a lane walks a row, loads of packed bytes, bit tricks.
//
// A row of weights is a sequence of units. A unit is what one lane loads and decodes at a time: UNIT values in
// RUNS runs of
// 16 consecutive values each. Run `r` of unit `u` is the row's run number `run_index<W>(u, r)`, its values are
// `16 * run_index .. + 16`. In formats whose bytes hold values that lie 32 apart (PAIRED), a unit's runs lie 32
// apart too,
// so that it takes whole 16-byte pieces of its block, and two neighbouring units take the runs between in turn.
//
// The header of a type defines `struct <type>` with the enumerators
//   BLOCK       values a row is a multiple of (a block, or a group of an affine type)
//   BYTES, SCALE_BYTES, BIAS_BYTES   bytes of a block in each plane
//   UNIT, RUNS, PAIRED               see above
//   IS_FLOAT    values are floats: `values(raw, unit, r, v)` gives 16 of them
// and, unless IS_FLOAT,
//   SIGNED      integers come as signed bytes; else as unsigned ones
//   OFFSET      what is added to every integer: value = scale * (q + OFFSET) (+ min where HAS_MIN)
//   HAS_MIN     the format adds a minimum
//   WIDE        8-bit integers, which meet 16-bit activations: those of 8 bits would err more than the weights
//   SMALL       unsigned integers are below 128, signed ones within 63 of zero
// It has `struct Raw`, the loaded bytes as they are, and
//   load(row, unit, raw)                       loads and nothing else, so that several units can be in flight
//   run(raw, unit, r, w[4], scale, min)        16 integers as four words of bytes, in order
//
// This file and the types' headers keep to the C++14 subset that CUDA, Metal and host compilers share.
#pragma once

#include "quant/ints.h"

#if defined(__METAL_VERSION__)
#define QUANT_FN inline
#define QUANT_PTR const device u8*
#define QUANT_LOCAL thread
#define QUANT_TABLE constant
#elif defined(__CUDACC__)
#define QUANT_TABLE static __device__ const
#define QUANT_FN __host__ __device__ __forceinline__
#define QUANT_PTR const u8*
#define QUANT_LOCAL
#else
#define QUANT_TABLE static const
#define QUANT_FN inline
#define QUANT_PTR const u8*
#define QUANT_LOCAL
#endif

// Encoded values of one row: its place in every plane, and how many values it has.
struct Row {
    QUANT_PTR q;
    QUANT_PTR scales;
    QUANT_PTR biases;
    u32 n;
};

template <class W> QUANT_FN u32 run_index(u32 unit, int r) {
    return W::PAIRED ? 2 * W::RUNS * (unit / 2) + 2 * r + (unit & 1) : W::RUNS * unit + r;
}

// The float of these bits.
QUANT_FN float float_of_bits(u32 bits) {
#if defined(__METAL_VERSION__)
    return as_type<float>(bits);
#elif defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
#endif
}

QUANT_FN float float_of_bf16(u32 bits) { return float_of_bits(bits << 16); }

// The IEEE half in the low 16 bits, exactly; bits above are ignored.
QUANT_FN float float_of_f16(u32 bits) {
#if defined(__METAL_VERSION__)
    return float(as_type<half>((ushort)bits));
#elif defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
#else
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = (float)mantissa * (1.0f / 16777216.0f);
    return sign ? -magnitude : magnitude;
#endif
}

// The number of an E4M3 code below 128. No step has a subnormal number, which GPUs may take for zero.
QUANT_FN float float_of_ue4m3(u32 code) {
    // Codes below 8 are subnormal: as far above 0 as those of the next exponent are above 2^-6.
    const u32 bits = code << 20;
    return code < 8 ? float_of_bits(bits + (121u << 23)) - 0.015625f : float_of_bits(bits + (120u << 23));
}

// Bytes of the eight in b:a chosen by the four nibbles of `selector`, each 0..=7.
QUANT_FN u32 permute(u32 a, u32 b, u32 selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, selector);
#else
    const u64 both = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
#endif
}

// The low word of high:low >> shift, shift 0..=32.
QUANT_FN u32 funnel(u32 low, u32 high, u32 shift) {
#if defined(__CUDA_ARCH__)
    return __funnelshift_rc(low, high, shift);
#else
    return (u32)(((u64)high << 32 | low) >> shift);
#endif
}

// Byte `i` of a word as a float, plus an integer of at most 2^22.
QUANT_FN float float_of_byte(u32 word, int i, int offset) {
#if defined(__CUDA_ARCH__)
    // 2^23 + byte, put together from bytes; the difference is exact.
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - (float)(8388608 - offset);
#else
    return (float)((int)(word >> (8 * i) & 255) + offset);
#endif
}

#if defined(__CUDA_ARCH__) && defined(WEIGHTS_IN_SHARED)
// A block has copied its weights to shared memory.
template <class T> __device__ __forceinline__ T load_ordered(const T* p) { return *p; }
#elif defined(__CUDA_ARCH__)
// Loads that stay where they are written: the assembler moves those of read-only memory behind a wait, to their first
// use, where nothing is in flight any more.
__device__ __forceinline__ uint4 load_ordered(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_ordered(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load_ordered(const u32* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
#endif

// BYTES bytes from an address that is a multiple of ALIGN. Where that is less than a word, CUDA loads the aligned words
// around them, which end in the word of the last byte: a plane's memory must end at a multiple of four bytes.
template <int BYTES, int ALIGN> struct Words {
    enum { N = ALIGN >= 4 ? (BYTES + 3) / 4 : (BYTES + 7 - ALIGN) / 4 };
    u32 a[N];

    QUANT_FN void load(QUANT_PTR p) {
#if defined(__CUDA_ARCH__)
        if (ALIGN >= 16 && N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const uint4 v = load_ordered((const uint4*)p + i);
                a[4 * i] = v.x, a[4 * i + 1] = v.y, a[4 * i + 2] = v.z, a[4 * i + 3] = v.w;
            }
        } else if (ALIGN >= 8 && N % 2 == 0) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const uint2 v = load_ordered((const uint2*)p + i);
                a[2 * i] = v.x, a[2 * i + 1] = v.y;
            }
        } else {
            const u32* words = (const u32*)(p - ((u64)p & 3));
            const u32 last = ALIGN >= 4 ? N - 1 : (u32)(((u64)p & 3) + BYTES - 1) / 4;
#pragma unroll
            for (int i = 0; i < N; i++) a[i] = i < N - 1 || ALIGN >= 4 || i <= last ? load_ordered(words + i) : 0;
        }
#else
#if defined(__METAL_VERSION__)
        // As wide as the address and the length allow; no byte behind the last is read.
        if (ALIGN >= 16 && BYTES % 16 == 0) {
            for (int i = 0; i < BYTES / 16; i++) {
                const uint4 v = ((const device uint4*)p)[i];
                a[4 * i] = v.x, a[4 * i + 1] = v.y, a[4 * i + 2] = v.z, a[4 * i + 3] = v.w;
            }
            return;
        }
        if (ALIGN >= 4 && BYTES % 4 == 0) {
            for (int i = 0; i < N; i++) a[i] = ((const device u32*)p)[i];
            return;
        }
        if (ALIGN >= 2 && BYTES % 2 == 0) {
            for (int i = 0; i < N; i++) {
                a[i] = 4 * i < BYTES ? (u32)((const device ushort*)p)[2 * i] : 0;
                if (4 * i + 2 < BYTES) a[i] |= (u32)((const device ushort*)p)[2 * i + 1] << 16;
            }
            return;
        }
#endif
        for (int i = 0; i < N; i++) {
            a[i] = 0;
            for (int j = 4 * i; j < 4 * i + 4 && j < BYTES; j++) a[i] |= (u32)p[j] << (8 * (j % 4));
        }
#endif
    }

    // The four bytes from `byte` on, a constant; `shift` is `misalignment<ALIGN>` of the address.
    QUANT_FN u32 get(int byte, u32 shift) const {
        const u32 low = a[byte / 4], high = byte / 4 + 1 < N ? a[byte / 4 + 1 < N ? byte / 4 + 1 : 0] : 0;
        return funnel(low, high, shift + 8 * (byte % 4));
    }
};

// Bits by which `Words` of this address lie in the words loaded.
template <int ALIGN> QUANT_FN u32 misalignment(QUANT_PTR p) {
#if defined(__CUDA_ARCH__)
    return ALIGN >= 4 ? 0 : 8 * (u32)((u64)p & 3);
#else
    (void)p;
    return 0;
#endif
}

// Four table entries for the four nibbles in the low half of `codes`; `table` holds sixteen bytes.
struct Table16 {
    u32 a, b, c, d;
    QUANT_FN u32 four(u32 codes) const {
        const u32 select = codes & 0x7777u;
        const u32 low = permute(a, b, select), high = permute(c, d, select);
        return permute(low, high, (codes & 0x8888u) >> 1 | 0x3210u);
    }
    // Entries of the low (r = 0) or high nibbles of four bytes.
    QUANT_FN u32 half(u32 codes, int r) const {
        return permute(four(codes), four(codes >> 16), r == 0 ? 0x6420 : 0x7531);
    }
};

// The sixteen codes of IQ4_NL and IQ4_XS: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
QUANT_FN Table16 iq4_table() { return Table16{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}; }

// Twice the sixteen numbers of e2m1, whole: 0 1 2 3 4 6 8 12, then the same below zero.
QUANT_FN Table16 e2m1_table() { return Table16{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}; }

// Sub-scales and minimums of 32-groups 2c and 2c + 1 of Q4_K and Q5_K, a byte each: sixteen six-bit numbers in twelve
// bytes `s`.
//   bytes 0..4   low six bits: scale 0..4;      high two: bits 4, 5 of scale 4..8
//   bytes 4..8   low six bits: minimum 0..4;    high two: bits 4, 5 of minimum 4..8
//   bytes 8..12  low nibble: scale 4..8;        high nibble: minimum 4..8
QUANT_FN void scales_mins(const QUANT_LOCAL u32* s, u32 c, QUANT_LOCAL u32& scales, QUANT_LOCAL u32& mins) {
    const u32 at = 16 * (c % 2), x = s[0] >> at, y = s[1] >> at, z = s[2] >> at;
    scales = c < 2 ? x & 0x3f3fu : (z & 0x0f0fu) | (x >> 2 & 0x3030u);
    mins = c < 2 ? y & 0x3f3fu : (z >> 4 & 0x0f0fu) | (y >> 2 & 0x3030u);
}

// Bits 0..4 of `bits` as bit 4 of four bytes.
QUANT_FN u32 fifth_bits(u32 bits) {
    return (bits << 4 & 0x10u) | (bits << 11 & 0x1000u) | (bits << 18 & 0x100000u) | (bits << 25 & 0x10000000u);
}

// Sixteen floats of SIZE bytes as they lie; those behind the row's end are zero.
template <int SIZE> QUANT_FN void load_floats(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL u32* a) {
    const u32 first = 16 * unit;
    QUANT_PTR p = row.q + (u64)first * SIZE;
#if defined(__CUDA_ARCH__)
    if (first + 16 <= row.n && ((u64)p & 15) == 0) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const uint4 v = load_ordered((const uint4*)p + i);
            a[4 * i] = v.x, a[4 * i + 1] = v.y, a[4 * i + 2] = v.z, a[4 * i + 3] = v.w;
        }
        return;
    }
#elif defined(__METAL_VERSION__)
    // Planes begin at a multiple of 16 bytes, and such rows too.
    if (first + 16 <= row.n && row.n * SIZE % 16 == 0) {
        for (int i = 0; i < SIZE; i++) {
            const uint4 v = ((const device uint4*)p)[i];
            a[4 * i] = v.x, a[4 * i + 1] = v.y, a[4 * i + 2] = v.z, a[4 * i + 3] = v.w;
        }
        return;
    }
#endif
    // In steps of two bytes, which is what rows of an odd length leave.
#pragma unroll
    for (int i = 0; i < 4 * SIZE; i++) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const u32 at = 4 * i + j;
            if (first + at / SIZE < row.n) word |= (u32)(p[at] | p[at + 1] << 8) << (8 * j);
        }
        a[i] = word;
    }
}

// Half of the e8m0 number 2^(e - 127).
QUANT_FN float e8m0_half(u32 e) { return float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

// Run `r` of a loaded unit as sixteen floats, rounded as the format's own arithmetic rounds.
template <class W, bool IS_FLOAT> struct Values {
    static QUANT_FN void of(const QUANT_LOCAL typename W::Raw& raw, u32 unit, int r, QUANT_LOCAL float* v) {
        u32 w[4];
        float scale, min;
        W::run(raw, unit, r, w, scale, min);
        const u32 flip = W::SIGNED ? 0x80808080u : 0;
        const int offset = W::OFFSET - (W::SIGNED ? 128 : 0);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float q = float_of_byte(w[i / 4] ^ flip, i % 4, offset);
            v[i] = W::HAS_MIN ? scale * q + min : scale * q;
        }
    }
};
template <class W> struct Values<W, true> {
    static QUANT_FN void of(const QUANT_LOCAL typename W::Raw& raw, u32 unit, int r, QUANT_LOCAL float* v) {
        W::values(raw, unit, r, v);
    }
};

template <class W>
QUANT_FN void decode_run(const QUANT_LOCAL typename W::Raw& raw, u32 unit, int r, QUANT_LOCAL float* v) {
    Values<W, W::IS_FLOAT != 0>::of(raw, unit, r, v);
}

// Row `i` of a matrix whose rows of `n` values follow each other in every plane.
template <class W> QUANT_FN Row row_of(QUANT_PTR q, QUANT_PTR scales, QUANT_PTR biases, u64 i, u32 n) {
    const u64 blocks = i * (n / W::BLOCK);
    Row row;
    row.q = q + blocks * W::BYTES;
    row.scales = W::SCALE_BYTES > 0 ? scales + blocks * W::SCALE_BYTES : scales;
    row.biases = W::BIAS_BYTES > 0 ? biases + blocks * W::BIAS_BYTES : biases;
    row.n = n;
    return row;
}
