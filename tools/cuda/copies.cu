// How fast weights of experts come into shared memory, by the pieces in which they are copied: 128 experts of the shape
// of Qwen3-30B-A3B in Q4_K (gate and up, 226 MB) and its last product in Q4_K and Q6_K. Nothing is computed.
//
//     nvcc -O3 -arch=sm_90a -std=c++17 -o copies tools/cuda/copies.cu && ./copies
//
// Times are of a launch between two events, the mean and the least of ten, each after 200 MB that fill the L2.
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

extern __shared__ uint4 shared[];
constexpr u32 EXPERTS = 128, ROWS = 768, ROW = 1152, STEP = 144, STEPS = 8, PITCH = 160, STAGE = 16 * PITCH;

__device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes; a miss brings 32, 128 or 256 bytes to the L2.
template <int HINT>
__device__ void copy(u32 to, const void* from) {
    if (HINT == 0) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else if (HINT == 1) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Steps of 144 bytes, three ahead, in blocks of 64 rows of gate and of up. NINE: lanes go along the nine pieces of a
// step of a row; else four lanes share two rows.
template <int HINT, bool NINE>
__global__ void __launch_bounds__(256, 3) steps(const u8* gate, const u8* up, u32* out) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 base = address(shared) + 14592 + warp * 3 * STAGE;
    const u64 row = (u64)blockIdx.y * ROWS + blockIdx.x * 64 + 8 * warp;
    const u8 *first = gate + row * ROW, *second = up + row * ROW;
    const auto ask = [&](u32 stage, u32 step) {
        if (step < STEPS && NINE) {
            for (int i = 0; i < 2; i++) {
                const u32 piece = lane + 32 * i, r = piece / 9, at = piece % 9 * 16;
                const u32 to = base + stage * STAGE + r * PITCH + at;
                copy<HINT>(to, first + r * ROW + at + step * STEP);
                copy<HINT>(to + 8 * PITCH, second + r * ROW + at + step * STEP);
            }
            if (lane < 16) {
                const u32 piece = 64 + lane % 8, r = piece / 9, at = piece % 9 * 16;
                const u32 to = base + stage * STAGE + (lane < 8 ? 0 : 8 * PITCH) + r * PITCH + at;
                copy<HINT>(to, (lane < 8 ? first : second) + r * ROW + at + step * STEP);
            }
        } else if (step < STEPS) {
            const u32 to = base + stage * STAGE + g * PITCH;
            const u8 *a = first + g * ROW + step * STEP, *b = second + g * ROW + step * STEP;
            copy<HINT>(to + 16 * t, a + 16 * t), copy<HINT>(to + 16 * t + 64, a + 16 * t + 64);
            copy<HINT>(to + 8 * PITCH + 16 * t, b + 16 * t), copy<HINT>(to + 8 * PITCH + 16 * t + 64, b + 16 * t + 64);
            if (t < 2) copy<HINT>(to + 128 + t * 8 * PITCH, (t ? b : a) + 128);
        }
        commit();
    };
    for (int i = 0; i < 3; i++) ask(i, i);
    u32 sum = 0;
    for (u32 step = 0; step < STEPS; step++) {
        asm volatile("cp.async.wait_group 2;" ::: "memory");
        __syncwarp();
        sum += *(const u32*)((const u8*)shared + 14592 + warp * 3 * STAGE + step % 3 * STAGE + g * PITCH + 4 * t);
        __syncwarp();
        ask(step % 3, step + 3);
    }
    if (sum == 0x12345678) out[0] = sum;
}

__device__ void barrier_init(u32 barrier, u32 n) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}
__device__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra D; bra L; D:}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}

// A ring of tiles of 8 rows of gate and 8 of up, in bulk copies of BYTES: a row, or all eight.
template <int SLOTS, int BYTES>
__global__ void ring(const u8* gate, const u8* up, u32 tiles_each, u32* out) {
    constexpr u32 N_TILES = EXPERTS * ROWS / 8, OF_ROW = BYTES == ROW ? ROW + 32 : ROW, SLOT = 16 * (ROW + 32);
    const u32 barriers = address(shared), data = barriers + 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) barrier_init(barriers + 16 * i, 1), barrier_init(barriers + 16 * i + 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const u64 first = (u64)blockIdx.x * tiles_each;
    const u32 n = min((u64)tiles_each, N_TILES - min(first, (u64)N_TILES));
    const auto fill = [&](u32 i) {
        const u32 slot = i % SLOTS;
        barrier_expect(barriers + 16 * slot, 16 * ROW);
        const u64 row = (first + i) * 8;
        for (int j = 0; j < 8 * ROW / BYTES; j++) {
            const u32 to = data + slot * SLOT + (BYTES == ROW ? j * OF_ROW : 0);
            bulk_copy(to, gate + row * ROW + j * BYTES, BYTES, barriers + 16 * slot);
            bulk_copy(to + 8 * OF_ROW, up + row * ROW + j * BYTES, BYTES, barriers + 16 * slot);
        }
    };
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < min(n, (u32)SLOTS); i++) fill(i);
    }
    u32 sum = 0;
    for (u32 i = 0; i < n; i++) {
        const u32 slot = i % SLOTS;
        barrier_wait(barriers + 16 * slot, i / SLOTS % 2);
        sum += *(const u32*)((const u8*)shared + 128 + slot * SLOT + threadIdx.x * 4);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers + 16 * slot + 8);
        if (threadIdx.x == 0 && i + SLOTS < n) {
            barrier_wait(barriers + 16 * slot + 8, i / SLOTS % 2);
            fill(i + SLOTS);
        }
    }
    if (sum == 0x12345678) out[0] = sum;
}

