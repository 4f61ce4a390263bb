// normalize_few: normalize of up to 16 rows in training, statistics included: what normalize.cu says, of the same operands.
//
// A thread has two columns, and all rows of these in registers: it needs no other thread, and g is read once. All that it reads
// is on its way before anything is made of it: what such a launch takes is the way to memory and back, once.
//
// Moves g, y and what is kept once, the minimum.
#define COLUMNS_OF_THREAD 2
#include "activation.cuh"
#include "features.cuh"

#ifndef Y_TYPE
#define Y_TYPE float
#endif
using Y = Y_TYPE;
#ifdef D_TYPE
constexpr bool KEEPS = true;
#else
constexpr bool KEEPS = false;
#define D_TYPE float
#endif
using D = D_TYPE;

constexpr int FEW = 16;           // rows at most
constexpr int THREADS_HERE = 64;  // few, so that they spread over the SMs
static_assert(!KEEPS || !in_units<D>, "of few rows deviations are kept in a type that has the range");

// Mean and M2 of a column: about the first row, so that equal rows have exactly none, and then about the mean.
__device__ __forceinline__ Moments moments_of(const Vector<G, VEC> (&g)[FEW], int j, int rows) {
    const double first = g[0].at[j];
    double sum = 0.0, left = 0.0, squares = 0.0;
#pragma unroll
    for (int i = 0; i < FEW; ++i)
        if (i < rows) sum += g[i].at[j] - first;
    const double shift = sum / rows;
#pragma unroll
    for (int i = 0; i < FEW; ++i)
        if (i < rows) {
            const double d = (g[i].at[j] - first) - shift;
            left += d;
            squares = fma(d, d, squares);
        }
    return Moments(first + shift, left, squares, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1)
    normalize_few(const __grid_constant__ Problem p, const G* g, Y* y, const void* bias, const void* scale,
                  const void* gamma, const void* beta, void* running_mean, void* running_var,
                  long long* num_batches_tracked, D* deviations, double* saved) {
    await_kernel_ahead();
    if (blockIdx.x == 0 && threadIdx.x == 0 && num_batches_tracked != nullptr) ++*num_batches_tracked;
    constexpr int COLUMNS = THREADS_HERE * VEC;
    const int rows = static_cast<int>(p.m);
    for_each_item((p.n + COLUMNS - 1) / COLUMNS, [&](unsigned item) {
        const long long col = static_cast<long long>(item) * COLUMNS + threadIdx.x * VEC;
        const int inside = static_cast<int>(min(p.n - col, static_cast<long long>(VEC)));
        if (inside <= 0) return;

        Vector<G, VEC> in[FEW] = {};
#pragma unroll
        for (int i = 0; i < FEW; ++i)
            if (i < rows) in[i] = load<G, VEC>(g + i * p.ldg + col, inside);
        Arguments of[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) of[j] = Arguments(p, col + j, bias, scale, gamma, beta, running_mean, running_var);

        Vector<G, VEC> m = {}, m_low = {}, a = {}, offset = {};
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) {
                const Moments moments = moments_of(in, j, rows);
                const Feature found(p, rows, moments.mean, moments.m2, of[j]);
                found.store(p, col + j, of[j], 0, true, running_mean, running_var, saved);
                const Parts<G> parts(moments.mean);
                m.at[j] = parts.high;
                m_low.at[j] = parts.low;
                a.at[j] = static_cast<G>(found.a);
                offset.at[j] = static_cast<G>(found.beta);
            }

        const bool whole = inside == VEC && p.flags & FLAG_VECTOR_Y;
        Y* to = y + col * p.y_col;
        D* keep = deviations + col;
#pragma unroll
        for (int i = 0; i < FEW; ++i, to += p.y_row, keep += p.ldg)
            if (i < rows) {
                Vector<Y, VEC> out;
                Vector<D, VEC> kept;
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const G d = (in[i].at[j] - m.at[j]) - m_low.at[j];
                    G u = fma(a.at[j], d, offset.at[j]);
                    if (KEEPS)
                        kept.at[j] = deviation<Y, D>(in[i].at[j], m.at[j], m_low.at[j], d, a.at[j], offset.at[j], u);
                    from_float(Activation<Y>::of(u), out.at[j]);
                }
                if (whole) {
                    *reinterpret_cast<Vector<Y, VEC>*>(to) = out;
                    if (KEEPS) *reinterpret_cast<Vector<D, VEC>*>(keep) = kept;
                } else {
#pragma unroll
                    for (int j = 0; j < VEC; ++j)
                        if (j < inside) {
                            to[j * p.y_col] = out.at[j];
                            if (KEEPS) keep[j] = kept.at[j];
                        }
                }
            }
    });
}
