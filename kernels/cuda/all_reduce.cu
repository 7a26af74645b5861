// all_reduce: x = sum of x over the parts of a plan, each on a device that reaches the others' memory. Terms
// are added in the order of the parts, so that all have the same bits.
//
// Every part has a room that the others write to: control words, flags, and two turns of rows from each part. Calls are
// numbered from 1 on, in every room alike, and take the two turns alternately: a part writes into a turn again when it
// has seen the others' numbers of the call between, which they sent after they had read it.
#include "cuda/args.h"
#include "cuda/common.h"

// Words of control before the flags, and flags of a part: most blocks of a launch.
#define CONTROL 64
#define FLAGS 256
// Nanoseconds without a word of another part until this one gives up.
#define PATIENCE 20000000000ull

struct Control {
    u32 calls; // so far
    u32 done;  // blocks of this call
};

__device__ __forceinline__ Control* control(const AllReduce& a) { return (Control*)a.parts[a.part]; }

__device__ __forceinline__ u32* flags(const AllReduce& a, u32 room, u32 from) {
    return (u32*)a.parts[room] + CONTROL + from * FLAGS;
}

// Numbers with their call, of a part in a room.
__device__ __forceinline__ uint2* small_rows(const AllReduce& a, u32 room, u32 from, u32 turn) {
    return (uint2*)((u32*)a.parts[room] + CONTROL + MAX_PARTS * FLAGS) + (u64)(turn * a.n_parts + from) * a.rooms[0];
}

// Numbers as bf16.
__device__ __forceinline__ u16* large_rows(const AllReduce& a, u32 room, u32 from, u32 turn) {
    return (u16*)small_rows(a, room, 0, 2) + (u64)(turn * a.n_parts + from) * a.rooms[1];
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Waits until `there()`; a part that never comes ends the program of this one, instead of its device's time.
template <class There>
__device__ __forceinline__ void wait_until(const There& there) {
    u64 begin = 0;
    for (u32 i = 0; !there(); i++) {
        if (i % 4096 != 4095) continue;
        if (begin == 0) begin = nanoseconds();
        if (nanoseconds() - begin > PATIENCE) asm volatile("trap;");
    }
}

__device__ __forceinline__ uint4 load_volatile(const void* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_volatile(void* p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ u32 call_number(const AllReduce& a) { return *(volatile u32*)&control(a)->calls + 1; }

// Counts a call when all of its blocks know its number, which is long before they are done. Called by a block whose
// threads have read it.
__device__ __forceinline__ void count_call(const AllReduce& a, u32 call) {
    __syncthreads();
    if (threadIdx.x != blockDim.x - 1) return;
    if (gridDim.x > 1 && atomicAdd(&control(a)->done, 1u) != gridDim.x - 1) return;
    control(a)->done = 0;
    control(a)->calls = call;
}

__device__ __forceinline__ u32 bits(float x) { return __float_as_uint(x); }

// Few rows, each number together with its call, so that a part which finds the call has the number: grid (rows), block
// up to 1024, four numbers of a row a thread. With a residual x is added to it, and with a norm its rms_norm goes to
// norm_out.
KERNEL __launch_bounds__(1024) all_reduce_rows(const __grid_constant__ AllReduce a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
    float4 near = {0.0f, 0.0f, 0.0f, 0.0f};
    if (a.norm_w && 4 * threadIdx.x < a.d) near = *(const float4*)(a.norm_w + 4 * threadIdx.x);
    PDL_WAIT();
    const u32 call = call_number(a), turn = call & 1;
    const u64 row = (u64)blockIdx.x * a.d;
    for (u32 i = 4 * threadIdx.x; i < a.d; i += 4 * blockDim.x) {
        const float4 v = *(const float4*)(a.x + row + i);
        for (u32 p = 0; p < a.n_parts; p++) {
            if (p == a.part) continue;
            uint2* to = small_rows(a, p, a.part, turn) + row + i;
            store_volatile(to, make_uint4(bits(v.x), call, bits(v.y), call));
            store_volatile(to + 2, make_uint4(bits(v.z), call, bits(v.w), call));
        }
    }
    count_call(a, call);
    float squares = 0.0f;
    float4 kept = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 i = 4 * threadIdx.x; i < a.d; i += 4 * blockDim.x) {
        const float4 own = *(const float4*)(a.x + row + i);
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f}, before = sum;
        if (a.residual) before = *(const float4*)(a.residual + row + i);
        for (u32 p = 0; p < a.n_parts; p++) {
            float4 v = own;
            if (p != a.part) {
                const uint2* from = small_rows(a, a.part, p, turn) + row + i;
                uint4 low, high;
                wait_until([&] {
                    low = load_volatile(from), high = load_volatile(from + 2);
                    return low.y == call && low.w == call && high.y == call && high.w == call;
                });
                v = make_float4(__uint_as_float(low.x), __uint_as_float(low.z), __uint_as_float(high.x),
                                __uint_as_float(high.z));
            }
            if (p == 0) {
                sum = v;
            } else {
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
        }
        if (!a.residual || a.keeps_x) *(float4*)(a.x + row + i) = sum;
        if (!a.residual) continue;
        sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
        *(float4*)(a.residual + row + i) = sum;
        squares += sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w;
        if (i == 4 * threadIdx.x) kept = sum;
    }
    if (a.norm_w) {
        const float r = 1.0f / sqrtf(block_sum(squares, scratch) / (float)a.d + a.eps);
        for (u32 i = 4 * threadIdx.x; i < a.d; i += 4 * blockDim.x) {
            const float4 v = i == 4 * threadIdx.x ? kept : *(const float4*)(a.residual + row + i);
            const float4 w = i == 4 * threadIdx.x ? near : *(const float4*)(a.norm_w + i);
            *(float4*)(a.norm_out + row + i) = make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w);
        }
    }
}

__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint4 packed_eight(const float* x) {
    const float4 a = *(const float4*)x, b = *(const float4*)(x + 4);
    return make_uint4(pair_of(a.x, a.y), pair_of(a.z, a.w), pair_of(b.x, b.y), pair_of(b.z, b.w));
}

__device__ __forceinline__ void add_eight(float (&sum)[8], uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        sum[2 * j] += __uint_as_float(words[j] << 16);
        sum[2 * j + 1] += __uint_as_float(words[j] & 0xffff0000u);
    }
}

