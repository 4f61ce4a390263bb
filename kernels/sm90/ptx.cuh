// PTX instructions of forward_sm90, one function each: TMA with multicast, cluster ranks, counters in shared memory.
#pragma once
#include "sm90/config.cuh"
#include "common/tma.cuh"

// volatile: each role reads these numbers again, so that no register holds them across roles
__device__ __forceinline__ int lane_id() {
    int l;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(l));
    return l;
}
__device__ __forceinline__ int cluster_id() {
    int c;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(c));
    return c / CLUSTER_CTAS;
}
__device__ __forceinline__ int cluster_rank() {
    int r = 0;
    if constexpr (CLUSTER_CTAS > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// which of the SPLIT_K ranges of k
__device__ __forceinline__ int cluster_part() { return SPLIT_K > 1 ? cluster_rank() % SPLIT_K : 0; }

// All threads of a cluster wait for each other. Threads of one CTA then see each other's writes. (A release at cluster
// scope would cost every warp a GPU fence.)
__device__ __forceinline__ void cluster_begin() {
    __syncthreads();
    if constexpr (CLUSTER_CTAS > 1) cluster_arrive(), cluster_wait();
}

// waits for the four warps of a consumer warpgroup
__device__ __forceinline__ void warpgroup_sync(int half) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
}

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box. With ALL the box goes to the same place, and counts at the same barrier, in every CTA that has a bit in
// to_ctas. DEEP: the map has a third dimension, the limb or the sample.
#define TMA_LOAD(DIMENSIONS, COORDINATES, MULTICAST, MASK)                                                         \
    asm volatile("cp.async.bulk.tensor." DIMENSIONS                                                                \
                 ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" MULTICAST " [%0], [%1, {" COORDINATES \
                 "}], [%2]" MASK ";" ::"r"(smem(to)),                                                              \
                 "l"(map), "r"(smem(bar)), "r"(x), "r"(y), "r"(z), "h"(to_ctas)                                    \
                 : "memory")
template <bool ALL, bool DEEP = MATRICES == 2>
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, u64* bar, int x, int y, int z,
                                         short to_ctas = 0) {
    if constexpr (!DEEP && !ALL) TMA_LOAD("2d", "%3, %4", "", "");
    if constexpr (!DEEP && ALL) TMA_LOAD("2d", "%3, %4", ".multicast::cluster", ", %6");
    if constexpr (DEEP && !ALL) TMA_LOAD("3d", "%3, %4, %5", "", "");
    if constexpr (DEEP && ALL) TMA_LOAD("3d", "%3, %4, %5", ".multicast::cluster", ", %6");
}

// Counters in shared memory. A warp adds 1 after its writes (release); a warp that has seen the count may read what was
// written (acquire).
__device__ __forceinline__ void count_up(int* counter) {
    asm volatile("red.release.cta.shared::cta.add.s32 [%0], 1;" ::"r"(smem(counter)) : "memory");
}

// The same without ordering: a hint that it is worth looking.
__device__ __forceinline__ void hint(int* counter) {
    asm volatile("red.relaxed.cta.shared::cta.add.s32 [%0], 1;" ::"r"(smem(counter)) : "memory");
}

__device__ __forceinline__ int look(const int* counter) {
    int n;
    asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(n) : "r"(smem(counter)) : "memory");
    return n;
}

__device__ __forceinline__ void wait_count(const int* counter, int least, int backoff) {
    while (look(counter) < least) __nanosleep(backoff);
}
