// decay_beta: g = exp(a_log * softplus(a + dt_bias)), beta = sigmoid(b), with STEP that softplus. A thread a number.
// A head has `each` decays. Compiled with STEP 0 or 1.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct DecayBeta {
    uint n;
    uint width;
    uint each;
};

kernel void decay_beta(device const float* a_in [[buffer(0)]],
#if !STEP
                       device const float* b_in [[buffer(1)]],
#endif
                       device const float* a_log [[buffer(2)]], device const float* dt_bias [[buffer(3)]],
                       device float* g [[buffer(4)]], device float* beta [[buffer(5)]],
                       constant DecayBeta& a [[buffer(6)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const uint c = i % a.width;
    g[i] = decay(a_in[i] + dt_bias[c], a_log[c / a.each]);
#if STEP
    beta[i] = softplus(a_in[i] + dt_bias[c]);
#else
    if (i % a.each == 0) beta[i / a.each] = sigmoid(b_in[i / a.each]);
#endif
}
