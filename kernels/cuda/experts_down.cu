// experts_down: the last product of the chosen experts and of the shared one, weighted and added up, for at most 8
// rows: x[t, i] (+)= sum_s weights[t, s] * (w[ids[t, s], i] * h[t, s] + bias) (+ sigmoid(share[t]) * shared_w[i] *
// shared_h[t])
//
// Compiled for a weight type, -DWEIGHT, and -DWEIGHT_B where the shared expert's differs. grid (rows of weights / 16,
// rows), block 512: a warp has a row of weights of every slot, as one long row whose units its lanes take in turn, then
// a row of the shared expert. Slots' activations lie in shared memory as one row. The kernel before launches this one
// behind its own wait: ids, weights and x are there before the wait here, and so are the first weights asked for.
#include "cuda/vec.h"
#include WEIGHT_HEADER
#ifdef WEIGHT_B
#include WEIGHT_HEADER_B
#else
#define WEIGHT_B WEIGHT
#endif

extern __shared__ uint4 shared[];

typedef VecOf<WEIGHT>::type Type;
typedef VecOf<WEIGHT_B>::type SharedType;

#define WARPS (VEC_THREADS / 32)
// Slots with the shared expert's.
#define MAX_SLOTS 33
// Units that a lane has in flight.
#define AHEAD (Vec<Type>::RAW > 14 ? 1 : 2)

KERNEL __launch_bounds__(VEC_THREADS, 2) experts_down(const __grid_constant__ ExpertsDown a) {
    __shared__ float worth[MAX_SLOTS];
    __shared__ u32 ids[MAX_SLOTS];
    PDL_LAUNCH();
    const u32 token = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < a.n_used) {
        ids[threadIdx.x] = a.ids[token * a.n_used + threadIdx.x];
        worth[threadIdx.x] = a.weights[token * a.n_used + threadIdx.x];
    }
    __syncthreads();
    const u64 wanted = (u64)blockIdx.x * WARPS + warp, i = wanted < a.n ? wanted : a.n - 1;
    const u32 units = (a.k + Type::UNIT - 1) / Type::UNIT, n_units = a.n_used * units;
    const auto row = [&](u32 slot) {
        // An id that names no expert never becomes an address; its weight is zero or NaN.
        const u32 id = ids[slot], expert = id < a.n_expert ? id : 0;
        return row_of<Type>(a.w.q, a.w.scales, a.w.biases, (u64)expert * a.n + i, a.k);
    };
    Type::Raw raw[AHEAD];
    const auto load = [&](u32 first) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const u32 at = first + 32 * j;
            if (at < n_units) Type::load(row(at / units), at % units, raw[j]);
        }
    };
    load(lane);
    const float before = a.add ? a.x[(u64)token * a.n + i] : 0.0f;
    PDL_WAIT();
    if (threadIdx.x == 0 && a.shared_h) worth[a.n_used] = a.share ? sigmoid(a.share[token]) : 1.0f;
    // Slots follow each other in memory; the shared expert's activations do not.
    const u32 k_runs = a.k / 16, used_runs = (a.n_used * k_runs + 31) / 32 * 32;
    const Staged<Type, 1> staged = {shared, used_runs};
    const Staged<SharedType, 1> staged_shared = {
        (uint4*)((u8*)shared + used_runs * Vec<Type>::RUN_BYTES), ((a.shared_k + 15) / 16 + 31) / 32 * 32};
    float squares[1];
    staged.fill<false>(a.h + (u64)token * a.n_used * a.k, 0, Prologue{}, 1, a.n_used * a.k, 0, squares);
    if (a.shared_h) {
        staged_shared.fill<false>(a.shared_h + (u64)token * a.shared_k, 0, Prologue{}, 1, a.shared_k, 0, squares);
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 1
    for (u32 first = lane; first < n_units; first += 32 * AHEAD) {
        if (first != lane) load(first);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const u32 at = first + 32 * j, slot = at / units;
            if (at < n_units) {
                float part[1] = {0.0f};
                staged.dot(raw[j], at % units, 0u - slot * k_runs, part);
                sum += worth[slot] * part[0];
            }
        }
    }
    const u32 shared_units = a.shared_h ? (a.shared_k + SharedType::UNIT - 1) / SharedType::UNIT : 0;
#pragma unroll 1
    for (u32 unit = lane; unit < shared_units; unit += 32) {
        SharedType::Raw shared_raw;
        SharedType::load(row_of<SharedType>(a.shared_w.q, a.shared_w.scales, a.shared_w.biases, i, a.shared_k), unit,
                         shared_raw);
        float part[1] = {0.0f};
        staged_shared.dot(shared_raw, unit, 0, part);
        sum += worth[a.n_used] * part[0];
    }
    if (a.bias && lane < a.n_used && ids[lane] < a.n_expert) {
        sum += worth[lane] * a.bias[(u64)ids[lane] * a.n + i];
    }
    sum = warp_sum(sum);
    if (lane == 0 && wanted < a.n) a.x[(u64)token * a.n + i] = before + sum;
}
