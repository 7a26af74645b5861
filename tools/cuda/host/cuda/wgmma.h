// `kernels/cuda/wgmma.h` for emulation. Copies and products end before the call does.
#pragma once

#include "emulate.h"
#include "quant/ints.h"

#define HAS_WGMMA 1

// Shared memory by its distance from `shared`.
inline u32 address_in_shared(const void* p) { return (u32)((const char*)p - (const char*)shared); }
inline char* in_shared(u32 at) { return (char*)shared + (int)at; }

// A phase lasts until all have arrived and all announced bytes were copied.
struct Barrier {
    u8 n_arrivals, arrived;
    u16 phase;
    u32 announced;
};
inline Barrier& barrier_at(u32 at) { return *(Barrier*)in_shared(at); }
inline void barrier_init(u32 at, u32 n_arrivals) { barrier_at(at) = {(u8)n_arrivals, 0, 0, 0}; }
inline void fence_async() {}
inline void barrier_check(Barrier& barrier) {
    if (barrier.arrived == barrier.n_arrivals && barrier.announced == 0) barrier.arrived = 0, barrier.phase++;
}
inline void barrier_arrive(u32 at) {
    Barrier& barrier = barrier_at(at);
    barrier.arrived++;
    barrier_check(barrier);
}
inline void barrier_expect(u32 at, u32 bytes) {
    barrier_at(at).announced += bytes;
    barrier_arrive(at);
}
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 at) {
    Barrier& barrier = barrier_at(at);
    if (bytes % 16 || (u64)from % 16 || to % 16 || bytes > barrier.announced) abort();
    memcpy(in_shared(to), from, bytes);
    barrier.announced -= bytes;
    barrier_check(barrier);
}
inline void barrier_wait(u32 at, u32 parity) {
    while (barrier_at(at).phase % 2 == parity) emulate::give_way();
}

inline uint4 shared4(u32 at) { return *(const uint4*)in_shared(at); }
inline uint2 shared2(u32 at) { return *(const uint2*)in_shared(at); }
inline void keep_word(u32&) {}
inline u32 thread_anew() { return threadIdx.x; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
inline void wgmma_wait() {}
template <int N>
void wgmma_wait_but() {}
template <int N>
void give_registers() {}
template <int N>
void take_registers() {}

// Barriers of some threads, by number.
struct Group {
    u32 arrived, round;
};
inline Group groups[16];
inline void group_arrive(u32 id, u32 n) {
    if (++groups[id].arrived == n) groups[id].arrived = 0, groups[id].round++;
}
inline void group_sync(u32 id, u32 n) {
    const u32 round = groups[id].round;
    group_arrive(id, n);
    while (groups[id].round == round) emulate::give_way();
}

template <int N>
void keep(float (&)[N]) {}

// The address above, the piece of 16 bytes below.
inline u64 wgmma_matrix(u32 at) {
    if (at % 1024) abort();
    return (u64)at << 32;
}

template <int N>
void wgmma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    const auto all = emulate::exchange<4>({a0, a1, a2, a3});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    const char* matrix = in_shared((u32)(b >> 32));
    const auto value = [](u32 word, u32 half) { return emulate::number(half ? word & 0xffff0000u : word << 16); };
    for (u32 i = 0; i < N / 2; i++) {
        const u32 col = i / 4 * 8 + 2 * t + i % 2, second = i / 2 % 2;
        double sum = c[i];
        for (u32 k = 0; k < 16; k++) {
            const u32 word = all[4 * g + k % 8 / 2][2 * (k / 8) + second], piece = (u32)b + k / 8;
            u32 x;
            memcpy(&x, matrix + col * 128 + 16 * (piece ^ col % 8) + k % 8 / 2 * 4, 4);
            sum += (double)value(word, k % 2) * (double)value(x, k % 2);
        }
        c[i] = (float)sum;
    }
}

inline double f16_of(const char* at) {
    _Float16 x;
    memcpy(&x, at, 2);
    return (double)x;
}

// Number `i` of 64 of a swizzled row.
inline double swizzled(const char* matrix, u32 row, u32 i) {
    return f16_of(matrix + row * 128 + 16 * (i / 8 ^ row % 8) + i % 8 * 2);
}

template <int N>
void wgmma_scores(float* c, u64 a, u64 b, bool is_added) {
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4, warp = emulate::now / 32 % 4;
    for (u32 i = 0; i < N / 2; i++) {
        const u32 col = i / 4 * 8 + 2 * t + i % 2, row = 16 * warp + g + i / 2 % 2 * 8;
        double sum = is_added ? c[i] : 0;
        for (u32 k = 0; k < 16; k++) {
            sum += swizzled(in_shared((u32)(a >> 32)), row, 8 * (u32)a + k) *
                   swizzled(in_shared((u32)(b >> 32)), col, 8 * (u32)b + k);
        }
        c[i] = (float)sum;
    }
    emulate::exchange<1>({0});  // a warp's products end together
}

// The address above, the distance of the next columns below.
inline u64 wgmma_columns(u32 at, u32 next) {
    if (at % 1024) abort();
    return (u64)at << 32 | next;
}

template <int N>
void wgmma_values(float* c, const u32 (&a)[4], u64 b) {
    const auto all = emulate::exchange<4>({a[0], a[1], a[2], a[3]});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    for (u32 i = 0; i < N / 2; i++) {
        const u32 col = i / 4 * 8 + 2 * t + i % 2, second = i / 2 % 2;
        const char* columns = in_shared((u32)(b >> 32) + col / 64 * (u32)b);
        double sum = c[i];
        for (u32 k = 0; k < 16; k++) {
            const u32 word = all[4 * g + k % 8 / 2][2 * (k / 8) + second];
            const u16 half = (u16)(word >> (16 * (k % 2)));
            sum += f16_of((const char*)&half) * swizzled(columns, k, col % 64);
        }
        c[i] = (float)sum;
    }
    emulate::exchange<1>({0});
}
