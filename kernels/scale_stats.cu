// scale_stats: computes the statistics of g in one pass over g (normalize/features.cuh has the formulas).
// merge_statistics: merges them and computes everything that follows from them.
//
//   g (m, n) of G (float or double), row pitch ldg, rows on 16 bytes
//
// An item of scale_stats is a block of columns and `stats_rows` rows. A thread has VEC columns; `row_threads` threads
// share a row, and a thread has every at_once.rows-th row (Places), GROUP rows at a time. It writes mean and M2 of each
// column to the partials, (splits, 2, ldg).
//
// Bytes moved: g is read once, the minimum, and 16 bytes are written for each column and split: at (16384, 4096) 268 MB
// + 1 MB.
#include "normalize/features.cuh"
#include "common/ranks.cuh"

constexpr int GROUP = 16;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scale_stats(const __grid_constant__ ForwardProblem p, const G* g, char* workspace) {
    await_kernel_ahead();
    __shared__ double first_of[THREADS * VEC], second_of[THREADS * VEC];  // [row][column] of Places
    __shared__ __align__(16) G pivot_of[32 * VEC];

    const Places<THREADS, VEC> at_once(p.row_threads);
    const unsigned splits = unsigned(p.splits);
    for_each_item(at_once.blocks(p.n) * p.splits, [&](unsigned item) {
        const long long block = item / splits, split = item % splits;
        const long long col = block * at_once.columns + at_once.column;
        const long long begin = split * p.stats_rows, end = min(begin + p.stats_rows, p.m);
        const Column place(p, col);
        const int inside = place.inside<VEC>();

        Vector<G, VEC> pivot = near_first(g + begin * p.ldg + place.at(p.ldg), p.ldg, end - begin, inside);
        const long long row = begin + at_once.row, c = block * at_once.columns + threadIdx.x;
        const bool mine = threadIdx.x < at_once.columns && c < p.n;  // whether this thread has a column to finish
        Moments pooled = {};
#pragma unroll 1
        for (bool again = false;; again = true) {
            double first[VEC] = {}, second[VEC] = {};
            add_rows<GROUP>(g + row * p.ldg + place.at(p.ldg), row, end, at_once.rows, p.ldg, inside, pivot, first,
                            second);
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                first_of[threadIdx.x * VEC + j] = first[j];
                second_of[threadIdx.x * VEC + j] = second[j];
                if (at_once.row == 0) pivot_of[at_once.column + j] = pivot.at[j];
            }
            __syncthreads();
            bool far = false;
            if (mine) {
                LongSum<sizeof(G) == 8> sum, squares;
#pragma unroll 8
                for (int i = threadIdx.x; i < at_once.rows * at_once.columns; i += at_once.columns) {
                    sum.add(first_of[i]);
                    squares.add(second_of[i]);
                }
                const double rows = double(end - begin), about = pivot_of[threadIdx.x];
                pooled = Moments(about, sum.total(), squares.total(), rows);
                far = pooled.far(about, rows);
            }
            if (sizeof(G) == 4 || again || !__syncthreads_or(far)) break;
            if (mine) pivot_of[threadIdx.x] = G(pooled.mean);
            __syncthreads();
            pivot = *reinterpret_cast<const Vector<G, VEC>*>(pivot_of + at_once.column);
            __syncthreads();
        }
        if (!mine) return;
        const long long pitch = pitch_of_columns(p);
        double* partials = reinterpret_cast<double*>(workspace + p.partials) + split * 2 * pitch + c;
        partials[0] = pooled.mean;
        partials[pitch] = pooled.m2;
    });
}

// merge_statistics: merges the partials of all splits, and of all ranks if they share the batch. It computes the
// constants of y, what a backward needs, and the running statistics. The means of the splits may be far apart. So the
// splits are pooled about the mean of the first split, mean_0 (for float64, about the mean of all), just as the groups
// of a CTA are pooled about a row (normalize/features.cuh):
//   first = sum n_i (mean_i - mean_0),  second = sum (M2_i + n_i (mean_i - mean_0)^2)
//
// An item is `merge_columns` columns. THREADS / merge_columns threads share a column: each of them fetches an argument
// and adds some of the splits. From the total, one thread computes the constants of y, one what a backward needs, and
// one the running statistics.
//
// Ranks (common/ranks.cuh). Through peer memory the kernel posts mean and M2 of this rank's rows, and waits for those
// of the other ranks: two letters (32 bytes) for each feature and rank. The CTAs of all ranks take items in the same
// order, and a CTA posts before it waits. So no two ranks wait for each other, however many CTAs each has. If another
// library exchanges the statistics, there are two launches: the first ends with writing `posted`, the second begins
// with reading `gathered`.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_statistics(const __grid_constant__ ForwardProblem p, char* workspace, double* posted, Ranks* ranks,
                     const double* gathered, const void* bias, const void* scale, const void* gamma, const void* beta,
                     void* running_mean, void* running_var, long long* num_batches_tracked, double* saved
#if RENORM
                     ,
                     const void* renorm
