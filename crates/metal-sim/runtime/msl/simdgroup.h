// Synchronisation, functions of simdgroups, conversions of halves.
namespace metal {
enum class mem_flags : uint {
    mem_none = 0,
    mem_device = 1,
    mem_threadgroup = 2,
    mem_texture = 4,
    mem_threadgroup_imageblock = 8
};
MSL_INL constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
enum memory_order {
    memory_order_relaxed,
    memory_order_acquire,
    memory_order_release,
    memory_order_acq_rel,
    memory_order_seq_cst
};
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
} // namespace metal
// what runner.cpp provides
extern "C" {
typedef void (*msl_opfn)(void** arg, uint32_t mask); // arg[lane] valid where mask bit set
void sim_collective(msl_opfn fn, void* arg, const char* name, int pos, int strict);
void sim_tg_barrier(uint flags, int pos);
void* sim_tgvar(int id, size_t size, size_t align, const char* name, int line);
void sim_atomic(const volatile void* p, size_t n);
// A thread keeps its lane: asked for once, as by what a thread of a GPU is given.
__attribute__((const)) uint sim_lane(void);
}
#ifdef MSL_TYPECHECK
namespace sim {
template <class T> MSL_AS3 T& tgvar(int id, const char* name, int line);
}
#else
namespace sim {
template <class T> MSL_INL T& tgvar(int id, const char* name, int line) {
    return *(T*)sim_tgvar(id, sizeof(T), alignof(T), name, line);
}
} // namespace sim
#endif
#define MSL_POS int msl_line = __builtin_LINE(), int msl_col = __builtin_COLUMN()
#define MSL_AT (msl_line << 10 | (msl_col & 1023))
#define MSL_NOTSAN __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))
namespace metal {
MSL_INL void threadgroup_barrier(mem_flags f, MSL_POS) { sim_tg_barrier((uint)f, MSL_AT); }
template <class T, class A> struct SimdArg {
    T v, r;
    A a;
};
MSL_NOTSAN inline void msl_nop(void**, uint32_t) {}

// ---- what the compiler calls where a number becomes a half, or a half a number; hidden, since libgcc has them too
#ifndef MSL_TYPECHECK
extern "C" {
void sim_half_overflow(float x, ulong pc);
MSL_NOTSAN __attribute__((used, visibility("hidden"), target("f16c"))) ::half __truncsfhf2(float x) {
    const ::half h = (::half)x;
    const bool is_infinite = (__builtin_bit_cast(ushort, h) & 0x7fff) == 0x7c00;
    if (__builtin_expect(is_infinite && !__builtin_isinf(x), 0)) {
        sim_half_overflow(x, (ulong)__builtin_return_address(0));
    }
    return h;
}
MSL_NOTSAN __attribute__((used, visibility("hidden"), target("f16c"))) float __extendhfsf2(::half h) { return (float)h; }
// To the nearest number of 16 bits, to the even one of two that are as near; NaN stays NaN.
MSL_NOTSAN __attribute__((used, visibility("hidden"))) ::bfloat __truncsfbf2(float x) {
    const uint bits = __builtin_bit_cast(uint, x);
    const uint rounded = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_bit_cast(::bfloat, (ushort)(rounded >> 16));
}
}
#endif
MSL_INL void simdgroup_barrier(mem_flags f, MSL_POS) {
    SimdArg<uint, uint> s{(uint)f, 0, 0};
    sim_collective(msl_nop, &s, "simdgroup_barrier", MSL_AT, 2 | ((int)f << 8));
}
MSL_INL void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

extern "C" int sim_reduce_order; // 0: butterfly 16..1   1: butterfly 1..16   2: sequential
template <class T, class F> MSL_NOTSAN inline void msl_reduce(void** arg, uint32_t mask, F f) {
    T x[32];
    int n = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) x[n++] = ((SimdArg<T, uint>*)arg[i])->v;
    if (n == 32 && sim_reduce_order < 2) {
        for (int k = 0; k < 5; k++) {
            int s = sim_reduce_order == 0 ? 16 >> k : 1 << k;
            T y[32];
            for (int i = 0; i < 32; i++) y[i] = f(x[i], x[i ^ s]);
            for (int i = 0; i < 32; i++) x[i] = y[i];
        }
    } else
        for (int i = 1; i < n; i++) x[0] = f(x[0], x[i]);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) ((SimdArg<T, uint>*)arg[i])->r = x[0];
}
#define MSL_REDUCE(name, e)                                                                                            \
    template <class T> struct msl_##name {                                                                             \
        MSL_NOTSAN static T f(T a, T b) { return e; }                                                                  \
        MSL_NOTSAN static void op(void** a, uint32_t m) { msl_reduce<T>(a, m, f); }                                    \
    };                                                                                                                 \
    template <class T> MSL_INL T name(T v, MSL_POS) {                                                                  \
        SimdArg<T, uint> s{v, v, 0};                                                                                   \
        sim_collective(msl_##name<T>::op, &s, #name, MSL_AT, 0);                                                       \
        return s.r;                                                                                                    \
    }
MSL_REDUCE(simd_sum, (T)(a + b))
MSL_REDUCE(simd_product, (T)(a* b))
MSL_REDUCE(simd_max, metal::max(a, b))
MSL_REDUCE(simd_min, metal::min(a, b))
MSL_REDUCE(simd_and, (T)(a& b))
MSL_REDUCE(simd_or, (T)(a | b))
MSL_REDUCE(simd_xor, (T)(a ^ b))
// shuffles: reading an inactive lane is undefined in MSL -> poison (all ones)
template <class T> MSL_NOTSAN inline T msl_poison() {
    T t;
    __builtin_memset(&t, 0xff, sizeof t);
    return t;
}
extern "C" void sim_bad_lane(const char* what);
template <class T, class F> MSL_NOTSAN inline void msl_shuf(void** arg, uint32_t mask, F src) {
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) {
            auto* s = (SimdArg<T, uint>*)arg[i];
            int j = src(i, s->a);
            if (j >= 0 && j < 32 && (mask >> j & 1)) s->r = ((SimdArg<T, uint>*)arg[j])->v;
            else {
                if (j >= 0 && j < 32) sim_bad_lane("shuffle reads an inactive lane");
                s->r = msl_poison<T>();
            }
        }
}
#define MSL_SHUF(name, e)                                                                                              \
    template <class T> struct msl_##name {                                                                             \
        MSL_NOTSAN static int s(int i, uint a) { return e; }                                                           \
        MSL_NOTSAN static void op(void** p, uint32_t m) { msl_shuf<T>(p, m, s); }                                      \
    };                                                                                                                 \
    template <class T> MSL_INL T name(T v, ushort a, MSL_POS) {                                                        \
        SimdArg<T, uint> s{v, v, a};                                                                                   \
        sim_collective(msl_##name<T>::op, &s, #name, MSL_AT, 0);                                                       \
        return s.r;                                                                                                    \
    }
MSL_SHUF(simd_shuffle, (int)a)
MSL_SHUF(simd_broadcast, (int)a)
MSL_SHUF(simd_shuffle_xor, i ^ (int)a)
MSL_SHUF(simd_shuffle_rotate_down, (i + (int)a) & 31)
MSL_SHUF(simd_shuffle_rotate_up, (i - (int)a) & 31)
MSL_SHUF(simd_shuffle_down, i + (int)a > 31 ? -1 : i + (int)a)
MSL_SHUF(simd_shuffle_up, i - (int)a < 0 ? -1 : i - (int)a)
MSL_SHUF(quad_shuffle, (i & ~3) | ((int)a & 3))
MSL_SHUF(quad_shuffle_xor, i ^ ((int)a & 3))
MSL_SHUF(quad_broadcast, (i & ~3) | ((int)a & 3))
template <class T> struct msl_bf {
    MSL_NOTSAN static void op(void** p, uint32_t m) {
        int f = __builtin_ctz(m);
        for (int i = 0; i < 32; i++)
            if (m >> i & 1) ((SimdArg<T, uint>*)p[i])->r = ((SimdArg<T, uint>*)p[f])->v;
    }
};
template <class T> MSL_INL T simd_broadcast_first(T v, MSL_POS) {
    SimdArg<T, uint> s{v, v, 0};
    sim_collective(msl_bf<T>::op, &s, "simd_broadcast_first", MSL_AT, 0);
    return s.r;
}
template <class T, bool INC> struct msl_scan {
    MSL_NOTSAN static void op(void** p, uint32_t m) {
        T acc = 0;
        for (int i = 0; i < 32; i++)
            if (m >> i & 1) {
                auto* s = (SimdArg<T, uint>*)p[i];
                T v = s->v;
                s->r = INC ? (T)(acc + v) : acc;
                acc = (T)(acc + v);
            }
    }
};
template <class T> MSL_INL T simd_prefix_inclusive_sum(T v, MSL_POS) {
    SimdArg<T, uint> s{v, v, 0};
    sim_collective(msl_scan<T, true>::op, &s, "simd_prefix_inclusive_sum", MSL_AT, 0);
    return s.r;
}
template <class T> MSL_INL T simd_prefix_exclusive_sum(T v, MSL_POS) {
    SimdArg<T, uint> s{v, v, 0};
    sim_collective(msl_scan<T, false>::op, &s, "simd_prefix_exclusive_sum", MSL_AT, 0);
    return s.r;
}
struct simd_vote {
    ulong m;
    explicit operator ulong() const { return m; }
    bool all() const { return m == 0xffffffffu; }
    bool any() const { return m != 0; }
};
struct msl_ballot {
    MSL_NOTSAN static void op(void** p, uint32_t m) {
        uint b = 0;
        for (int i = 0; i < 32; i++)
            if ((m >> i & 1) && ((SimdArg<uint, uint>*)p[i])->v) b |= 1u << i;
        for (int i = 0; i < 32; i++)
            if (m >> i & 1) {
                ((SimdArg<uint, uint>*)p[i])->r = b;
                ((SimdArg<uint, uint>*)p[i])->a = m;
            }
    }
};
#define MSL_BALLOT                                                                                                     \
    SimdArg<uint, uint> s{(uint)e, 0, 0};                                                                              \
    sim_collective(msl_ballot::op, &s, "simd_ballot", MSL_AT, 0)
MSL_INL simd_vote simd_ballot(bool e, MSL_POS) {
    MSL_BALLOT;
    return simd_vote{s.r};
}
MSL_INL bool simd_any(bool e, MSL_POS) {
    MSL_BALLOT;
    return s.r != 0;
}
MSL_INL bool simd_all(bool e, MSL_POS) {
    MSL_BALLOT;
    return s.r == s.a;
}
MSL_INL simd_vote simd_active_threads_mask(MSL_POS) {
    bool e = true;
    MSL_BALLOT;
    return simd_vote{s.a};
}
MSL_INL bool simd_is_first(MSL_POS) {
    bool e = true;
    MSL_BALLOT;
    return (uint)__builtin_ctz(s.a) == sim_lane();
}
} // namespace metal
