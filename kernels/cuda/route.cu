// route: the experts of each token and their weights (`route.h`). grid (rows), block 32: a warp a row; with shares any
// number of warps, of which the first one chooses.
#include "cuda/route.h"
#include "cuda/shares.h"

KERNEL __launch_bounds__(256) route(const __grid_constant__ RouteRows a) {
    __shared__ RouteScratch scratch;
    __shared__ float sums[N_EXPERT];
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 row = blockIdx.x;
    if (a.shares.n == 0) {
        const float* logits = a.op.logits + row * N_EXPERT;
        route_row(a.op, row, [&](u32 e) { return __ldcg(logits + e); }, scratch);
        return;
    }
    for (u32 i = threadIdx.x; i < N_EXPERT + a.n_rest; i += blockDim.x) {
        float sum[1];
        add_shares<1, 16>(a.shares, a.shares.of + row * a.shares.row + i, sum);
        if (i < N_EXPERT) {
            sums[i] = sum[0];
        } else {
            a.rest[row * a.n_rest + i - N_EXPERT] = sum[0];
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) route_row(a.op, row, [&](u32 e) { return sums[e]; }, scratch);
}
