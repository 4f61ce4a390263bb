// The merger: a warp that turns the statistics of tiles into centre and a of each feature (cta.cuh). The CTAs that have
// tiles of a block of features divide its features: the merger of a CTA merges one share of them, over all rows. In
// MODE_CLUSTER_BATCH a CTA has four such warps, and this is number `which` of MERGERS.
#pragma once
#include "sm90/deferred_epilogue.cuh"

// Merges the statistics of the CTA's nth tile into those of its earlier tiles of the same block (merges_tiles), and
// publishes the result after the last tile. A lane has BLOCK_N / 32 neighbouring features.
__device__ __forceinline__ void Cta::merge_own_tile(Welford (&own)[BLOCK_N / 32], int nth, int row, int block,
                                                    int backoff) const {
    constexpr int EACH = BLOCK_N / 32;
    wait_count(&sh.ready, (nth + 1) * (CONSUMERS / 32), backoff);
    const u64 launch = load_volatile(&sh.launch);
    const int first = EACH * lane_id(), count = part_count(block);
    const Word* words = partial + (size_t(block) * scheduler.rows + row) * BLOCK_N + first;
    Word tile[EACH];
    bool here;
    do {
        here = true;
#pragma unroll
        for (int e = 0; e < EACH; ++e) tile[e] = peek(words + e);
#pragma unroll
        for (int e = 0; e < EACH; ++e) here &= tile[e].launch == launch;
    } while (!here);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        own[e].merge(tile[e].x, tile[e].y, row / count * BLOCK_M, min(int(m) - row * BLOCK_M, BLOCK_M));
        if (row + count >= scheduler.rows)
            publish(words_of(block) + row % count * BLOCK_N + first + e, own[e].mean(), own[e].m2, launch);
    }
}

