// What every CUDA kernel shares: launch control, reductions, the gated activations. Needs no header of the toolkit.
//
// Sums run in a fixed order, so that the same input gives the same bits: lanes first, then warps in order.
#pragma once

#include "quant/ints.h"

// Programmatic dependent launch (sm_90 and up). A kernel calls PDL_LAUNCH at its start, may then read weights and what
// the last step left, and every thread calls PDL_WAIT once before it reads what an earlier kernel of the step wrote, or
// writes anything.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PDL_LAUNCH() asm volatile("griddepcontrol.launch_dependents;")
#define PDL_WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define PDL_LAUNCH()
#ifndef PDL_WAIT
#define PDL_WAIT()
#endif
#endif

// Brings what a kernel reads first behind its wait nearer.
__device__ __forceinline__ void prefetch(const void* p) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
#endif
}

// As far as the L2, for what may be many lines.
__device__ __forceinline__ void prefetch_far(const void* p) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

#define KERNEL extern "C" __global__ void

// When the blocks of a kernel's last launch came to a place: cycles of their multiprocessors, for tools/cuda/layer.cpp.
#ifdef TRACED
#define TRACE_MARKS 8
__device__ u64 trace_marks[2048][TRACE_MARKS];
__device__ u32 trace_sm[2048];
__device__ __forceinline__ void trace(int mark) {
    const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (threadIdx.x != 0 || block >= 2048) return;
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    trace_marks[block][mark] = now;
    if (mark == 0) asm volatile("mov.u32 %0, %%smid;" : "=r"(trace_sm[block]));
}
#define TRACE(mark) trace(mark)
#else
#define TRACE(mark)
#endif
#define FULL_MASK 0xffffffffu

// Infinity without a header.
#define INF __int_as_float(0x7f800000)
#define QNAN __int_as_float(0x7fc00000)

// 2^x, to two units in the last place; 0 for -inf.
__device__ __forceinline__ float exp2_near(float x) {
#if defined(__CUDACC__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}

// The sum over a block of whole warps, at most 32; every thread gets it. `scratch` holds 33 numbers and is free again
// when the call returns.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        float total = warp_sum(lane < n_warps ? scratch[lane] : 0.0f);
        if (lane == 0) scratch[32] = total;
    }
    __syncthreads();
    const float total = scratch[32];
    __syncthreads();
    return total;
}

// The sum of `mine` over lanes up to this one.
__device__ __forceinline__ u32 sum_up_to(u32 mine) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_MASK, mine, step);
        if (threadIdx.x % 32 >= step) mine += other;
    }
    return mine;
}

// exp in full precision is finite where it should be: sigmoid(-inf) is 0, sigmoid(inf) is 1, NaN stays.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

enum Act : u32 { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_SWIGLU = 2, ACT_CLAMPED_SILU = 3, ACT_RELU = 4 };

// A quotient of two instructions: g / inf is 0, and so is a quotient below 2^-120.
__device__ __forceinline__ float silu(float g) { return __fdividef(g, 1.0f + expf(-g)); }

// x * Phi(x), nearly
__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// act(g) * u; `alpha` is of the clamped SwiGLU of gpt-oss, `limit` of it and of the clamped silu. Comparisons keep NaN.
__device__ __forceinline__ float gated(u32 act, float g, float u, float alpha, float limit) {
    if (act == ACT_SILU) return silu(g) * u;
    if (act == ACT_GELU_TANH) return gelu_tanh(g) * u;
    if (act == ACT_RELU) return (g < 0.0f ? 0.0f : g) * u;
    u = u > limit ? limit : u < -limit ? -limit : u;
    if (act == ACT_CLAMPED_SILU) {
        g = silu(g);
        return (g > limit ? limit : g) * u;
    }
    g = g > limit ? limit : g;
    return g / (1.0f + expf(-alpha * g)) * (u + 1.0f);
}
