// The macros and the parameter struct of the backward kernels, and how a thread reads rows of dy and d through a
// pipeline in shared memory. No kernels.
#pragma once
#include "common/activation.cuh"
#include "common/ghost.cuh"
#include "common/walk.cuh"

#ifndef T_TYPE
#define T_TYPE float
#define D_TYPE float
#define G_TYPE float
#define TRAINING true
#endif
using T = T_TYPE;
using D = D_TYPE;
using G = G_TYPE;

#ifndef CHANNELS_FIRST
#define CHANNELS_FIRST 0
#endif
#ifndef TRANSPOSED
#define TRANSPOSED false
#endif
#ifndef RESIDUAL
#define RESIDUAL 0  // 1: dy becomes dv = dy f'(kept), which is written, before anything else: backward_sums alone
#endif
#ifndef IDENTITY
#define IDENTITY false  // no norm: the layer is y = f(x wᵀ + bias), d is y, or u where y does not tell f'(u)
#endif

struct BackwardProblem {
    long long m, n, k;                   // B, O, I
    long long ldx, ldw;                  // row pitches of x and of the weight, in elements
    long long skinny_rows;               // skinny_backward: rows of a CTA, or of a cluster
    long long skinny_features;           // skinny_backward: features of each CTA of a cluster
    long long dy_row, dy_col;            // strides of dy, in elements
    long long ldd, lddg, ld_transposed;  // row pitches of d, of dg and of its transpose, in elements
    long long row_threads;               // threads along a row of dy
    long long sums_rows, dg_rows;        // rows of a CTA of backward_sums; of an item of backward_dg
    long long splits;                    // clusters of backward_sums that share a column block; 0 if there are no sums
    long long vector_dy;  // whether rows of dy start on 16 bytes and its columns are adjacent; otherwise dy_col is 0
    long long dy_ahead;   // backward_dg: whether the launch ahead makes dy, so that no row may be read before it ends
    long long words;      // how many zeros the first launch writes for a later one
    long long signature;  // with a group: identifies this call (Exchange)
    long long to_bias, to_scale, to_gamma, to_beta;  // vector codes of the gradients, see fetch
#if RESIDUAL
    long long kept_row;  // row pitch of kept, in elements
#endif
#if GHOST
    long long features, ghost_pitch;  // common/ghost.cuh
#endif
#if CHANNELS_FIRST
    long long reciprocal;  // for quotient(): of the number of 16-byte words of a feature in one sample
#endif
};

constexpr bool ACTIVE = !RESIDUAL && !is_same<Activation<T>, Identity<T>>;  // d tells the activation's gradient

constexpr int VEC = 16 / sizeof(T);
constexpr int LANES = 32, WARPS = 8;
constexpr int THREADS = LANES * WARPS;
// words of 16 bytes for VEC columns of a row of dy, d and kept
constexpr int WORDS = 1 + sizeof(D) / sizeof(T) + RESIDUAL;
constexpr int STAGES = RESIDUAL || WORDS == 2 ? 4 : WORDS == 3 ? 2 : 1;  // rows that a thread has in flight

// Stores 16 bytes in one access. The compiler would use four accesses if the elements were computed one by one.
template <typename E>
__device__ inline void store_whole(E* to, const Vector<E, 16 / sizeof(E)>& v) {
    const unsigned* word = reinterpret_cast<const unsigned*>(&v);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
}

// VEC columns of a row of dy and of d. Absent columns, and an absent d, are zeros.
struct Row {
    Vector<T, VEC> dy;
    Vector<D, VEC> d;
};

// A thread's rows of dy and d: first, first + step, ... (Walk).
struct BackwardRows {
    const T* dy;  // of the next row to copy
    const D* d;   // the same; it may be null
    long long dy_step, d_step;
    uint4* pipeline;  // [stage][WORDS][THREADS]
    int inside;       // columns that exist
    bool vector_dy;
    bool whole;  // all columns exist, and all words are copied as they are
#if RESIDUAL
    const T* kept = nullptr;  // of the next row to copy
    T* dv = nullptr;          // of the next row to read
    long long kept_step = 0, dv_step = 0;

