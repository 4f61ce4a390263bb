// The centres of x's columns, which the forwards by limbs subtract from x before they multiply. No kernels.
//
//   g - z = sum_k (x_k - c_k) w_k        z = sum_k c_k w_k, in float64
//
// Limbs err by 2^-23 of x, and the tensor core cuts sums off at a part of their largest term, always towards zero. If
// the mean of a column is large, both errors are large beside the column's spread, and the second has the same sign in
// all rows. So a number c_k that column k is near is subtracted first; x_k - c_k is rounded by 2^-24 of itself. Each
// CTA has its own centres: c_k is the column's element in one of five rows, if all five are at least 32 times as large
// as they are apart. Otherwise the column is not far from 0, or one of the rows is padding or an outlier, and c_k = 0.
#pragma once
#include "skinny/config.cuh"

// Elements of a column in five of the CTA's rows, of even and of odd number; in all of them if there are fewer. Only
// forwards by limbs need them.
struct Sample {
    float v[5] = {};

    template <typename Tiles>
    __device__ __forceinline__ Sample(const Tiles& tiles, int k) {
        if (!BY_LIMBS || k >= tiles.k) return;
        const int last = int(tiles.end - tiles.begin) - 1, fourth = last / 4, step = max(fourth - (fourth % 2 == 0), 1);
        const T* from = tiles.x + tiles.begin * tiles.ldx + k;
#pragma unroll
        for (int i = 0; i < 5; ++i) v[i] = to_float(from[min(i * step, last) * tiles.ldx]);
    }
    __device__ __forceinline__ float centre() const {
        float least = v[0], most = v[0];
#pragma unroll
        for (int i = 1; i < 5; ++i) least = fminf(least, v[i]), most = fmaxf(most, v[i]);
        const float size = fabsf(v[2]);
        return size >= 32.0f * (most - least) && size < 0x1p100f ? v[2] : 0.0f;  // x - c does not overflow
    }
};

// Writes the centres of all columns to shared memory. `sample` is of the column with the thread's number. All threads
// call this; it meets them. Returns whether any centre is not 0.
template <typename Tiles>
__device__ __forceinline__ bool store_centres(const Tiles& tiles, Sample sample, float* centres) {
    if constexpr (!BY_LIMBS) {
        __syncthreads();
        return false;
    } else {
        bool any = false;
        for (int k = threadIdx.x; k < tiles.parts * CHUNKS * CHUNK; k += CTA, sample = Sample(tiles, k)) {
            const float c = centres[k] = sample.centre();
            any |= c != 0.0f;
        }
        return __syncthreads_or(any);
    }
}

// Computes z of FEATURES features, from feature `first` on.
template <typename P>
__device__ __forceinline__ void product_of_centres(const P& p, const T* w, int first, const float* centres, double* z) {
    constexpr int SHARE = 8;  // neighbouring threads that share a feature
    const bool words = p.flags & FLAG_VECTOR_W && p.k % 4 == 0;
    for (int feature = threadIdx.x / SHARE; feature < FEATURES; feature += CTA / SHARE) {
        const T* row = w + (first + feature) * p.ldw;
        const int k = first + feature < p.n ? int(p.k) : 0;
        double sum = 0.0;
#pragma unroll 8
        for (int i = 4 * (threadIdx.x % SHARE); i < k; i += 4 * SHARE) {
            Vector<T, 4> v = {};
            if (words) v = *reinterpret_cast<const Vector<T, 4>*>(row + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!words && i + j < k) v.at[j] = row[i + j];
                sum = fma(double(to_float(v.at[j])), double(centres[i + j]), sum);
            }
        }
#pragma unroll
        for (int apart = SHARE / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (threadIdx.x % SHARE == 0) z[feature] = sum;
    }
}
