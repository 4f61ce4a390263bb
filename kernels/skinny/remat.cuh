// How skinny_sums and skinny_backward compute a tile's g again, from x and the weight, where the forward stored no
// deviations (REMAT). No kernels.
//
// wgmma computes the transposed product in the order of forward_sm90, with the weight as operand A. So g has the bits
// of the forward, and f'(u) agrees with y in every element. A feature is a row of the accumulator: a thread has two
// features of each block of 64, and a quarter of the tile's rows. ldmatrix and stmatrix transpose dy and dg on their
// way, so a thread gets dy of its own elements, and its features' coefficients stay in registers.
#pragma once
#include "skinny/pipeline.cuh"

// What a thread needs of a feature to compute f'(u) of an element: u = slope (g - mean) + offset.
struct OfFeature {
    float mean = 0.0f, slope = 0.0f, offset = 0.0f;

    OfFeature() = default;
    __device__ OfFeature(const double* saved, long long n, long long feature)
        : mean(narrow<float>(saved[SAVED_G_MEAN * n + feature])) {
        if constexpr (ACTIVE)
            slope = narrow<float>(saved[SAVED_SLOPE * n + feature]),
            offset = narrow<float>(saved[SAVED_OFFSET * n + feature]);
    }
    __device__ __forceinline__ float deviation(float g) const { return g - mean; }
    __device__ __forceinline__ float before_y(float dy, float d) const {
        return ACTIVE ? Activation<T>::gradient(dy, fmaf(slope, d, offset)) : dy;
    }
};

// g of a tile, in registers.
struct RematTile {
    static constexpr int BLOCKS = FEATURES / WARPGROUPS / 64;           // blocks of 64 features of a warpgroup
    static constexpr int AT_ONCE = MAKERS && INPUTS > 64 ? 1 : BLOCKS;  // blocks whose g is in registers at once

    // The number, in the CTA, of the thread's feature h of a block.
    static __device__ __forceinline__ int feature(int block, int h) {
        return (int(threadIdx.x) % TEAM / 128 * BLOCKS + block) * 64 + int(threadIdx.x) % 128 / LANES * 16 +
               int(threadIdx.x) % LANES / 4 + 8 * h;
    }

    static __device__ __forceinline__ void load(const double* saved, long long n, long long col0, int features,
                                                OfFeature (&of)[BLOCKS][2]) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (const int f = feature(block, h); f < features) of[block][h] = OfFeature(saved, n, col0 + f);
    }

    // Computes g of a tile, and calls then(block, h, dy, g0, g1) for pairs of neighbouring rows of the thread's feature
    // h of a block: dy has two elements of T. If STORES, `then` returns two elements that take the place of dy.
    template <bool STORES, typename Then>
    static __device__ __forceinline__ void take(uint4* dy, const uint4* x, const T* weight, const Then& then) {
        constexpr int BLOCK = ROWS * 128, OF_WEIGHT = FEATURES * 128;  // bytes of 64 inputs of x, and of the weight
        const int group = ByWgmma::group(), lane = threadIdx.x % LANES, warp = threadIdx.x % 128 / LANES;
        const auto of_x = operand_descriptor(smem(x), 16);
        float g[AT_ONCE][ROWS / 2];
        const auto multiply = [&](int block, float (&sums)[ROWS / 2]) {
            const auto of_w = operand_descriptor(smem(weight) + (group * BLOCKS + block) * (64 * 128), 16);
#pragma unroll
            for (int i = 0; i < INPUTS / 16; ++i)
                wgmma<OF_T, false, false>(sums, of_w + (i / 4 * (OF_WEIGHT / 16) + i % 4 * 2),
                                          of_x + (i / 4 * (BLOCK / 16) + i % 4 * 2), i);
            wgmma_commit();
        };
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const int at_once = block % AT_ONCE;
            if (at_once == 0) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) multiply(block + i, g[i]);
            }
            if (at_once == AT_ONCE - 1)
                wgmma_wait<0>();
            else
                wgmma_wait<1>();
#pragma unroll
            for (int j = 0; j < ROWS / 8; j += 2) {  // 16 rows by the warp's 16 features: four matrices of 8 by 8
                uint4* at = dy + place(8 * j + lane / 16 * 8 + lane % 8,
                                       (group * BLOCKS + block) * 8 + 2 * warp + lane / 8 % 2);
                unsigned words[4];
                load_matrices_trans(words, smem(at));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int first = Accumulator::at(j + i / 2, i % 2, 0);
                    const unsigned out = then(block, i % 2, words[i], g[at_once][first], g[at_once][first + 1]);
                    if (STORES) words[i] = out;
                }
                if (STORES) stmatrix_trans(smem(at), words[0], words[1], words[2], words[3]);
            }
        }
    }
};
