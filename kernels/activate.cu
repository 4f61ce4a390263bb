// activate: computes y = f(u) (f: common/activation.cuh) for a layer without a norm (gsbn.linear) that keeps u for its
// backward, because the gradient does not follow from y. u is first rounded to T, as in PyTorch: the backward sees the
// same u.
// With RESIDUAL it computes y = f(v) with v = u + residual, added in float32 or float64 and rounded to T, as PyTorch
// does. v may be stored, too. v and y may lie where u does: a thread loads its words of u before it stores there.
// activate_backward: computes dv = dy f'(v), from v or, where y is enough, from y.
//
//   u, v, dv (m, n) of T, contiguous, on 16 bytes      y, residual, dy (m, n) of T, any strides
//
// A thread takes UNROLL words of 16 bytes of u, THREADS apart and all in flight at once. An item of work is ITEM
// elements.
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
    long long flags;         // FLAG_VECTOR_Y: y is contiguous, and on 16 bytes
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

// A thread's words of an item. The matrix has `count` elements, in row-major order.
struct Words {
    long long first, count;

    __device__ Words(unsigned item, long long count) : first(1LL * item * ITEM + threadIdx.x * VEC), count(count) {}
    __device__ long long at(int i) const { return first + i * THREADS * VEC; }
    __device__ int inside(int i) const {  // elements of the i-th word
        return int(max(min(count - at(i), 1LL * VEC), 0LL));
    }
};

// Calls work(j, offset) for each element j of the word that starts at element `at`; offset follows from the strides row
// and col.
template <typename Work>
__device__ __forceinline__ void each(long long at, int inside, long long n, long long row, long long col,
                                     const Work& work) {
    long long i = at / n, c = at - i * n;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        if (j < inside) work(j, i * row + c * col);
        if (++c == n) {
            c = 0;
            ++i;
        }
    }
}

// A matrix with n columns and any strides. If it is contiguous and starts on 16 bytes, it is read in whole words.
struct Strided {
    const T* from;
    long long n, row, col;
    bool whole;

    __device__ Strided(const T* from, long long n, long long row, long long col)
        : from(from),
          n(n),
          row(row),
          col(col),
          whole(row == n && col == 1 && reinterpret_cast<unsigned long long>(from) % 16 == 0) {}
    __device__ Vector<T, VEC> read(long long at, int inside) const {
        if (whole) return load<T, VEC>(from + at, inside);
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) out.at[j] = T(0.0f);
        each(at, inside, n, row, col, [&](int j, long long offset) { out.at[j] = from[offset]; });
        return out;
    }
};

__device__ inline void store(const Vector<T, VEC>& words, T* to, int inside) {
    if (inside == VEC) {
        *reinterpret_cast<Vector<T, VEC>*>(to) = words;
        return;
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j)
        if (j < inside) to[j] = words.at[j];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    activate(const __grid_constant__ ActivateProblem p, const T* u, T* y
#if RESIDUAL
             ,
             const T* residual, T* v
#endif
    ) {
    await_kernel_ahead();
    const long long count = p.m * p.n;
#if RESIDUAL
    const Strided more(residual, p.n, p.residual_row, p.residual_col);
#endif
    for_each_item((count + ITEM - 1) / ITEM, [&](unsigned item) {
        const Words words(item, count);
        Vector<T, VEC> in[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) in[i] = load<T, VEC>(u + words.at(i), words.inside(i));
#if RESIDUAL
        Vector<T, VEC> added[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) added[i] = more.read(words.at(i), words.inside(i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) from_float(to_float(in[i].at[j]) + to_float(added[i].at[j]), in[i].at[j]);
            if (v != nullptr) store(in[i], v + words.at(i), words.inside(i));
        }
#endif
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const long long at = words.at(i);
            Vector<T, VEC> out;
#pragma unroll
            for (int j = 0; j < VEC; ++j) from_float(Activation<T>::of(to_float(in[i].at[j])), out.at[j]);
            if (p.flags & FLAG_VECTOR_Y) {
                store(out, y + at, words.inside(i));
            } else {
                each(at, words.inside(i), p.n, p.y_row, p.y_col,
                     [&](int j, long long offset) { y[offset] = out.at[j]; });
            }
        }
    });
}

// Without an activation, dv is a copy of dy, and the values of v do not matter: v may be dy itself.
extern "C" __global__ void __launch_bounds__(THREADS)
    activate_backward(const __grid_constant__ ActivateBackwardProblem p, const T* dy, const T* v, T* dv) {
    await_kernel_ahead();
    const long long count = p.m * p.n;
    const Strided of_dy(dy, p.n, p.dy_row, p.dy_col), of_v(v, p.n, p.v_row, p.v_col);
    for_each_item((count + ITEM - 1) / ITEM, [&](unsigned item) {
        const Words words(item, count);
        Vector<T, VEC> in[UNROLL], at_v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) in[i] = of_dy.read(words.at(i), words.inside(i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) at_v[i] = of_v.read(words.at(i), words.inside(i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                from_float(Activation<T>::gradient(to_float(in[i].at[j]), to_float(at_v[i].at[j])), in[i].at[j]);
            store(in[i], dv + words.at(i), words.inside(i));
        }
    });
}
