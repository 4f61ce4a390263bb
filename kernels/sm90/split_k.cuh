// With SPLIT_K, the CTAs of a cluster share k. They have SPLIT_K tiles, one below the other: each multiplies all of them over
// its range of k, and what it has of a tile goes to the CTA whose tile it is, through distributed shared memory.
//
// A thread's sums of rows 8 j + ... (Consumer) are 16 bytes for each j, its own in every CTA: whoever receives them works on
// the same two features and, with BLOCK_M / 8 of the j's, on the rows of its own tile. They lie in the ring, which is free
// once the wgmmas of the CTA have read all of its stages: [part][BLOCK_M / 8][CONSUMERS], 16 bytes each. So a CTA receives
// (and sends) 512 PRODUCT_M bytes, its own part among them: the least is (SPLIT_K - 1) / SPLIT_K of it.
#pragma once
#include "sm90/cta.cuh"

constexpr int SENT_BYTES = PRODUCT_ACC * 4 * CONSUMERS;  // to each CTA, by all
static_assert(SPLIT_K == 1 || SENT_BYTES <= STAGES * STAGE_BYTES, "the ring holds what is sent");

// By all consumers of the cluster, with no wgmma of theirs in flight: `of_all` over this CTA's range of k, to d over all of
// it. HighLow are added in their order, so that the bits are always the same.
__device__ __forceinline__ void reduce_scatter(Shared& sh, int rank, const float (&of_all)[PRODUCT_ACC],
                                               float (&d)[ACC]) {
    const int lane = lane_id(), thread = threadIdx.x - (THREADS - CONSUMERS), first = rank / SPLIT_K * SPLIT_K;
    if (lane < SPLIT_K) mbar_arrive_at(&sh.drained, first + lane);
    mbar_wait(&sh.drained, 0);
    const auto place = [&](int part, int j) {
        return sh.stage[0] + ((part * (BLOCK_M / 8) + j) * CONSUMERS + thread) * 16;
    };
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; j++)
#pragma unroll
        for (int part = 0; part < SPLIT_K; part++) {  // in turn, so that all receive at the same time
            const float* e = of_all + Accumulator::at(part * (BLOCK_M / 8) + j, 0, 0);
            send(place(rank % SPLIT_K, j), e[0], e[1], e[2], e[3], &sh.summed, first + part);
        }
    mbar_wait_sent(&sh.summed, 0);
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; j++)
#pragma unroll
        for (int part = 0; part < SPLIT_K; part++) {
            const float4 v = *(const float4*)place(part, j);
            const float e[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& sum = d[Accumulator::at(j, 0, 0) + i];
                sum = part == 0 ? e[i] : sum + e[i];
            }
        }
}
