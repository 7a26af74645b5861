// Plays Apple's <metal_stdlib> (its compute part) for clang 16 and newer. The driver includes it before a rewritten
// kernel source. It uses compiler builtins only, so that no name of a C library leaks into kernels.
#pragma once
#include <stdint.h>
#include <stddef.h>

// ---- scalar and vector types
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
#define MSL_VT(T, N)                                                                                                   \
    typedef T N##2 __attribute__((ext_vector_type(2)));                                                                \
    typedef T N##3 __attribute__((ext_vector_type(3)));                                                                \
    typedef T N##4 __attribute__((ext_vector_type(4)));
MSL_VT(char, char)
MSL_VT(uchar, uchar)
MSL_VT(short, short)
MSL_VT(ushort, ushort)
MSL_VT(int, int)
MSL_VT(uint, uint)
MSL_VT(long, long)
MSL_VT(ulong, ulong)
MSL_VT(float, float)
MSL_VT(half, half)
MSL_VT(bool, bool)
MSL_VT(bfloat, bfloat)
#define MSL_INL inline __attribute__((always_inline))

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// ---- traits
template <class A, class B> struct is_same {
    static constexpr bool value = false;
};
template <class A> struct is_same<A, A> {
    static constexpr bool value = true;
};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
    typedef T type;
};
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional {
    typedef T type;
};
template <class T, class F> struct conditional<false, T, F> {
    typedef F type;
};
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class V> struct vtr {
    typedef V E;
    static constexpr int N = 1;
};
template <class T, int M> struct vtr<T __attribute__((ext_vector_type(M)))> {
    typedef T E;
    static constexpr int N = M;
};
template <class T> constexpr bool is_f = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> constexpr bool is_i = is_same_v<T, char> || is_same_v<T, signed char> || is_same_v<T, uchar> ||
                                         is_same_v<T, short> || is_same_v<T, ushort> || is_same_v<T, int> ||
                                         is_same_v<T, uint> || is_same_v<T, long> || is_same_v<T, ulong>;
template <class T> constexpr bool is_floating_point_v = is_f<T>;
template <class T> constexpr bool is_integral_v = is_i<T> || is_same_v<T, bool>;

#define MSL_AS1 __attribute__((address_space(1)))
#define MSL_AS2 __attribute__((address_space(2)))
#define MSL_AS3 __attribute__((address_space(3)))
template <class T> T msl_elem(const volatile T*);
template <class T> T msl_elem(const volatile MSL_AS1 T*);
template <class T> T msl_elem(const volatile MSL_AS2 T*);
template <class T> T msl_elem(const volatile MSL_AS3 T*);
template <class P> using unqual_t =
    decltype(msl_elem((P) nullptr)); // pointer type -> element type without const / volatile / address space
// ---- constructor calls: the rewriter turns  float4(a, b, c, d)  into  msl_mk<float4>(a, b, c, d)
template <class E, class A> MSL_INL void msl_put(E* out, int& k, A a) {
    if constexpr (vtr<A>::N == 1) out[k++] = (E)a;
    else
        for (int i = 0; i < vtr<A>::N; i++) out[k++] = (E)a[i];
}
template <class V, class... A> MSL_INL V msl_mk(A... a) {
    typedef typename vtr<V>::E E;
    constexpr int N = vtr<V>::N;
    constexpr int M = (0 + ... + vtr<A>::N);
    V v;
    if constexpr (M == 0) {
        for (int i = 0; i < N; i++) v[i] = (E)0;
    } else if constexpr (sizeof...(A) == 1 && M == 1) {
        E e = (E)(a, ...);
        for (int i = 0; i < N; i++) v[i] = e;
    } else {
        static_assert(M == N, "MSL vector constructor: wrong number of components");
        E t[N];
        int k = 0;
        (msl_put<E>(t, k, a), ...);
        for (int i = 0; i < N; i++) v[i] = t[i];
    }
    return v;
}
template <class T, class F> MSL_INL T as_type(F f) {
    static_assert(sizeof(T) == sizeof(F), "as_type size");
    return __builtin_bit_cast(T, f);
}

