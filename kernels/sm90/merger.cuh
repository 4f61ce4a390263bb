// The merger: a warp that turns the statistics of tiles into mean and a (cta.cuh) of each feature. The tiles of a block
// of features share its features out: a CTA's merger merges one share, over all rows. merge_training, merge_recompute
// and merge_cluster_batch are its three forms, one for each mode that trains; the last one is four warps.
#pragma once
#include "sm90/deferred_epilogue.cuh"

// ---- what the three have in common -----------------------------------------------------------------------------------

// The first thing, by one lane of a CTA: tells the launch's number, and the weight of the new running statistics, and
// counts the batch.
__device__ __forceinline__ void Cta::begin_training(u64 number, long long count) const {
    sh.launch = number;
    sh.momentum = p.flags & FLAG_CUMULATIVE ? (StatisticsType)1 / (StatisticsType)count : (StatisticsType)p.momentum;
    mbar_arrive(&sh.agreed);
    if (batches && blockIdx.x == 0) *batches = count;  // all CTAs that need it have read it
}

// One feature, in the hands of the merger's lanes that share it.
struct MergedFeature {
    int c, feature;     // its number in the block, and among all
    bool speaks, mine;  // this lane acts for the feature; and the feature is there
    bool tracked;       // and it has running statistics
    Fetched scale, gamma, beta, bias, running_mean, running_var;
};

// Asks for the arguments of a feature: they travel while its statistics are not there yet.
__device__ __forceinline__ MergedFeature Cta::fetch_feature(int block, int c, bool speaks, bool tracked) const {
    const Fetched none = {KIND_ABSENT, 0};
    MergedFeature of = {c, block * BLOCK_N + c, speaks, false, false, none, none, none, none, none, none};
    of.mine = speaks && of.feature < n;
    of.tracked = of.mine && tracked;
    if (of.mine) {
        of.scale = fetch(f.scale, f.scale_code, of.feature);
        of.gamma = fetch(f.gamma, f.gamma_code, of.feature);
        of.beta = fetch(f.beta, f.beta_code, of.feature);
    }
    if (of.tracked) {
        of.bias = fetch(f.bias, f.bias_code, of.feature);
        of.running_mean = fetch(f.running_mean, f.running_mean_code, of.feature);
        of.running_var = fetch(f.running_var, f.running_var_code, of.feature);
    }
    return of;
}

// All that follows from a feature's mean and M2 over all rows: what the epilogue takes (published, unless each CTA
// merges for itself), the running statistics, and what a backward needs.
__device__ __forceinline__ void Cta::use_statistics(const MergedFeature& of, int block, float mean, float m2,
                                                    u64 launch, StatisticsType unbiased) const {
    const Affine u = {of.scale.or_else(f.number), of.gamma.or_else(1.f), of.beta.or_else(0.f)};
    const float var = m2 / (float)m;
    if (MODE != MODE_CLUSTER_BATCH && of.speaks) {
        publish(merged + (size_t)block * BLOCK_N + of.c, mean, u.slope(var, f.eps), launch);
        if (SAVE_DEVIATIONS && IN_UNITS)
            publish(merged + features + (size_t)block * BLOCK_N + of.c, deviation_unit(var, 1), 0.f, launch);
    }
    if (of.tracked) {
        const StatisticsType weight = sh.momentum, s = u.scale;
        const StatisticsType b = of.bias.or_else((StatisticsType)0);
        const StatisticsType old_mean = of.running_mean.or_else((StatisticsType)0);
        const StatisticsType old_var = of.running_var.or_else((StatisticsType)0);
        store_vector(f.running_mean, f.running_mean_code, of.feature,
                     (1 - weight) * old_mean + weight * (s * (mean + b)));
        store_vector(f.running_var, f.running_var_code, of.feature,
                     (1 - weight) * old_var + weight * (s * s * var * unbiased));
    }
    if (SAVE_DEVIATIONS && of.mine)
        store_saved(for_backward.vectors, n, of.feature, u.scale, u.gamma, var, p.eps, deviation_unit(var, 1),
                    u.slope(var, f.eps), u.beta);
}

// The features [first, first + size) of a block, each of which `lanes` neighbouring lanes merge together: the share of
// whoever published part `part` of the rows.
struct Share {
    int block, first, size, lanes;
};

