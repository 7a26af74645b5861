// few_experts: gate, up and activation of the chosen experts, and of a shared one, for one row of x, weights through
// shared memory (`few.h`). The shared expert may have more rows, and separate weights for the row's norm.
// With a router's logits (-DN_EXPERT) every block chooses its row's experts itself, which costs less than a block that
// ends last and does it for all; without them ids are read.
//
// grid (tiles of `each` rows of weights for every pair, then for every row of the shared expert), block up to 640.
// Launches the next kernel behind the wait: it may read logits, ids and everything older before it waits itself.
#include "cuda/few.h"
#include "cuda/choose.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

KERNEL __maxnreg__(FEW_REGISTERS) few_experts(const __grid_constant__ FewExperts f) {
    typedef VecOf<WEIGHT>::type W;
    __shared__ u32 chosen[MAX_CHOSEN];
    const Experts& a = f.op;
    const u32 n_pairs = a.rows * a.n_used, tiles = (a.n + f.each - 1) / f.each, n_routed = n_pairs * tiles;
    const bool is_shared = blockIdx.x >= n_routed;
    const u32 n = is_shared ? a.shared_n : a.n, tiles_of_it = is_shared ? (a.shared_n + f.each - 1) / f.each : tiles;
    const u32 block = is_shared ? blockIdx.x - n_routed : blockIdx.x, pair = block / tiles_of_it;
    const u32 first = (block - pair * tiles_of_it) * f.each, count = min(f.each, n - first);
    const u32 runs = ((a.k + 15) / 16 + 31) / 32 * 32;
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES;
    const u32 token = is_shared ? pair : pair / a.n_used;
    Prologue prologue = a.prologue;
    if (is_shared && f.shared_norm) prologue.w = f.shared_norm;
    const FewShared s = few_shared<W>(shared, FEW_WARPS, 1, runs);
    const FewRows rows = few_rows_of_warp(count);
    TRACE(0);
    const auto copy = [&](u32 expert) {
        const Matrix &w = is_shared ? a.shared_w : a.w, &up = is_shared ? a.shared_up : a.up;
        const u64 at = ((u64)expert * a.n + first) * row_bytes;
        const auto row_at = [&](u32 i, int part) { return (part ? up.q : w.q) + at + i * row_bytes; };
        few_copy<2>(s, rows, row_bytes, true, row_at);
    };
    few_barrier(s);
    if (is_shared) copy(0);
    // The first warp chooses while others stage the row.
    const bool chooses = !is_shared && f.route.logits != nullptr;
    const u32 thread = chooses ? threadIdx.x - 32 : threadIdx.x, threads = chooses ? blockDim.x - 32 : blockDim.x;
    const Staged<W, 1> staged = {s.staged, runs};
    const u32 row = first + rows.first + threadIdx.x % 32;
    const bool has_row = threadIdx.x % 32 < rows.n;
    float* out = (is_shared ? a.shared_out : a.out) + (u64)pair * n + row;
    float sum = 0.0f, up = 0.0f, bias = 0.0f, up_bias = 0.0f;
    few_ahead(prologue, a.k);
    TRACE(1);
    // All barriers are there.
    __syncthreads();
    PDL_WAIT();
    TRACE(2);
    PDL_LAUNCH();
    float squares[1] = {};
    if (chooses && threadIdx.x < 32) {
        bool is_bad;
        const Best best = choose(f.route, token, is_bad);
        const u32 own = local_expert(f.route, best.index);
        if (threadIdx.x < a.n_used) chosen[threadIdx.x] = own;
        // It asks for the weights of all warps, which need not wait for those that stage. An id that names no expert
        // never becomes an address.
        const u32 of = __shfl_sync(FULL_MASK, own, pair % a.n_used);
        if (of < a.n_expert) {
            const u32 warps = blockDim.x / 32, most = (count + warps - 1) / warps;
            const u32 from = min(threadIdx.x * most, count);
            const u32 n_rows = threadIdx.x < warps ? min(most, count - from) : 0;
            if (n_rows > 0) {
                const u32 barrier = s.barriers + threadIdx.x * 8;
                barrier_expect(barrier, 2 * n_rows * row_bytes);
                const u64 at = ((u64)of * a.n + first + from) * row_bytes;
                bulk_copy(s.at + 2 * from * row_bytes, a.w.q + at, n_rows * row_bytes, barrier);
                bulk_copy(s.at + (2 * from + n_rows) * row_bytes, a.up.q + at, n_rows * row_bytes, barrier);
            }
        }
        TRACE(5);
    } else {
        few_stage(staged, 0, a.x + (u64)token * a.k, prologue, a.k, thread, threads, squares[0]);
    }
    if (a.prologue.kind == NORMED) few_squares(squares, s.squares);
    __syncthreads();
    TRACE(3);
    if (!is_shared) {
        const u32 expert = chooses ? chosen[pair % a.n_used] : a.ids[pair];
        if (expert >= a.n_expert) {
            // An id that names no expert never becomes an address.
            if (has_row) *out = 0.0f;
            return;
        }
        if (!chooses) copy(expert);
        if (a.bias && has_row) bias = a.bias[(u64)expert * a.n + row];
        if (a.up_bias && has_row) up_bias = a.up_bias[(u64)expert * a.n + row];
    }
    few_rows_of_one<W, 2>(s, a.k, rows, row_bytes, sum, up);
    const float r = few_factor(a.prologue, s.squares, 0, a.k);
    const float y = gated(a.act, sum * r + bias, up * r + up_bias, a.alpha, a.limit);
    if (has_row) *out = y;
    TRACE(4);
}

