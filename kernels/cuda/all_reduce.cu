// all_reduce: x = sum of x over the parts of a plan, each on a device of its own that reaches the others' memory. Terms
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

// The last block of a call counts it.
__device__ __forceinline__ void end_call(const AllReduce& a, u32 call) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&control(a)->done, 1u) == gridDim.x - 1) {
        control(a)->done = 0;
        __threadfence();
        control(a)->calls = call;
    }
}

__device__ __forceinline__ u32 bits(float x) { return __float_as_uint(x); }

// Few rows, each number beside its call, so that whoever finds the call has the number: grid (rows), block up to 1024,
// four numbers of a row a thread. With a residual x is added to it, and with a norm its rms_norm goes to norm_out.
KERNEL __launch_bounds__(1024) all_reduce_rows(const __grid_constant__ AllReduce a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
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
        *(float4*)(a.x + row + i) = sum;
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
            const float4 w = *(const float4*)(a.norm_w + i);
            *(float4*)(a.norm_out + row + i) = make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w);
        }
    }
    end_call(a, call);
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

// Many rows, rounded to bf16 in every part alike, a share of them a block: grid (at most FLAGS), block 512. All blocks
// are resident at once, here and in the other parts. n is a multiple of 8.
KERNEL __launch_bounds__(512) all_reduce_many(const __grid_constant__ AllReduce a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 call = call_number(a), turn = call & 1;
    const u64 each = (a.n / 8 + gridDim.x - 1) / gridDim.x * 8, first = min(blockIdx.x * each, a.n);
    const u64 end = min(first + each, a.n), step = 8 * blockDim.x;
    for (u64 i = first + 8 * threadIdx.x; i < end; i += step) {
        const uint4 v = packed_eight(a.x + i);
        for (u32 p = 0; p < a.n_parts; p++) {
            if (p != a.part) *(uint4*)(large_rows(a, p, a.part, turn) + i) = v;
        }
    }
    __threadfence_system();
    __syncthreads();
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
    for (u64 i = first + 8 * threadIdx.x; i < end; i += step) {
        float sum[8] = {};
        for (u32 p = 0; p < a.n_parts; p++) {
            const uint4 v = p == a.part ? packed_eight(a.x + i) : load_volatile(large_rows(a, a.part, p, turn) + i);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[2 * j] += __uint_as_float(words[j] << 16);
                sum[2 * j + 1] += __uint_as_float(words[j] & 0xffff0000u);
            }
        }
        *(float4*)(a.x + i) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        *(float4*)(a.x + i + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    end_call(a, call);
}
