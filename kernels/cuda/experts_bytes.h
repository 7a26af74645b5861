// Gate and up of experts with few pairs each, Q4_K, in integers (mma.sync): unpacking to bytes is an eighth of what
// unpacking to bf16 is, and sub-scales multiply sums of 32 products as the integers that they are.
//
// Activations are columns of bytes with a scale for 64 numbers. Minimums meet the sums of 32 numbers, two bf16 numbers
// each, in another product. Columns lie as lanes multiply them, eight together, so that a step of a tile is one
// bulk copy; an expert's begin with a group of eight. Weights come as in `wide_staged.h`.
#pragma once

#include "cuda/wide_staged.h"

// A step of eight columns: 256 numbers of each. Lane (g, t) has column g in products, columns 2t and 2t + 1 in sums.
struct ByteColumns {
    uint4 words[4][32];      // by pair of groups of 32 and lane: numbers 8t .. 8t + 8 of either group
    float scales[4][4][2];   // by t, pair of groups and column
    uint2 sums[32];          // by lane: of groups 2t and 2t + 1, rounded to bf16, and what that left
};
static_assert(sizeof(ByteColumns) == 2432, "a multiple of 16");

// Threads, their rows of weights of gate and as many of up, most groups of columns of a tile, steps of a warp's weights
// and steps of groups of columns in shared memory. Rows lie so that four of them meet different banks.
constexpr u32 BYTES_THREADS = 256, BYTES_ROWS = 64, BYTES_GROUPS = 3, BYTES_AHEAD = 3, BYTES_RING = 6;
constexpr u32 BYTES_PITCH = 160, BYTES_STAGE = 16 * BYTES_PITCH;
constexpr u32 BYTES_COLUMNS = BYTES_RING * sizeof(ByteColumns);
constexpr u32 BYTES_BARRIERS = BYTES_COLUMNS + BYTES_THREADS / 32 * BYTES_AHEAD * BYTES_STAGE;
constexpr u32 BYTES_SHARED = BYTES_BARRIERS + 16 * BYTES_RING;

// The group of eight with which the columns of an expert begin, whose first pair is number `first` of the lists.
__device__ __forceinline__ u32 bytes_group(u32 first, u32 expert) { return first / 8 + expert; }

// Packs a row of k numbers as column g of a group. Whole warps, a step each.
__device__ __forceinline__ void bytes_pack(const float* x, u32 k, ByteColumns* columns, u32 n_groups, u32 group,
                                           u32 g) {
    const u32 lane = threadIdx.x % 32, c = lane / 8, j = lane % 8;
    for (u32 step = threadIdx.x / 32; step < k / 256; step += blockDim.x / 32) {
        float v[8];
        load8<256>(x, true, k, 256 * step + 8 * lane, v);
        u32 words[2], sum;
        const float d = bytes64(v, words, sum);
        const float first = d * (float)(int)sum, second = __shfl_xor_sync(FULL_MASK, first, 4);
        ByteColumns& to = columns[(u64)step * n_groups + group];
        ((uint2*)&to.words[c][4 * g + j % 4])[j / 4] = make_uint2(words[0], words[1]);
        if (j == 0) {
            to.scales[g / 2][c][g % 2] = d;
            const u32 rounded = bf16_pair(first, second);
            to.sums[4 * g + c] = make_uint2(rounded, bf16_rest(first, second, rounded));
        }
    }
}

#if HAS_WGMMA
// Before `bytes_tile`, and before anything that waits.
__device__ __forceinline__ void bytes_begin(u8* shared) {
    const u32 full = address_in_shared(shared) + BYTES_BARRIERS, empty = full + 8 * BYTES_RING;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < BYTES_RING; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, BYTES_THREADS / 32);
        }
        fence_async();
    }
}

// Where this thread's copies go: four lanes copy their two rows.
__device__ __forceinline__ u32 bytes_copies(u8* shared) {
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    return address_in_shared(shared) + BYTES_COLUMNS + warp * (BYTES_AHEAD * BYTES_STAGE) + g * BYTES_PITCH;
}

// Lane t of four asks for a step of both rows, which move on by it: eight pieces of 16 bytes each, then the last of
// both.
__device__ __forceinline__ void bytes_copy(const u8* (&rows)[2], u32 copies, u32 t, u32 stage, bool is_there) {
    if (is_there) {
        const u32 to = copies + stage * BYTES_STAGE + 16 * t;
        const u8 *first = rows[0] + 16 * t, *second = rows[1] + 16 * t;
        copy_async(to, first), copy_async(to + 64, first + 64);
        copy_async(to + 8 * BYTES_PITCH, second), copy_async(to + 8 * BYTES_PITCH + 64, second + 64);
        if (t < 2) copy_async(to + t * (8 * BYTES_PITCH - 16) + 128, (t ? rows[1] : rows[0]) + 128);
        rows[0] += 144, rows[1] += 144;
    }
    copy_async_commit();
}

