// For kernels in which a CTA or, with CLUSTER, a cluster has all rows of its columns: the sums of a column over all
// threads that have rows of it. No kernels.
#pragma once
#include "common/common.cuh"
#include "common/cluster.cuh"

template <int THREADS, int VEC, int SUMS = 2>
struct Totals {
    static constexpr int PAD = 16 / VEC;  // padding that prevents bank conflicts of writers and readers
    double of_threads[SUMS][VEC][THREADS / 2 + PAD];
    double of_parts[SUMS][THREADS];
};

// Computes the sums of each column over the CTA. A thread brings the sums of its VEC columns (Places, `row_threads` up
// to 16), and gets the sums of one column (Sharers). The order of the additions depends only on `row_threads`.
template <int THREADS, int VEC, int SUMS>
__device__ __forceinline__ void total(Totals<THREADS, VEC, SUMS>& shared, int row_threads, double (&sums)[SUMS][VEC],
                                      double (&of_column)[SUMS]) {
    const int thread = int(threadIdx.x), lane = thread % 32;
#pragma unroll
    for (int j = 0; j < VEC; ++j)
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            sums[i][j] += __shfl_xor_sync(~0u, sums[i][j], 16);
            if (lane < 16) shared.of_threads[i][j][thread / 32 * 16 + lane] = sums[i][j];
        }
    __syncthreads();
    const int columns = row_threads * VEC;
    const Sharers<THREADS> of(columns);
    double of_part[SUMS] = {};
#pragma unroll
    for (int k = 0; k < VEC / 2; ++k) {
        const int at = (of.part * (VEC / 2) + k) * row_threads + of.column / VEC;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) of_part[i] += shared.of_threads[i][of.column % VEC][at];
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) shared.of_parts[i][thread] = of_part[i];
    __syncthreads();
    double high[SUMS] = {}, low[SUMS] = {};  // low: rounding errors of high; there are up to 32 parts
#pragma unroll 2
    for (int at = of.column; at < THREADS; at += columns) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            const double v = shared.of_parts[i][at], sum = high[i] + v;
            low[i] += rest_of_sum(high[i], v, sum);
            high[i] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) of_column[i] = high[i] + (isfinite(high[i]) ? low[i] : 0.0);
}

// The sums of up to WIDEST columns over all CTAs of a cluster, PAIRS pairs of sums for each column. An object serves
// once. With EVERYWHERE each CTA gets the sums of every column; otherwise only CTA column % CLUSTER gets those of a
// column. COMPENSATED: see LongSum.
template <int WIDEST, bool EVERYWHERE = true, int PAIRS = 1, bool COMPENSATED = false>
struct ClusterTotals {
    double2 of_rank[CLUSTER][PAIRS][CLUSTER == 1 ? 1 : EVERYWHERE ? WIDEST : WIDEST / CLUSTER];
    unsigned long long here;  // a barrier: all sums are here

    // All threads call this before anything is sent.
    __device__ __forceinline__ void begin(int rank, int columns) {
        if constexpr (CLUSTER > 1) {
            if (threadIdx.x == 0) {
                mbar_init(&here, 1);
                mbar_init_fence();
                const int own = EVERYWHERE ? columns : (columns + CLUSTER - 1 - rank) / CLUSTER;
                mbar_expect(&here, CLUSTER * own * PAIRS * int(sizeof(double2)));
            }
            __syncthreads();
            cluster_arrive();
        }
    }
    // Turns the sums of the CTA into those of the cluster. All threads call this, each with one column; of the threads
    // with the same column, one has `sends` set. Sums are sent, not fetched, so that a CTA that has received all its
    // sums may end. They are added in the order of the ranks.
    __device__ __forceinline__ void add(int rank, int column, bool sends, double (&sums)[2 * PAIRS]) {
        if constexpr (CLUSTER > 1) {
            cluster_wait();
            const int at = EVERYWHERE ? column : column / CLUSTER;
            if (sends)
#pragma unroll
                for (int i = 0; i < (EVERYWHERE ? CLUSTER : 1); ++i)
#pragma unroll
                    for (int j = 0; j < PAIRS; ++j)
                        send(&of_rank[rank][j][at], sums[2 * j], sums[2 * j + 1], &here,
                             EVERYWHERE ? i : column % CLUSTER);
            mbar_wait_sent(&here, 0);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                LongSum<COMPENSATED> first, second;
#pragma unroll
                for (int cta = 0; cta < CLUSTER; ++cta) {
                    first.add(of_rank[cta][j][at].x);
                    second.add(of_rank[cta][j][at].y);
                }
                sums[2 * j] = first.total();
                sums[2 * j + 1] = second.total();
            }
        }
    }
};
