// normalize: y = f(a ((g - m) - m_low) + beta), feature by feature; one pass over g, one write of y. f: activation.cuh.
//
//   g (m, n) of G, row pitch ldg, rows on 16 bytes      y (m, n) of Y, any strides; it may be g itself
//   With D_TYPE, g - mean(g) is kept for a backward in deviations (m, n) of D, row pitch ldg, which may be g itself;
//   for float16 in units of each feature's own (SAVED_UNIT).
//
// An item of work is a block of columns and `normalize_rows` rows; a thread keeps the constants of its VEC columns (16 bytes of
// g) in registers and walks down every so many rows (Places), UNROLL of them in flight.
// Items run from the last rows to the first: scale_stats read g forwards, so its end is what L2 still holds.
// The first thread also counts the batch: every reader of num_batches_tracked ran in an earlier launch.
//
// Moves: g, y and what is kept once, the minimum; at (16384, 4096) float32 537 MB, and 268 MB for the deviations.
#include "activation.cuh"

#ifndef G_TYPE
#define G_TYPE float
#define Y_TYPE float
#endif
using G = G_TYPE;
using Y = Y_TYPE;
#ifdef D_TYPE
constexpr bool KEEPS = true;
#else
constexpr bool KEEPS = false;
#define D_TYPE float
#endif
using D = D_TYPE;

struct Problem {
    long long m, n;            // B, O
    long long ldg;             // row pitch of g, of the deviations and of the rows in the workspace, in elements
    long long y_row, y_col;    // strides of y, in elements
    long long along;           // threads along a row of g
    long long normalize_rows;  // rows of g in an item
    long long affine;          // where store_affine's rows start in the workspace, in bytes
    long long flags;           // FLAG_VECTOR_Y
};

template <typename A>
constexpr bool in_units = false;
template <>
constexpr bool in_units<__half> = true;

constexpr int VEC = 16 / sizeof(G);
constexpr int THREADS = 256;
constexpr int UNROLL = 4;

// g - mean(g) as it is kept, d being its value in G and in units. In a wider type it is all but exact: the mean comes in
// two parts. An activation then sees u as the backward will.
template <typename K>
__device__ __forceinline__ K deviation(G g, G m, G m_low, G d, G slope, G offset, G& u) {
    if constexpr (sizeof(K) > sizeof(G)) {
        const K exact = (static_cast<K>(g) - m) - m_low;
        if (Activation<Y>::JUMPS) u = fma(static_cast<K>(slope), exact, static_cast<K>(offset));
        return exact;
    } else {
        return settle<Y, K>(d, slope, offset);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    normalize(const __grid_constant__ Problem p, const G* g, Y* y, const char* workspace,
              long long* num_batches_tracked, D* deviations, const double* saved) {
    await_kernel_ahead();
    const Places<THREADS, VEC> at_once(p.along);
    if (blockIdx.x == 0 && threadIdx.x == 0 && num_batches_tracked != nullptr) ++*num_batches_tracked;

    const long long blocks = (p.n + at_once.columns - 1) / at_once.columns;
    const long long items = blocks * ((p.m + p.normalize_rows - 1) / p.normalize_rows);
    for_each_item(items, [&](long long item) {
        const long long at = items - 1 - item;
        const long long col = at % blocks * at_once.columns + at_once.column;
        const long long begin = at / blocks * p.normalize_rows, end = min(begin + p.normalize_rows, p.m);
        if (col >= p.n || !at_once.used()) return;

        const int inside = static_cast<int>(min(p.n - col, static_cast<long long>(VEC)));
        const G* affine = reinterpret_cast<const G*>(workspace + p.affine) + col;
        const Vector<G, VEC> m = load<G, VEC>(affine + AFFINE_M * p.ldg, inside);
        const Vector<G, VEC> m_low = load<G, VEC>(affine + AFFINE_M_LOW * p.ldg, inside);
        const Vector<G, VEC> a = load<G, VEC>(affine + AFFINE_A * p.ldg, inside);
        const Vector<G, VEC> beta = load<G, VEC>(affine + AFFINE_BETA * p.ldg, inside);

        Vector<G, VEC> inverse_unit = {}, slope = a;  // slope d / unit + beta, as the backward will have it
        if (KEEPS && in_units<D>) {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) {
                    inverse_unit.at[j] = 1.0 / saved[SAVED_UNIT * p.n + col + j];
                    slope.at[j] = saved[SAVED_SLOPE * p.n + col + j];
                }
        }

        const auto apply = [&](const Vector<G, VEC>& in, Vector<D, VEC>& kept) {
            Vector<Y, VEC> out;
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const G d = (in.at[j] - m.at[j]) - m_low.at[j];
                G u = fma(a.at[j], d, beta.at[j]);
                if (KEEPS)
                    kept.at[j] = deviation<D>(in.at[j], m.at[j], m_low.at[j], in_units<D> ? d * inverse_unit.at[j] : d,
                                              slope.at[j], beta.at[j], u);
                from_float(Activation<Y>::of(u), out.at[j]);
            }
            return out;
        };

        long long row = begin + at_once.row;
        const G* from = g + row * p.ldg + col;
        Y* to = y + row * p.y_row + col * p.y_col;
        D* keep = deviations + row * p.ldg + col;
        const long long from_step = at_once.rows * p.ldg, to_step = at_once.rows * p.y_row;
        if (inside == VEC && p.flags & FLAG_VECTOR_Y) {
            for (; row + (UNROLL - 1) * at_once.rows < end; row += UNROLL * at_once.rows) {
                Vector<G, VEC> in[UNROLL];
#pragma unroll
                for (int i = 0; i < UNROLL; ++i, from += from_step)
                    in[i] = *reinterpret_cast<const Vector<G, VEC>*>(from);
#pragma unroll
                for (int i = 0; i < UNROLL; ++i, to += to_step, keep += from_step) {
                    Vector<D, VEC> kept;
                    *reinterpret_cast<Vector<Y, VEC>*>(to) = apply(in[i], kept);
                    if (KEEPS) *reinterpret_cast<Vector<D, VEC>*>(keep) = kept;
                }
            }
        }
        for (; row < end; row += at_once.rows, from += from_step, to += to_step, keep += from_step) {
            Vector<D, VEC> kept;
            const Vector<Y, VEC> out = apply(load<G, VEC>(from, inside), kept);
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) {
                    to[j * p.y_col] = out.at[j];
                    if (KEEPS) keep[j] = kept.at[j];
                }
        }
    });
}
