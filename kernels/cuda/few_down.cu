// few_down: as `experts_down` for one row of x, weights through shared memory (`few.h`), experts chosen by every block
// where there are a router's logits.
//
// grid (tiles of `each` rows of weights), block up to 512: a warp has a row of weights of every slot, as one long
// row whose units its lanes take in turn. The kernel before launches this one behind its own wait: logits, ids, weights
// and x are there before the wait here, and so are the weights asked for.
#include "cuda/few.h"
#include "cuda/choose.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

template <bool HAS_SHARED>
__device__ __forceinline__ void down(const FewDown& f) {
    typedef VecOf<WEIGHT>::type W;
    __shared__ float worth[MAX_CHOSEN + 1];
    __shared__ u32 ids[MAX_CHOSEN];
    PDL_LAUNCH();
    const ExpertsDown& a = f.op;
    const u32 token = 0, warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const u32 n_slots = a.n_used + (HAS_SHARED ? 1 : 0), first = blockIdx.x * f.each;
    const u32 count = min(f.each, a.n - first);
    const u32 units = (a.k + W::UNIT - 1) / W::UNIT;
    const u32 n_units = a.n_used * units + (HAS_SHARED ? (a.shared_k + W::UNIT - 1) / W::UNIT : 0);
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES, tile_bytes = f.each * row_bytes;
    const u32 shared_bytes = HAS_SHARED ? a.shared_k / W::BLOCK * W::BYTES : 0;
    // Slots follow each other in memory; the shared expert's activations do not.
    const u32 k_runs = a.k / 16, used_runs = (a.n_used * k_runs + 31) / 32 * 32;
    const u32 own_runs = HAS_SHARED ? (a.shared_k / 16 + 31) / 32 * 32 : 0;
    const FewShared s = few_shared<W>(shared, 1, 1, used_runs + own_runs);
    TRACE(0);
    if (warp == 0) {
        if (f.route.logits) {
            choose_weighed(f.route, token, blockIdx.x == 0, ids, worth);
        } else if (lane < a.n_used) {
            ids[lane] = a.ids[token * a.n_used + lane];
            worth[lane] = a.weights[token * a.n_used + lane];
        }
        __syncwarp();
        if (lane == 0) {
            barrier_init(s.barriers, 1);
            fence_async();
            u32 n_copied = 0;
            for (u32 slot = 0; slot < a.n_used; slot++) n_copied += ids[slot] != ELSEWHERE;
            barrier_expect(s.barriers, count * (n_copied * row_bytes + shared_bytes));
        }
        __syncwarp();
        for (u32 slot = lane; slot < n_slots; slot += 32) {
            // An id that names no expert never becomes an address; its weight is zero or NaN.
            const u32 id = slot == a.n_used ? 0 : ids[slot], expert = id < a.n_expert ? id : 0;
            if (id == ELSEWHERE) continue;
            const Matrix& w = slot == a.n_used ? a.shared_w : a.w;
            const u32 bytes = slot == a.n_used ? shared_bytes : row_bytes;
            bulk_copy(s.at + slot * tile_bytes, w.q + ((u64)expert * a.n + first) * bytes, count * bytes, s.barriers);
        }
    }
    const float before = a.add && warp < count ? a.x[(u64)token * a.n + first + warp] : 0.0f;
    const Staged<W, 1> staged = {s.staged, used_runs};
    const Staged<W, 1> staged_shared = {(uint4*)((u8*)s.staged + used_runs * Vec<W>::RUN_BYTES), own_runs};
    TRACE(1);
    PDL_WAIT();
    TRACE(2);
    if (HAS_SHARED && threadIdx.x == 0) worth[a.n_used] = a.share ? sigmoid(a.share[token]) : 1.0f;
    float none;
    few_stage(staged, 0, a.h + (u64)token * a.n_used * a.k, Prologue{}, a.n_used * a.k, threadIdx.x, blockDim.x, none);
    if (HAS_SHARED) {
        few_stage(staged_shared, 0, a.shared_h + (u64)token * a.shared_k, Prologue{}, a.shared_k, threadIdx.x, blockDim.x,
                  none);
    }
    __syncthreads();
    TRACE(3);
    barrier_wait(s.barriers, 0);
    TRACE(5);
#pragma unroll 1
    for (u32 i = warp; i < count; i += warps) {
        const u64 at = (u64)token * a.n + first + i;
        float sum = 0.0f, own = 0.0f;
#pragma unroll 1
        for (u32 j = lane; j < n_units; j += 32) {
            const u32 slot = HAS_SHARED ? min(j / units, a.n_used) : j / units, unit = j - slot * units;
            const bool is_own = HAS_SHARED && slot == a.n_used;
            if (!is_own && ids[slot] == ELSEWHERE) continue;
            const u8* from = s.weights + slot * tile_bytes + i * (is_own ? shared_bytes : row_bytes);
            typename W::Raw raw;
            W::load({from, from, from, is_own ? a.shared_k : a.k}, unit, raw);
            float part[1] = {0.0f};
            if (is_own) {
                staged_shared.dot(raw, unit, 0, part);
            } else {
                staged.dot(raw, unit, 0u - slot * k_runs, part);
            }
            if (is_own && f.shared_out) {
                own += part[0];
            } else {
                sum += worth[slot] * part[0];
            }
        }
        if (HAS_SHARED && f.shared_out) {
            own = warp_sum(own);
            if (lane == 0) f.shared_out[at] = own;
        }
        if (a.bias && lane < a.n_used && ids[lane] < a.n_expert) {
            sum += worth[lane] * a.bias[(u64)ids[lane] * a.n + first + i];
        }
        sum = warp_sum(sum);
        if (lane == 0) a.x[at] = (i == warp || !a.add ? before : a.x[at]) + sum;
    }
    TRACE(4);
}