// Merges a share; a CTA has MERGERS warps for it, and this is number `warp`. statistics_of(c, member, mean, m2) gives
// the statistics of feature c to its lanes once they are there; use(feature, mean, m2) is called by each of them.
template <typename StatisticsOf, typename Use>
__device__ __forceinline__ void Cta::merge_share(const Share& share, int warp, bool tracked,
                                                 const StatisticsOf& statistics_of, const Use& use) const {
    const int lanes = share.lanes;
#pragma unroll 1
    for (int base = warp * (32 / lanes); base < share.size; base += MERGERS * (32 / lanes)) {
        const int lane = lane_id(), member = lane % lanes, c = share.first + base + lane / lanes;
        const bool speaks = member == 0 && base + lane / lanes < share.size && c < BLOCK_N;
        const MergedFeature of = fetch_feature(share.block, c, speaks, tracked);
        float mean, m2;
        statistics_of(min(c, BLOCK_N - 1), member, mean, m2);
        use(of, mean, m2);
    }
}

// What M2 / m is multiplied by for the running variance.
__device__ __forceinline__ StatisticsType Cta::unbiased() const {
    return (StatisticsType)m / (StatisticsType)(m - 1) * (StatisticsType)(BY_LIMBS ? M2_OF_LIMBS : 1.0);
}

__device__ __forceinline__ bool Cta::has_running_statistics() const { return (f.running_mean_code & 7) != KIND_ABSENT; }

// The statistics of a feature over all parts, which CTAs publish in the workspace. It looks first in this CTA, then at
// one word of all, the last part's, and then at all: polling must not crowd others out of L2. Returns the launch's
// number.
__device__ __forceinline__ u64 Cta::merge_published(int nth, const Word* words, const RowParts& parts, int c,
                                                    int member, int backoff, float& mean, float& m2) const {
    wait_count(&sh.ready, (nth + 1) * (CONSUMERS / 32), backoff);
    const u64 launch = *(volatile u64*)&sh.launch;
    await(words + (size_t)(parts.count - 1) * BLOCK_N, launch, backoff);
    merge_feature(Published{words + c, launch}, parts, member, parts.lanes(), mean, m2);
    return launch;
}

// ---- MODE_TRAINING ---------------------------------------------------------------------------------------------------

// Merges the statistics of the CTA's nth tile into those of its earlier tiles of the same block (merges_tiles), and
// publishes them after the last of these. A lane has BLOCK_N / 32 neighbouring features.
__device__ __forceinline__ void Cta::merge_tile(Welford (&own)[BLOCK_N / 32], int nth, int row, int block,
                                                int backoff) const {
    constexpr int EACH = BLOCK_N / 32;
    wait_count(&sh.ready, (nth + 1) * (CONSUMERS / 32), backoff);
    const u64 launch = *(volatile u64*)&sh.launch;
    const int first = EACH * lane_id(), count = part_count(block);
    const Word* words = partial + ((size_t)block * scheduler.rows + row) * BLOCK_N + first;
    Word tile[EACH];
    bool here;
    do {
        here = true;
#pragma unroll
        for (int e = 0; e < EACH; e++) tile[e] = peek(words + e);
#pragma unroll
        for (int e = 0; e < EACH; e++) here &= tile[e].launch == launch;
    } while (!here);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        own[e].merge(tile[e].x, tile[e].y, row / count * BLOCK_M, min((int)m - row * BLOCK_M, BLOCK_M));
        if (row + count >= scheduler.rows)
            publish(words_of(block) + row % count * BLOCK_N + first + e, own[e].mean(), own[e].m2, launch);
    }
}

// With RANKS it posts the statistics of this rank's rows, and goes on: the joiner waits for those of the others.
__device__ __forceinline__ void Cta::merge_training(int lane, int rank) const {
    const long long count = batches ? *(volatile long long*)batches + 1 : 1;
    const u64 number = p.flags & FLAG_ALONE ? later_than(now()) : agree_on_number(epoch, lane);
#if RANKS
    const Exchange exchange(ranks, nullptr, 0, p.signature);
#endif
    if (lane == 0) {
#if RANKS
        if (blockIdx.x == 0) exchange.post_header((double)m);
#endif
        begin_training(number, count);
    }
    __syncwarp();
    [[maybe_unused]] const StatisticsType unbiased = this->unbiased();
    const bool tracked = !RANKS && has_running_statistics();
    Welford own[BLOCK_N / 32];  // of the CTA's tiles of a block
    int nth = 0;
    for (int i; (i = tile(nth)) < scheduler.count(); nth++) {
        const auto [row, block] = scheduler.at(i, rank);
        if (block >= blocks) continue;
        const bool several = merges_tiles(block);
        const RowParts parts = this->parts(block);
        const int size = parts.share();
        const Share share = {block, size * (several ? row % parts.count : row), size, parts.lanes()};
        const int backoff = i + clusters >= scheduler.count() ? SHORT_BACKOFF : LONG_BACKOFF;
        if (several) {
            merge_tile(own, nth, row, block, backoff);
            if (row + parts.count < scheduler.rows) continue;  // more of its tiles come
        }
        if (share.first >= BLOCK_N) continue;  // the others merge all there are
        const Word* const words = words_of(block);
        u64 launch;
        const auto statistics_of = [&](int c, int member, float& mean, float& m2) {
            launch = merge_published(nth, words, parts, c, member, backoff, mean, m2);
        };
#if RANKS
        merge_share(share, 0, tracked, statistics_of, [&](const MergedFeature& of, float mean, float m2) {
            if (of.mine) exchange.post_feature(of.feature, mean, BY_LIMBS ? m2 * M2_OF_LIMBS : m2);
        });
#else
        merge_share(share, 0, tracked, statistics_of, [&](const MergedFeature& of, float mean, float m2) {
            use_statistics(of, block, mean, m2, launch, unbiased);
        });
#endif
    }
}

