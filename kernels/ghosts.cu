// Two kernels that combine the results of all ghost batches of a call (common/ghost.cuh), for each feature, in float64.
//
//   track_ghosts: updates the running statistics as if BatchNorm1d had seen the ghost batches one after the other
//                 v <- (1 - mu) v + mu w    for the statistics w of each ghost batch, in order
//   sum_ghosts:   computes the gradients of size O, which are sums over the ghost batches
//
// An item is LANES features. Each warp takes consecutive ghost batches, and one warp for each result merges the results
// of the warps, in order: in track_ghosts, the ghost batches of a warp turn v into keep v + moved. So the order of all
// sums depends only on the shape.
//
// Bytes moved: for each feature of a ghost batch, track_ghosts reads 16 bytes, and sum_ghosts reads 8 bytes for each
// gradient; 16 bytes make 1 MB for 128 ghost batches of 512 features.
#include "common/ghost.cuh"

constexpr int LANES = 32, WARPS = 8, THREADS = LANES * WARPS;

struct Share {
    int begin, end;  // ghost batches of this warp
    __device__ Share(long long ghosts, int warp) {
        const int all = int(ghosts), of_warp = (all + WARPS - 1) / WARPS;
        begin = min(warp * of_warp, all);
        end = min(begin + of_warp, all);
    }
};

struct TrackProblem {
    long long n, features, ghost_pitch;   // common/ghost.cuh
    long long flags;                      // FLAG_CUMULATIVE
    long long running_mean, running_var;  // vector codes, see fetch
    double momentum;
};

// statistics (2, n): mean and unbiased variance of each feature of z. The launch ahead has counted the ghost batches.
extern "C" __global__ void __launch_bounds__(THREADS)
    track_ghosts(const __grid_constant__ TrackProblem p, const double* statistics, void* running_mean,
                 void* running_var, const long long* num_batches_tracked) {
    await_kernel_ahead();
    __shared__ double keeps[WARPS], moved[2][WARPS][LANES];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const long long ghosts = ghosts_of(p), before = p.flags & FLAG_CUMULATIVE ? *num_batches_tracked - ghosts : 0;
    for_each_item((p.features + LANES - 1) / LANES, [&](unsigned item) {
        const long long c = 1LL * item * LANES + lane;
        const bool there = c < p.features;
        const Share share(ghosts, warp);
        double keep = 1.0, mean = 0.0, var = 0.0;
#pragma unroll 4
        for (int i = share.begin; i < share.end; ++i) {
            const double mu = p.flags & FLAG_CUMULATIVE ? 1.0 / double(before + i + 1) : p.momentum;
            const double* at = statistics + i * p.ghost_pitch + (there ? c : 0);
            keep *= 1.0 - mu;
            mean = (1.0 - mu) * mean + mu * at[0];
            var = (1.0 - mu) * var + mu * at[p.n];
        }
        if (lane == 0) keeps[warp] = keep;
        moved[0][warp][lane] = mean;
        moved[1][warp][lane] = var;
        __syncthreads();
        if (warp > 1 || !there) return;
        void* const to = warp == 0 ? running_mean : running_var;
        const long long code = warp == 0 ? p.running_mean : p.running_var;
        double v = fetch(to, code, c).or_else(0.0);
#pragma unroll
        for (int i = 0; i < WARPS; ++i)
            if (Share(ghosts, i).begin < ghosts) v = keeps[i] * v + moved[warp][i][lane];
        store_vector(to, code, c, v);
    });
}

struct SumProblem {
    long long n, features, ghost_pitch;              // common/ghost.cuh
    long long to_bias, to_scale, to_gamma, to_beta;  // vector codes, see fetch
};

// gradients (4, n): the gradients of bias, scale, gamma and beta. Rows that were not asked for are not read.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_ghosts(const __grid_constant__ SumProblem p, const double* gradients, void* to_bias, void* to_scale,
               void* to_gamma, void* to_beta) {
    await_kernel_ahead();
    __shared__ double sums[WARPS][LANES];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const long long ghosts = ghosts_of(p), blocks = (p.features + LANES - 1) / LANES;
    for_each_item(4 * blocks, [&](unsigned item) {
        const int number = item / unsigned(blocks);
        void* to = to_bias;
        long long code = p.to_bias;
        if (number == 1) to = to_scale, code = p.to_scale;
        if (number == 2) to = to_gamma, code = p.to_gamma;
        if (number == 3) to = to_beta, code = p.to_beta;
        if (code == 0) return;
        const long long c = (item - number * blocks) * LANES + lane;
        const bool there = c < p.features;
        const Share share(ghosts, warp);
        LongSum<true> sum;
#pragma unroll 4
        for (int i = share.begin; i < share.end; ++i)
            sum.add(gradients[number * p.n + i * p.ghost_pitch + (there ? c : 0)]);
        sums[warp][lane] = sum.total();
        __syncthreads();
        if (warp > 0 || !there) return;
        LongSum<true> all;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) all.add(sums[i][lane]);
        store_vector(to, code, c, all.total());
    });
}