template <class T, int N> struct packed_vec {
    T v[N];
    packed_vec() = default;
    MSL_INL packed_vec(vec<T, N> x) {
        for (int i = 0; i < N; i++) v[i] = x[i];
    }
    MSL_INL operator vec<T, N>() const {
        vec<T, N> r;
        for (int i = 0; i < N; i++) r[i] = v[i];
        return r;
    }
    MSL_INL T& operator[](int i) { return v[i]; }
    MSL_INL const T& operator[](int i) const { return v[i]; }
};

// ---- math
// Functions that Metal does not round correctly may be off by some units in the last place.
} // namespace metal
extern "C" {
float sim_perturb(float);
float expf(float);
float exp2f(float);
float logf(float);
float log2f(float);
float log10f(float);
float sinf(float);
float cosf(float);
float tanf(float);
float tanhf(float);
float sinhf(float);
float coshf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float powf(float, float);
float fmodf(float, float);
float exp10f(float);
float ldexpf(float, int);
float frexpf(float, int*);
}
namespace metal {
MSL_INL float msl_pt(float x) { return sim_perturb(x); }
#define MSL_MAP1(name, T)                                                                                              \
    template <int N> MSL_INL vec<T, N> name(vec<T, N> v) {                                                             \
        vec<T, N> r;                                                                                                   \
        for (int i = 0; i < N; i++) r[i] = name(v[i]);                                                                 \
        return r;                                                                                                      \
    }
#define MSL_MAP2(name, T)                                                                                              \
    template <int N> MSL_INL vec<T, N> name(vec<T, N> a, vec<T, N> b) {                                                \
        vec<T, N> r;                                                                                                   \
        for (int i = 0; i < N; i++) r[i] = name(a[i], b[i]);                                                           \
        return r;                                                                                                      \
    }
#define MSL_MAP3(name, T)                                                                                              \
    template <int N> MSL_INL vec<T, N> name(vec<T, N> a, vec<T, N> b, vec<T, N> c) {                                   \
        vec<T, N> r;                                                                                                   \
        for (int i = 0; i < N; i++) r[i] = name(a[i], b[i], c[i]);                                                     \
        return r;                                                                                                      \
    }
#define MSL_FN1(name, e)                                                                                               \
    MSL_INL float name(float x) { return e; }                                                                          \
    MSL_INL half name(half h) {                                                                                        \
        float x = (float)h;                                                                                            \
        return (half)(e);                                                                                              \
    }                                                                                                                  \
    MSL_MAP1(name, float)                                                                                              \
    MSL_MAP1(name, half)
#define MSL_FN2(name, e)                                                                                               \
    MSL_INL float name(float x, float y) { return e; }                                                                 \
    MSL_INL half name(half a, half b) {                                                                                \
        float x = (float)a, y = (float)b;                                                                              \
        return (half)(e);                                                                                              \
    }                                                                                                                  \
    MSL_MAP2(name, float)                                                                                              \
    MSL_MAP2(name, half)
#define MSL_TRANS(P)                                                                                                   \
    MSL_FN1(exp, P(expf(x)))                                                                                           \
    MSL_FN1(exp2, P(exp2f(x)))                                                                                         \
    MSL_FN1(exp10, P(exp10f(x)))                                                                                       \
    MSL_FN1(log, P(logf(x)))                                                                                           \
    MSL_FN1(log2, P(log2f(x)))                                                                                         \
    MSL_FN1(log10, P(log10f(x)))                                                                                       \
    MSL_FN1(sin, P(sinf(x)))                                                                                           \
    MSL_FN1(cos, P(cosf(x)))                                                                                           \
    MSL_FN1(tan, P(tanf(x)))                                                                                           \
    MSL_FN1(tanh, P(tanhf(x)))                                                                                         \
    MSL_FN1(sinh, P(sinhf(x)))                                                                                         \
    MSL_FN1(cosh, P(coshf(x)))                                                                                         \
    MSL_FN1(asin, P(asinf(x)))                                                                                         \
    MSL_FN1(acos, P(acosf(x)))                                                                                         \
    MSL_FN1(atan, P(atanf(x)))                                                                                         \
    MSL_FN2(atan2, P(atan2f(x, y)))                                                                                    \
    MSL_FN2(pow, P(powf(x, y)))                                                                                        \
    MSL_FN2(powr, P(powf(x, y)))
#define MSL_ROOTS(P)                                                                                                   \
    MSL_FN1(rsqrt, P(1.0f / __builtin_sqrtf(x)))                                                                       \
    MSL_FN1(sqrt, P(__builtin_sqrtf(x)))                                                                               \
    MSL_FN2(fmod, fmodf(x, y))                                                                                         \
    MSL_FN2(divide, P(x / y))                                                                                          \
    MSL_FN1(recip, P(1.0f / x))
MSL_TRANS(msl_pt)
MSL_ROOTS(msl_pt)
namespace fast {
MSL_TRANS(msl_pt)
MSL_ROOTS(msl_pt)
}
// Safe math rounds roots and quotients correctly; exponentials and their kin are off by up to 5 units even so (Metal
// Shading Language specification, accuracy of single-precision functions).
namespace precise {
MSL_TRANS(msl_pt)
MSL_ROOTS()
}
MSL_FN1(floor, __builtin_floorf(x))
MSL_FN1(ceil, __builtin_ceilf(x))
MSL_FN1(trunc, __builtin_truncf(x))
MSL_FN1(rint, __builtin_rintf(x))
MSL_FN1(round, __builtin_roundf(x))
MSL_FN1(fabs, __builtin_fabsf(x))
MSL_FN1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
MSL_FN1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_FN1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
MSL_FN2(copysign, __builtin_copysignf(x, y))
MSL_FN2(fmin, __builtin_fminf(x, y))
MSL_FN2(fmax, __builtin_fmaxf(x, y))
MSL_FN2(step, y < x ? 0.0f : 1.0f)
MSL_INL float ldexp(float x, int e) { return ldexpf(x, e); }
MSL_INL float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_INL half fma(half a, half b, half c) {
    return (half)__builtin_fmaf((float)a, (float)b, (float)c);
} // double rounding: 1-ulp differences possible
MSL_MAP3(fma, float)
MSL_MAP3(fma, half)
template <class T> MSL_INL T mix(T a, T b, T t) { return a + (b - a) * t; }
MSL_INL bool isnan(float x) { return __builtin_isnan(x); }
MSL_INL bool isinf(float x) { return __builtin_isinf(x); }
MSL_INL bool isfinite(float x) { return __builtin_isfinite(x); }
MSL_INL bool isnan(half x) { return __builtin_isnan((float)x); }
MSL_INL bool isinf(half x) { return __builtin_isinf((float)x); }
// min / max / clamp / abs: one type only, as in MSL (mixed types are ambiguous there and fail here)
template <class T> MSL_INL enable_if_t<is_i<T>, T> min(T a, T b) { return b < a ? b : a; }
template <class T> MSL_INL enable_if_t<is_i<T>, T> max(T a, T b) { return a < b ? b : a; }
MSL_INL float min(float a, float b) { return __builtin_fminf(a, b); }
MSL_INL float max(float a, float b) { return __builtin_fmaxf(a, b); }
MSL_INL half min(half a, half b) { return (half)__builtin_fminf((float)a, (float)b); }
MSL_INL half max(half a, half b) { return (half)__builtin_fmaxf((float)a, (float)b); }
MSL_INL bfloat min(bfloat a, bfloat b) { return (bfloat)__builtin_fminf((float)a, (float)b); }
MSL_INL bfloat max(bfloat a, bfloat b) { return (bfloat)__builtin_fmaxf((float)a, (float)b); }
template <class T, int N> MSL_INL vec<T, N> min(vec<T, N> a, vec<T, N> b) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = min(a[i], b[i]);
    return r;
}
template <class T, int N> MSL_INL vec<T, N> max(vec<T, N> a, vec<T, N> b) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = max(a[i], b[i]);
    return r;
}
template <class T> MSL_INL T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> MSL_INL enable_if_t<is_i<T>, T> abs(T a) { return a < 0 ? -a : a; }
MSL_INL float abs(float x) { return __builtin_fabsf(x); }
MSL_INL half abs(half x) { return (half)__builtin_fabsf((float)x); }
template <class T, int N> MSL_INL vec<T, N> abs(vec<T, N> a) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = abs(a[i]);
    return r;
}
template <class T> MSL_INL T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N, class B> MSL_INL vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<B, N> c) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
    return r;
}
template <class B, int N> MSL_INL bool any(vec<B, N> c) {
    bool r = false;
    for (int i = 0; i < N; i++) r |= c[i] != 0;
    return r;
}
template <class B, int N> MSL_INL bool all(vec<B, N> c) {
    bool r = true;
    for (int i = 0; i < N; i++) r &= c[i] != 0;
    return r;
}
template <class T, int N> MSL_INL T dot(vec<T, N> a, vec<T, N> b) {
    T s = a[0] * b[0];
    for (int i = 1; i < N; i++) s += a[i] * b[i];
    return s;
}
template <class T, int N> MSL_INL T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> MSL_INL T length(vec<T, N> a) { return sqrt(dot(a, a)); }
// integer
template <class T> MSL_INL T popcount(T x) {
    return (T)__builtin_popcountll((unsigned long long)x & (~0ull >> (64 - 8 * sizeof(T))));
}
template <class T> MSL_INL T clz(T x) {
    unsigned long long u = (unsigned long long)x & (~0ull >> (64 - 8 * sizeof(T)));
    return (T)(u ? __builtin_clzll(u) - (64 - 8 * (int)sizeof(T)) : 8 * sizeof(T));
}
template <class T> MSL_INL T ctz(T x) {
    unsigned long long u = (unsigned long long)x & (~0ull >> (64 - 8 * sizeof(T)));
    return (T)(u ? __builtin_ctzll(u) : 8 * sizeof(T));
}
template <class T> MSL_INL T extract_bits(T x, uint o, uint b) {
    return b == 0 ? (T)0 : (T)(x << (8 * sizeof(T) - o - b)) >> (8 * sizeof(T) - b);
}
template <class T> MSL_INL T insert_bits(T base, T ins, uint o, uint b) {
    T m = (b >= 8 * sizeof(T) ? (T) ~(T)0 : (T)(((T)1 << b) - 1)) << o;
    return (base & ~m) | ((ins << o) & m);
}
template <class T> MSL_INL T rotate(T x, T n) {
    const int w = 8 * sizeof(T);
    int k = (int)n & (w - 1);
    return k ? (T)((x << k) | ((typename conditional < sizeof(T) == 4, uint, ulong > ::type) x >> (w - k))) : x;
}
MSL_INL uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
MSL_INL int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
MSL_INL uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }

