// few_experts: gate, up and activation of the chosen experts, and of a shared one, for one to eight rows of x, weights
// through shared memory (`few.h`). The shared expert may have more rows, and weights of its own for the row's norm.
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
        few_copy<2>(s, rows, row_bytes, [&](u32 i, int part) { return (part ? up.q : w.q) + at + i * row_bytes; });
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
