// scale_stats: the batch statistics of g and all that follows from them, in one pass over g; features.cuh says how.
//
//   g (m, n) of G (float or double), row pitch ldg, rows on 16 bytes
//
// An item of work is a block of columns and `stats_rows` rows; a thread has VEC columns, `along` threads a row (Places), of
// every so many rows, GROUP at a time. The splits of a column, far apart perhaps, merge without any cancelling:
//   m = sum n_i mean_i / B,  M2 = sum M2_i + sum n_i (mean_i - m)^2
//
// Where ranks share the batch (`posted`), scale_stats ends with mean and M2 of its own rows; merge_statistics takes them to
// the other ranks, and goes on with those of all (ranks.cuh).
//
// The CTA that draws a column block's last ticket adds that block's partial sums: who that is depends on timing, what
// it computes does not. Tickets start at zero, set by the caller.
//
// Moves: g once, and per column 16 bytes a split: at (16384, 4096) 268 MB + 1 MB.
#include "features.cuh"
#include "ranks.cuh"

constexpr int GROUP = 16;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scale_stats(const __grid_constant__ Problem p, const G* g, char* workspace, const void* bias, const void* scale,
                const void* gamma, const void* beta, void* running_mean, void* running_var,
                const long long* num_batches_tracked, double* saved, double* posted) {
    await_kernel_ahead();
    if (posted != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
        posted[ROWS_AT] = static_cast<double>(p.m);
        posted[CALL_AT] = static_cast<double>(p.signature);
    }
    __shared__ double first_of[THREADS * VEC], second_of[THREADS * VEC];  // [row][column] of Places
    __shared__ G pivot_of[32 * VEC];
    __shared__ bool last;

    const Places<THREADS, VEC> at_once(p.along);
    const unsigned splits = static_cast<unsigned>(p.splits);
    for_each_item(at_once.blocks(p.n) * p.splits, [&](unsigned item) {
        const long long block = item / splits, split = item % splits;
        const long long col = block * at_once.columns + at_once.column;
        const long long begin = split * p.stats_rows, end = min(begin + p.stats_rows, p.m);
        const int inside = static_cast<int>(max(min(p.n - col, static_cast<long long>(VEC)), 0LL));

        const Vector<G, VEC> pivot = mean_of_first(g + begin * p.ldg + col, p.ldg, end - begin, inside);
        double first[VEC] = {}, second[VEC] = {};
        const long long row = begin + at_once.row;
        add_rows<GROUP>(g + row * p.ldg + col, row, end, at_once.rows, p.ldg, inside, pivot, first, second);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            first_of[threadIdx.x * VEC + j] = first[j];
            second_of[threadIdx.x * VEC + j] = second[j];
            if (at_once.row == 0) pivot_of[at_once.column + j] = pivot.at[j];
        }
        __syncthreads();

        const long long c = block * at_once.columns + threadIdx.x;  // from here on a thread has one column
        const bool mine = threadIdx.x < at_once.columns && c < p.n;
        double mean = 0.0, m2 = 0.0;
        if (mine) {
            double sum = 0.0, squares = 0.0;
#pragma unroll 8
            for (int i = threadIdx.x; i < at_once.rows * at_once.columns; i += at_once.columns) {
                sum += first_of[i];
                squares += second_of[i];
            }
            const Moments pooled(pivot_of[threadIdx.x], sum, squares, static_cast<double>(end - begin));
            mean = pooled.mean;
            m2 = pooled.m2;
        }

        if (p.splits > 1) {
            double* partials = reinterpret_cast<double*>(workspace + p.partials);  // (splits, 2, ldg)
            if (mine) {
                __stcg(&partials[(split * 2) * p.ldg + c], mean);
                __stcg(&partials[(split * 2 + 1) * p.ldg + c], m2);
            }
            __threadfence();  // the partials before the ticket
            __syncthreads();
            if (threadIdx.x == 0) {
                unsigned* tickets = reinterpret_cast<unsigned*>(workspace + p.tickets);
                last = atomicAdd(&tickets[block], 1u) == p.splits - 1;
            }
            __syncthreads();
            if (!last) return;
            __threadfence();  // the ticket before the others' partials
        }
        if (!mine) return;
        const Arguments of(p, c, bias, scale, gamma, beta, running_mean, running_var);
        // normalize, a later launch, is what raises the count: here every CTA still reads the old one.
        const long long batches = p.flags & FLAG_CUMULATIVE ? *num_batches_tracked : 0;

        if (p.splits > 1) {
            const double* partials = reinterpret_cast<const double*>(workspace + p.partials);
            const double mean_0 = __ldcg(&partials[c]);  // the means are summed from the first: equal ones stay exact
            double sum = 0.0;
#pragma unroll 8
            for (long long i = 0; i < p.splits; ++i) {
                const double n_i = min(p.stats_rows, p.m - i * p.stats_rows);
                sum += n_i * (__ldcg(&partials[(i * 2) * p.ldg + c]) - mean_0);
            }
            mean = mean_0 + sum / p.m;
            m2 = 0.0;
#pragma unroll 8
            for (long long i = 0; i < p.splits; ++i) {
                const double n_i = min(p.stats_rows, p.m - i * p.stats_rows);
                const double d = __ldcg(&partials[(i * 2) * p.ldg + c]) - mean;
                m2 += __ldcg(&partials[(i * 2 + 1) * p.ldg + c]) + n_i * d * d;
            }
        }
        if (posted != nullptr) {
            posted[FEATURES_AT + 2 * c] = mean;
            posted[FEATURES_AT + 2 * c + 1] = m2;
        } else {
            const Feature found(p, static_cast<double>(p.m), mean, m2, of);
            store_affine(reinterpret_cast<G*>(workspace + p.affine), p.ldg, c, mean, found.a, found.beta);
            found.store(p, c, of, batches, true, running_mean, running_var, saved);
        }
    });
}

