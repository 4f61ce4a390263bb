// skinny: computes a forward of many short rows without writing g to memory. skinny_stats computes g from x and keeps
// only its statistics. skinny_normalize computes the same g again, bit for bit, and y from it. They replace scale_stats
// and normalize; merge_statistics runs between them.
//
//   x (m, k) of T, row pitch ldx; rows start on 16 bytes and have at most CHUNKS * 64 bytes
//   weight (n, k) of T, row pitch ldw
//   y (m, n) of T, in rows of whole words of 16 bytes or, with ANY_ROWS, of any strides
//   With SAVE_DEVIATIONS, the deviations of g (m, n), row pitch ldg, in rows of whole words
//   ELEMENT: how T is multiplied (TypeOf): in 16 bits, as TF32, as limbs, or in IEEE float32 by FMAs. With limbs,
//   rows of x may be as long as the limbs of the weight fit into shared memory.
//
// With limbs, the forwards subtract a centre from each column of x where its mean is large (skinny/centres.cuh). What
// is called g below is then less by z, the product of the centres and the weight; the means in memory are those of g.
//
// Threads. A CTA has an SM to itself, FEATURES features and p.stats_rows rows; p.splits CTAs divide the rows of the
// same features. It loads the weight into shared memory, and each warp takes tiles of the rows (Tiles); with limbs,
// four warps take a tile together. Warps wait for each other only at the end.
//
// Statistics. In skinny_stats a lane adds d = g - p and d^2 for each of its features. It adds GROUP rows in float32;
// the lanes that have the same feature add these sums; then they are added in float64. The pivot p is the mean of the
// warp's first tile; whenever the number of rows has doubled, p becomes the mean of all rows so far. So the sum of d^2
// is at most a few times M2, whatever the data are: M2 of the rows before p moved and M2 of the rows since are parts of
// the whole M2 (Chan: n1 n2 / (n1 + n2) (mean1 - mean2)^2). About any one row of the data, the sum could be far larger
// than M2, and its float32 rounding error, too.
//
// Bytes moved. x is read twice and y is written once: at (1000000, 32, 32) in bfloat16 192 MB, the minimum without g.
// To write and read g, which is float32, would add 256 MB. skinny_normalize begins where skinny_stats ended, with the
// rows that L2 still holds.
#include "common/tma.cuh"
#include "skinny/centres.cuh"
#include "skinny/tiles.cuh"

// how many rows of a lane are added in float32; with limbs only those of one tile, because the sums take registers
constexpr int GROUP = BY_LIMBS ? LANE_ROWS : 16;
constexpr bool GROUP_IS_TILE = GROUP == LANE_ROWS;  // the sums then start anew with each tile

#ifndef SAVE_DEVIATIONS
#define SAVE_DEVIATIONS 0
#endif

extern __shared__ __align__(1024) char shared[];

// Adds N numbers over the eight lanes that have the same features. Each lane gets N / 8 of the N sums, from number lane
// / 4 * N / 8 on.
template <int N, int BIT = 16>
__device__ __forceinline__ void sum_over_rows(float* v, int lane) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const float low = v[i], high = v[i + N / 2];
        const bool upper = lane & BIT;
        v[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, BIT);
    }
    if constexpr (BIT > 4) sum_over_rows<N / 2, BIT / 2>(v, lane);
}

