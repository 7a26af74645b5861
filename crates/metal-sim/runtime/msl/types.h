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
} // namespace metal