// merge_statistics: of mean and M2 of every rank's rows those of all, and what scale_stats makes of them; a thread has one
// column. `posted` are this rank's own, as scale_stats left them (not read where it has no rows, p.m = 0), which go to the
// others, unless another library has `gathered` them already. Moves two letters, 32 bytes, a feature to each rank.
//
// It waits for the other ranks. A CTA takes its columns in the order in which every rank's CTAs take them, and posts before
// it waits, so that no two ranks wait for each other, however many CTAs each has.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_statistics(const __grid_constant__ Problem p, const double* posted, Ranks* ranks, const double* gathered,
                     char* workspace, const void* bias, const void* scale, const void* gamma, const void* beta,
                     void* running_mean, void* running_var, long long* num_batches_tracked, double* saved) {
    await_kernel_ahead(true);
    __shared__ bool counted;
    const Exchange exchange(ranks, gathered, FEATURES_AT + 2 * p.n, p.signature);
    const long long batches = num_batches_tracked != nullptr ? *num_batches_tracked : 0;
    if (threadIdx.x == 0) {
        counted = true;
        if (blockIdx.x == 0 && gathered == nullptr) exchange.post_header(static_cast<double>(p.m));
    }
    __syncthreads();
    for_each_item((p.n + THREADS - 1) / THREADS, [&](long long item) {
        const long long c = item * THREADS + threadIdx.x;
        if (c >= p.n) return;
        if (gathered == nullptr) {
            const bool rows = p.m > 0;
            exchange.post_feature(c, rows ? posted[FEATURES_AT + 2 * c] : 0.0,
                                  rows ? posted[FEATURES_AT + 2 * c + 1] : 0.0);
        }
        const Arguments of(p, c, bias, scale, gamma, beta, running_mean, running_var);
        const Whole<double> all = exchange.statistics<double>(c);
        const bool tracked = all.right && all.rows > 1.0;
        if (!tracked) counted = false;
        const Feature found(p, fmax(all.rows, 1.0), all.mean, all.m2, of);
        store_affine(reinterpret_cast<G*>(workspace + p.affine), p.ldg, c, all.mean, found.a, found.beta);
        found.store(p, c, of, batches, tracked, running_mean, running_var, saved);
    });
    __syncthreads();
    if (threadIdx.x == 0 && exchange.leave(gridDim.x) && num_batches_tracked != nullptr && counted)
        *num_batches_tracked = batches + 1;  // every CTA has read it
}