__device__ __forceinline__ void Cta::merge(int lane, int rank, int which) const {
    const long long count = batches ? load_volatile(batches) + 1 : 1;
    u64 number = 0;  // stays 0 in MODE_CLUSTER_BATCH, which has no words
    if constexpr (MODE != MODE_CLUSTER_BATCH)
        number = p.flags & FLAG_ALONE ? later_than(now()) : agree_on_number(epoch, lane);
#if RANKS
    const Exchange<2> exchange(ranks, nullptr, 0, p.signature);
#endif
    if (which == 0 && lane == 0) {
        sh.launch = number;
#if RANKS
        if (blockIdx.x == 0) exchange.post_header(double(m));
#endif
#if RENORM
        sh.limits = RenormLimits<float>(p, f.renorm, count - 1);
#endif
        sh.momentum =
            p.flags & FLAG_CUMULATIVE ? StatisticsType(1) / StatisticsType(count) : StatisticsType(p.momentum);
#if FEW_ROWS
        sh.inverse_m = 1.0 / double(m);
#endif
        mbar_arrive(&sh.agreed);
        if (batches && blockIdx.x == 0) *batches = count;  // all CTAs that need it have read it
    }
    if (MERGERS > 1) mbar_wait(&sh.agreed, 0);
    __syncwarp();
    const StatisticsType unbiased =
        StatisticsType(m) / StatisticsType(m - 1) * StatisticsType(BY_LIMBS ? M2_OF_LIMBS : 1.0);
    const long long n = this->n;
    const bool tracked = !RANKS && (f.running_mean.code & 7) != KIND_ABSENT;
    Welford own[BLOCK_N / 32];
    int nth = 0;
    for (; has(nth); ++nth) {
        if (MODE == MODE_RECOMPUTE && nth > 0) break;  // all tiles are one part
        const auto [row, block] = tile(nth, rank);
        if (block >= blocks) continue;
        const bool merges_tiles = this->merges_tiles(block);
        const RowParts parts = this->parts(block);
        const int share = parts.share(), lanes = parts.lanes(),
                  first = share * (MODE == MODE_RECOMPUTE ? own_tiles.part
                                   : merges_tiles         ? row % parts.count
                                                          : row);
        const int backoff = MODE == MODE_RECOMPUTE || !has(nth + 1) ? SHORT_BACKOFF : LONG_BACKOFF;
        if (merges_tiles) {
            merge_own_tile(own, nth, row, block, backoff);
            if (row + parts.count < scheduler.rows) continue;  // the CTA has more tiles of this block
        }
        if (first >= BLOCK_N) continue;  // other CTAs merge all features
        const Word* const words = words_of(block);
#pragma unroll 1
        for (int base = which * (32 / lanes); base < share; base += MERGERS * (32 / lanes)) {
            const int lane = lane_id(), member = lane % lanes;
            const int c = first + base + lane / lanes, feature = block * BLOCK_N + c;
            const bool speaks = member == 0 && base + lane / lanes < share && c < BLOCK_N;
            const bool mine = speaks && feature < n, running = mine && tracked;
            // load the arguments before the partial statistics are there
            const Fetched none = {KIND_ABSENT, 0};
            Fetched of_s = none, of_gamma = none, of_beta = none, of_b = none, of_rm = none, of_rv = none;
            if (mine) of_s = f.scale.fetch(feature), of_gamma = f.gamma.fetch(feature), of_beta = f.beta.fetch(feature);
            if (running)
                of_b = f.bias.fetch(feature), of_rm = f.running_mean.fetch(feature),
                of_rv = f.running_var.fetch(feature);
            // wait for this CTA; then, beside a mainloop, for one word of all parts; then for all words
            u64 launch = 0;
#if FEW_ROWS
            for (int half = 0; half < WARPGROUPS; ++half) mbar_wait_sent(&sh.here[half], 0);
            const auto [mean, var] = sh.of_all_rows[min(c, BLOCK_N - 1)];
#else
            float mean, m2;
            if constexpr (MODE == MODE_CLUSTER_BATCH) {
                for (int half = 0; half < WARPGROUPS; ++half) mbar_wait_sent(&sh.here[half], 0);
                merge_feature(Gathered{&sh.gathered[0][min(c, BLOCK_N - 1)]}, parts, 0, 1, mean, m2);
            } else {
                wait_count(&sh.ready, (nth + 1) * (CONSUMERS / 32), backoff);
                launch = load_volatile(&sh.launch);
                if (backoff != SHORT_BACKOFF) await(words + size_t(parts.count - 1) * BLOCK_N, launch, backoff);
                const Published published = {words + min(c, BLOCK_N - 1), launch};
                merge_feature(published, parts, member, lanes, mean, m2);
            }
#endif
#if RANKS
            if (mine) exchange.post_feature(feature, {mean, BY_LIMBS ? m2 * M2_OF_LIMBS : m2});
            continue;
#endif
            const Arguments u = {of_s.or_else(f.number), of_gamma.or_else(1.0f), of_beta.or_else(0.0f)};
#if !FEW_ROWS
            const float var = m2 / float(m);
#endif
            const bool publishes = MODE != MODE_CLUSTER_BATCH && speaks;
#if RENORM
            const Running of_running = {u, of_b.or_else(0.0f), of_rm.or_else(0.0f), of_rv.or_else(1.0f), f.eps};
            const Corrected to_y = {u, of_running, sh.limits, mean, var, f.eps};
#else
            const Arguments& to_y = u;
#endif
            const Merged all = merged_of(mean, var, to_y.slope(var, f.eps), to_y.beta);
            if (publishes) publish_merged(merged, features, size_t(block) * BLOCK_N + c, all, launch);
            if (running) {
                const StatisticsType weight = sh.momentum, s = u.scale;
                const StatisticsType b = of_b.or_else(StatisticsType(0));
                const StatisticsType rm = (1 - weight) * of_rm.or_else(StatisticsType(0)) + weight * (s * (mean + b));
                const StatisticsType rv =
                    (1 - weight) * of_rv.or_else(StatisticsType(0)) + weight * (s * s * var * unbiased);
                store_vector(f.running_mean.at, f.running_mean.code, feature, rm);
                store_vector(f.running_var.at, f.running_var.code, feature, rv);
            }
            if (SAVE_VECTORS && mine)
                store_saved(for_backward.vectors, n, feature, u.scale, u.gamma, var, p.eps,
                            FEW_ROWS ? 0.0 : mean - all.centre, REMAT ? 1.0f : all.unit, all.a, all.offset,
                            to_y.ratio(), to_y.shift());
            if (REMAT && mine) for_backward.vectors[SAVED_G_MEAN * n + feature] = mean;
        }
    }
}

#if RANKS
// The joiner calls this while it waits. It does a piece of a deferred tile if one is ready, else it sleeps.
__device__ __forceinline__ void Cta::epilogue_meanwhile(int backoff) const {
    int piece = -1;
    if (lane_id() == 0) {
        const int next = load_volatile(&sh.ticket);
        if (next < look(&sh.merged_tiles) * DEFERRED_PIECES && atomicCAS(&sh.ticket, next, next + 1) == next)
            piece = next;
    }
    piece = __shfl_sync(~0u, piece, 0);
    if (piece < 0)
        __nanosleep(backoff);
    else
        epilogue_of_deferred_rows(piece, backoff);
}

