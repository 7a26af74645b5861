// Copies from memory to shared memory that a thread waits for later (sm_80 and up). They bring whole lines to the L2,
// which otherwise looks up each of a line's sectors by itself.
#pragma once

#include "quant/ints.h"

// 16 bytes, both addresses multiples of it.
__device__ __forceinline__ void copy_async(void* shared, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)),
                 "l"(from)
                 : "memory");
}

// The same, to an address in shared memory.
__device__ __forceinline__ void copy_async(u32 shared, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// The same, or zeros.
__device__ __forceinline__ void copy_async_if(void* shared, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)),
                 "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups but the last N.
template <int N>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
