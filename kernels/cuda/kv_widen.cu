// kv_widen: keys and values of blocks of 8 bits as f16, for kernels of attention that read nothing else: of every chunk
// the pages that its queries see, each at its place in a copy of the layer's cache. What was never written stays what it
// is, and is not read.
//
// grid (any number, n_chunks), block 256: a thread takes 16 numbers at a time.
#define KV_F16 1
#include "cuda/kv_blocks.h"

__device__ __forceinline__ void widen(const KvWiden& a, const void* from, u16* to, u32 d, u64 page, u32 part) {
    // Pieces of the page, head after head.
    const u32 of_row = d / 16, of_head = PAGE * of_row;
    for (u32 i = part * blockDim.x + threadIdx.x; i < a.n_kv * of_head; i += gridDim.x * blockDim.x) {
        const u64 head = page * a.n_kv + i / of_head;
        const u32 at = i % of_head, row = at / of_row, column = at % of_row * 16;
        const u8* q = blocks_of(from, head, d);
        const uint4 raw = *(const uint4*)(q + row * d + column);
        const u32 scale = ((const u16*)(q + PAGE * d))[column / 32 * PAGE + row] * 0x10001u;
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        u32 out[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            out[j] = multiply_pairs(pair_of_bytes(words[j / 2], j % 2 == 0 ? 0x4140 : 0x4342), scale);
        }
        uint4* place = (uint4*)(to + (head * PAGE + row) * d + column);
        place[0] = make_uint4(out[0], out[1], out[2], out[3]);
        place[1] = make_uint4(out[4], out[5], out[6], out[7]);
    }
}

KERNEL __launch_bounds__(256) kv_widen(const __grid_constant__ KvWiden a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Chunk& c = a.step.chunks[blockIdx.y];
    if (a.singles && c.len == 1) return;
    for (u32 block = first_seen(a.window, c.pos) / PAGE; block <= (c.pos + c.len - 1) / PAGE; block++) {
        const u64 page = page_of(a.step, c, a.windowed, block);
        // Blocks of threads begin at another piece of each page, so that small pages take all of them.
        const u32 part = (blockIdx.x + block) % gridDim.x;
        if (a.k_out) widen(a, a.k, a.k_out, a.d_k, page, part);
        if (a.v_out) widen(a, a.v, a.v_out, a.d_v, page, part);
    }
}
