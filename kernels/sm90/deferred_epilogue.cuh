// The deferred epilogue: warps turn the deviations of deferred tiles into y, beside the mainloop of later tiles.
#pragma once
#include "sm90/cta.cuh"

// Loads the coefficients of y = f(a (d + tile's centre - centre) + offset) for the VEC_Y features of a lane's columns,
// once all features of the tile are merged. A lane computes the coefficients of EACH neighbouring features, with all
// its words in flight at once; shuffles distribute them.
__device__ inline void Cta::load_epilogue(Epilogue (&coef)[VEC_Y], int row, int block, int backoff) const {
    const u64 launch = load_volatile(&sh.launch);
    constexpr int EACH = BLOCK_N / 32;
    const int lane = lane_id(), first = block * BLOCK_N + EACH * lane;
    const Word *of_all = merged + first,
               *of_tile = partial + (size_t(block) * scheduler.rows + row) * BLOCK_N + EACH * lane;
    Fetched beta[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        beta[e] = !TWO_WORDS && first + e < n ? f.beta.fetch(first + e) : Fetched{KIND_ABSENT, 0};
    Word all[EACH], tile[EACH], units[EACH];
    while (true) {
        bool here = true;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            all[e] = peek(of_all + e), tile[e] = peek(of_tile + e);
            if (TWO_WORDS) units[e] = peek(of_all + features + e);
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            here &= all[e].launch == launch && tile[e].launch == launch;
            if (TWO_WORDS) here &= units[e].launch == launch;
        }
        if (__all_sync(~0u, here)) break;
        __nanosleep(backoff);
    }
    Epilogue made[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int rows = min(int(m) - row * BLOCK_M, BLOCK_M);
        const float unit_of = deviation_unit(tile[e].y, rows), of_tile = centre_of(tile[e].x, tile[e].y, float(rows));
        const float unit = TWO_WORDS ? units[e].x : 1.0f, offset = TWO_WORDS ? units[e].y : beta[e].or_else(0.0f);
        made[e] = epilogue_of(unit_of, of_tile - all[e].x, all[e].y, unit, offset);
    }
#pragma unroll
    for (int e = 0; e < VEC_Y; ++e) {
        const int from = lane % (BLOCK_N / VEC_Y) * (VEC_Y / EACH) + e / EACH;
        const auto given = [&](float2 of) {
            return make_float2(__shfl_sync(~0u, of.x, from), __shfl_sync(~0u, of.y, from));
        };
#if SAVE_DEVIATIONS
        coef[e].to_deviation = given(made[e % EACH].to_deviation);
        if constexpr (SETTLES) coef[e].jump = JumpOfU(__shfl_sync(~0u, made[e % EACH].jump.from, from));
#endif
        coef[e].to_y = given(made[e % EACH].to_y);
    }
}

// Step 5 of training. A piece has DEFERRED_ROWS rows; `piece` is its number among those of all tiles of this CTA but
// the last. A ticket hands the pieces out. One warp does a piece alone: no warp waits for another.
__device__ inline void Cta::epilogue_of_deferred_rows(int piece, int backoff) const {
    const int nth = piece / DEFERRED_PIECES;
    const auto [row, block] = tile(nth, cluster_rank());
    if (block >= blocks) return;
    // wait first for this CTA's stores, then for the word that is merged last, then for all words: polling must not
    // slow down the accesses of others to L2
    for (int half = 0; half < WARPGROUPS; ++half) wait_count(&sh.stored[half], nth + 1, backoff);
    if (look(&sh.merged_tiles) <= nth)
        await(merged + size_t(block + 1) * BLOCK_N - 1, load_volatile(&sh.launch), backoff);
    constexpr int LANES_PER_ROW = BLOCK_N / VEC_Y, STEP = 32 / LANES_PER_ROW;  // STEP: rows of an access
    // accesses; coefficients of deviations, and residuals, take the other registers
    constexpr int BATCH = (SAVE_DEVIATIONS ? 4 : 8) / (1 + RESIDUAL);
    using Words = uint4[BATCH * (1 + RESIDUAL)];  // deviations, then the residual
    const int lane = lane_id(), feature = block * BLOCK_N + lane % LANES_PER_ROW * VEC_Y;
    const int first = row * BLOCK_M + piece % DEFERRED_PIECES * DEFERRED_ROWS + lane / LANES_PER_ROW;
    // in accesses
    int to_read = feature < n ? (min(int(m) - first, DEFERRED_ROWS) + STEP - 1) / STEP : 0, to_write = to_read;
    const size_t step = STEP * y_pitch, deviations_step = STEP * p.ld_deviations * Y_BYTES;
    char *from = y + size_t(first) * y_pitch + size_t(feature) * Y_BYTES, *to = from;
    char* deviations_at = for_backward.deviations + (size_t(first) * p.ld_deviations + size_t(feature)) * Y_BYTES;
#if RESIDUAL
    const char* from_residual = residual + (size_t(first) * p.residual_row + size_t(feature)) * Y_BYTES;
#endif
    // bypass L1, which might hold older lines
    const auto read = [&](Words& d) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i, from += step)
            if (i < to_read) d[i] = __ldcg(reinterpret_cast<const uint4*>(from));