// few_experts_rows: the same for several rows, in blocks that stay, where the shared expert is as large as the others.
// Rows of weights of every pair, then those of the shared expert for every row of x, are numbered as one. A warp has
// `each` of them, and `stages` in flight.
//
// grid (blocks), block up to 640: as many warps as there are rows of x choose.
KERNEL __maxnreg__(FEW_REGISTERS) few_experts_rows(const __grid_constant__ FewExperts f) {
    typedef VecOf<WEIGHT>::type W;
    __shared__ u32 chosen[MAX_LATE_ROWS * MAX_CHOSEN]; // of each pair
    const Experts& a = f.op;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const u32 units = (a.k + W::UNIT - 1) / W::UNIT, runs = ((a.k + 15) / 16 + 31) / 32 * 32;
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES;
    const u32 n_pairs = a.rows * a.n_used, n_items = (n_pairs + (a.n_shared ? a.rows : 0)) * a.n;
    const FewShared s = few_shared<W>(shared, FEW_WARPS * f.stages, a.rows, runs);
    const u32 words = runs * Vec<W>::RUN_BYTES / 16;
    const auto staged_of = [&](u32 col) { return Staged<W, 1>{s.staged + col * words, runs}; };
    const auto first_of = [&](u32 of_warp) { return min((blockIdx.x * warps + of_warp) * f.each, n_items); };
    const auto barrier_of = [&](u32 of_warp, u32 stage) { return s.barriers + 8 * (of_warp * f.stages + stage); };
    const auto slot_of = [&](u32 of_warp, u32 stage) { return 2 * (of_warp * f.stages + stage) * row_bytes; };
    // Asks for a row of gate and of up; an id that names no expert never becomes an address.
    const auto copy = [&](u32 of_warp, u32 stage, u32 pair, u32 i, u32 id) {
        const bool is_shared = pair >= n_pairs;
        const u32 barrier = barrier_of(of_warp, stage), to = s.at + slot_of(of_warp, stage);
        const bool is_there = is_shared || id < a.n_expert;
        barrier_expect(barrier, is_there ? 2 * row_bytes : 0);
        if (!is_there) return;
        const Matrix &w = is_shared ? a.shared_w : a.w, &up = is_shared ? a.shared_up : a.up;
        const u64 at = ((u64)(is_shared ? 0 : id) * a.n + i) * row_bytes;
        bulk_copy(to, w.q + at, row_bytes, barrier);
        bulk_copy(to + row_bytes, up.q + at, row_bytes, barrier);
    };
    u32 item = first_of(warp);
    const u32 end = first_of(warp + 1);
    few_saw_nothing(s, a.rows);
    if (lane == 0) {
        for (u32 stage = 0; stage < f.stages; stage++) barrier_init(barrier_of(warp, stage), 1);
        fence_async();
        for (u32 stage = 0; stage < f.stages; stage++) {
            const u32 at = item + stage, pair = at / a.n;
            if (at < end && pair >= n_pairs) copy(warp, stage, pair, at - pair * a.n, 0);
        }
    }
    few_ahead(a.prologue, a.k);
    // All barriers are there.
    __syncthreads();
    PDL_WAIT();
    PDL_LAUNCH();
    if (warp < a.rows) {
        bool is_bad;
        const Best best = choose(f.route, warp, is_bad);
        const u32 own = local_expert(f.route, best.index);
        if (lane < a.n_used) chosen[warp * a.n_used + lane] = own;
        // It asks for what the warps of the block need first of this row's experts.
        for (u32 from = 0; from < warps * f.stages; from += 32) {
            const u32 of_warp = (from + lane) / f.stages, stage = from + lane - of_warp * f.stages;
            const u32 at = first_of(of_warp) + stage, pair = at / a.n;
            const bool is_own = of_warp < warps && at < first_of(of_warp + 1) && pair / a.n_used == warp;
            const u32 id = __shfl_sync(FULL_MASK, own, pair % a.n_used);
            if (is_own) copy(of_warp, stage, pair, at - pair * a.n, id);
        }
    } else {
        few_stage_rows<W, false>(
            s, a.x, a.k, a.prologue, a.rows, a.rows, a.k, threadIdx.x - 32 * a.rows, blockDim.x - 32 * a.rows,
            [&](u32 col, u32 run, u32 half, const float (&v)[8]) { staged_of(col).put(0, run, half, v); });
    }
    __syncthreads();
    constexpr bool HOLDS = VecOf<W>::IS_GROUPED;
    typename Staged<W, 1>::Held x;
    u32 stage = 0, parity = 0;
#pragma unroll 1
    while (item < end) {
        // Rows of one pair, a lane each.
        const auto pair_of = [&](u32 item) { return item / a.n; };
        const auto token_of = [&](u32 pair) { return pair >= n_pairs ? pair - n_pairs : pair / a.n_used; };
        const u32 count = min(min(end - item, a.n - item % a.n), 32u);
        const Staged<W, 1> staged = staged_of(token_of(pair_of(item)));
        if (HOLDS && lane < units) staged.hold(lane, x);
        float sum = 0.0f, up = 0.0f;
#pragma unroll 1
        for (u32 i = 0; i < count; i++, item++) {
            barrier_wait(barrier_of(warp, stage), parity);
            const u8* const at = s.weights + slot_of(warp, stage);
            float sums[2][1] = {};
#pragma unroll 1
            for (u32 unit = lane; unit < units; unit += 32) {
                if (HOLDS && units > 32) staged.hold(unit, x);
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const u8* const row = at + part * row_bytes;
                    typename W::Raw raw;
                    W::load({row, row, row, a.k}, unit, raw);
                    if constexpr (HOLDS) {
                        Staged<W, 1>::dot_held(raw, unit, x, sums[part][0]);
                    } else {
                        staged.dot(raw, unit, 0, sums[part]);
                    }
                }
            }
            __syncwarp();
            if (lane == 0 && item + f.stages < end) {
                const u32 next = item + f.stages, of = next / a.n;
                copy(warp, stage, of, next - of * a.n, of < n_pairs ? chosen[of] : 0);
            }
            // The lower half of the warp has the sum of gate, the upper half that of up.
            float both[2] = {sums[0][0], sums[1][0]};
            const float half = few_sums(both), other = __shfl_xor_sync(FULL_MASK, half, 16);
            if (lane == i) sum = lane < 16 ? half : other, up = lane < 16 ? other : half;
            if (++stage == f.stages) stage = 0, parity ^= 1;
        }
        // Found again, for want of registers.
        const u32 pair = pair_of(item - 1), first = item - count - pair * a.n, token = token_of(pair);
        const bool is_shared = pair >= n_pairs;
        const u32 id = is_shared ? 0 : chosen[pair];
        const bool is_there = is_shared || id < a.n_expert;
        const float r = few_factor(a.prologue, s.squares, token, a.k);
        if (lane < count) {
            const u64 row = (u64)id * a.n + first + lane;
            float bias = 0.0f, up_bias = 0.0f;
            if (!is_shared && is_there && a.bias) bias = a.bias[row];
            if (!is_shared && is_there && a.up_bias) up_bias = a.up_bias[row];
            const float y = gated(a.act, sum * r + bias, up * r + up_bias, a.alpha, a.limit);
            const u32 to = is_shared ? token : pair;
            (is_shared ? a.shared_out : a.out)[(u64)to * a.n + first + lane] = is_there ? y : 0.0f;
        }
    }
}
