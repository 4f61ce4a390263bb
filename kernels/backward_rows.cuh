// What the kernels of backward.cu are compiled for and told, and how their threads come by rows of dy and d: through rings
// in shared memory. No kernels.
#pragma once
#include "activation.cuh"
#include "async_copy.cuh"

#ifndef T_TYPE
#define T_TYPE float
#define D_TYPE float
#define G_TYPE float
#define TRAINING true
#endif
using T = T_TYPE;
using D = D_TYPE;
using G = G_TYPE;

#ifndef ACROSS
#define ACROSS false
#endif
#ifndef COLUMNS_OF_THREAD
#define COLUMNS_OF_THREAD 16 / sizeof(T)
#endif

struct Problem {
    long long m, n, k;               // B, O, I
    long long ldx, ldw;              // row pitches of x and of the weight, in elements
    long long narrow_rows;           // rows of a CTA of narrow_backward
    long long dy_row, dy_col;        // strides of dy, in elements
    long long ldd, lddg, ld_across;  // row pitches of d, of dg and of its transpose, in elements
    long long along;                 // threads along a row of dy
    long long sums_rows, dg_rows;    // rows in an item of backward_sums and of backward_dg
    long long splits;                // items of backward_sums that share a column block; 0 where there are no sums
    long long vector_dy;             // whether rows of dy start on 16 bytes and its columns are adjacent
    long long words;                 // zeros that the first launch writes for a later one
    long long signature;             // what this call is, of a group
    long long to_bias, to_scale, to_gamma, to_beta;  // codes of the gradients' vectors, see fetch
};

constexpr bool ACTIVE = !is_same<Activation<T>, Identity<T>>;  // y was put through something

constexpr int VEC = COLUMNS_OF_THREAD;
constexpr int LANES = 32, WARPS = 8;
constexpr int THREADS = LANES * WARPS;
constexpr int CHUNKS = 1 + sizeof(D) / sizeof(T);              // of 16 bytes: VEC columns of a row of dy and of d
constexpr int STAGES = CHUNKS == 2 ? 4 : CHUNKS == 3 ? 2 : 1;  // rows that a thread has on their way at once
constexpr int NARROW = 8;                                      // threads along a row of backward_fused, at most
constexpr int NARROW_COLUMNS = NARROW * VEC;

// One access of 16 bytes: where the elements were made one by one, the compiler would write them in four.
template <typename E>
__device__ inline void store_whole(E* to, const Vector<E, 16 / sizeof(E)>& v) {
    const unsigned* word = reinterpret_cast<const unsigned*>(&v);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
}

// A thread's `count` rows of dy and d, VEC columns of first, first + step, ... in this order; zeros beyond. Whole ones
// come through shared memory, STAGES of them on their way at once without a register: a thread copies there what it
// will read itself, so that it waits for nobody.
struct Rows {
    const T* dy;
    const D* d;  // may be null
    long long dy_step, d_step, dy_col;
    uint4* ring;
    int left, ahead, inside;  // rows not taken yet, rows not asked for yet, columns
    bool whole;

    __device__ Rows(const Problem& p, const T* dy_, const D* d_, long long first, long long step, long long count,
                    long long col, int inside_, uint4* memory)
        : dy(dy_ + first * p.dy_row + col * p.dy_col),
          d(d_ == nullptr ? d_ : d_ + first * p.ldd + col),
          dy_step(step * p.dy_row),
          d_step(step * p.ldd),
          dy_col(p.dy_col),
          ring(memory + threadIdx.x),
          left(inside_ > 0 ? static_cast<int>(count) : 0),
          ahead(left),
          inside(inside_),
          whole(inside_ == VEC && p.vector_dy) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) ask(i);
    }
    __device__ void ask(int stage) {
        if (!whole) return;
        if (ahead-- > 0) {
            copy_async(ring + stage * CHUNKS * THREADS, dy);
            if (d != nullptr)
#pragma unroll
                for (int i = 1; i < CHUNKS; ++i)
                    copy_async(ring + (stage * CHUNKS + i) * THREADS, d + (i - 1) * 16 / sizeof(D));
            advance();
        }
        commit_copies();
    }
    __device__ void advance() {
        dy += dy_step;
        if (d != nullptr) d += d_step;
    }
    // The next row, if there is one; its stage is its number modulo STAGES.
    __device__ bool take(int stage, Vector<T, VEC>& dy_at, Vector<D, VEC>& d_at) {
        dy_at = {};
        d_at = {};
        if (left-- <= 0) return false;
        if (whole) {
            await_copies<STAGES - 1>();
            *reinterpret_cast<uint4*>(&dy_at) = ring[stage * CHUNKS * THREADS];
            if (d != nullptr)
#pragma unroll
                for (int i = 1; i < CHUNKS; ++i)
                    reinterpret_cast<uint4*>(&d_at)[i - 1] = ring[(stage * CHUNKS + i) * THREADS];
            ask(stage);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) dy_at.at[j] = dy[j * dy_col];
            if (d != nullptr) d_at = load<D, VEC>(d, inside);
            advance();
        }
        return true;
    }
};

// Zeros in place of a memset: of the maxima that take_maxima will raise. By the first launch, every thread of it.
__device__ inline void clear(unsigned* zeros, long long words, int threads = THREADS) {
#pragma unroll 1
    for (long long i = 1LL * blockIdx.x * threads + threadIdx.x; i < words; i += 1LL * gridDim.x * threads)
        zeros[i] = 0;
}

// How many of `height` rows are those of offset `first` and every `step` on.
__device__ inline long long count_rows(long long height, long long first, long long step) {
    return max((height - first + step - 1) / step, 0LL);
}