// The joiner is another warp. For the features that this CTA's merger merges, it computes mean and a from the
// statistics that the mergers of all ranks have posted, and updates the running statistics. The merger never waits for
// other ranks. So no two ranks wait for each other, whatever the order in which their CTAs take tiles.
__device__ __forceinline__ void Cta::join(int lane, int rank) const {
    mbar_wait(&sh.agreed, 0);
    const Exchange<2> exchange(ranks, nullptr, 0, p.signature);
    const u64 launch = load_volatile(&sh.launch);
    // the features [first, end) of a tile's block that this CTA's merger has merged
    struct Share {
        int block, first, end;
    };
    const auto share_of = [&](int nth) -> Share {
        const auto [row, block] = tile(nth, rank);
        const int count = part_count(block);
        if (block >= blocks || (merges_tiles(block) && row + count < scheduler.rows)) return {block, 0, 0};
        const int share = parts(block).share(), first = share * (merges_tiles(block) ? row % count : row);
        return {block, first, min(first + share, BLOCK_N)};
    };
    for (int nth = 0; has(nth); ++nth) {
        const auto [block, first, end] = share_of(nth);
        const int backoff = !has(nth + 1) ? SHORT_BACKOFF : LONG_BACKOFF;
#pragma unroll 1
        for (int base = first; base < end; base += 32) {
            const int c = base + lane_id(), feature = block * BLOCK_N + c;
            const bool speaks = c < end, mine = speaks && feature < n;
            Arguments u = {1.0f, 1.0f, 0.0f};  // it is loaded during the wait
            if (mine) u = f.arguments_of(feature);
#if RENORM
            Running of_running;
            if (mine) of_running = f.running(feature, u);
#endif
            while (!__all_sync(~0u, !mine || exchange.ready(feature))) epilogue_meanwhile(backoff);
            GroupStatistics<float> all = {1.0f, 0.0f, 0.0f, true};
            if (mine) all = exchange.statistics<float>(feature);
            const float var = all.m2 / all.rows * float(BY_LIMBS ? M2_AS_MADE : 1.0);
#if RENORM
            const Corrected to_y = {u, of_running, sh.limits, all.mean, var, f.eps};
#else
            const Arguments& to_y = u;
#endif
            const Merged of_y = merged_of(all.mean, var, to_y.slope(var, f.eps), to_y.beta);
            if (speaks) publish_merged(merged, features, size_t(block) * BLOCK_N + c, of_y, launch);
        }
    }
    if (RENORM) __syncwarp();  // all lanes have read the running statistics
    // Now compute what no tile waits for, for all these features, in float64: the letters are still there.
    const bool tracked = (f.running_mean.code & 7) != KIND_ABSENT;
    const int most = (BLOCK_N - 1) / int(min(p.parts_in_panels, p.parts_alone)) + 1;  // the most features in a share
    const int left = SAVE_DEVIATIONS || tracked ? tiles() * most : 0;
#pragma unroll 1
    for (int i = lane; i < left; i += 32) {
        const auto [block, first, end] = share_of(i / most);
        const int c = first + i % most, feature = block * BLOCK_N + c;
        if (c >= end || feature >= n) continue;
        const double s = f.scale.fetch(feature).or_else(p.number);
        const GroupStatistics<double> all = exchange.statistics<double>(feature);
#if RENORM
        const Running of_running = f.running(feature, f.arguments_of(feature));  // before they are updated
#endif
        if (tracked && all.right) {
            const double b = f.bias.fetch(feature).or_else(0.0), mu = sh.momentum;
            const double rm = f.running_mean.fetch(feature).or_else(0.0);
            const double rv = f.running_var.fetch(feature).or_else(0.0);
            store_vector(f.running_mean.at, f.running_mean.code, feature, (1.0 - mu) * rm + mu * (s * (all.mean + b)));
            store_vector(f.running_var.at, f.running_var.code, feature,
                         (1.0 - mu) * rv + mu * (s * s * (all.m2 / (all.rows - 1.0))));
        }
        if (SAVE_DEVIATIONS) {  // slope and unit of y must be the published ones
            const GroupStatistics<float> rounded = exchange.statistics<float>(feature);
            const float var = rounded.m2 / rounded.rows * float(BY_LIMBS ? M2_AS_MADE : 1.0);
            const Arguments u = f.arguments_of(feature);
            const double gamma = f.gamma.fetch(feature).or_else(1.0);
#if RENORM
            const Corrected to_y = {u, of_running, sh.limits, rounded.mean, var, f.eps};
#else
            const Arguments& to_y = u;
#endif
            const Merged of_y = merged_of(rounded.mean, var, to_y.slope(var, f.eps), to_y.beta);
            store_saved(for_backward.vectors, n, feature, s, gamma, all.m2 / all.rows * (BY_LIMBS ? M2_AS_MADE : 1.0),
                        p.eps, rounded.mean - of_y.centre, of_y.unit, of_y.a, of_y.offset, to_y.ratio(), to_y.shift());
        }
    }
    __syncwarp();
    if (lane == 0) exchange.leave(gridDim.x);
}
#endif