// Adds d = g - pivot and d^2 of a lane's elements to the sums of their features. Rows from `inside` on are set to the
// pivot, so that they add nothing.
__device__ __forceinline__ void add_tile(OfLane& g, const float* pivots, int lane, int inside, bool whole,
                                         float (&sum)[LANE_FEATURES], float (&squares)[LANE_FEATURES]) {
    if (!whole)
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
            if (lane / 4 + i * 8 >= inside)
#pragma unroll
                for (int j = 0; j < LANE_FEATURES; ++j) g[i][j] = pivots[feature_of(lane % 4, j)];
#pragma unroll
    for (int j = 0; j < LANE_FEATURES; j += WORD) {
        const auto pivot = *reinterpret_cast<const Vector<float, WORD>*>(&pivots[feature_of(lane % 4, j)]);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
            for (int l = 0; l < WORD; ++l) {
                const float d = g[i][j + l] - pivot.at[l];
                const bool first = GROUP_IS_TILE && i == 0;
                sum[j + l] = first ? d : sum[j + l] + d;
                squares[j + l] = first ? d * d : fmaf(d, d, squares[j + l]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(CTA, 1)
    skinny_stats(const __grid_constant__ ForwardProblem p, const T* x, const T* w, char* workspace) {
    await_kernel_ahead();
    const CtaWork work(p);
    uint4* weight = reinterpret_cast<uint4*>(shared);
    __shared__ float backs[BY_LIMBS ? FEATURES : 1];
    uint4* pipeline = weight + weight_words(p);
    __shared__ __align__(16) float centres[BY_LIMBS ? K_AT_ONCE : 1];
    __shared__ double z[BY_LIMBS ? FEATURES : 1];  // the product of the centres and the weight
    Tiles<false> tiles(p, x, work.cta, weight, pipeline);
    const Sample sample(tiles, threadIdx.x);
    load_operand(p, w, work.first, weight, backs);
    const bool centred = store_centres(tiles, sample, centres);

    constexpr int N = LANE_FEATURES, M = N / 8;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    __shared__ __align__(16) float pivots[WARPS][FEATURES];  // the pivot p of each warp
    const int own = feature_of(lane % 4, lane / 4 * M);  // the first of M adjacent features whose sums this lane gets
    static_assert(WORD % M == 0, "they lie in one word");
    float* const pivot = pivots[warp] + own;
    float sum[N] = {}, squares[N] = {};    // sums about p, since the last settle_sums
    double first[M] = {}, second[M] = {};  // sums about p, over the warp's rows before
    int rows = 0, moved = 0;               // number of the warp's rows: so far, and when p last moved
    const auto settle_sums = [&] {
        if (rows == 0) return;
        sum_over_rows<N>(sum, lane);
        sum_over_rows<N>(squares, lane);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            first[i] += sum[i];
            second[i] += squares[i];
        }
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = squares[j] = 0.0f;
        if (rows < 2 * moved) return;
        moved = rows;
        const double count = double(rows);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const float to = pivot[i] + __fdividef(float(first[i]), float(rows));
            const double by = double(pivot[i]) - to;
            second[i] += by * (2.0 * first[i] + count * by);
            first[i] += count * by;
            pivot[i] = to;
        }
        __syncwarp();
    };
    int since = 0;  // how many rows of a lane are in sum and squares
    const auto add = [&](OfLane& g, long long row0, bool whole) {
        bring_back(g, lane, backs);
        const int inside = whole ? ROWS : int(max(tiles.end - row0, 0LL));
        bool fresh = rows == 0 && inside > 0;  // the first tile is added twice: about its first row, then its mean
        rows += inside;
        if (fresh) {
            if (lane < 4)
#pragma unroll
                for (int j = 0; j < N; ++j) pivots[warp][feature_of(lane, j)] = g[0][j];
            __syncwarp();
        }
#pragma unroll 1
        for (;; fresh = false) {
            add_tile(g, pivots[warp], lane, inside, whole, sum, squares);
            if (!fresh) break;
            // the tile's mean is its first row plus the mean difference from that row: exact if all rows are equal
            sum_over_rows<N>(sum, lane);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < M; ++i) pivot[i] += __fdividef(sum[i], float(inside));
            __syncwarp();
#pragma unroll
            for (int j = 0; j < N; ++j) sum[j] = squares[j] = 0.0f;
        }
        since += LANE_ROWS;
        if (since >= GROUP) {
            settle_sums();
            since = 0;
        }
    };
    tiles.for_each(add, centred ? centres : nullptr);
    if constexpr (GROUP > LANE_ROWS) settle_sums();  // otherwise nothing is left
    if (centred) product_of_centres(p, w, work.first, centres, z);
    __syncthreads();  // the weight is no longer needed

    double* sums = reinterpret_cast<double*>(shared);  // [2][WARPS][FEATURES]
#pragma unroll
    for (int i = 0; i < M; ++i) {
        const int at = own + i;
        const double d = rows > 0 ? double(pivot[i]) - pivots[0][at] : 0.0;
        sums[warp * FEATURES + at] = first[i] + rows * d;
        sums[(WARPS + warp) * FEATURES + at] = second[i] + d * (2.0 * first[i] + rows * d);
    }
    __syncthreads();

    const int at = threadIdx.x;  // from here on a thread has one feature
    const long long c = work.first + at;
    if (at >= FEATURES || c >= p.n) return;
    double of_cta = 0.0, squares_of_cta = 0.0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        of_cta += sums[i * FEATURES + at];
        squares_of_cta += sums[(WARPS + i) * FEATURES + at];
    }
    const Moments pooled(pivots[0][at], of_cta, squares_of_cta, double(tiles.end - tiles.begin));
    double* partials = reinterpret_cast<double*>(workspace + p.partials) + 2 * work.cta * p.ldg + c;
    partials[0] = centred ? pooled.mean + z[at] : pooled.mean;
    partials[p.ldg] = pooled.m2;
}

