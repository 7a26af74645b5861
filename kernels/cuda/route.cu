// route: the experts of each token and their weights (`route.h`). grid (rows), block 32: a warp a row.
#include "cuda/route.h"

KERNEL __launch_bounds__(32) route(const __grid_constant__ Route a) {
    __shared__ RouteScratch scratch;
    PDL_LAUNCH();
    PDL_WAIT();
    route_row(a, blockIdx.x, a.logits + (u64)blockIdx.x * N_EXPERT, scratch);
}
