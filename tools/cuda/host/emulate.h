// Runs CUDA kernels on this machine, one block after the other: every thread is a fiber, which gives way at barriers
// and at the operations of a warp. Order of threads within a block is ascending or descending (`descending`).
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static  // of headers
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct dim3 {
    unsigned x, y, z;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

template <class T>
using Array = std::vector<T>;
inline bool descending = false;  // the order of threads in a block

namespace emulate {
constexpr unsigned MAX_THREADS = 1024;
struct Warp {
    unsigned arrived = 0, round = 0;
    unsigned words[2][32][8];
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    dim3 thread;
};
inline std::vector<Fiber> fibers;
inline Warp warps[MAX_THREADS / 32];
inline ucontext_t scheduler;
inline unsigned now, live, waiting, barrier_round;
inline dim3 block_idx, grid_dim, block_dim;
inline std::function<void()> body;
// Writes what earlier launches of the step put out, or takes it back: a block sees it after its wait.
inline std::function<void(bool)> earlier;

inline void give_way() { swapcontext(&fibers[now].context, &scheduler); }

inline void entry() {
    body();
    fibers[now].done = true;
    live--;
    if (live > 0 && waiting == live) waiting = 0, barrier_round++;
    give_way();
}

inline void barrier() {
    const unsigned round = barrier_round;
    if (++waiting == live) {
        waiting = 0, barrier_round++;
    } else {
        while (barrier_round == round) give_way();
    }
}

inline void wait() {
    if (!earlier) return;
    barrier();
    earlier(true);
    barrier();
}

// Every lane gives N words; all lanes see them all.
template <int N>
const unsigned (*exchange(const unsigned (&mine)[N]))[8] {
    Warp& warp = warps[now / 32];
    const unsigned round = warp.round;
    memcpy(warp.words[round % 2][now % 32], mine, sizeof mine);
    if (++warp.arrived == 32) {
        warp.arrived = 0, warp.round++;
    } else {
        while (warp.round == round) give_way();
    }
    return warp.words[round % 2];
}

inline void launch(dim3 grid, unsigned block, std::function<void()> kernel) {
    body = kernel, grid_dim = grid, block_dim = {block, 1, 1};
    if (fibers.size() < MAX_THREADS) fibers.resize(MAX_THREADS);
    for (unsigned b = 0; b < grid.x * grid.y * grid.z; b++) {
        block_idx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        live = block, waiting = 0;
        if (earlier) earlier(false);
        for (unsigned i = 0; i < block; i++) {
            Fiber& fiber = fibers[i];
            if (fiber.stack.empty()) fiber.stack.resize(256 << 10);
            fiber.done = false, fiber.thread = {i, 0, 0};
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, entry, 0);
        }
        for (unsigned idle = 0; live > 0; idle++) {
            if (idle > 100000) {
                fprintf(stderr, "threads wait for each other for ever\n");
                abort();
            }
            for (unsigned i = 0; i < block; i++) {
                now = descending ? block - 1 - i : i;
                if (!fibers[now].done) swapcontext(&scheduler, &fibers[now].context);
            }
        }
    }
}

inline unsigned bits(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
inline float number(unsigned u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
template <class T>
unsigned word(T x) {
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
template <class T>
T from(unsigned u) {
    T x;
    memcpy(&x, &u, 4);
    return x;
}
}  // namespace emulate

#define PDL_WAIT() emulate::wait()
#define threadIdx (emulate::fibers[emulate::now].thread)
#define blockIdx emulate::block_idx
#define gridDim emulate::grid_dim
#define blockDim emulate::block_dim

inline void __syncthreads() { emulate::barrier(); }
inline void __syncwarp() { emulate::exchange<1>({0}); }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned n) { return (*at += n) - n; }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long n) { return (*at += n) - n; }
inline unsigned atomicMin(unsigned* at, unsigned n) {
    const unsigned old = *at;
    *at = n < old ? n : old;
    return old;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
T __ldcs(const T* p) {
    return *p;
}
inline double __shfl_xor_sync(unsigned, double x, unsigned step) {
    const unsigned lane = emulate::now % 32;
    unsigned words[2];
    memcpy(words, &x, 8);
    memcpy(&x, emulate::exchange<2>(words)[lane ^ step], 8);
    return x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, unsigned step) {
    const unsigned lane = emulate::now % 32;
    return emulate::from<T>(emulate::exchange<1>({emulate::word(x)})[lane ^ step][0]);
}
template <class T>
T __shfl_up_sync(unsigned, T x, unsigned step) {
    const unsigned lane = emulate::now % 32;
    const auto all = emulate::exchange<1>({emulate::word(x)});
    return emulate::from<T>(all[lane >= step ? lane - step : lane][0]);
}
template <class T>
T __shfl_sync(unsigned, T x, unsigned lane) {
    return emulate::from<T>(emulate::exchange<1>({emulate::word(x)})[lane % 32][0]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const auto all = emulate::exchange<1>({(unsigned)x});
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= all[i][0] << i;
    return out;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline unsigned __match_any_sync(unsigned, unsigned x) {
    const auto all = emulate::exchange<1>({x});
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= (unsigned)(all[i][0] == x) << i;
    return out;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const auto all = emulate::exchange<1>({x});
    for (int i = 0; i < 32; i++) x = all[i][0] > x ? all[i][0] : x;
    return x;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
    const auto all = emulate::exchange<1>({x});
    for (int i = 0; i < 32; i++) x = all[i][0] < x ? all[i][0] : x;
    return x;
}
inline unsigned __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __ffs(unsigned x) { return __builtin_ffs(x); }
inline unsigned __float_as_uint(float x) { return emulate::bits(x); }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(unsigned x) { return emulate::number(x); }
inline float __int_as_float(int x) { return emulate::number(x); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline long long __float2ll_rn(float x) { return llrintf(x); }
template <class T>
T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
    return a > b ? a : b;
}

extern uint4 shared[];
template <class Args, class Given>
void launch(dim3 grid, unsigned block, unsigned n_shared, void (*kernel)(Args), const Given& args) {
    memset((void*)shared, 0xff, n_shared);  // NaN, whoever reads what nobody wrote
    emulate::launch(grid, block, [&] { kernel(args); });
}