// ---- MODE_RECOMPUTE --------------------------------------------------------------------------------------------------

// All tiles of the CTA are one part of the rows; its number is the row of the first tile.
__device__ __forceinline__ void Cta::merge_recompute(int lane, int rank) const {
    const long long count = batches ? *(volatile long long*)batches + 1 : 1;
    const u64 number = p.flags & FLAG_ALONE ? later_than(now()) : agree_on_number(epoch, lane);
    if (lane == 0) begin_training(number, count);
    __syncwarp();
    const StatisticsType unbiased = this->unbiased();
    const auto [part, block] = scheduler.at(cluster_id(), rank);
    const RowParts parts = this->parts(block);
    const int size = parts.share();
    const Share share = {block, size * part, size, parts.lanes()};
    if (block >= blocks || share.first >= BLOCK_N) return;
    const Word* const words = words_of(block);
    u64 launch;
    merge_share(
        share, 0, has_running_statistics(),
        [&](int c, int member, float& mean, float& m2) {
            launch = merge_published(0, words, parts, c, member, SHORT_BACKOFF, mean, m2);
        },
        [&](const MergedFeature& of, float mean, float m2) { use_statistics(of, block, mean, m2, launch, unbiased); });
}

// ---- MODE_CLUSTER_BATCH ----------------------------------------------------------------------------------------------

// The CTAs that have rows share the block's features out, for the running statistics and for what a backward needs; the
// consumers merge for y by themselves. `warp` is this one's number among the MERGERS.
__device__ __forceinline__ void Cta::merge_cluster_batch(int lane, int rank, int warp) const {
    const long long count = batches ? *(volatile long long*)batches + 1 : 1;
    if (warp == 0 && lane == 0) begin_training(0, count);  // no words, no number
    mbar_wait(&sh.agreed, 0);
    __syncwarp();
    const StatisticsType unbiased = this->unbiased();
    const auto [row, block] = scheduler.at(cluster_id(), rank);
    const RowParts parts = this->parts(block);
    const int size = parts.share();
    const Share share = {block, size * row, size, parts.lanes()};
    if (block >= blocks || share.first >= BLOCK_N) return;
    merge_share(
        share, warp, has_running_statistics(),
        [&](int c, int, float& mean, float& m2) {
            for (int half = 0; half < WARPGROUPS; half++) mbar_wait_sent(&sh.here[half], 0);
            merge_feature(Gathered{&sh.gathered[0][c]}, parts, 0, 1, mean, m2);
        },
        [&](const MergedFeature& of, float mean, float m2) { use_statistics(of, block, mean, m2, 0, unbiased); });
}

// ---- ranks: the joiner -----------------------------------------------------------------------------------------------

#if RANKS
// What the joiner does while it waits.
__device__ __forceinline__ void Cta::epilogue_meanwhile(int backoff) const {
    int unit = -1;
    if (lane_id() == 0) {
        const int next = *(volatile int*)&sh.ticket;
        if (next < look(&sh.merged_tiles) * DEFERRED_PIECES && atomicCAS(&sh.ticket, next, next + 1) == next)
            unit = next;
    }
    unit = __shfl_sync(0xFFFFFFFF, unit, 0);
    if (unit < 0)
        __nanosleep(backoff);
    else
        epilogue_of_deferred_rows(unit, backoff);
}

