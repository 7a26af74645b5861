// The paged cache: a page holds 32 positions of each key-value head. Keys lie transposed, [n_pages, n_kv, d_k, 32], so
// that a page's positions are the lanes of a simdgroup; values as rows, [n_pages, n_kv, 32, d_v]. K_TYPE and V_TYPE are
// 0 for floats, 1 for halves and 2 for the blocks of q8_0: integers, 128 added to each, and after those of a head in a
// page the scales, half [d / 32, 32]. Integers and scales are those of `encode_block` in backend/cache_type.rs.
#pragma once

#include "metal/chunk.h"

#define PAGE 32

#if K_TYPE == 2
typedef uchar Key;
typedef uchar4 Key4;
#elif K_TYPE
typedef half Key;
typedef half4 Key4;
#else
typedef float Key;
typedef float4 Key4;
#endif
#if V_TYPE == 2
typedef uchar Value;
typedef uchar4 Value4;
#elif V_TYPE
typedef half Value;
typedef half4 Value4;
#else
typedef float Value;
typedef float4 Value4;
#endif

// Elements that a head of d numbers takes in a page.
inline uint page_of_keys(uint d) { return K_TYPE == 2 ? PAGE * (d + d / 16) : PAGE * d; }
inline uint page_of_values(uint d) { return V_TYPE == 2 ? PAGE * (d + d / 16) : PAGE * d; }

// Saturates: one infinity would make a whole softmax NaN. NaN stays NaN.
inline float kv_bounded(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// The scale of a block, of which each lane of a simdgroup has a number, and what that is multiplied with. As integers
// NaN is the largest.
inline half block_scale(float x) {
    return half(kv_bounded(as_type<float>(simd_max(as_type<uint>(x) & 0x7fffffffu)) / 127.0f));
}
inline uchar block_number(float x, half scale) {
    const float by = float(scale) == 0.0f ? 0.0f : 1.0f / float(scale);
    return uchar(rint(fmin(fmax(x * by, -127.0f), 127.0f)) + 128.0f);
}

// Stores number i of the key at position p of a head's page; of the value. With blocks the lanes of a simdgroup store
// those of a block.
inline void store_key(device Key* head, uint d, uint p, uint i, float x) {
#if K_TYPE == 2
    const half scale = block_scale(x);
    head[i * PAGE + p] = block_number(x, scale);
    if (i % 32 == 0) ((device half*)(head + PAGE * d))[i / 32 * PAGE + p] = scale;
#elif K_TYPE
    head[i * PAGE + p] = half(kv_bounded(x));
#else
    head[i * PAGE + p] = x;
#endif
}
inline void store_value(device Value* head, uint d, uint p, uint i, float x) {
#if V_TYPE == 2
    const half scale = block_scale(x);
    head[p * d + i] = block_number(x, scale);
    if (i % 32 == 0) ((device half*)(head + PAGE * d))[i / 32 * PAGE + p] = scale;
#elif V_TYPE
    head[p * d + i] = half(kv_bounded(x));
#else
    head[p * d + i] = x;
#endif
}

// Number i of the key at position p of a head's page, and of keys at four positions that follow each other.
inline float key_at(device const Key* head, uint d, uint p, uint i) {
#if K_TYPE == 2
    return (float(head[i * PAGE + p]) - 128.0f) * float(((device const half*)(head + PAGE * d))[i / 32 * PAGE + p]);
#else
    return float(head[i * PAGE + p]);
#endif
}
inline float4 keys_at(device const Key* head, uint d, uint p, uint i) {
    const float4 x = float4(*(device const Key4*)(head + i * PAGE + p));
#if K_TYPE == 2
    return (x - 128.0f) * float4(*(device const half4*)((device const half*)(head + PAGE * d) + i / 32 * PAGE + p));
#else
    return x;
#endif
}

// Number i of the value at position p of a head's page, and four from i on.
inline float value_at(device const Value* head, uint d, uint p, uint i) {
#if V_TYPE == 2
    return (float(head[p * d + i]) - 128.0f) * float(((device const half*)(head + PAGE * d))[i / 32 * PAGE + p]);
#else
    return float(head[p * d + i]);
#endif
}
inline float4 values_at(device const Value* head, uint d, uint p, uint i) {
    const float4 x = float4(*(device const Value4*)(head + p * d + i));
#if V_TYPE == 2
    return (x - 128.0f) * float(((device const half*)(head + PAGE * d))[i / 32 * PAGE + p]);
#else
    return x;
#endif
}

// The first position that a query sees: of a window, 0 for none, or with the highest bit of a chunk of that length.
inline uint first_seen(uint window, uint pos) {
    if (window >> 31) return pos - pos % (window << 1 >> 1);
    return window != 0 && pos + 1 > window ? pos + 1 - window : 0;
}

// The position after the last that a query of a span sees, which is `end`: with SPANS 2 no further than the window.
inline uint span_end(uint end, uint window, uint pos) {
#if SPANS == 2
    return min(end, pos + (window << 1 >> 1));
#else
    return end;
#endif
}

// The page of a block of positions of a chunk's sequence; `pages` are those of its kind of cache.
inline uint page_of(device const uint* pages, device const Chunk& c, uint windowed, uint block) {
    return windowed ? pages[c.first_window_page + block - c.first_window_block] : pages[c.first_page + block];
}
