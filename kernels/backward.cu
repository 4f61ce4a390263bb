// backward: computes, from dy and the deviations d that the forward saved, the whole backward except its two GEMMs.
//
//   dy (m, n) of T, any strides      d (m, n) of D, row pitch ldd, rows on 16 bytes
//   training:   d = (g - c) / unit    c: mean(g), or 0 (deviation_centre); unit: a power of two, 1 except for float16
//   inference:  d = g
//
// If the forward had an activation, both passes first turn dy into the gradient with respect to the activation's input
// (BeforeY, common/activation.cuh). In the formulas below, dy means this gradient.
//
// backward_sums.cu computes S = sum dy and E = sum dy (d - centre) in one pass. From these, backward_dg computes the
// gradients of size O and, in a second pass, dg = a (dy - S/B - rate d), in T, as the GEMMs read it.
//   training:   dbeta = S    dgamma = s r D    dscale = gamma eps r^3 D    dbias = 0
//               rate = s^2 r^2 D / B    D = unit E
//   inference:  dbeta = S    dbias = a S       dg = a dy    centre = running_mean / s - b, or near g
//               dscale = gamma r (E + (centre + b) S)    dgamma = r (s E + (s (centre + b) - running_mean) S)
//   IDENTITY:   dbias = S    dg = dy    d = y, or u: gsbn.linear, which has no norm; `saved` is not read
// For 16-bit deviations, S, E and rate are first corrected for the rounding of d (Projection in backward/columns.cuh).
// The forward left the factors in `saved`, in float64, as rows of n (SAVED_). Without a centre, the two terms of dgamma
// would cancel where the mean of g is large relative to its spread.
//
// An item of work is a block of columns and dg_rows rows. A thread has VEC columns of every at_once.rows-th row;
// `row_threads` threads share a row (Places). Rows come through the thread's own pipeline in shared memory
// (BackwardRows). Every item of backward_dg merges all splits of its columns, in float64, in an order that depends only
// on the shape: there is no ticket, and no CTA waits for another. backward_dg takes the last rows first: backward_sums
// took the first rows first, so L2 still holds the end.
//
// If ranks share the batch, merge_sums runs between the two kernels (common/ranks.cuh). It computes the gradients of
// size O from this rank's rows, and leaves the sums over all ranks as one split, from which backward_dg computes dg.
//
// Bytes moved: dy and d are read once, and dg is written once (with TRANSPOSED twice), the minimum of a second pass; at
// (16384, 4096) in bfloat16 403 MB.
#include "backward/columns.cuh"

constexpr int COLUMNS = LANES * VEC;  // the most columns that a CTA has
constexpr int TILE = STAGES * WARPS;  // with TRANSPOSED: rows of a tile, as many as the CTA's pipelines hold
constexpr int TILE_BYTES = VEC * LANES * (TILE + 1) * sizeof(T);  // read by gsbn/_plan/variants.py
constexpr bool MERGED_BY_MANY = sizeof(G) == 4;                   // several threads share a column in merge_splits

