// linear_pair: as `linear`, for matrices of two types, -DWEIGHT and -DWEIGHT_B, that share x. The first blocks take
// those of the first type.
#include "cuda/linear.h"
#include WEIGHT_HEADER
#include WEIGHT_HEADER_B

extern __shared__ uint4 shared[];

#define PAIR(C)                                                                                            \
    KERNEL __launch_bounds__(VEC_THREADS)             \
        linear_pair_vec##C(const __grid_constant__ LinearPair a) {                                         \
        PDL_LAUNCH();                                                                                      \
        if (blockIdx.x < a.blocks_a) {                                                                     \
            linear_vec<WEIGHT, C>(a.a, blockIdx.x, a.blocks_a, shared);                                    \
        } else {                                                                                           \
            linear_vec<WEIGHT_B, C>(a.b, blockIdx.x - a.blocks_a, gridDim.x - a.blocks_a, shared);         \
        }                                                                                                  \
    }
PAIR(1)
PAIR(2)
PAIR(4)
PAIR(8)
