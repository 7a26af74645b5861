// Ops on single numbers: add, add_bias, scale, scale_by, softcap, clamp, gelu, gate_by, gated_act, decay_beta; and
// those that move numbers only: constant, split_heads and join_heads, select, input. A thread a number, 256 threads a
// block.
#include "cuda/common.h"
#include "cuda/args.h"

#define ELEMENT_OR_RETURN(n)                                     \
    PDL_LAUNCH();                                                \
    PDL_WAIT();                                                  \
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;    \
    if (i >= (n)) return;

// x += y
KERNEL __launch_bounds__(256) add(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] += a.y[i];
}

// x *= a
KERNEL __launch_bounds__(256) scale(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] *= a.a;
}

// x[t, :] *= y, `width` numbers
KERNEL __launch_bounds__(256) scale_by(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] *= a.y[i % a.width];
}

// x[t, :] += y
KERNEL __launch_bounds__(256) add_bias(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] += a.y[i % a.width];
}

// x[t, :] = y
KERNEL __launch_bounds__(256) fill_rows(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] = a.y[i % a.width];
}

// x = min(max(x, y[0]), out[0])
KERNEL __launch_bounds__(256) clamp(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] = fminf(fmaxf(a.x[i], a.y[0]), a.out[0]);
}

// x = x * Phi(x), by the error function, or where act is 1 by tanh
KERNEL __launch_bounds__(256) gelu(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    const float x = a.x[i];
    a.x[i] = a.act ? gelu_tanh(x) : 0.5f * x * erfcf(-0.7071067811865476f * x);
}

// x = cap * tanh(x / cap)
KERNEL __launch_bounds__(256) softcap(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.x[i] = a.a * tanhf(a.x[i] / a.a);
}

// ln(1 + e^x). A comparison keeps NaN where fmaxf would lose it.
__device__ __forceinline__ float softplus(float x) { return (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))); }

// x *= sigmoid(y), softplus(y) where act is 1, y where it is 2; y a number for each `width` of x
KERNEL __launch_bounds__(256) gate_by(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    const float y = a.y[i / a.width];
    a.x[i] *= a.act == 2 ? y : a.act ? softplus(y) : sigmoid(y);
}

// out = act(x) * y
KERNEL __launch_bounds__(256) gated_act(const __grid_constant__ Elementwise a) {
    ELEMENT_OR_RETURN(a.n)
    a.out[i] = gated(a.act, a.x[i], a.y[i], a.a, a.b);
}

// g = exp(a_log * softplus(a + dt_bias)), or with a bound exp(bound * sigmoid(a_log * (a + dt_bias))); beta =
// sigmoid(b), or the softplus
KERNEL __launch_bounds__(256) decay_beta(const __grid_constant__ DecayBeta a) {
    ELEMENT_OR_RETURN(a.len)
    const u64 c = i % a.n, head = i / a.each;
    const float x = a.a[i] + a.dt_bias[c], step = softplus(x);
    for (u32 r = 0; r < a.rates; r++) {
        const float rate = a.a_log[c / a.each * a.rates + r];
        a.g[i * a.rates + r] = expf(a.bound != 0.0f ? a.bound * sigmoid(rate * x) : rate * step);
    }
    if (i % a.each == 0) a.beta[head] = a.b ? sigmoid(a.b[head]) : step;
}

// Part of every head: split, to[head, :] = from[head, first + :]; joined, the other way.
KERNEL __launch_bounds__(256) heads(const __grid_constant__ Heads a) {
    ELEMENT_OR_RETURN(a.n * a.width)
    const u64 in_whole = i / a.width * a.d_head + a.first + i % a.width;
    if (a.is_split) {
        a.to[i] = a.from[in_whole];
    } else {
        a.to[in_whole] = a.from[i];
    }
}

// Rows that the step is given: in place of those of their tokens, or added to them.
KERNEL __launch_bounds__(256) input_rows(const __grid_constant__ Input a) {
    ELEMENT_OR_RETURN(a.n)
    const float own = a.rows[i / a.d * a.d_input + a.first + i % a.d];
    float* to = a.x + (u64)a.tokens[i / a.d] * a.d + i % a.d;
    *to = a.add ? *to + own : own;
}

// out[r] = x[rows[r]] and the rows that follow it, side by side
KERNEL __launch_bounds__(256) select_rows(const __grid_constant__ Select a) {
    ELEMENT_OR_RETURN((u64)a.n_rows * a.d_out)
    a.out[i] = a.x[(u64)a.rows[i / a.d_out] * a.d + i % a.d_out];
}