__device__ __forceinline__ void store_eight(float* to, const float (&v)[8]) {
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

#define MOST_WARPS 32

// Many rows, rounded to bf16 in every part alike, some of them a block: grid (at most FLAGS), block up to 1024. All
// blocks are resident at once, here and in the other parts. Residual and norm as above; d is a multiple of 8. As many
// warps share a row as leave none idle.
KERNEL __launch_bounds__(32 * MOST_WARPS, 1) all_reduce_many(const __grid_constant__ AllReduce a) {
    __shared__ float squares_of[MOST_WARPS];
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 call = call_number(a), turn = call & 1, rows = (u32)(a.n / a.d);
    const u32 each = (rows + gridDim.x - 1) / gridDim.x, first_row = min(blockIdx.x * each, rows);
    const u32 n_rows = min(each, rows - first_row);
    const u64 first = (u64)first_row * a.d, n = (u64)n_rows * a.d;
#pragma unroll 2
    for (u64 i = first + 8 * threadIdx.x; i < first + n; i += 8 * blockDim.x) {
        const uint4 v = packed_eight(a.x + i);
        for (u32 p = 0; p < a.n_parts; p++) {
            if (p != a.part) *(uint4*)(large_rows(a, p, a.part, turn) + i) = v;
        }
    }
    __threadfence_system();
    count_call(a, call);
    if (threadIdx.x < a.n_parts && threadIdx.x != a.part) {
        u32* to = flags(a, threadIdx.x, a.part) + blockIdx.x;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(call) : "memory");
        const u32* from = flags(a, a.part, threadIdx.x) + blockIdx.x;
        wait_until([&] {
            u32 seen;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
            return (i32)(seen - call) >= 0;
        });
    }
    __syncthreads();
    const u32 warps = blockDim.x / 32;
    u32 share = 1; // warps of a row
    while (2 * share * each <= warps) share *= 2;
    const u32 warp = threadIdx.x / 32, group = warp / share, groups = warps / share;
    const u32 thread = threadIdx.x % (32 * share), step = 8 * 32 * share;
    for (u32 base = 0; base < n_rows; base += groups) {
        const bool has_row = base + group < n_rows;
        const u64 row = first + (u64)(base + group) * a.d;
        float squares = 0.0f;
        for (u32 i = 8 * thread; has_row && i < a.d; i += step) {
            const uint4 own = packed_eight(a.x + row + i);
            float sum[8] = {};
            for (u32 p = 0; p < a.n_parts; p++) {
                add_eight(sum, p == a.part ? own : __ldcg((const uint4*)(large_rows(a, a.part, p, turn) + row + i)));
            }
            if (!a.residual || a.keeps_x) store_eight(a.x + row + i, sum);
            if (!a.residual) continue;
            const float4 low = *(const float4*)(a.residual + row + i);
            const float4 high = *(const float4*)(a.residual + row + i + 4);
            const float before[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += before[j], squares += sum[j] * sum[j];
            store_eight(a.residual + row + i, sum);
        }
        if (!a.norm_w) continue;
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) squares_of[warp] = squares;
        __syncthreads();
        float total = 0.0f;
        for (u32 w = 0; w < share; w++) total += squares_of[group * share + w];
        __syncthreads();
        const float r = 1.0f / sqrtf(total / (float)a.d + a.eps);
        for (u32 i = 8 * thread; has_row && i < a.d; i += step) {
#pragma unroll
            for (int h = 0; h < 8; h += 4) {
                const float4 v = *(const float4*)(a.residual + row + i + h), w = *(const float4*)(a.norm_w + i + h);
                *(float4*)(a.norm_out + row + i + h) =
                    make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w);
            }
        }
    }
}
