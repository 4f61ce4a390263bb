// The roles that load for the consumers: the producer, one thread that loads x and w, and in inference the warps that
// load constants.
#pragma once
#include "sm90/cta.cuh"
#include "sm90/operand.cuh"

__device__ __forceinline__ void Cta::produce(int rank) const {
    int phase = 0, s = 0;
    for (int nth = 0; has(nth); ++nth) {
        const auto [row, block] = tile(nth, rank);
        // If CTAs share x, each loads half of the rows, or one limb of all rows. If they share w, each loads some rows
        // of each limb.
        const int x_part = X_SHARERS > 1 ? rank / SPLIT_K : 0,
                  w_first = W_SHARERS > 1 ? rank * (BLOCK_N / W_SHARERS) : 0;
        int x_row = (row - rank % SPLIT_K) * BLOCK_M + (MATRICES == 1 ? x_part * (PRODUCT_M / X_SHARERS) : 0);
        int depth = MATRICES == 2 ? x_part : 0;  // number of the limb, or of the sample
        if constexpr (CHANNELS_FIRST) {
            const Samples::Place at = samples().place(row);
            x_row = at.first + x_part * (PRODUCT_M / X_SHARERS), depth = at.sample;
        }
        int first = first_step;
        const int each = (int(p.y_row) + BLOCK_K - 1) / BLOCK_K;  // K_IN_SAMPLES: steps of a sample
        int sample = 0, in_sample = 0;
        if constexpr (K_IN_SAMPLES) {
            const OfSplit at = of_split(row);
            x_row = at.row * BLOCK_M + x_part * (PRODUCT_M / X_SHARERS), first = at.split * steps;
            sample = first / each, in_sample = first % each;
        }
#pragma unroll 1
        for (int of_all = first; of_all < first + steps; ++of_all) {
            int step = of_all, w_depth = 0;
            if constexpr (K_IN_SAMPLES) {
                depth = w_depth = sample, step = in_sample;
                if (++in_sample == each) in_sample = 0, ++sample;
            }
            mbar_wait(&sh.empty[s], phase ^ 1);
            mbar_expect(&sh.full[s], STAGE_BYTES);
            char* w_tile = sh.stage[s];
            // With ELEMENT_LIMBS_RS, w is loaded in two parts of 32 of k or, if it is MN-major, in four parts of 32
            // features. With ELEMENT_LIMBS, one load brings both limbs if no CTAs share w.
            if constexpr (ELEMENT == ELEMENT_LIMBS_RS && W_MN_MAJOR)
                for (int part = 0; part < BLOCK_N / 32; ++part)
                    tma_load<false, false>(w_tile + part * (BLOCK_K * 128), &w_map, &sh.full[s],
                                           block * BLOCK_N + part * 32, step * BLOCK_K, 0);
            else if constexpr (ELEMENT == ELEMENT_LIMBS_RS)
                for (int part = 0; part < 2; ++part)
                    tma_load<false, false>(w_tile + part * (BLOCK_N * 128), &w_map, &sh.full[s],
                                           step * BLOCK_K + part * 32, block * BLOCK_N, 0);
            else
#pragma unroll
                for (int limb = 0; limb < (W_SHARERS > 1 ? MATRICES : 1); ++limb)
                    W::load<BLOCK_N / W_SHARERS, (W_SHARERS > 1)>(w_tile + (limb * BLOCK_N + w_first) * 128, &w_map,
                                                                  &sh.full[s], step, block * BLOCK_N + w_first,
                                                                  K_IN_SAMPLES ? w_depth : limb);
            X::load<PRODUCT_M / X_SHARERS, (X_SHARERS > 1)>(w_tile + W_BYTES + x_part * (X_BYTES / X_SHARERS), &x_map,
                                                            &sh.full[s], step, x_row, depth);
            if (++s == STAGES) s = 0, phase ^= 1;
        }
#if RESIDUAL
        for (int stage = 0; stores_y(nth) && stage < RESIDUAL_STAGES; ++stage) {
            constexpr int PARTS = WARPGROUPS / RESIDUAL_STAGES;  // a stage has the residual of so many warpgroups
            mbar_wait(&sh.empty[s], phase ^ 1);
            mbar_expect(&sh.full[s], PARTS * RESIDUAL_BYTES);
            for (int part = 0; part < PARTS; ++part)
                for (int first = 0; first < BLOCK_M; first += PASS_M)
                    tma_load(sh.stage[s] + part * RESIDUAL_BYTES + first * 128, &residual_map, &sh.full[s],
                             block * BLOCK_N + (stage * PARTS + part) * 64, row * BLOCK_M + first);
            if (++s == STAGES) s = 0, phase ^= 1;
        }
#endif
    }
}

// Runs beside the mainloop. For each run of tiles it fills one slot, while the tiles of the run before read the other
// slot.
__device__ __forceinline__ void Cta::load_constants(int warp, int lane, int rank) const {
    Run run;
    int nth = 0, start = 0;  // the first tile of the run
    for (; has(nth); ++nth) {
        const auto [row, block] = tile(nth, rank);
        if (block >= blocks || !run.ends_before(block)) continue;
        // wait until the run before has begun: then nobody reads this slot
        for (int half = 0; half < WARPGROUPS; ++half) wait_count(&sh.stored[half], start, LONG_BACKOFF);
        start = nth;
#pragma unroll 1
        for (int c = 32 * (warp - 1) + lane; c < BLOCK_N; c += 32 * CONSTANT_WARPS) {  // beyond n, any values serve
            const Frozen of = f.frozen(min(block * BLOCK_N + c, int(n) - 1));
            sh.constants[run.number % 2][c] = make_float2(of.a, of.c);
            if constexpr (WITH_LOWS) sh.lows[run.number % 2][c] = __float2bfloat16(of.low);
        }
        __syncwarp();
        if (lane == 0) count_up(&sh.constants_ready[run.number % 2]);
    }
}