// If there are sums (splits > 0), every item merges the sums of its columns, and the items of the last rows write the
// gradients of size O. Then, unless dg is null, each item writes dg (m, n) of T, row pitch lddg, rows on 16 bytes; in
// inference dg needs no sums. With TRANSPOSED it also writes the transpose (n, m), row pitch ld_transposed, through a
// tile in shared memory: cuBLAS reads it in TF32 products.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    backward_dg(const __grid_constant__ BackwardProblem p, const T* dy, const D* d, const double* saved,
                const char* workspace, T* dg, T* transposed, void* to_bias, void* to_scale, void* to_gamma,
                void* to_beta) {
    if (p.splits == 0 || p.dy_ahead) await_kernel_ahead();
    __shared__ uint4 pipeline[STAGES * WORDS * THREADS];
    __shared__ alignas(VEC * sizeof(G)) G stored[DG_ROWS][COLUMNS];
    __shared__ double scratch[MERGED_BY_MANY ? SUMS * THREADS : 1];
    extern __shared__ T tile[];  // with TRANSPOSED [VEC][LANES][TILE + 1]: an odd pitch puts lanes in different banks

    const Places<THREADS, VEC> at_once(TRANSPOSED ? LANES : p.row_threads);
    const unsigned blocks = at_once.blocks(p.n);
    // float64 is exact here; a division of 64-bit integers would take about a hundred instructions
    const double items_of_rows = ceil(double(p.m) / double(p.dg_rows));
    const unsigned row_blocks = dg == nullptr ? 1 : unsigned(items_of_rows);
    for_each_item(blocks * row_blocks, [&](unsigned item) {
        const long long col0 = 1LL * at_once.columns * (item % blocks), col = col0 + at_once.column;
        const long long end = p.m - item / blocks * p.dg_rows;
        const int height = int(min(p.dg_rows, end));
        const Column place(p, col);
        const int inside = place.inside<VEC>();

        const int count = inside > 0 && dg != nullptr ? count_every(height, at_once.row, at_once.rows) : 0;
        Walk<STAGES, BackwardRows> rows(
            count, BackwardRows(p, dy, TRAINING || ACTIVE ? d : nullptr, end - 1 - at_once.row, -at_once.rows, place,
                                inside, pipeline));
        const BeforeY before(p, saved, col, inside);
        const long long own = col0 + threadIdx.x;  // the column whose sums this thread will get
        if (p.splits > 0) {
            if (threadIdx.x < at_once.columns && own < p.n)
                Factors{saved_of(p, saved, own) + own, saved_pitch(p), own}.prefetch();
            // Wait only now: the kernel ahead belongs to the same call, and has itself waited for the kernels that
            // wrote the data read above.
            await_kernel_ahead();
            merge_splits(p, workspace, at_once.columns, col0, MERGED_BY_MANY ? scratch : nullptr,
                         [&](long long c, int column, const ColumnSums& sums) {
                             store_feature(p, Factors{saved_of(p, saved, c) + c, saved_pitch(p), c}, sums,
                                           item < blocks, to_bias, to_scale, to_gamma, to_beta, &stored[0][0], COLUMNS,
                                           column);
                         });
        }
        if (dg == nullptr) return;
        __syncthreads();

        const Coefficients of(before, &stored[0][0], COLUMNS, at_once.column, p, saved, col, inside);
        T* to = dg + (end - 1 - at_once.row) * p.lddg + place.at(p.lddg);
        const long long dg_step = at_once.rows * p.lddg;
        const auto write = [&](int, const Row& row) {
            const Vector<T, VEC> out = of.dg(row);
            store_dg(to, out, inside);
            to -= dg_step;
            return out;
        };
        if constexpr (TRANSPOSED) {
            const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
            const auto turned = [&](int column, int row) -> T& {
                return tile[(column % VEC * LANES + column / VEC) * (TILE + 1) + row];
            };
            int begin = 0;  // number of this thread's first row in the tile
            for (long long row0 = end - TILE; row0 > end - height - TILE; row0 -= TILE, begin += STAGES) {
                rows.down(begin, min(begin + STAGES, count), [&](int i, const Row& row) {
                    const Vector<T, VEC> out = write(i, row);
#pragma unroll
                    for (int j = 0; j < VEC; ++j)
                        turned(at_once.column + j, TILE - 1 - (i % STAGES * WARPS + warp)) = out.at[j];
                });
                __syncthreads();
                for (int i = warp; i < COLUMNS && col0 + i < p.n; i += WARPS) {
                    const Column target(p, col0 + i);
                    T* const to = transposed + target.at(1, p.ld_transposed) + row0;
                    for (int r = lane; r < TILE && target.left > 0; r += LANES)
                        if (row0 + r >= end - height) to[r] = turned(i, r);
                }
                __syncthreads();
            }
        } else {
            rows.down<true>(0, count, write);
        }
    });
}

