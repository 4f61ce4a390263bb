// skinny_product: computes a product g = x wᵀ of many short rows and few features, through limbs. It serves the
// backward's dx = dg w, with dg as x and the columns of w as rows, and gsbn.matmul. It replaces split_limbs and
// forward_sm90's GEMM.
//
//   x (m, k) of float32, row pitch ldx, rows on 16 bytes      weight (n, k), row pitch ldw      g (m, n), row pitch ldg
//   With ANY_ROWS, rows of g need not be whole words of 16 bytes.
//
// Threads. As in skinny.cu: a CTA has an SM to itself, FEATURES features and p.stats_rows rows, and four warps take a
// tile of them together (Tiles). It loads limbs of K_AT_ONCE elements of the weight's rows. If the rows are longer, it
// then takes the next elements in another turn, and adds up g in memory.
//
// Bytes moved. x is read and g is written once: at (802816, 128, 128) 822 MB. To write limbs of x and read them would
// add 822 MB. Each further turn reads and writes g: at (50000, 64, 1024) 26 of 243 MB.
#include "skinny/tiles.cuh"

extern __shared__ __align__(1024) char shared[];

struct ProductProblem {
    long long m, n, k;
    long long ldx, ldw, ldg;  // row pitches in elements
    long long stats_rows;     // rows of a CTA
    long long flags;          // FLAG_VECTOR_W
};

// Calls then(i, j, address, how many elements of the row exist from there on) for each word of g that a lane has in a
// tile (OfLane).
template <typename Then>
__device__ __forceinline__ void for_words_of_g(const ProductProblem& p, int lane, long long row0, long long end,
                                               int first, T* g, const Then& then) {
#pragma unroll
    for (int j = 0; j < LANE_FEATURES; j += WORD)
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const int at = first + feature_of(lane % 4, j);
            const long long row = row0 + lane / 4 + i * 8;
            then(i, j, g + row * p.ldg + at, row < end ? int(p.n) - at : 0);
        }
}

// Stores all tiles, or adds them to what the same warps have stored in an earlier turn.
__device__ __forceinline__ void store_sums(const ProductProblem& p, Tiles<true>& tiles, int first, const float* backs,
                                           T* g, bool adds) {
    const int lane = threadIdx.x % LANES;
    tiles.for_each([&](OfLane& sums, long long row0, bool) {
        OfLane before = {};
        if (adds)  // all loads are in flight at once
            for_words_of_g(p, lane, row0, tiles.end, first, g, [&](int i, int j, const T* from, int left) {
                if (!ANY_ROWS && left > 0) {
                    const Word v = *reinterpret_cast<const Word*>(from);
#pragma unroll
                    for (int l = 0; l < WORD; ++l) before[i][j + l] = v.at[l];
                } else {
#pragma unroll
                    for (int l = 0; l < WORD; ++l)
                        if (l < left) before[i][j + l] = from[l];
                }
            });
        bring_back(sums, lane, backs);
        const auto sum = [&](int i, int j) {
            Word v;
#pragma unroll
            for (int l = 0; l < WORD; ++l) v.at[l] = before[i][j + l] + sums[i][j + l];
            return v;
        };
        if constexpr (!ANY_ROWS) {
            for_words_of_g(p, lane, row0, tiles.end, first, g, [&](int i, int j, T* to, int left) {
                if (left > 0) *reinterpret_cast<Word*>(to) = sum(i, j);
            });
        } else {
            AnyRows rows{p.n, 1};
            for_words_of_g(p, lane, row0, tiles.end, first, g, [&](int i, int j, T* to, int left) {
                rows.store(i, feature_of(lane % 4, j), to, sum(i, j), left);
            });
        }
    });
}

extern "C" __global__ void __launch_bounds__(CTA, 1)
    skinny_product(const __grid_constant__ ProductProblem p, const T* x, const T* w, T* g) {
    await_kernel_ahead();  // the kernel ahead may have copied the weight
    const CtaWork work(p);
    uint4* weight = reinterpret_cast<uint4*>(shared);
    __shared__ float backs[FEATURES];
    ProductProblem part = p;
#pragma unroll 1
    for (long long k0 = 0; k0 < p.k; k0 += K_AT_ONCE) {
        part.k = min(p.k - k0, 1LL * K_AT_ONCE);
        if (k0 > 0) __syncthreads();  // all warps have read the weight
        Tiles<true> tiles(part, x + k0, work.cta, weight, weight + weight_words(part));
        load_operand(part, w + k0, work.first, weight, backs);
        __syncthreads();
        store_sums(p, tiles, work.first, backs, g, k0 > 0);
    }
}
