// The roles that load for the consumers: the producer, one thread that loads x and w, and in inference the warps that
// load constants.
#pragma once
#include "sm90/cta.cuh"
#include "sm90/operand.cuh"

__device__ __forceinline__ void Cta::produce(int rank) const {
    // A bit for each CTA: those with the same rows share x, and their ranks are ROWS_OF_CLUSTER apart; those with the
    // same features share w.
    constexpr int SIDES = ((1 << CLUSTER_CTAS) - 1) / ((1 << ROWS_OF_CLUSTER) - 1);
    const short x_ctas = SIDES << rank % ROWS_OF_CLUSTER, w_ctas = ((1 << CLUSTER_M) - 1) << (rank - rank % CLUSTER_M);
    int phase = 0, s = 0;
    for (int nth = 0; has(nth); ++nth) {
        const auto [row, block] = tile(nth, rank);
        // If CTAs share x, each loads a part of it, or one limb of all rows. If they share w, each loads a part of each
        // limb.
        const int x_part = CLUSTER > 1 ? rank / ROWS_OF_CLUSTER : 0, w_part = CLUSTER_M > 1 ? rank % CLUSTER_M : 0;
        int x_row = (row - rank % SPLIT_K) * BLOCK_M;
        int depth = MATRICES == 2 ? x_part : 0;  // number of the limb, or of the sample
        if constexpr (CHANNELS_FIRST) {
            const Samples::Place at = samples().place(row);
            x_row = at.first, depth = at.sample;
        }
        int first = first_step;
        const int each = (int(p.y_row) + BLOCK_K - 1) / BLOCK_K;  // K_IN_SAMPLES: steps of a sample
        int sample = 0, in_sample = 0;
        if constexpr (K_IN_SAMPLES) {
            const OfSplit at = of_split(row);
            x_row = at.row * BLOCK_M, first = at.split * steps;
            sample = first / each, in_sample = first % each;
        }
        if (nth == 0) begin();
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
                for (int limb = 0; limb < (CLUSTER_M > 1 ? MATRICES : 1); ++limb)
                    W::load<BLOCK_N, CLUSTER_M>(w_tile + limb * (BLOCK_N * 128), &w_map, &sh.full[s], step,
                                                block * BLOCK_N, w_part, K_IN_SAMPLES ? w_depth : limb, w_ctas);
            char* const x_tile = w_tile + W_BYTES;
            if constexpr (MATRICES == 2)
                X::load<PRODUCT_M, 1, (CLUSTER > 1)>(x_tile + x_part * (X_BYTES / 2), &x_map, &sh.full[s], step, x_row,
                                                     0, depth, x_ctas);
            else
                X::load<PRODUCT_M, CLUSTER>(x_tile, &x_map, &sh.full[s], step, x_row, x_part, depth, x_ctas);
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

// Computes a and c of a block's features, for a slot. V: see frozen_arguments. If the code for one feature is short, a
// lane loads the arguments of all its features before it uses any.
template <typename V>
__device__ __forceinline__ void Cta::lay_out_constants(int slot, int block, int warp, int lane) const {
    constexpr int LANES = 32 * CONSTANT_WARPS;
    constexpr int AT_ONCE = is_same<V, void> ? 1 : (BLOCK_N + LANES - 1) / LANES;
#pragma unroll 1
    for (int first = 32 * (warp - 1) + lane; first < BLOCK_N; first += AT_ONCE * LANES) {
        FrozenArguments of[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)  // beyond n, any values serve
            of[i] = f.frozen_arguments<V>(min(block * BLOCK_N + first + i * LANES, int(n) - 1));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int c = first + i * LANES;
            if (c >= BLOCK_N) break;
            const Frozen y = f.frozen(of[i]);
            sh.constants[slot][c] = make_float2(y.a, y.c);
            if constexpr (WITH_LOWS) sh.lows[slot][c] = __float2bfloat16(y.low);
        }
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
        const int kind = f.common_kind(), slot = run.number % 2;
        begin();
        if (kind == KIND_FLOAT32)
            lay_out_constants<float>(slot, block, warp, lane);
        else if (kind == KIND_OF_Y)
            lay_out_constants<Y>(slot, block, warp, lane);
        else
            lay_out_constants<void>(slot, block, warp, lane);
        __syncwarp();
        if (lane == 0) count_up(&sh.constants_ready[slot]);
    }
}
