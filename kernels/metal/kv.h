// The paged cache: a page holds 32 positions of each key-value head. Keys lie transposed, [n_pages, n_kv, d_k, 32], so
// that a page's positions are the lanes of a simdgroup; values as rows, [n_pages, n_kv, 32, d_v]. KV_F16 is 1 for
// halves.
#pragma once

#include "metal/chunk.h"

#define PAGE 32

#if KV_F16
typedef half Kv;
typedef half4 Kv4;
#else
typedef float Kv;
typedef float4 Kv4;
#endif

// Saturates: one infinity would make a whole softmax NaN. NaN stays NaN.
inline Kv kv_store(float x) {
#if KV_F16
    return Kv(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
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
