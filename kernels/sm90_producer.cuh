// What feeds the consumers: the producer, a thread that loads x and w, and in inference the warps that lay out constants.
#pragma once
#include "sm90_cta.cuh"
#include "sm90_wgmma.cuh"

__device__ __forceinline__ void Cta::produce(int rank) const {
    int phase = 0, s = 0;
    int nth = 0;
    for (int i; (i = tile(nth)) < order.count(); nth++) {
        const auto [row, block] = order.at(i, rank);
        // a CTA of a pair loads half of the rows of x, or one limb of all
        const int x_limb = MATRICES == 2 ? rank : 0, w_row = block * BLOCK_N;
        const int x_row = row * BLOCK_M + (MATRICES == 1 ? rank * (BLOCK_M / CLUSTER) : 0);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            mbar_wait(&sh.empty[s], phase ^ 1);
            mbar_expect(&sh.full[s], STAGE_BYTES);
            char* w_tile = sh.stage[s];
            char* x_part = w_tile + W_BYTES + rank * (X_BYTES / CLUSTER);
            W::load<BLOCK_N, false>(w_tile, &w_map, &sh.full[s], step, w_row, 0);
            X::load<BLOCK_M / CLUSTER, (CLUSTER > 1)>(x_part, &x_map, &sh.full[s], step, x_row, x_limb);
            if (++s == STAGES) s = 0, phase ^= 1;
        }
    }
}

// Beside the main loop.
__device__ __forceinline__ void Cta::lay_out_constants(int warp, int lane, int rank) const {
    int nth = 0;
    for (int i; (i = tile(nth)) < order.count(); nth++) {
        const auto [row, block] = order.at(i, rank);
        const int first = block * BLOCK_N;
        for (int half = 0; half < WARPGROUPS; half++) wait_count(&sh.stored[half], nth, LONG_NAP);
        for (int c = 32 * (warp - 1) + lane; c < BLOCK_N; c += 32 * LAYING_WARPS)
            sh.constants[c] = first + c < n ? f.frozen(first + c) : make_float2(0.f, 0.f);
        __syncwarp();
        if (lane == 0) count_up(&sh.ready);
    }
}