#if RESIDUAL
#pragma unroll
        for (int i = 0; i < BATCH; ++i, from_residual += STEP * p.residual_row * Y_BYTES)
            if (i < to_read) d[BATCH + i] = __ldcg(reinterpret_cast<const uint4*>(from_residual));
#endif
        to_read -= BATCH;
    };
    Epilogue coef[VEC_Y];
    const auto write = [&](const Words& d) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i, to += step, deviations_at += deviations_step) {
            uint4 of_y, of_deviations;
            apply_epilogue(d[i], coef, of_y, of_deviations);
#if RESIDUAL
            const uint4& of = d[BATCH + i];
            of_y = make_uint4(add_residual(of_y.x, of.x), add_residual(of_y.y, of.y), add_residual(of_y.z, of.z),
                              add_residual(of_y.w, of.w));
#endif
            if (i < to_write) {
                *reinterpret_cast<uint4*>(to) = of_y;
                if constexpr (SAVE_DEVIATIONS) *reinterpret_cast<uint4*>(deviations_at) = of_deviations;
            }
        }
        to_write -= BATCH;
    };
    Words even = {}, odd = {};  // one batch is loaded while the other is used
    read(even);
    load_epilogue(coef, row, block, backoff);
    if (lane == 0) atomicMax(&sh.merged_tiles, nth + 1);
#pragma unroll 1
    for (int r = 0; r < DEFERRED_ROWS / STEP; r += 2 * BATCH) {
        read(odd);
        write(even);
        read(even);
        write(odd);
    }
}

__device__ inline void Cta::epilogue_of_deferred_tiles(int backoff) const {
    const int pieces = (tiles() - 1) * DEFERRED_PIECES;
    while (true) {
        int piece;
        if (lane_id() == 0) piece = atomicAdd(&sh.ticket, 1);
        piece = __shfl_sync(~0u, piece, 0);
        if (piece >= pieces) break;
        epilogue_of_deferred_rows(piece, backoff);
    }
}

// Loads the arguments that the consumers need for the epilogue of the CTA's last tile. One warp calls this.
__device__ __forceinline__ void Cta::load_last_tile_arguments(int lane) const {
    const auto [row, block] = tile(tiles() - 1, cluster_rank());
#pragma unroll
    for (int c = lane; c < BLOCK_N; c += 32)
        if (block * BLOCK_N + c < n) {
            if constexpr (LOADS_BETA)
                sh.beta[c] = f.beta.fetch(block * BLOCK_N + c).or_else(0.0f);
            else
                sh.arguments[c] = f.arguments_of(block * BLOCK_N + c);
#if RENORM
            if constexpr (MODE == MODE_CLUSTER_BATCH)
                sh.running[c] = f.running(block * BLOCK_N + c, f.arguments_of(block * BLOCK_N + c));
#endif
        }
    mbar_arrive(&sh.arguments_ready);
}