// acc = the products of this thread's rows g and g + 8 with N groups of columns at `columns`, whose steps lie `stride`
// groups apart: columns 8n + 2t and 8n + 2t + 1 of row g are acc[4n], acc[4n + 1], of row g + 8 the two after them. The
// first BYTES_AHEAD steps of weights have been asked for.
template <int N>
__device__ __forceinline__ void bytes_tile(u32 k, const u8* (&rows)[2], const ByteColumns* columns, u32 stride,
                                           u8* shared, float (&acc)[4 * BYTES_GROUPS]) {
    constexpr u32 STAGES = BYTES_RING / N, COLUMNS = N * sizeof(ByteColumns);
    constexpr bool IS_AHEAD = N == 1;
    const u32 steps = k / 256;
    // What the compiler would compute again in every step, since it may.
    u32 lane = threadIdx.x % 32, ring = address_in_shared(shared);
    keep_word(lane), keep_word(ring);
    const u32 t = lane % 4, full = ring + BYTES_BARRIERS, empty = full + 8 * BYTES_RING;
    u32 mine = bytes_copies(shared);
    keep_word(mine);
    const auto fill = [&](u32 stage, u32 step) {
        barrier_expect(full + 8 * stage, COLUMNS);
        bulk_copy(ring + stage * COLUMNS, columns + (u64)step * stride, COLUMNS, full + 8 * stage);
    };
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < min(STAGES, steps); i++) fill(i, i);
    }
    __syncthreads();

    u32 stage = 0, parity = 0, of_copies = 0;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<BYTES_AHEAD - 1>();
        __syncwarp();
        const u32 block = mine + of_copies * BYTES_STAGE, qs = block + 16 + 8 * t;
        uint4 heads[2];
        uint2 words[4][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            heads[i] = shared4(block + i * 8 * BYTES_PITCH);
#pragma unroll
            for (int c = 0; c < (IS_AHEAD ? 4 : 1); c++) words[c][i] = shared2(qs + i * 8 * BYTES_PITCH + 32 * c);
        }
        barrier_wait(full + 8 * stage, parity);
        const u32 x = ring + stage * COLUMNS;
        uint4 b[2][N];
#pragma unroll
        for (int n = 0; n < N; n++) b[0][n] = shared4(x + n * sizeof(ByteColumns) + 16 * lane);
        // Sub-scales of groups 4i + 2h and 4i + 2h + 1 are halves h of words i. Those of even groups are sixteenfold,
        // as are numbers of odd ones, whose bits stay where they are. Minimums are those of groups 2t and 2t + 1, found
        // by the same steps in all lanes (`scales_mins`).
        u32 even[2][2], odd[2][2], mins[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 s[3] = {heads[i].y, heads[i].z, heads[i].w};
            const u32 scales[2] = {s[0] & 0x3f3f3f3fu, (s[2] & 0x0f0f0f0fu) | (s[0] >> 2 & 0x30303030u)};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                even[i][j] = scales[j] << 4 & 0x0ff00ff0u, odd[i][j] = scales[j] >> 8 & 0x00ff00ffu;
            }
            mins[i] = ((t < 2 ? s[1] : s[2]) >> (16 * (t % 2) + (t < 2 ? 0 : 4)) & (t < 2 ? 0x3f3fu : 0x0f0fu)) |
                      (s[1] >> (16 * (t % 2) + 2) & (t < 2 ? 0u : 0x3030u));
            // Bytes below 128 become bf16 numbers after a byte 0x43, which stands for 128: the difference is exact.
            mins[i] = bf16_fma(permute(mins[i], 0x43434343u, 0x4140), 0x3f803f80u, 0xc300c300u);
        }
        float sums[4 * N];
#pragma unroll
        for (int i = 0; i < 4 * N; i++) sums[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (c < 3) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    b[(c + 1) % 2][n] = shared4(x + n * sizeof(ByteColumns) + 512 * (c + 1) + 16 * lane);
                }
                if (!IS_AHEAD) {
#pragma unroll
                    for (int i = 0; i < 2; i++) words[c + 1][i] = shared2(qs + i * 8 * BYTES_PITCH + 32 * (c + 1));
                }
            }
            u32 low[4], high[4];
            int first[2], second[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                low[i] = words[c][i].x & 0x0f0f0f0fu, low[2 + i] = words[c][i].y & 0x0f0f0f0fu;
                high[i] = words[c][i].x & 0xf0f0f0f0u, high[2 + i] = words[c][i].y & 0xf0f0f0f0u;
                first[i] = (int)permute(even[i][c / 2], 0, c % 2 ? 0x4432 : 0x4410);
                second[i] = (int)permute(odd[i][c / 2], 0, c % 2 ? 0x4432 : 0x4410);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint2 scale = shared2(x + n * sizeof(ByteColumns) + 2048 + 32 * t + 8 * c);
                int one[4], two[4];
                mma_bytes_of(one, low, b[c % 2][n].x, b[c % 2][n].y);
                mma_bytes_of(two, high, b[c % 2][n].z, b[c % 2][n].w);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float sum = (float)(first[i / 2] * one[i] + second[i / 2] * two[i]);
                    sums[4 * n + i] = fmaf(float_of_bits(i % 2 ? scale.y : scale.x), sum, sums[4 * n + i]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint2 of_groups = shared2(x + n * sizeof(ByteColumns) + 2176 + 8 * lane);
            float of_mins[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma(of_mins, mins[0], mins[1], mins[0], mins[1], of_groups.x, of_groups.y);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 d = heads[i / 2].x;
                acc[4 * n + i] = fmaf(float_of_f16(d) * 0.0625f, sums[4 * n + i], acc[4 * n + i]);
                acc[4 * n + i] = fmaf(-float_of_f16(d >> 16), of_mins[i], acc[4 * n + i]);
            }
        }
        __syncwarp();
        bytes_copy(rows, mine, t, of_copies, step + BYTES_AHEAD < steps);
        of_copies = of_copies + 1 == BYTES_AHEAD ? 0 : of_copies + 1;
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        if (threadIdx.x == 0 && step + STAGES < steps) {
            barrier_wait(empty + 8 * stage, parity);
            fill(stage, step + STAGES);
        }
        stage++;
        if (stage == STAGES) stage = 0, parity ^= 1;
    }
}
#endif