// Calls put(i, at, y, deviations) for all words of a lane: WORD features of its row i, from the CTA's feature `at` on.
// With ANY_ROWS, all lanes of a warp call it equally often, even if they have no such features. of(at) returns a
// function for these features. It turns an element of g, with its number among them, into an element of y and a
// deviation.
template <typename P, typename Of, typename Put>
__device__ __forceinline__ void for_words(const P& p, const OfLane& g, int lane, int first, const Of& of,
                                          const Put& put) {
#pragma unroll
    for (int j = 0; j < LANE_FEATURES; j += WORD) {
        const int at = feature_of(lane % 4, j);
        if (first + (ANY_ROWS ? feature_of(0, j) : at) >= p.n) break;
        const auto make = of(at);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            Word out, deviation;
#pragma unroll
            for (int l = 0; l < WORD; ++l) make(g[i][j + l], l, out.at[l], deviation.at[l]);
            put(i, at, out, deviation);
        }
    }
}

// Stores y and the deviations of all tiles of g. In 16 bits, a tile of a y whose rows lie together is put together in
// shared memory and stored as one piece: rows that do not fit lines of the cache then take no longer than others.
// (Strides are references, because values would cost registers.)
template <typename P, typename Of>
__device__ __forceinline__ void store_tiles(const P& p, Tiles<true>& tiles, int first, const float* backs, T* y,
                                            const long long& y_row, const long long& y_col, T* deviations,
                                            const float* centres, const Of& of) {
    const int lane = threadIdx.x % LANES;
    const bool together = OF_16_BITS && !ANY_ROWS && p.n <= FEATURES && y_row == p.n;
    char* const stagings = shared + STAGING_AT + threadIdx.x / LANES * STAGINGS * STAGING_BYTES;
    int turn = 0;
    const auto store = [&](OfLane& g, long long row0, bool whole) {
        bring_back(g, lane, backs);
        if (together && whole) {
            T* const staging = reinterpret_cast<T*>(stagings + turn * STAGING_BYTES);
            turn ^= 1;
            if (lane == 0) tma_store_wait_read<STAGINGS - 1>();  // the last store from this buffer
            __syncwarp();
            for_words(p, g, lane, first, of, [&](int i, int at, const Word& out, const Word& deviation) {
                const int row = lane / 4 + i * 8;
                *reinterpret_cast<Word*>(staging + row * int(p.n) + at) = out;
                if constexpr (SAVE_DEVIATIONS)
                    *reinterpret_cast<Word*>(deviations + (row0 + row) * p.ldg + at) = deviation;
            });
            fence_async();
            __syncwarp();
            if (lane == 0) {
                tma_store(y + row0 * p.n, staging, ROWS * unsigned(p.n) * sizeof(T));
                tma_store_commit();
            }
            return;
        }
        const auto row_of = [&](int i) { return row0 + lane / 4 + i * 8; };
        const auto exists = [&](long long row) { return whole || row < tiles.end; };
        if constexpr (ANY_ROWS) {
            AnyRows rows{p.n, y_col};
            for_words(p, g, lane, first, of, [&](int i, int at, const Word& out, const Word& deviation) {
                const long long row = row_of(i);
                const int col = first + at, left = exists(row) ? int(p.n) - col : 0;
                rows.store(i, at, y + row * y_row + col * y_col, out, left);
                if (SAVE_DEVIATIONS && left > 0) *reinterpret_cast<Word*>(deviations + row * p.ldg + col) = deviation;
            });
        } else {
            for_words(p, g, lane, first, of, [&](int i, int at, const Word& out, const Word& deviation) {
                const long long row = row_of(i), col = first + at;
                if (!exists(row)) return;
                *reinterpret_cast<Word*>(y + row * y_row + col) = out;
                if (SAVE_DEVIATIONS) *reinterpret_cast<Word*>(deviations + row * p.ldg + col) = deviation;
            });
        }
    };
    tiles.for_each(store, centres);
    if (together) tma_store_wait();
}

