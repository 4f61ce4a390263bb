// reduce_split_k: adds the partial products of the CTAs of tall_product, skinny_backward or forward_sm90
// (K_IN_SAMPLES), in float64 and in a fixed order.
//
//   partials (number, size): float32; each is n rows of `pitch` elements, a multiple of 4; k of a row are used
//   c (n, k), contiguous, in the dtype of a vector code (to_c)
//
// Threads. `share` threads of a CTA share four neighbouring elements of c: each thread adds these elements over some of
// the partials, and then up to four of the threads add up these sums for an element each. Bytes moved: partials are read
// once and c is written once, the minimum.
#include "common/common.cuh"

struct ReduceSplitKProblem {
    long long n, k;
    long long pitch, size, number;
    long long share;  // threads that share four elements of c: a power of two, up to 8
    long long to_c;
};

constexpr int THREADS = 256, AT_ONCE = 8;  // partials that a thread has in flight

// Without the 2, the compiler would keep to 44 registers, and wait for one load after the other.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    reduce_split_k(const __grid_constant__ ReduceSplitKProblem p, const float* partials, void* c) {
    await_kernel_ahead();
    __shared__ double sums[THREADS][4];
    const int share = int(p.share), at_once = THREADS / share, number = int(p.number);
    const unsigned pitch = unsigned(p.pitch / 4);
    const unsigned words = unsigned(p.n) * pitch;  // a grid, and so `words`, is below 2^31
    const int mine = int(threadIdx.x) % at_once, which = int(threadIdx.x) / at_once;
    for_each_item((words + at_once - 1) / at_once, [&](unsigned item) {
        const unsigned word = item * at_once + mine;
        double sum[4] = {};
        if (word < words) {
            const float* from = partials + which * p.size + 4LL * word;
#pragma unroll 1
            for (int j = which; j < number; j += AT_ONCE * share) {
                float4 part[AT_ONCE];  // all loads come before any use of what they load
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i, from += share * p.size) {
                    part[i] = {};
                    if (j + i * share < number) part[i] = *reinterpret_cast<const float4*>(from);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    sum[0] += part[i].x;
                    sum[1] += part[i].y;
                    sum[2] += part[i].z;
                    sum[3] += part[i].w;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[threadIdx.x][i] = sum[i];
        __syncthreads();
        if (word >= words) return;
        const unsigned row = word / pitch, column = (word - row * pitch) * 4;
#pragma unroll 1
        for (int i = which; i < 4 && column + i < p.k; i += share) {
            double total = sums[mine][i];
            for (int j = 1; j < share; ++j) total += sums[mine + j * at_once][i];
            store_vector(c, p.to_c, row * p.k + column + i, total);
        }
    });
}