KERNEL __maxnreg__(FEW_REGISTERS) few_down(const __grid_constant__ FewDown a) { down<false>(a); }
KERNEL __maxnreg__(FEW_REGISTERS) few_down_shared(const __grid_constant__ FewDown a) {
    down<true>(a);
}

// few_down_rows: the same for several rows of x by a router's logits, where the shared expert is as large as the
// others. A block has `each` rows of weights of the experts of one row of x, in tiles of the rows that a warp multiplies
// at once: of every slot, then of the shared expert. Warps alternate, each with `stages` tiles in flight. What a tile
// gives waits in shared memory, so that slots are added in their order.
//
// grid (tiles of `each` rows of weights, rows), block up to 640. `each` is a multiple of a tile; k a multiple of 256.
template <bool HAS_SHARED>
__device__ __forceinline__ void down_rows(const FewDown& f) {
    typedef VecOf<WEIGHT>::type W;
    __shared__ float worth[MAX_CHOSEN];
    __shared__ u32 ids[MAX_CHOSEN];
    PDL_LAUNCH();
    const ExpertsDown& a = f.op;
    const u32 token = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const u32 first = blockIdx.x * f.each, count = min(f.each, a.n - first);
    const u32 units = a.k / W::UNIT, runs = a.k / 16, row_bytes = a.k / W::BLOCK * W::BYTES;
    const u32 lanes = units % 8 == 0 ? 8 : 4, tile = 32 / lanes, tiles = count / tile, tile_bytes = tile * row_bytes;
    const u32 n_slots = a.n_used + (HAS_SHARED ? 1 : 0), n_items = n_slots * tiles;
    const FewShared s = few_shared<W>(shared, FEW_WARPS * f.stages, n_slots, runs);
    float* const sums = (float*)(s.weights + warps * f.stages * tile_bytes); // [n_slots][each]
    const u32 words = runs * Vec<W>::RUN_BYTES / 16;
    const auto staged_of = [&](u32 slot) { return Staged<W, 1>{s.staged + slot * words, runs}; };
    const auto barrier_of = [&](u32 stage) { return s.barriers + 8 * (warp * f.stages + stage); };
    const auto place_of = [&](u32 stage) { return (warp * f.stages + stage) * tile_bytes; };
    const auto is_elsewhere = [&](u32 slot) { return slot < a.n_used && ids[slot] == ELSEWHERE; };
    const auto copy = [&](u32 item, u32 stage) {
        const u32 slot = item / tiles, row = first + (item - slot * tiles) * tile;
        if (is_elsewhere(slot)) return barrier_expect(barrier_of(stage), 0);
        // An id that names no expert never becomes an address; its weight is zero or NaN.
        const bool is_shared = slot == a.n_used;
        const u32 expert = is_shared || ids[slot] >= a.n_expert ? 0 : ids[slot];
        const u8* const from = (is_shared ? a.shared_w : a.w).q + ((u64)expert * a.n + row) * row_bytes;
        barrier_expect(barrier_of(stage), tile_bytes);
        bulk_copy(s.at + place_of(stage), from, tile_bytes, barrier_of(stage));
    };
    if (warp == 0) choose_weighed(f.route, token, blockIdx.x == 0, ids, worth);
    __syncthreads();
    if (lane == 0) {
        for (u32 stage = 0; stage < f.stages; stage++) barrier_init(barrier_of(stage), 1);
        fence_async();
        for (u32 stage = 0; stage < f.stages; stage++) {
            if (warp + stage * warps < n_items) copy(warp + stage * warps, stage);
        }
    }
    __syncwarp();
    PDL_WAIT();
    float* const x = a.x + (u64)token * a.n + first;
    const float before = a.add && threadIdx.x < count ? x[threadIdx.x] : 0.0f;
    const float share = HAS_SHARED && a.share ? sigmoid(a.share[token]) : 1.0f;
    // Eight numbers of two columns at a time.
    const u32 eighths = a.k / 8;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n_slots * eighths; i += 2 * blockDim.x) {
        float v[2][8];
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const u32 at = i + j * blockDim.x, slot = at / eighths;
            const float* const from =
                slot < a.n_used ? a.h + ((u64)token * a.n_used + slot) * a.k : a.shared_h + (u64)token * a.k;
            load8<8>(from, true, slot < n_slots ? a.k : 0, 8 * (at - slot * eighths), v[j]);
        }
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const u32 at = i + j * blockDim.x, slot = at / eighths, in_row = at - slot * eighths;
            // Warps are in one column as a whole.
            if (slot < n_slots) staged_of(slot).put(0, in_row / 2, in_row % 2, v[j]);
        }
    }
    __syncthreads();
    u32 stage = 0, parity = 0;
