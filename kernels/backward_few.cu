// backward_few: backward_sums and backward_dg of up to 16 rows, in one launch: what backward.cu says, of the same operands.
//
// A thread has two columns, and all rows of these in registers, so that their sums need no other thread, and dy and d are read
// once. All that it reads is on its way before anything is made of it: what such a launch takes is the way to memory and back,
// once.
//
// Moves dy, d and dg once, the minimum.
#define COLUMNS_OF_THREAD 2
#include "backward_columns.cuh"

constexpr int FEW = 16;           // rows at most
constexpr int THREADS_HERE = 64;  // few, so that they spread over the SMs

// The rows of SAVED_ that a column wants, on their way.
struct Held {
    double at[Factors::ROWS];

    Held() = default;
    __device__ explicit Held(const Factors& of) {
#pragma unroll
        for (int i = 0; i < Factors::ROWS; ++i) at[i] = of(i);
    }
    __device__ double operator()(int row) const { return at[row]; }
};

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1)
    backward_few(const __grid_constant__ Problem p, const T* dy, const D* d, const double* saved, T* dg, void* to_bias,
                 void* to_scale, void* to_gamma, void* to_beta, unsigned* zeros) {
    await_kernel_ahead();
    clear(zeros, p.words, THREADS_HERE);
    constexpr int COLUMNS = THREADS_HERE * VEC;
    const int rows = static_cast<int>(p.m);
    for_each_item((p.n + COLUMNS - 1) / COLUMNS, [&](unsigned item) {
        const long long col = static_cast<long long>(item) * COLUMNS + threadIdx.x * VEC;
        const int inside = static_cast<int>(min(p.n - col, static_cast<long long>(VEC)));
        if (inside <= 0) return;

        Vector<T, VEC> dy_at[FEW] = {};
        Vector<D, VEC> d_at[FEW] = {};
#pragma unroll
        for (int i = 0; i < FEW; ++i)
            if (i < rows) {
                const T* from = dy + i * p.dy_row + col * p.dy_col;
                if (p.vector_dy) {
                    dy_at[i] = load<T, VEC>(from, inside);
                } else {
#pragma unroll
                    for (int j = 0; j < VEC; ++j)
                        if (j < inside) dy_at[i].at[j] = from[j * p.dy_col];
                }
                if (d != nullptr) d_at[i] = load<D, VEC>(d + i * p.ldd + col, inside);
            }
        Held of[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) of[j] = Held(Factors{saved, p.n, col + j});
        const BeforeY before(p, saved, col, inside);

        alignas(16) G stored[DG_ROWS][VEC] = {};
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) {
                const G centre = TRAINING ? G(0) : static_cast<G>(of[j](SAVED_CENTRE));
                Sum sum, dot;
#pragma unroll
                for (int i = 0; i < FEW; ++i)
                    if (i < rows) {
                        const G d_of = to_float(d_at[i].at[j]), u = before.gradient(j, to_float(dy_at[i].at[j]), d_of);
                        sum.add(u);
                        dot.add_product(u, TRAINING ? d_of : d_of - centre);
                    }
                const double S = static_cast<double>(sum.high) + sum.low, E = static_cast<double>(dot.high) + dot.low;
                store_feature(p, of[j], col + j, S, E, true, to_bias, to_scale, to_gamma, to_beta, &stored[0][0], VEC,
                              j);
            }
        if (dg == nullptr) return;

        const Coefficients make(p, saved, &stored[0][0], VEC, 0, col, inside);
        T* to = dg + col;
#pragma unroll
        for (int i = 0; i < FEW; ++i)
            if (i < rows) {
                const Vector<T, VEC> out = make.dg(dy_at[i], d_at[i]);
                if (inside == VEC)
                    *reinterpret_cast<Vector<T, VEC>*>(to + i * p.lddg) = out;
                else
                    to[i * p.lddg] = out.at[0];
            }
    });
}
