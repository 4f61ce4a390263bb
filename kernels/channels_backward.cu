// channels_backward: backward.cu for channels first. From dy and the deviations d that the forward saved, it computes
// all of the backward in training except the two products. dy, d and dg are (samples, n, length) in memory, with 16-bit
// elements; `length` is a multiple of VEC. backward.cu has the formulas and the corrections for the rounding of d
// (Projection).
//
// An item of work is one split of one feature: sums_rows words of 16 bytes. The field ldd holds the length. A thread
// loads AT_ONCE words of one feature at once; they lie THREADS apart. channel_sums adds 2 VEC elements of a thread in
// float32, and adds these sums in float64, in an order that depends only on the shape. Each item of channel_dg merges
// all splits of its feature, in a fixed order; the items of the first split write the gradients of size O. channel_dg
// takes the last item first: channel_sums took the first item first, so L2 still holds the end. dg may overwrite d.
//
// Bytes moved: channel_sums reads dy and d once; channel_dg reads dy and d once and writes dg once. At (32, 128, 4096)
// in bfloat16 that is 67 and 101 MB.
#include "backward/columns.cuh"

static_assert(sizeof(T) == 2 && sizeof(D) == 2 && TRAINING && SUMS == 4, "training in 16 bits");
constexpr int AT_ONCE = 4;  // words of 16 bytes that a thread has in flight, from dy and from d each

using Words = Vector<T, VEC>;

// The words of an item: one split of the words of one feature, which are numbered sample after sample.
struct Strip {
    unsigned begin, count, of_sample;  // words
    unsigned long long reciprocal;     // reciprocal of of_sample, for quotient()
    long long start, per_sample;       // the feature's first word; words from sample to sample

    __device__ Strip(const BackwardProblem& p, long long feature, long long split) {
        const long long first = split * p.sums_rows;
        begin = unsigned(first);
        count = unsigned(max(min(p.sums_rows, p.m / VEC - first), 0LL));
        of_sample = unsigned(p.ldd / VEC);
        reciprocal = p.reciprocal;
        start = feature * of_sample;
        per_sample = p.n * of_sample;
    }
    __device__ long long at(unsigned i) const {
        const unsigned word = begin + i, sample = quotient(word, reciprocal);
        return start + sample * per_sample + (word - sample * of_sample);
    }
};

// The words of dy and of d that a thread has in flight: from word i of a strip on, THREADS apart. Words beyond the
// strip's end are zeros.
struct InFlight {
    Words dy[AT_ONCE], d[AT_ONCE];

    __device__ void load(const Strip& strip, const T* dy_, const D* d_, unsigned i) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            dy[j] = d[j] = {};
            if (i + j * THREADS < strip.count) {
                const long long at = strip.at(i + j * THREADS);
                *reinterpret_cast<uint4*>(&dy[j]) = reinterpret_cast<const uint4*>(dy_)[at];
                *reinterpret_cast<uint4*>(&d[j]) = reinterpret_cast<const uint4*>(d_)[at];
            }
        }
    }
};

// workspace (splits, SUMS, n): the sums of each split, in float64
extern "C" __global__ void __launch_bounds__(THREADS)
    channel_sums(const __grid_constant__ BackwardProblem p, const T* dy, const D* d, const double* saved,
                 double* workspace) {
    await_kernel_ahead();
    __shared__ double of_warps[SUMS][WARPS];
    for_each_item(p.n * p.splits, [&](unsigned item) {
        const long long split = item / unsigned(p.n), feature = item % unsigned(p.n);
        const Strip strip(p, feature, split);
        const BeforeY before(p, saved, feature, 1);
        double sums[SUMS] = {};
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < strip.count; i += AT_ONCE * THREADS) {
            InFlight of;
            of.load(strip, dy, d, i);
#pragma unroll
            for (int pair = 0; pair < AT_ONCE; pair += 2) {
                float part[SUMS] = {};
#pragma unroll
                for (int j = pair; j < pair + 2; ++j)
#pragma unroll
                    for (int e = 0; e < VEC; ++e) {
                        const float v = element(of.d[j], e), u = before.gradient(0, element(of.dy[j], e), v);
                        part[0] += u;
                        part[1] = fmaf(u, v, part[1]);
                        part[2] += v;
                        part[3] = fmaf(v, v, part[3]);
                    }
#pragma unroll
                for (int s = 0; s < SUMS; ++s) sums[s] += double(part[s]);
            }
        }
#pragma unroll
        for (int s = 0; s < SUMS; ++s) {
#pragma unroll
            for (int bit = 1; bit < LANES; bit *= 2) sums[s] += __shfl_xor_sync(~0u, sums[s], bit);
            if (threadIdx.x % LANES == 0) of_warps[s][threadIdx.x / LANES] = sums[s];
        }
        __syncthreads();
        if (threadIdx.x < SUMS) {
            double sum = 0.0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[threadIdx.x][warp];
            workspace[(split * SUMS + threadIdx.x) * p.n + feature] = sum;
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    channel_dg(const __grid_constant__ BackwardProblem p, const T* dy, const D* d, const double* saved,
               const double* workspace, T* dg, void* to_bias, void* to_scale, void* to_gamma, void* to_beta) {
    await_kernel_ahead();
    __shared__ G stored[DG_ROWS];
    const unsigned features = unsigned(p.n), items = features * unsigned(p.splits);
    for_each_item(items, [&](unsigned turn) {
        const unsigned item = items - 1 - turn;
        const long long split = item / features, feature = item % features;
        const Strip strip(p, feature, split);
        InFlight of;  // loaded while the sums are merged
        if (dg != nullptr) of.load(strip, dy, d, threadIdx.x);
        if (threadIdx.x < LANES) {
            double sums[SUMS] = {};
#pragma unroll 1
            for (int i = threadIdx.x; i < p.splits; i += LANES)
#pragma unroll
                for (int s = 0; s < SUMS; ++s) sums[s] += workspace[(i * SUMS + s) * p.n + feature];
#pragma unroll
            for (int s = 0; s < SUMS; ++s)
#pragma unroll
                for (int bit = 1; bit < LANES; bit *= 2) sums[s] += __shfl_xor_sync(~0u, sums[s], bit);
            if (threadIdx.x == 0) {
                ColumnSums all;
#pragma unroll
                for (int s = 0; s < SUMS; ++s) all.of[s] = sums[s];
                store_feature(p, Factors{saved + feature, p.n, feature}, all, split == 0, to_bias, to_scale, to_gamma,
                              to_beta, stored, 1, 0);
            }
        }
        __syncthreads();
        const float a = stored[DG_A], mean = stored[DG_MEAN], mean_low = stored[DG_MEAN_LOW], rate = stored[DG_RATE];
        const BeforeY before(p, saved, feature, 1);
        if (dg != nullptr)
#pragma unroll 1
            for (unsigned i = threadIdx.x; i < strip.count;) {
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    if (i + j * THREADS >= strip.count) break;
                    Vector<float, VEC> out;
#pragma unroll
                    for (int e = 0; e < VEC; ++e) {
                        const float v = element(of.d[j], e), u = before.gradient(0, element(of.dy[j], e), v);
                        out.at[e] = a * fmaf(-rate, v, (u - mean) - mean_low);
                    }
                    store_whole(dg + strip.at(i + j * THREADS) * VEC, rounded<T>(out));
                }
                i += AT_ONCE * THREADS;
                of.load(strip, dy, d, i);
            }
    });
}