// ---- synchronisation and simdgroup functions
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
uint sim_lane(void);
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

// ---- simdgroup_matrix: 8x8, two elements a lane (Apple's layout)
MSL_INL int msl_mrow(uint l) { return (int)((l >> 4 & 1) * 4 + (l >> 1 & 3)); }
MSL_INL int msl_mcol(uint l) { return (int)((l >> 3 & 1) * 4 + (l & 1) * 2); }
template <class T, int C, int R> struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "only 8x8 simdgroup matrices exist");
    vec<T, 2> e;
    MSL_INL simdgroup_matrix() { __builtin_memset(&e, 0xff, sizeof e); } // poison: NaN
    MSL_INL explicit simdgroup_matrix(T d) {
        uint l = sim_lane();
        int r = msl_mrow(l), c = msl_mcol(l);
        e[0] = r == c ? d : (T)0;
        e[1] = r == c + 1 ? d : (T)0;
    }
    MSL_INL vec<T, 2>& thread_elements() { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C> MSL_INL simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
    simdgroup_matrix<T, C, R> m;
    m.e[0] = v;
    m.e[1] = v;
    return m;
}
struct MatSync {
    const volatile void* p;
    ulong epr;
    ulong2 o;
    bool t;
};
extern "C" void sim_mat_uniform(void** arg, uint32_t mask);
MSL_INL void msl_matsync(const volatile void* p, ulong epr, ulong2 o, bool t, const char* nm, int at) {
    MatSync s{p, epr, o, t};
    sim_collective(sim_mat_uniform, &s, nm, at, 1);
}
template <class T, class S> MSL_INL void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, S src, ulong epr = 8,
                                                        ulong2 o = 0, bool tr = false, MSL_POS) {
    static_assert(is_same_v<T, unqual_t<S>>, "simdgroup_load: element type differs from the matrix type");
    msl_matsync((const volatile void*)src, epr, o, tr, "simdgroup_load", MSL_AT);
    uint l = sim_lane();
    ulong r = (ulong)msl_mrow(l), c = (ulong)msl_mcol(l);
    for (int k = 0; k < 2; k++, c++) d.e[k] = tr ? src[(c + o.x) * epr + r + o.y] : src[(r + o.y) * epr + c + o.x];
}
template <class T, class S> MSL_INL void simdgroup_store(const simdgroup_matrix<T, 8, 8>& s, S dst, ulong epr = 8,
                                                         ulong2 o = 0, bool tr = false, MSL_POS) {
    static_assert(is_same_v<T, unqual_t<S>>, "simdgroup_store: element type differs from the matrix type");
    msl_matsync((const volatile void*)dst, epr, o, tr, "simdgroup_store", MSL_AT);
    uint l = sim_lane();
    ulong r = (ulong)msl_mrow(l), c = (ulong)msl_mcol(l);
    for (int k = 0; k < 2; k++, c++) {
        if (tr) dst[(c + o.x) * epr + r + o.y] = s.e[k];
        else dst[(r + o.y) * epr + c + o.x] = s.e[k];
    }
}
template <class A, class B, class C, class D> struct MmaArg {
    vec<A, 2> a;
    vec<B, 2> b;
    vec<C, 2> c;
    vec<D, 2> d;
};
template <class A, class B, class C, class D> struct msl_mma {
    MSL_NOTSAN static void op(void** p, uint32_t m) {
        typedef MmaArg<A, B, C, D> M;
        float a[8][8] = {}, b[8][8] = {};
        for (uint l = 0; l < 32; l++)
            if (m >> l & 1) {
                M* s = (M*)p[l];
                int r = (int)((l >> 4 & 1) * 4 + (l >> 1 & 3)), c = (int)((l >> 3 & 1) * 4 + (l & 1) * 2);
                for (int k = 0; k < 2; k++) {
                    a[r][c + k] = (float)s->a[k];
                    b[r][c + k] = (float)s->b[k];
                }
            }
        for (uint l = 0; l < 32; l++)
            if (m >> l & 1) {
                M* s = (M*)p[l];
                int r = (int)((l >> 4 & 1) * 4 + (l >> 1 & 3)), c = (int)((l >> 3 & 1) * 4 + (l & 1) * 2);
                for (int k = 0; k < 2; k++) {
                    float acc = (float)s->c[k];
                    for (int i = 0; i < 8; i++) acc = __builtin_fmaf(a[r][i], b[i][c + k], acc);
                    s->d[k] = (D)acc;
                }
            }
    }
};
template <class D, class A, class B, class C>
MSL_INL void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                           const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                           MSL_POS) {
    MmaArg<A, B, C, D> s{a.e, b.e, c.e, {}};
    sim_collective(msl_mma<A, B, C, D>::op, &s, "simdgroup_multiply_accumulate", MSL_AT, 1);
    d.e = s.d;
}
template <class D, class A, class B> MSL_INL void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                                                     const simdgroup_matrix<A, 8, 8>& a,
                                                                     const simdgroup_matrix<B, 8, 8>& b, MSL_POS) {
    MmaArg<A, B, D, D> s{a.e, b.e, {}, {}};
    s.c[0] = (D)0;
    s.c[1] = (D)0;
    sim_collective(msl_mma<A, B, D, D>::op, &s, "simdgroup_multiply", MSL_AT, 1);
    d.e = s.d;
}