// merge_sums: turns the sums of each rank into those of all ranks, in training. A thread has one column. First, unless
// `gathered` is given, it merges the splits and posts their sums: to the other ranks or, if another library gathers
// them, to `posted`. Then, unless `totals` is null, it collects the sums of all ranks, adds them in the order of the
// ranks, and stores the gradients of size O. It writes the totals to `totals` (SUMS, n), scaled by p.m / (rows of all
// ranks), because backward_dg divides by p.m. It waits for other ranks as merge_statistics does.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_sums(const __grid_constant__ BackwardProblem p, const D* d, const double* saved, const char* workspace,
               double* posted, Ranks* ranks, const double* gathered, double* totals, void* to_bias, void* to_scale,
               void* to_gamma, void* to_beta) {
    await_kernel_ahead(true);
    const BackwardExchange exchange(ranks, gathered, FEATURES_AT + POSTS * p.n, p.signature);
    if (posted != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
        posted[ROWS_AT] = double(p.m);
        posted[CALL_AT] = double(p.signature);
    }
    __shared__ double scratch[MERGED_BY_MANY ? SUMS * THREADS : 1];
    const Places<THREADS, VEC> at_once(p.row_threads);
    for_each_item(at_once.blocks(p.n), [&](long long item) {
        const auto post = [&](long long c, int, const ColumnSums& sums) {
            const Factors of{saved + c, p.n, c};
            if (posted == nullptr) {
                post_sums(exchange, p, d, of, sums);
            } else {
                double posts[POSTS];
                sums_to_post(p, d, of, sums, posts);
#pragma unroll
                for (int j = 0; j < POSTS; ++j) posted[FEATURES_AT + POSTS * c + j] = posts[j];
            }
        };
        if (gathered == nullptr)
            merge_splits(p, workspace, at_once.columns, item * at_once.columns, MERGED_BY_MANY ? scratch : nullptr,
                         post);
        const long long c = item * at_once.columns + threadIdx.x;
        if (totals == nullptr || threadIdx.x >= at_once.columns || c >= p.n) return;
        const Factors of{saved + c, p.n, c};
        double all[POSTS], S, E;
        const double rows = collect_sums(exchange, of, all);
        const Projection by(rows, of, all);
        exchange.peek(exchange.rank, FEATURES_AT + POSTS * c, S);
        exchange.peek(exchange.rank, FEATURES_AT + POSTS * c + 1, E);
        E += of(SAVED_OF_MEAN) * S;  // from this rank's centre
        store_gradients(p, of, S, by.of_part(S, E / of(SAVED_UNIT)), to_bias, to_scale, to_gamma, to_beta);
        const double own = double(p.m) / rows;
        if constexpr (SUMS < POSTS) {  // backward_dg makes no correction
            all[1] = by.stretch * by.E;
            all[0] -= by.centre * of(SAVED_RATE) * all[1];
        }
#pragma unroll
        for (int j = 0; j < SUMS; ++j) totals[j * p.n + c] = own * all[j];
    });
    __syncthreads();
    if (threadIdx.x == 0 && totals != nullptr) exchange.leave(gridDim.x);
}

// sum_features: computes the gradient of one scale that all features share. One CTA adds the gradients of the features,
// in float64 and in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_features(const __grid_constant__ BackwardProblem p, const double* of_features, void* to_scale) {
    await_kernel_ahead();
    __shared__ double sums[WARPS];
    double sum = 0.0;
    for (long long c = threadIdx.x; c < p.n; c += THREADS) sum += of_features[c];
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (threadIdx.x % LANES == 0) sums[threadIdx.x / LANES] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < WARPS; ++i) sum += sums[i];
    store_vector(to_scale, p.to_scale, 0, sum);
}