#pragma unroll 1
    for (u32 item = warp; item < n_items; item += warps) {
        const u32 slot = item / tiles, row = (item - slot * tiles) * tile + lane / lanes;
        const Staged<W, 1> staged = staged_of(slot);
        const u8* const at = s.weights + place_of(stage) + lane / lanes * row_bytes;
        float sum[1] = {0.0f};
        barrier_wait(barrier_of(stage), parity);
#pragma unroll 1
        for (u32 unit = lane % lanes; unit < units && !is_elsewhere(slot); unit += lanes) {
            typename W::Raw raw;
            W::load({at, at, at, a.k}, unit, raw);
            staged.dot(raw, unit, 0, sum);
        }
        __syncwarp();
        if (lane == 0 && item + f.stages * warps < n_items) copy(item + f.stages * warps, stage);
        sum[0] += __shfl_xor_sync(FULL_MASK, sum[0], 1);
        sum[0] += __shfl_xor_sync(FULL_MASK, sum[0], 2);
        if (lanes == 8) sum[0] += __shfl_xor_sync(FULL_MASK, sum[0], 4);
        if (lane % lanes == 0) sums[slot * f.each + row] = sum[0];
        if (++stage == f.stages) stage = 0, parity ^= 1;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        float sum = i == threadIdx.x || !a.add ? before : x[i];
        for (u32 slot = 0; slot < a.n_used; slot++) {
            if (ids[slot] == ELSEWHERE) continue;
            float y = sums[slot * f.each + i];
            if (a.bias && ids[slot] < a.n_expert) y += a.bias[(u64)ids[slot] * a.n + first + i];
            sum += worth[slot] * y;
        }
        if (HAS_SHARED) sum += share * sums[a.n_used * f.each + i];
        x[i] = sum;
    }
}

KERNEL __maxnreg__(FEW_REGISTERS) few_down_rows(const __grid_constant__ FewDown a) { down_rows<false>(a); }
KERNEL __maxnreg__(FEW_REGISTERS) few_down_rows_shared(const __grid_constant__ FewDown a) {
    down_rows<true>(a);
}