// ---- atomics (relaxed only, as in MSL before 3.2)
template <class T> struct atomic {
    T v;
};
#define MSL_AP
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
template <class T> MSL_NOTSAN inline T atomic_load_explicit(const volatile MSL_AP atomic<T>* p, memory_order) {
    sim_atomic(p, sizeof(T));
    T r;
    __atomic_load(const_cast<T*>(&p->v), &r, __ATOMIC_RELAXED);
    return r;
}
template <class T> MSL_NOTSAN inline void atomic_store_explicit(volatile MSL_AP atomic<T>* p, T x, memory_order) {
    sim_atomic(p, sizeof(T));
    __atomic_store(const_cast<T*>(&p->v), &x, __ATOMIC_RELAXED);
}
template <class T> MSL_NOTSAN inline T atomic_exchange_explicit(volatile MSL_AP atomic<T>* p, T x, memory_order) {
    sim_atomic(p, sizeof(T));
    T r;
    __atomic_exchange(const_cast<T*>(&p->v), &x, &r, __ATOMIC_RELAXED);
    return r;
}
template <class T> MSL_NOTSAN inline bool atomic_compare_exchange_weak_explicit(volatile MSL_AP atomic<T>* p, T* e, T x,
                                                                                memory_order, memory_order) {
    sim_atomic(p, sizeof(T));
    return __atomic_compare_exchange(const_cast<T*>(&p->v), e, &x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define MSL_RMW(name, e)                                                                                               \
    template <class T>                                                                                                 \
    MSL_NOTSAN inline T atomic_fetch_##name##_explicit(volatile MSL_AP atomic<T>* p, T b, memory_order) {              \
        sim_atomic(p, sizeof(T));                                                                                      \
        T* q = const_cast<T*>(&p->v);                                                                                  \
        T a, n;                                                                                                        \
        __atomic_load(q, &a, __ATOMIC_RELAXED);                                                                        \
        do { n = (e); } while (!__atomic_compare_exchange(q, &a, &n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));       \
        return a;                                                                                                      \
    }
MSL_RMW(add, a + b)
MSL_RMW(sub, a - b)
MSL_RMW(max, metal::max(a, b))
MSL_RMW(min, metal::min(a, b))
MSL_RMW(and, a& b)
MSL_RMW(or, a | b)
MSL_RMW(xor, a ^ b)
template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float max() { return 3.402823466e+38f; }
    static constexpr float lowest() { return -3.402823466e+38f; }
};
template <> struct numeric_limits<half> {
    static constexpr half infinity() { return (half)__builtin_inff(); }
    static constexpr half max() { return (half)65504.0f; }
    static constexpr half lowest() { return (half)-65504.0f; }
};
template <> struct numeric_limits<int> {
    static constexpr int max() { return 2147483647; }
    static constexpr int lowest() { return -2147483647 - 1; }
};
template <> struct numeric_limits<uint> {
    static constexpr uint max() { return 0xffffffffu; }
    static constexpr uint lowest() { return 0; }
};
} // namespace metal
using metal::as_type;
using metal::msl_mk;
typedef metal::packed_vec<float, 2> packed_float2;
typedef metal::packed_vec<float, 3> packed_float3;
typedef metal::packed_vec<float, 4> packed_float4;
typedef metal::packed_vec<half, 4> packed_half4;
namespace metal {
using ::float2;
using ::float3;
using ::float4;
using ::half;
using ::half2;
using ::half3;
using ::half4;
using ::int2;
using ::int3;
using ::int4;
using ::uchar2;
using ::uchar4;
using ::uint;
using ::uint2;
using ::uint3;
using ::uint4;
using ::ushort2;
} // namespace metal
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_E_F 2.71828182845904523536f
#define MAXFLOAT FLT_MAX
#define __METAL_VERSION__ 310
#define __METAL__ 1
#define METAL_SIM 1