    // Of the same rows and columns. Rows of all three start on 16 bytes, and n is a multiple of VEC.
    __device__ void with_residual(const BackwardProblem& p, const T* of_kept, T* to, long long first, long long step,
                                  const Column& place) {
        kept = of_kept + first * p.kept_row + place.at(p.kept_row);
        dv = to + first * p.n + place.at(p.n);
        kept_step = step * p.kept_row, dv_step = step * p.n;
    }
#endif

    __device__ BackwardRows(const BackwardProblem& p, const T* dy, const D* d, long long first, long long step,
                            const Column& place, int inside, uint4* memory)
        : dy(dy + first * p.dy_row + place.at(p.dy_row, p.dy_col)),
          d(d == nullptr ? d : d + first * p.ldd + place.at(p.ldd)),
          dy_step(step * p.dy_row),
          d_step(d == nullptr ? 0 : step * p.ldd),
          pipeline(memory + threadIdx.x),
          inside(inside),
          vector_dy(p.vector_dy),
          whole(p.vector_dy && d != nullptr && inside == VEC) {}
    __device__ __forceinline__ void copy(int stage) {
        uint4* to = pipeline + stage * WORDS * THREADS;
        if (whole) {
            copy_async(to, dy);
#pragma unroll
            for (int j = 1; j < WORDS - RESIDUAL; ++j) copy_async(to + j * THREADS, d + (j - 1) * 16 / sizeof(D));
        } else {
            copy_any(to);
        }
        dy += dy_step;
        d += d_step;
#if RESIDUAL
        copy_async(to + (WORDS - 1) * THREADS, kept);
        kept += kept_step;
#endif
    }
    __device__ __forceinline__ void copy_any(uint4* to) const {
        if (vector_dy) {
            copy_async(to, dy, inside * int(sizeof(T)));
        } else {  // columns of stride 0: one value for all columns
            Vector<T, VEC> all;
#pragma unroll
            for (int j = 0; j < VEC; ++j) all.at[j] = *dy;
            *to = *reinterpret_cast<const uint4*>(&all);
        }
#pragma unroll
        for (int j = 1; j < WORDS - RESIDUAL; ++j) {
            const int left = inside * int(sizeof(D)) - 16 * (j - 1);
            copy_async(to + j * THREADS, d + (j - 1) * 16 / sizeof(D), d == nullptr ? 0 : max(min(left, 16), 0));
        }
    }
    __device__ __forceinline__ void turn_back(int rows) {
        dy -= rows * dy_step;
        d -= rows * d_step;
        dy_step = -dy_step;
        d_step = -d_step;
    }
    __device__ __forceinline__ Row read(int stage) {
        const uint4* from = pipeline + stage * WORDS * THREADS;
        Row row;
        *reinterpret_cast<uint4*>(&row.dy) = from[0];
#pragma unroll
        for (int j = 1; j < WORDS - RESIDUAL; ++j) reinterpret_cast<uint4*>(&row.d)[j - 1] = from[j * THREADS];
#if RESIDUAL
        Vector<T, VEC> of;
        *reinterpret_cast<uint4*>(&of) = from[(WORDS - 1) * THREADS];
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            from_float(Activation<T>::gradient(to_float(row.dy.at[j]), to_float(of.at[j])), row.dy.at[j]);
        store_whole(dv, row.dy);
        dv += dv_step;
#endif
        return row;
    }
};

// Writes the zeros with which take_maxima starts, to save a memset. All threads of the first launch call it.
__device__ inline void clear(unsigned* zeros, long long words) {
#pragma unroll 1
    for (long long i = 1LL * blockIdx.x * THREADS + threadIdx.x; i < words; i += 1LL * gridDim.x * THREADS)
        zeros[i] = 0;
}
