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
        const int side = rank / SPLIT, x_limb = MATRICES == 2 ? side : 0, w_row = block * BLOCK_N;
        const int x_row = (row - rank % SPLIT) * BLOCK_M + (MATRICES == 1 ? side * (PRODUCT_M / CLUSTER) : 0);
#pragma unroll 1
        for (int step = first_step; step < first_step + steps; step++) {
            mbar_wait(&sh.empty[s], phase ^ 1);
            mbar_expect(&sh.full[s], STAGE_BYTES);
            char* w_tile = sh.stage[s];
            char* x_part = w_tile + W_BYTES + side * (X_BYTES / CLUSTER);
            W::load<BLOCK_N, false>(w_tile, &w_map, &sh.full[s], step, w_row, 0);
            X::load<PRODUCT_M / CLUSTER, (CLUSTER > 1)>(x_part, &x_map, &sh.full[s], step, x_row, x_limb);
            if (++s == STAGES) s = 0, phase ^= 1;
        }
    }
}

// Beside the main loop, once for a run of tiles: in one slot, while the tiles of the run before read the other.
__device__ __forceinline__ void Cta::lay_out_constants(int warp, int lane, int rank) const {
    Run run;
    int nth = 0, start = 0;  // of the run
    for (int i; (i = tile(nth)) < order.count(); nth++) {
        const auto [row, block] = order.at(i, rank);
        if (block >= blocks || !run.ends_before(block)) continue;
        // the run before has begun: nobody reads this slot any more
        for (int half = 0; half < WARPGROUPS; half++) wait_count(&sh.stored[half], start, LONG_NAP);
        start = nth;
        for (int c = 32 * (warp - 1) + lane; c < BLOCK_N; c += 32 * LAYING_WARPS) {
            const int feature = block * BLOCK_N + c;
            sh.constants[run.number % 2][c] = feature < n ? f.frozen(feature) : make_float2(0.f, 0.f);
        }
        __syncwarp();
        if (lane == 0) count_up(&sh.ready);
    }
}