#endif
    ) {
    await_kernel_ahead(ranks != nullptr);
    enum { ROWS, MEAN, M2 };
    __shared__ double first_of[THREADS], second_of[THREADS], arguments[Arguments::COUNT][THREADS], pooled[3][THREADS];
    __shared__ bool counted;
    const long long batches = num_batches_tracked != nullptr ? *num_batches_tracked : 0;
#if RENORM
    const RenormLimits<double> limits(p, renorm, batches);
#else
    const RenormLimits<double> limits;
#endif
    if (threadIdx.x == 0) {
        counted = true;
        if (blockIdx.x == 0 && posted != nullptr) {
            posted[ROWS_AT] = double(p.m);
            posted[CALL_AT] = double(p.signature);
        }
    }
    __syncthreads();
    const int columns = int(p.merge_columns);
    const auto [at, part, parts] = Sharers<THREADS>(columns);
    const auto merge = [&](long long item, const Exchange<2>* exchange) {
        const long long c = item * columns + at, pitch = pitch_of_columns(p);
        const bool there = c < p.n;
#pragma unroll 1
        for (int i = part; there && i < Arguments::COUNT; i += parts)
            arguments[i][at] = argument(i, p, c, bias, scale, gamma, beta, running_mean, running_var);
        double rows = double(p.m), mean = 0.0, m2 = 0.0;
        if (gathered == nullptr && p.m > 0) {
            const int splits = int(p.splits);
            const double rows_of = double(p.stats_rows);
            const double rows_of_last = double(p.m - (splits - 1) * p.stats_rows);
            const double* of_split = reinterpret_cast<const double*>(workspace + p.partials) + c;
            double mean_0 = there ? of_split[0] : 0.0;
            if (sizeof(G) == 8 && there) {  // float64 has no bits to spare: pool about the mean of all
                double shift = 0.0;
#pragma unroll 4
                for (int i = 1; i < splits; ++i)
                    shift += (i + 1 < splits ? rows_of : rows_of_last) * (of_split[i * 2 * pitch] - mean_0);
                mean_0 += shift / rows;
            }
            LongSum<sizeof(G) == 8> first, second;
            of_split += part * 2 * pitch;
#pragma unroll 4
            for (int i = part; there && i < splits; i += parts, of_split += parts * 2 * pitch) {
                const double d = of_split[0] - mean_0, n_d = (i + 1 < splits ? rows_of : rows_of_last) * d;
                first.add(n_d);
                second.add(of_split[pitch] + n_d * d);
            }
            first_of[threadIdx.x] = first.total();
            second_of[threadIdx.x] = second.total();
            __syncthreads();
            if (part == 0) {
#pragma unroll 4
                for (int i = at + columns; i < THREADS; i += columns) {
                    first.add(first_of[i]);
                    second.add(second_of[i]);
                }
                const Moments of_all(mean_0, first.total(), second.total(), rows);
                mean = of_all.mean;
                m2 = of_all.m2 * (p.flags & FLAG_LIMBS ? M2_OF_LIMBS : 1.0);
            }
        }
        if (part == 0 && there) {
            if (posted != nullptr) {
                posted[FEATURES_AT + 2 * c] = mean;
                posted[FEATURES_AT + 2 * c + 1] = m2;
            } else if (exchange != nullptr) {
                if (gathered == nullptr) exchange->post_feature(c, {mean, m2});
                const GroupStatistics<double> all = exchange->statistics<double>(c);
                rows = all.right ? all.rows : 0.0;
                mean = all.mean;
                m2 = all.m2;
                if (rows <= 1.0) counted = false;  // then no statistics are tracked, either
            }
            pooled[ROWS][at] = rows;
            pooled[MEAN][at] = mean;
            pooled[M2][at] = m2;
        }
        if (posted != nullptr) return;
        __syncthreads();
        if (!there) return;
        rows = pooled[ROWS][at];
        const Feature found(p, fmax(rows, 1.0), pooled[MEAN][at], pooled[M2][at], Arguments(&arguments[0][at], THREADS),
                            limits);
#pragma unroll 1
        for (int job = part; job < 3; job += parts) {
            if (job == 0)
                store_affine(reinterpret_cast<G*>(workspace + p.affine), pitch, c, found.centre, found.a, found.offset);
            else if (job == 1)
                found.save(p, c, saved);
            else if (exchange == nullptr || rows > 1.0)
                found.track(p, c, batches, running_mean, running_var);
        }
    };
    const long long items = (p.n + columns - 1) / columns;
    if (ranks == nullptr) {  // normalize counts the batch
        for_each_item(items, [&](long long item) { merge(item, nullptr); });
        return;
    }
    const Exchange<2> exchange(ranks, gathered, FEATURES_AT + 2 * p.n, p.signature);
    if (blockIdx.x == 0 && threadIdx.x == 0 && gathered == nullptr) exchange.post_header(double(p.m));
    for_each_item(items, [&](long long item) { merge(item, &exchange); });
    __syncthreads();
    const bool last = threadIdx.x == 0 && exchange.leave(gridDim.x);
    if (last && num_batches_tracked != nullptr && counted) *num_batches_tracked = batches + 1;  // all have read it
}
