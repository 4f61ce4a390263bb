// activate: computes y = f(u) (f: common/activation.cuh) for a layer without a norm (gsbn.linear) that keeps u for its
// backward, because the gradient does not follow from y. u is first rounded to T, as in PyTorch: the backward sees the
// same u.
// With RESIDUAL it computes y = f(v) with v = u + residual, added in float32 or float64 and rounded to T, as PyTorch
// does. v may be stored, too. v and y may lie where u does: a thread loads its words of u before it stores there.
// activate_backward: computes dv = dy f'(v), from v or, where y is enough, from y.
//
//   u, v, dv (m, n) of T, contiguous, on 16 bytes      y, residual, dy (m, n) of T, any strides
//
// An item of work is ITEM elements, in row-major order. If all matrices are contiguous and on 16 bytes, a thread takes
// UNROLL words of 16 bytes of each, THREADS apart, all in flight at once; else one word, element by element.
//
// Bytes moved: each operand and each result once, the minimum.
#include "common/activation.cuh"

#ifndef T_TYPE
#define T_TYPE float
#endif
#ifndef RESIDUAL
#define RESIDUAL 0
#endif
using T = T_TYPE;

struct ActivateProblem {
    long long m, n;
    long long y_row, y_col;  // strides of y, in elements
#if RESIDUAL
    long long residual_row, residual_col;
#endif
};

struct ActivateBackwardProblem {
    long long m, n;
    long long dy_row, dy_col, v_row, v_col;
};

constexpr int THREADS = 256, UNROLL = 4, VEC = 16 / sizeof(T);
constexpr int ITEM = THREADS * UNROLL * VEC;  // read by gsbn/_plan/variants.py

// A matrix with any strides.
template <typename E>
struct Strided {
    E* at;
    long long row, col;

    __device__ bool whole(long long n) const {
        return row == n && col == 1 && reinterpret_cast<unsigned long long>(at) % 16 == 0;
    }
};

// Calls work(in, out) for each element: `in` has its value in each matrix of `from`, and `out` gets those for `to`,
// where the address may be null. An element of `to` may lie where one of `from` does.
template <int READ, int WRITTEN, typename Work>
__device__ __forceinline__ void map_words(long long count, const Strided<const T> (&from)[READ],
                                          const Strided<T> (&to)[WRITTEN], const Work& work) {
    for_each_item((count + ITEM - 1) / ITEM, [&](unsigned item) {
        const long long first = 1LL * item * ITEM + threadIdx.x * VEC;
        Vector<T, VEC> in[READ][UNROLL];  // all loads come before any use of what they load
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
#pragma unroll
            for (int k = 0; k < READ; ++k) {
                const long long at = first + i * THREADS * VEC;
                uint4 word = {};
                if (at + VEC <= count) word = *reinterpret_cast<const uint4*>(from[k].at + at);
                *reinterpret_cast<uint4*>(&in[k][i]) = word;
            }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const long long at = first + i * THREADS * VEC;
            Vector<T, VEC> out[WRITTEN];
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                T of[READ], made[WRITTEN];
#pragma unroll
                for (int k = 0; k < READ; ++k) of[k] = in[k][i].at[j];
                work(of, made);
#pragma unroll
                for (int k = 0; k < WRITTEN; ++k) out[k].at[j] = made[k];
            }
#pragma unroll
            for (int k = 0; k < WRITTEN; ++k)
                if (at + VEC <= count && to[k].at != nullptr)
                    *reinterpret_cast<uint4*>(to[k].at + at) = *reinterpret_cast<const uint4*>(&out[k]);
        }
    });
}

// The same for `count` elements from `begin` on, of a matrix with n columns, one by one.
template <int READ, int WRITTEN, typename Work>
__device__ __forceinline__ void map_elements(long long begin, long long count, long long n,
                                             const Strided<const T> (&from)[READ], const Strided<T> (&to)[WRITTEN],
                                             const Work& work) {
    for_each_item((count + THREADS * VEC - 1) / (THREADS * VEC), [&](unsigned item) {
        const long long first = (1LL * item * THREADS + threadIdx.x) * VEC;
        long long row = (begin + first) / n, column = begin + first - row * n;
#pragma unroll 1
        for (int j = 0; j < VEC && first + j < count; ++j) {
            T of[READ], made[WRITTEN];
#pragma unroll
            for (int k = 0; k < READ; ++k) of[k] = from[k].at[row * from[k].row + column * from[k].col];
            work(of, made);
#pragma unroll
            for (int k = 0; k < WRITTEN; ++k)
                if (to[k].at != nullptr) to[k].at[row * to[k].row + column * to[k].col] = made[k];
            if (++column == n) {
                column = 0;
                ++row;
            }
        }
    });
}

// The same for all elements of matrices of m rows and n columns: those that fill words if all matrices are whole, and then
// the rest.
template <int READ, int WRITTEN, typename Work>
__device__ __forceinline__ void map(long long m, long long n, const Strided<const T> (&from)[READ],
                                    const Strided<T> (&to)[WRITTEN], const Work& work) {
    bool whole = true;
#pragma unroll
    for (int k = 0; k < READ; ++k) whole = whole && from[k].whole(n);
#pragma unroll
    for (int k = 0; k < WRITTEN; ++k) whole = whole && to[k].whole(n);
    const long long count = m * n, in_words = whole ? count / VEC * VEC : 0;
    map_words(in_words, from, to, work);
    map_elements(in_words, count - in_words, n, from, to, work);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    activate(const __grid_constant__ ActivateProblem p, const T* u, T* y
#if RESIDUAL
             ,
             const T* residual, T* v
#endif
    ) {
    await_kernel_ahead();
#if RESIDUAL
    const Strided<const T> from[] = {{u, p.n, 1}, {residual, p.residual_row, p.residual_col}};
    const Strided<T> to[] = {{y, p.y_row, p.y_col}, {v, p.n, 1}};
    map(p.m, p.n, from, to, [](const T(&in)[2], T(&out)[2]) {
        from_float(to_float(in[0]) + to_float(in[1]), out[1]);
        from_float(Activation<T>::of(to_float(out[1])), out[0]);
    });
#else
    const Strided<const T> from[] = {{u, p.n, 1}};
    const Strided<T> to[] = {{y, p.y_row, p.y_col}};
    map(p.m, p.n, from, to,
        [](const T(&in)[1], T(&out)[1]) { from_float(Activation<T>::of(to_float(in[0])), out[0]); });
#endif
}

// Without an activation, dv is a copy of dy, and the values of v do not matter: v may be dy itself.
extern "C" __global__ void __launch_bounds__(THREADS)
    activate_backward(const __grid_constant__ ActivateBackwardProblem p, const T* dy, const T* v, T* dv) {
    await_kernel_ahead();
    const Strided<const T> from[] = {{dy, p.dy_row, p.dy_col}, {v, p.v_row, p.v_col}};
    const Strided<T> to[] = {{dv, p.n, 1}};
    map(p.m, p.n, from, to, [](const T(&in)[2], T(&out)[1]) {
        from_float(Activation<T>::gradient(to_float(in[0]), to_float(in[1])), out[0]);
    });
}
