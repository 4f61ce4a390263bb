// activate: y = f(u), where a layer without a norm keeps u for its backward, because y does not tell the gradient
// (gsbn.linear). f: common/activation.cuh. u is rounded to T first, as in PyTorch: the backward sees the same u.
//
//   u (m, n) of T, contiguous, on 16 bytes      y (m, n) of T, any strides
//
// A thread takes UNROLL words of 16 bytes of u, THREADS apart, all in flight at once. An item of work is ITEM elements.
//
// Bytes moved: u and y once, the minimum.
#include "common/activation.cuh"

#ifndef T_TYPE
#define T_TYPE float
#endif
using T = T_TYPE;

struct ActivateProblem {
    long long m, n;
    long long y_row, y_col;  // strides of y, in elements
    long long flags;         // FLAG_VECTOR_Y: y is contiguous, and on 16 bytes
};

constexpr int THREADS = 256, UNROLL = 4, VEC = 16 / sizeof(T);
constexpr int ITEM = THREADS * UNROLL * VEC;  // read by gsbn/_plan/variants.py

extern "C" __global__ void __launch_bounds__(THREADS)
    activate(const __grid_constant__ ActivateProblem p, const T* u, T* y) {
    await_kernel_ahead();
    const long long count = p.m * p.n;
    for_each_item((count + ITEM - 1) / ITEM, [&](unsigned item) {
        const long long first = 1LL * item * ITEM + threadIdx.x * VEC;
        const auto inside = [&](int i) {  // elements of the thread's i-th word
            return static_cast<int>(max(min(count - first - i * THREADS * VEC, 1LL * VEC), 0LL));
        };
        Vector<T, VEC> in[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) in[i] = load<T, VEC>(u + first + i * THREADS * VEC, inside(i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const long long at = first + i * THREADS * VEC;
            Vector<T, VEC> out;
#pragma unroll
            for (int j = 0; j < VEC; ++j) from_float(Activation<T>::of(to_float(in[i].at[j])), out.at[j]);
            if (p.flags & FLAG_VECTOR_Y && inside(i) == VEC) {
                *reinterpret_cast<Vector<T, VEC>*>(y + at) = out;
            } else {
#pragma unroll
                for (int j = 0; j < VEC; ++j)
                    if (j < inside(i)) {
                        const long long row = (at + j) / p.n, col = at + j - row * p.n;
                        y[row * p.y_row + col * p.y_col] = out.at[j];
                    }
            }
        }
    });
}