extern "C" __global__ void __launch_bounds__(CTA, 1)
    skinny_normalize(const __grid_constant__ ForwardProblem p, const T* x, const T* w, T* y, const char* workspace,
                     const void* bias, const void* scale, const void* gamma, const void* beta, void* running_mean,
                     void* running_var, long long* num_batches_tracked, T* deviations, const double* saved) {
    const CtaWork work(p);
    uint4* weight = reinterpret_cast<uint4*>(shared);
    const bool running = p.flags & FLAG_RUNNING;
    __shared__ float backs[BY_LIMBS ? FEATURES : 1];
    __shared__ __align__(16) float centres[BY_LIMBS ? K_AT_ONCE : 1];
    __shared__ double z[BY_LIMBS ? FEATURES : 1];
    if (running)
        await_kernel_ahead();  // in training skinny_stats has waited for the kernels that wrote x and the weight
    Tiles<true> tiles(p, x, work.cta, weight, weight + weight_words(p));
    const Sample sample(tiles, threadIdx.x);
    load_operand(p, w, work.first, weight, backs);
    const bool centred = store_centres(tiles, sample, centres);
    if (centred) {
        product_of_centres(p, w, work.first, centres, z);
        __syncthreads();
    }
    if (!running) await_kernel_ahead();
    if (blockIdx.x == 0 && threadIdx.x == 0 && num_batches_tracked != nullptr) ++*num_batches_tracked;
    __shared__ __align__(32) float made[AFFINE_ROWS][FEATURES], slopes[FEATURES], inverse_units[FEATURES];
    __shared__ double arguments[Arguments::COUNT][FEATURES];
    if (running) {
#pragma unroll 1
        for (int i = threadIdx.x; i < Arguments::COUNT * FEATURES; i += blockDim.x) {
            const int feature = i % FEATURES, number = i / FEATURES;
            if (work.first + feature < p.n)
                arguments[number][feature] =
                    argument(number, p, work.first + feature, bias, scale, gamma, beta, running_mean, running_var);
        }
        __syncthreads();
    }
    const long long c = work.first + threadIdx.x;  // the feature whose constants this thread computes or fetches
    if (threadIdx.x < FEATURES && c < p.n) {
        if (running) {
            store_running(p, c, Arguments(&arguments[0][threadIdx.x], FEATURES), nullptr, made[0], FEATURES,
                          threadIdx.x, nullptr);
        } else {
            const float* from = reinterpret_cast<const float*>(workspace + p.affine) + c;
#pragma unroll
            for (int i = 0; i < AFFINE_ROWS; ++i) made[i][threadIdx.x] = from[i * p.ldg];
        }
        if (centred) {  // the mean of g - z
            float &high = made[AFFINE_MEAN][threadIdx.x], &low = made[AFFINE_MEAN_LOW][threadIdx.x];
            const HighLow<float> mean(double(high) + low - z[threadIdx.x]);
            high = mean.high;
            low = mean.low;
        }
        if constexpr (SAVE_DEVIATIONS && in_units<T>) {
            inverse_units[threadIdx.x] = 1.0 / saved[SAVED_UNIT * p.n + c];
            slopes[threadIdx.x] = saved[SAVED_SLOPE * p.n + c];
        }
    }
    __syncthreads();

    const auto of = [&](int at) {
        const auto row = [&](const float* from) { return *reinterpret_cast<const Vector<float, WORD>*>(from + at); };
        const Vector<float, WORD> mean = row(made[AFFINE_MEAN]), mean_low = row(made[AFFINE_MEAN_LOW]),
                                  a = row(made[AFFINE_A]);
        const Vector<float, WORD> offset = row(made[AFFINE_BETA]);
        Vector<float, WORD> inverse_unit = {}, slope = a;
        if constexpr (SAVE_DEVIATIONS && in_units<T>) {
            inverse_unit = row(inverse_units);
            if constexpr (Activation<T>::JUMPS) slope = row(slopes);  // it is read only then
        }
        return [=](float g, int l, T& out, T& deviation) {
            const float d = (g - mean.at[l]) - mean_low.at[l];
            const float u = fmaf(a.at[l], d, offset.at[l]);
            if constexpr (SAVE_DEVIATIONS)
                deviation = settle<T, T>(in_units<T> ? d * inverse_unit.at[l] : d, slope.at[l], offset.at[l]);
            from_float(Activation<T>::of(u), out);
        };
    };
    store_tiles(p, tiles, work.first, backs, y, p.y_row, p.y_col, deviations, centred ? centres : nullptr, of);
}