// Blocks of 128 rows, 16 a warp: FORM 0 in a bulk copy a warp, else by lanes along the bytes with hint FORM - 1.
template <int FORM, int BLOCKS>
__global__ void __launch_bounds__(256, BLOCKS) rows(const u8* weights, u32* out, u32 row) {
    const u32 barriers = address(shared), warp = threadIdx.x / 32, lane = threadIdx.x % 32, bytes = 16 * row;
    const u32 to = barriers + 128 + warp * bytes;
    const u8* from = weights + ((u64)blockIdx.y * 2048 + blockIdx.x * 128 + 16 * warp) * row;
    if (FORM == 0) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < 8; i++) barrier_init(barriers + 8 * i, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
        if (lane == 0) {
            barrier_expect(barriers + 8 * warp, bytes);
            bulk_copy(to, from, bytes, barriers + 8 * warp);
        }
        __syncwarp();
        barrier_wait(barriers + 8 * warp, 0);
    } else {
        for (u32 i = lane * 16; i < bytes; i += 512) copy<FORM - 1>(to + i, from + i);
        commit();
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    const u32 sum = *(const u32*)((const u8*)shared + 128 + warp * bytes + lane * 4);
    if (sum == 0x12345678) out[0] = sum;
}

template <class Launch>
static void timed(const char* name, double bytes, u8* flush, const Launch& launch) {
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    float least = 1e9f, sum = 0.0f;
    for (int i = 0; i < 12; i++) {
        cudaMemsetAsync(flush, i, 200 << 20);
        cudaEventRecord(begin);
        launch();
        cudaEventRecord(end);
        cudaEventSynchronize(end);
        float ms = 0.0f;
        cudaEventElapsedTime(&ms, begin, end);
        if (i > 1) least = min(least, ms), sum += ms / 10;
    }
    const cudaError_t error = cudaGetLastError();
    printf("%-40s mean %6.1f us, least %6.1f us, %4.2f TB/s %s\n", name, sum * 1e3, least * 1e3, bytes / least / 1e9,
           error ? cudaGetErrorString(error) : "");
}

template <class Kernel>
static void allow(Kernel* kernel, u32 bytes) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

int main() {
    u8 *gate, *flush;
    u32* out;
    const u64 matrix = (u64)EXPERTS * ROWS * ROW, q4 = (u64)EXPERTS * 2048 * 432, q6 = (u64)EXPERTS * 2048 * 630;
    cudaMalloc(&gate, 2 * matrix), cudaMalloc(&flush, 200 << 20), cudaMalloc(&out, 4);
    cudaMemset(gate, 7, 2 * matrix);
    const u8* up = gate + matrix;
#define STEPS_OF(name, ...)                                                                     \
    allow(steps<__VA_ARGS__>, 76128);                                                           \
    timed(name, 2.0 * matrix, flush,                                                            \
          [&] { steps<__VA_ARGS__><<<dim3(ROWS / 64, EXPERTS), 256, 76128>>>(gate, up, out); });
    STEPS_OF("steps, four lanes", 0, false)
    STEPS_OF("steps, four lanes, lines of 128", 1, false)
    STEPS_OF("steps, four lanes, lines of 256", 2, false)
    STEPS_OF("steps, nine lanes", 0, true)
    STEPS_OF("steps, nine lanes, lines of 128", 1, true)
#define RING_OF(slots, bytes, blocks)                                                           \
    allow(ring<slots, bytes>, 128 + slots * 18944);                                             \
    timed("ring of " #slots ", copies of " #bytes ", blocks " #blocks, 2.0 * matrix, flush, [&] { \
        ring<slots, bytes><<<blocks, 256, 128 + slots * 18944>>>(gate, up, (12288 + blocks - 1) / blocks, out); \
    });
    RING_OF(4, 1152, 264)
    RING_OF(3, 1152, 396)
    RING_OF(4, 9216, 264)
    RING_OF(3, 9216, 396)
    RING_OF(11, 9216, 132)
#define ROWS_OF(name, form, blocks, row, bytes)                                                 \
    allow(rows<form, blocks>, 128 + 128 * row);                                                 \
    timed(name, (double)bytes, flush,                                                           \
          [&] { rows<form, blocks><<<dim3(16, EXPERTS), 256, 128 + 128 * row>>>(gate, out, row); });
    ROWS_OF("last product, Q4_K, bulk", 0, 3, 432, q4)
    ROWS_OF("last product, Q4_K, lanes", 1, 3, 432, q4)
    ROWS_OF("last product, Q6_K, bulk", 0, 2, 630, q6)
    ROWS_OF("last product, Q6_K, lanes", 1, 2, 630, q6)
}
