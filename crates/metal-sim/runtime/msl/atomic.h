// Atomics: relaxed only, as in MSL before 3.2.
namespace metal {
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
} // namespace metal
