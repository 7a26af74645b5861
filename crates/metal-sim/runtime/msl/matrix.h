// simdgroup_matrix: 8x8, two elements a lane (Apple's layout).
namespace metal {
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
// What a lane does of a load or a store: its two numbers.
template <class T, class S> MSL_INL vec<T, 2> msl_load_pieces(S src, ulong epr, ulong2 o, bool tr, int at) {
    msl_matsync((const volatile void*)src, epr, o, tr, "simdgroup_load", at);
    uint l = sim_lane();
    ulong r = (ulong)msl_mrow(l), c = (ulong)msl_mcol(l);
    vec<T, 2> e;
    for (int k = 0; k < 2; k++, c++) e[k] = tr ? src[(c + o.x) * epr + r + o.y] : src[(r + o.y) * epr + c + o.x];
    return e;
}
template <class T, class S> MSL_INL void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, S src, ulong epr = 8,
                                                        ulong2 o = 0, bool tr = false, MSL_POS) {
    static_assert(is_same_v<T, unqual_t<S>>, "simdgroup_load: element type differs from the matrix type");
    d.e = msl_load_pieces<T, S>(src, epr, o, tr, MSL_AT);
}
template <class T, class S> MSL_INL void msl_store_pieces(vec<T, 2> e, S dst, ulong epr, ulong2 o, bool tr, int at) {
    msl_matsync((const volatile void*)dst, epr, o, tr, "simdgroup_store", at);
    uint l = sim_lane();
    ulong r = (ulong)msl_mrow(l), c = (ulong)msl_mcol(l);
    for (int k = 0; k < 2; k++, c++) {
        if (tr) dst[(c + o.x) * epr + r + o.y] = e[k];
        else dst[(r + o.y) * epr + c + o.x] = e[k];
    }
}
template <class T, class S> MSL_INL void simdgroup_store(const simdgroup_matrix<T, 8, 8>& s, S dst, ulong epr = 8,
                                                         ulong2 o = 0, bool tr = false, MSL_POS) {
    static_assert(is_same_v<T, unqual_t<S>>, "simdgroup_store: element type differs from the matrix type");
    msl_store_pieces<T, S>(s.e, dst, epr, o, tr, MSL_AT);
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
} // namespace metal
