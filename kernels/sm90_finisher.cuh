// The finishers: warps that turn the deviations of parked tiles into y, beside the main loop of later tiles.
#pragma once
#include "sm90_cta.cuh"

// Step 5. Units of rows are handed out by a ticket, over all tiles of this CTA but the last, in their order.
__device__ inline void Cta::finish_unit(int unit, int nap) const {
    const u64 launch = *(volatile u64*)&sh.launch;  // read anew rather than held in registers, here and below
    constexpr int ACROSS = BLOCK_N / CHUNK;         // lanes along a row
    const int lane = lane_id(), within = lane % ACROSS * CHUNK;  // first of this lane's columns in the block
    const auto [row, block] = order.at(tile(unit / UNITS), cluster_rank());
    const int feature = block * BLOCK_N + within;
    // The first unit's warp lays out y = f(a (d + tile mean - mean) + beta) for all.
    if (unit % UNITS == 0) {
        if (block < blocks) {
            // first in this CTA, then one word of all, then all: polling must not crowd the main loop out of L2
            for (int half = 0; half < WARPGROUPS; half++) wait_count(&sh.stored[half], unit / UNITS + 1, nap);
            await(merged + (size_t)block * BLOCK_N, launch, nap);
        }
        wait_count(&sh.finished, unit, SHORT_NAP);  // the last tile's coefficients are no longer read
#pragma unroll 1
        for (int i = lane; i < BLOCK_N; i += 32) {
            if (block * BLOCK_N + i < n) {
                const Merged all = await_merged(merged, features, (size_t)block * BLOCK_N + i, launch);
                const float2 own = await(partial + ((size_t)block * order.rows + row) * BLOCK_N + i, launch);
                const float unit_of = deviation_unit(own.y, min((int)m - row * BLOCK_M, BLOCK_M));
                const float b = fetch(f.beta, f.beta_code, block * BLOCK_N + i).or_else(0.f);
                const float shift = own.x - all.mean;
#if KEEP
                sh.coef[i] = {make_float2(unit_of / all.unit, shift / all.unit), make_float2(all.a * all.unit, b)};
#else
                sh.coef[i] = {make_float2(all.a * unit_of, fmaf(all.a, shift, b))};
#endif
            }
        }
        __syncwarp();
        if (lane == 0) count_up(&sh.laid);
    } else {
        wait_count(&sh.laid, unit / UNITS + 1, nap);
    }
    Finish coef[CHUNK];
#pragma unroll
    for (int e = 0; e < CHUNK; e++) coef[e] = sh.coef[within + e];
    // deviations are read past L1, which might hold older lines
    constexpr int STEP = 32 / ACROSS, BATCH = KEEP ? 4 : 8;  // KEEP's coefficients take the other registers
    const int first = row * BLOCK_M + unit % UNITS * UNIT + lane / ACROSS;
    const int end = feature < n ? (int)m - first : 0;
    char* at = y + (size_t)first * y_pitch + (size_t)feature * Y_BYTES;
    const size_t step = STEP * y_pitch;
    const size_t kept_pitch = p.ld_kept * Y_BYTES;
    char* keep_at = kept.deviations + (size_t)first * kept_pitch + (size_t)feature * Y_BYTES;
    auto finish_row = [&](int i, uint4 d) {  // i rows of the warp after the first
        uint4 of_y, of_kept;
        finish(d, coef, of_y, of_kept);
        *(uint4*)(at + i * step) = of_y;
        if constexpr (KEEP) *(uint4*)(keep_at + i * (STEP * kept_pitch)) = of_kept;
    };
    if (end >= UNIT) {
#pragma unroll 1
        for (int r = 0; r < UNIT / STEP; r += BATCH) {
            uint4 d[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) d[i] = __ldcg((const uint4*)(at + (r + i) * step));
#pragma unroll
            for (int i = 0; i < BATCH; i++) finish_row(r + i, d[i]);
        }
    } else {
#pragma unroll 1
        for (int r = 0; r * STEP < min(end, UNIT); r++) finish_row(r, __ldcg((const uint4*)(at + r * step)));
    }
    __syncwarp();
    if (lane == 0) count_up(&sh.finished);
}

__device__ inline void Cta::finish_tiles(int nap) const {
    const int finishing = (tiles() - 1) * UNITS;
    while (true) {
        int unit;
        if (lane_id() == 0) unit = atomicAdd(&sh.ticket, 1);
        unit = __shfl_sync(0xFFFFFFFF, unit, 0);
        if (unit >= finishing) break;
        finish_unit(unit, nap);
    }
}

// What the consumers need for the CTA's last tile, which they finish themselves. By one warp.
__device__ __forceinline__ void Cta::lay_out_last_tile(int lane) const {
    const auto [row, block] = order.at((tiles() - 1) * clusters + cluster_id(), cluster_rank());
#pragma unroll
    for (int c = lane; c < BLOCK_N; c += 32)
        if (block * BLOCK_N + c < n) {
            if constexpr (LAYS_BETA)
                sh.beta[c] = fetch(f.beta, f.beta_code, block * BLOCK_N + c).or_else(0.f);
            else
                sh.arguments[c] = f.affine(block * BLOCK_N + c);
        }
    mbar_arrive(&sh.laid_out);
}
