// reduce_split_k: adds the partial products of the CTAs of tall_product, skinny_backward or forward_sm90
// (K_IN_SAMPLES), in float64 and in a fixed order.
//
//   partials (number, size): float32; each is n rows of `pitch` elements, a multiple of 4; k of a row are used
//   c (n, k), contiguous, in the dtype of a vector code (to_c)
//
// Threads. `share` threads of a CTA share four neighbouring elements of c: each thread adds these elements over some of
// the partials. Bytes moved: they are read once and c is written once, the minimum.
#include "common/common.cuh"

struct ReduceSplitKProblem {
    long long n, k;
    long long pitch, size, number;
    long long share;  // threads that share four elements of c: a power of two, up to 8
    long long to_c;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_split_k(const __grid_constant__ ReduceSplitKProblem p, const float* partials, void* c) {
    await_kernel_ahead();
    __shared__ double sums[THREADS][4];
    const int share = int(p.share), at_once = THREADS / share;
    const long long words = p.n * (p.pitch / 4);
    const int mine = int(threadIdx.x) % at_once, which = int(threadIdx.x) / at_once;
    for_each_item((words + at_once - 1) / at_once, [&](unsigned item) {
        const long long word = 1LL * item * at_once + mine;
        double sum[4] = {};
        if (word < words) {
#pragma unroll 8
            for (long long j = which; j < p.number; j += share) {
                const float4 part = *reinterpret_cast<const float4*>(partials + j * p.size + word * 4);
                sum[0] += part.x;
                sum[1] += part.y;
                sum[2] += part.z;
                sum[3] += part.w;
            }
        }
        for (int i = 0; i < 4; ++i) sums[threadIdx.x][i] = sum[i];
        __syncthreads();
        if (which > 0 || word >= words) return;
        const long long row = word * 4 / p.pitch, column = word * 4 - row * p.pitch;
        for (int i = 0; i < 4 && column + i < p.k; ++i) {
            for (int j = 1; j < share; ++j) sum[i] += sums[threadIdx.x + j * at_once][i];
            store_vector(c, p.to_c, row * p.k + column + i, sum[i]);
        }
    });
}
