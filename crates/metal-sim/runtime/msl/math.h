// Functions of numbers.
// Functions that Metal does not round correctly may be off by some units in the last place.
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
} // namespace metal
