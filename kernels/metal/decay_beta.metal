// decay_beta: g = exp(a_log * softplus(a + dt_bias)), beta = sigmoid(b); with BOUNDED g = exp(bound * sigmoid(a_log *
// (a + dt_bias))). With STEP beta is that softplus, and it may have several rates. A thread a decay: those of a head
// are `each` that follow each other. With STEP they share a number of a, else a rate. Compiled with STEP and BOUNDED 0
// or 1, of which one at most is 1.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct DecayBeta {
    uint n;
    uint width; // decays of a row
    uint each;
    float bound;
};

kernel void decay_beta(device const float* a_in [[buffer(0)]],
#if !STEP
                       device const float* b_in [[buffer(1)]],
#endif
                       device const float* a_log [[buffer(2)]], device const float* dt_bias [[buffer(3)]],
                       device float* g [[buffer(4)]], device float* beta [[buffer(5)]],
                       constant DecayBeta& a [[buffer(6)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const uint c = i % a.width, head = c / a.each;
    const bool is_first = i % a.each == 0;
#if STEP
    const float x = a_in[i / a.each] + dt_bias[head];
    g[i] = decay(x, a_log[c]);
    if (is_first) beta[i / a.each] = softplus(x);
#else
    const float x = a_in[i] + dt_bias[c];
#if BOUNDED
    g[i] = precise::exp(a.bound * sigmoid(a_log[head] * x));
#else
    g[i] = decay(x, a_log[head]);
#endif
    if (is_first) beta[i / a.each] = sigmoid(b_in[i / a.each]);
#endif
}
