// Split k: the CTAs of a cluster have SPLIT_K tiles, one below the other. Each CTA multiplies all of them over its own
// range of k. It then sends its partial sums of each tile to the CTA that has this tile, through distributed shared
// memory (a reduce-scatter).
//
// A thread sends elements of its accumulator to the thread with the same number in the other CTA, which works on the
// same two features. The elements of every 8 rows (j, accumulator.cuh) are 16 bytes, and a tile has BLOCK_M / 8 of
// these. They arrive in the pipeline's memory, as [part][BLOCK_M / 8][CONSUMERS] of 16 bytes, after the CTA's wgmmas
// have read all stages. A CTA keeps its own part in registers. It receives and sends 512 (PRODUCT_M - BLOCK_M) bytes,
// the minimum.
#pragma once
#include "sm90/cta.cuh"

constexpr int SENT_BYTES = (PRODUCT_ACC - ACC) * 4 * CONSUMERS;  // bytes that the other CTAs send to each CTA
static_assert(SPLIT_K == 1 || PRODUCT_ACC * 4 * CONSUMERS <= STAGES * STAGE_BYTES,
              "the pipeline has room for all parts");

// All consumers of the cluster call this, with no wgmma in flight. `of_all` has the sums over this CTA's range of k; d
// becomes the sums over all of k. Parts are added in the order of their numbers, so that the bits are always the same.
__device__ __forceinline__ void reduce_scatter(Shared& sh, int rank, const float (&of_all)[PRODUCT_ACC],
                                               float (&d)[ACC]) {
    const int lane = lane_id(), thread = threadIdx.x - (THREADS - CONSUMERS), own = rank % SPLIT_K;
    const int first = rank - own;
    if (lane < SPLIT_K) mbar_arrive_at(&sh.drained, first + lane);
    mbar_wait(&sh.drained, 0);
    const auto place = [&](int part, int j) {
        return sh.stage[0] + ((part * (BLOCK_M / 8) + j) * CONSUMERS + thread) * 16;
    };
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j)
#pragma unroll
        for (int part = 0; part < SPLIT_K; ++part) {  // alternate, so that all CTAs receive at the same time
            const float* e = of_all + Accumulator::at(part * (BLOCK_M / 8) + j, 0, 0);
            if (part != own) send(place(own, j), e[0], e[1], e[2], e[3], &sh.summed, first + part);
        }
    mbar_wait_sent(&sh.summed, 0);
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j)
#pragma unroll
        for (int part = 0; part < SPLIT_K; ++part) {
            const float* mine = of_all + Accumulator::at(part * (BLOCK_M / 8) + j, 0, 0);
            float4 v = make_float4(mine[0], mine[1], mine[2], mine[3]);
            if (part != own) v = *reinterpret_cast<const float4*>(place(part, j));
            const float e[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& sum = d[Accumulator::at(j, 0, 0) + i];
                sum = part == 0 ? e[i] : sum + e[i];
            }
        }
}
