// The consumers of MODE_RECOMPUTE. They compute the statistics of their features over all tiles of the CTA, in
// registers, and multiply again for y once the statistics of all CTAs are merged. A thread has two features, as in
// Consumer.
#pragma once
#include "sm90/consumer.cuh"

struct Recomputer : Consumer {
    Welford so_far[2] = {};  // statistics over the CTA's tiles so far

    // Publishes the statistics over the CTA's tiles. If `finishes`, it then waits for the statistics over all rows.
    __device__ __forceinline__ void publish_statistics(int part, int block, int lane, bool finishes) {
        mbar_wait(&sh.agreed, 0);
        const u64 launch = sh.launch;
        const int h = lane & 1, mine = within + 8 * h;
        const bool speaks = (lane & 2) == 0;
        if (speaks)
            publish(words_of(block) + part * BLOCK_N + mine, h ? so_far[1].mean() : so_far[0].mean(),
                    h ? so_far[1].m2 : so_far[0].m2, launch);
        if (lane == 0) hint(&sh.ready);
        if (!finishes) return;
        mbar_wait(&sh.arguments_ready, 0);
        if (speaks) {
            const Merged all = await_merged(merged, features, size_t(block) * BLOCK_N + mine, launch);
            const float slope = all.a * all.unit, offset = all.offset_or(sh.beta[mine]);
            sh.centred[mine] = {all.centre, 1.0f / all.unit, slope, offset};
            if constexpr (SETTLES) sh.beta[mine] = JumpOfU::least(slope, offset);
        }
        __syncwarp();
    }

    // Applies f to the elements of feature h.
    template <typename F>
    static __device__ __forceinline__ void apply(float (&d)[ACC], int h, const F& f) {
#pragma unroll
        for (int j = 0; j < ACC / 4; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& v = d[Accumulator::at(j, h, e)];
                v = f(v);
            }
    }

    // Stores y and, with SAVE_DEVIATIONS, the deviations; d is g - removed.
    __device__ __forceinline__ void epilogue(float (&d)[ACC], const float (&removed)[2], int row, int block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Centred u = sh.centred[within + 8 * h];
            const float per_unit = SAVE_DEVIATIONS && IN_UNITS ? u.per_unit : 1.0f;  // a power of two
            const float2 to_deviation = make_float2(per_unit, (removed[h] - u.centre) * per_unit);
            apply(d, h, [&](float v) { return line(to_deviation, v); });
        }
        if constexpr (SAVE_DEVIATIONS) {
            JumpOfU jump[2];
            if constexpr (SETTLES)
                for (int h = 0; h < 2; ++h) jump[h] = JumpOfU(sh.beta[within + 8 * h]);
            store_deviations(d, jump, row, block);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // read only now: there are no registers to hold them
            const Centred u = sh.centred[within + 8 * h];
            apply(d, h, [&](float v) { return OfU::of(line(make_float2(u.slope, u.offset), v)); });
        }
        store_y(d, row, block, RESIDUAL);
    }

    // For a warpgroup whose 64 features are beyond n: publishes zeros, and releases all stages.
    __device__ __forceinline__ void pass_by(int part, int block) {
        if (block < blocks) publish_statistics(part, block, lane_id(), false);
        for (; has(nth); ++nth) {
            for (int step = 0; step < steps; ++step) {
                mbar_wait(&sh.full[s], phase);
                release(s);
                next_stage(step);
            }
            if (RESIDUAL && stores_y(nth)) release_residual();
        }
    }

    __device__ __forceinline__ void run() {
        const int last = tiles() - 1, block = tile(0, rank).block;
        within = 64 * half + 16 * warp + lane / 4;
        if (block * BLOCK_N + 64 * half >= n) return pass_by(own_tiles.part, block);
        float d[ACC];
        for (; has(nth); ++nth) {
            const int row = own_tiles.row(nth);
            float sum[ACC];
            int of_w[2];
            make(d, sum, of_w);
            const int lane = lane_id();  // read again: values that depend on it must not take registers in the mainloop
            if constexpr (BY_LIMBS) {
                load_exponents(w_exponents, int(n), block * BLOCK_N + within, of_w);
                unscale(sum, d, x_exponents, int(m), row * BLOCK_M + Accumulator::first_column(lane), of_w);
            }
            float removed[2] = {};  // the mean that has been subtracted from g
            if (nth <= last) {
                const int rows = CHANNELS_FIRST ? samples().rows_of(row) : min(int(m) - row * BLOCK_M, BLOCK_M);
                const int before = CHANNELS_FIRST ? samples().rows_between(own_tiles.first, row) : nth * BLOCK_M;
                float of_tile[2];
                centre(d, rows, lane, removed, of_tile);
#pragma unroll
                for (int h = 0; h < 2; ++h) so_far[h].merge(removed[h], of_tile[h], before, rows);
                if (nth < last) continue;
                publish_statistics(own_tiles.part, block, lane, true);
                if (REMAT) continue;
            }
            epilogue(d, removed, row, block);
        }
        if (storer) tma_store_wait_read<0>();  // shared memory must outlive the stores that read it
    }
};
