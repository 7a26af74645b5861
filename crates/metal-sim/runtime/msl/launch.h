// Launch glue, used by generated code at the end of the file.
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