// ---- launch glue (used by generated code at the end of the file)
namespace sim {
struct P {
    int kind;
    int index;
};
struct Ctx {
    void* const* buf;
};
template <class A> struct Conv;
template <class T> struct Conv<T*> {
    MSL_INL static T* get(const P& p, const Ctx& c) {
        return (T*)c.buf[p.index];
    }
};
template <class T> struct Conv<T&> {
    MSL_INL static T& get(const P& p, const Ctx& c) {
        return *(T*)c.buf[p.index];
    }
};
extern "C" void sim_builtin(int kind, uint* out3);
template <class A> struct Conv {
    MSL_INL static A get(const P& p, const Ctx&) {
        uint t[3];
        sim_builtin(p.kind, t);
        if constexpr (metal::vtr<A>::N == 1) return (A)t[0];
        else {
            A r;
            for (int i = 0; i < metal::vtr<A>::N; i++) r[i] = (typename metal::vtr<A>::E)t[i];
            return r;
        }
    }
};
template <int... I> struct Seq {};
template <int N, int... I> struct MkSeq : MkSeq<N - 1, N - 1, I...> {};
template <int... I> struct MkSeq<0, I...> {
    typedef Seq<I...> type;
};
template <class... A, int... I> MSL_NOTSAN MSL_INL void invoke(void (*f)(A...), const P* p, const Ctx& c, Seq<I...>) {
    f(Conv<A>::get(p[I], c)...);
}
template <class... A> MSL_NOTSAN MSL_INL void call(void (*f)(A...), const P* p, const Ctx& c) {
    invoke(f, p, c, typename MkSeq<sizeof...(A)>::type());
}
template <class A> struct Size {
    static constexpr int v = 0;
};
template <class T> struct Size<T&> {
    static constexpr int v = sizeof(T);
};
template <class T> struct Size<T*> {
    static constexpr int v = sizeof(T);
};
template <> struct Size<void*> {
    static constexpr int v = 1;
};
template <> struct Size<const void*> {
    static constexpr int v = 1;
};
template <class A> struct IsConst {
    static constexpr int v = 1;
};
template <class T> struct IsConst<T*> {
    static constexpr int v = 0;
};
template <class T> struct IsConst<const T*> {
    static constexpr int v = 1;
};
template <class T> struct IsConst<T&> {
    static constexpr int v = 0;
};
template <class T> struct IsConst<const T&> {
    static constexpr int v = 1;
};
template <class A> struct IsRef {
    static constexpr int v = 0;
};
template <class T> struct IsRef<T&> {
    static constexpr int v = 1;
};
// A kernel and its parameters: where each comes from, the size of what it points to, whether it is const, a reference.
struct Kernel {
    const char* name;
    void (*run)(const Ctx&);
    int n;
    const P* p;
    const int* size;
    const int* ro;
    const int* ref;
};
template <class F> struct Info;
template <class... A> struct Info<void (*)(A...)> {
    static constexpr int n = sizeof...(A);
    static constexpr int size[sizeof...(A) + 1] = {Size<A>::v..., 0};
    static constexpr int ro[sizeof...(A) + 1] = {IsConst<A>::v..., 0};
    static constexpr int ref[sizeof...(A) + 1] = {IsRef<A>::v..., 0};
};
} // namespace sim
#define kernel
#define thread
#ifdef MSL_TYPECHECK // second, syntax-only pass: the four address spaces are real types
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