// The joiner, another warp: of what the mergers of all ranks have posted it makes one mean and one a for the features
// that this CTA's merger merges, and updates the running statistics. The merger never waits for other ranks, so that no
// two ranks wait for each other, in whatever order their CTAs take their tiles.
__device__ __forceinline__ void Cta::join(int lane, int rank) const {
    mbar_wait(&sh.agreed, 0);
    const Exchange exchange(ranks, nullptr, 0, p.signature);
    const u64 launch = *(volatile u64*)&sh.launch;
    // the features [first, end) of a block: the share that this CTA's merger merged when it had tile i
    struct MergedShare {
        int block, first, end;
    };
    const auto merged_at = [&](int i) -> MergedShare {
        const auto [row, block] = scheduler.at(i, rank);
        const int count = part_count(block);
        if (block >= blocks || (merges_tiles(block) && row + count < scheduler.rows)) return {block, 0, 0};
        const int size = parts(block).share(), first = size * (merges_tiles(block) ? row % count : row);
        return {block, first, min(first + size, BLOCK_N)};
    };
    for (int i, nth = 0; (i = tile(nth)) < scheduler.count(); nth++) {
        const auto [block, first, end] = merged_at(i);
        const int backoff = i + clusters >= scheduler.count() ? SHORT_BACKOFF : LONG_BACKOFF;
#pragma unroll 1
        for (int base = first; base < end; base += 32) {
            const int c = base + lane_id(), feature = block * BLOCK_N + c;
            const bool speaks = c < end, mine = speaks && feature < n;
            Affine u = {1.f, 1.f, 0.f};  // on its way meanwhile
            if (mine) u = f.affine(feature);
            while (!__all_sync(0xFFFFFFFF, !mine || exchange.ready(feature))) epilogue_meanwhile(backoff);
            GroupStatistics<float> all = {1.f, 0.f, 0.f, true};
            if (mine) all = exchange.statistics<float>(feature);
            const float var = all.m2 / all.rows * (float)(BY_LIMBS ? M2_AS_MADE : 1.0);
            if (speaks) publish(merged + (size_t)block * BLOCK_N + c, all.mean, u.slope(var, f.eps), launch);
            if (SAVE_DEVIATIONS && IN_UNITS && speaks)
                publish(merged + features + (size_t)block * BLOCK_N + c, deviation_unit(var, 1), 0.f, launch);
        }
    }
    // What no tile waits for, of all these features, in float64: the letters are still there.
    const bool tracked = (f.running_mean_code & 7) != KIND_ABSENT;
    const int most = (BLOCK_N - 1) / (int)min(p.parts_in_panels, p.parts_alone) + 1;  // features of a tile
    const int left = SAVE_DEVIATIONS || tracked ? tiles() * most : 0;
#pragma unroll 1
    for (int i = lane; i < left; i += 32) {
        const auto [block, first, end] = merged_at(tile(i / most));
        const int c = first + i % most, feature = block * BLOCK_N + c;
        if (c >= end || feature >= n) continue;
        const double s = fetch(f.scale, f.scale_code, feature).or_else(p.number);
        const GroupStatistics<double> all = exchange.statistics<double>(feature);
        if (tracked && all.right) {
            const double b = fetch(f.bias, f.bias_code, feature).or_else(0.0), mu = sh.momentum;
            const double rm = fetch(f.running_mean, f.running_mean_code, feature).or_else(0.0);
            const double rv = fetch(f.running_var, f.running_var_code, feature).or_else(0.0);
            store_vector(f.running_mean, f.running_mean_code, feature, (1.0 - mu) * rm + mu * (s * (all.mean + b)));
            store_vector(f.running_var, f.running_var_code, feature,
                         (1.0 - mu) * rv + mu * (s * s * (all.m2 / (all.rows - 1.0))));
        }
        if (SAVE_DEVIATIONS) {  // y's slope and unit, as they were published
            const GroupStatistics<float> rounded = exchange.statistics<float>(feature);
            const float var = rounded.m2 / rounded.rows * (float)(BY_LIMBS ? M2_AS_MADE : 1.0);
            const Affine u = f.affine(feature);
            const double gamma = fetch(f.gamma, f.gamma_code, feature).or_else(1.0);
            store_saved(for_backward.vectors, n, feature, s, gamma, all.m2 / all.rows * (BY_LIMBS ? M2_AS_MADE : 1.0),
                        p.eps, deviation_unit(var, 1), u.slope(var, f.eps), u.beta);
        }
    }
    __syncwarp();
    if (lane == 0) exchange.leave(gridDim.x);
}
#endif
