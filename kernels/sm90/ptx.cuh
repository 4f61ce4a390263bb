// The PTX instructions that forward_sm90 alone needs, a function each: TMA, counters in shared memory.
#pragma once
#include "sm90/config.cuh"
#include "common/warp_roles.cuh"

struct alignas(64) TensorMap {
    char bytes[128];
};

// volatile: read anew in every role, rather than kept in a register across them
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
// which of those that share k
__device__ __forceinline__ int cluster_part() { return SPLIT_K > 1 ? cluster_rank() % SPLIT_K : 0; }

__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

// All threads of a cluster meet, and a CTA's see each other's writes; of other CTAs' only what was fenced for the cluster:
// barriers that were made. (A release at cluster scope would be a fence of the whole GPU in every warp.)
__device__ __forceinline__ void cluster_begin() {
    __syncthreads();
    if constexpr (CLUSTER_CTAS > 1)
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// the four warps of one consumer warpgroup
__device__ __forceinline__ void warpgroup_sync(int half) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
}

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// With ALL, to the same place, and the same barrier, in every CTA that shares the tile. Limbs are the map's third
// dimension.
#define TMA_LOAD(DIMENSIONS, COORDINATES, MULTICAST, MASK)                                                         \
    asm volatile("cp.async.bulk.tensor." DIMENSIONS                                                                \
                 ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" MULTICAST " [%0], [%1, {" COORDINATES \
                 "}], [%2]" MASK ";" ::"r"(smem(to)),                                                              \
                 "l"(map), "r"(smem(bar)), "r"(x), "r"(y), "r"(limb), "h"(every_cta)                               \
                 : "memory")
template <bool ALL, bool OF_LIMBS = MATRICES == 2>
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, u64* bar, int x, int y, int limb) {
    constexpr int SIDES = ((1 << CLUSTER_CTAS) - 1) / ((1 << SPLIT_K) - 1);  // a bit for each, SPLIT_K apart
    const short every_cta = ALL ? SIDES << cluster_part() : 0;
    if constexpr (!OF_LIMBS && !ALL) TMA_LOAD("2d", "%3, %4", "", "");
    if constexpr (!OF_LIMBS && ALL) TMA_LOAD("2d", "%3, %4", ".multicast::cluster", ", %6");
    if constexpr (OF_LIMBS && !ALL) TMA_LOAD("3d", "%3, %4, %5", "", "");
    if constexpr (OF_LIMBS && ALL) TMA_LOAD("3d", "%3, %4, %5", ".multicast::cluster", ", %6");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int col, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(smem(from)), "r"(col), "r"(row)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// all but the last PENDING of this thread's stores have read shared memory; all have arrived in global memory
template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// four transposed 8 x 8 matrices: `at` of lane l is where column l % 8 of matrix l / 8 goes
__device__ __forceinline__ void stmatrix_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// counters in shared memory: a warp that adds has done its writes, a warp that has seen the count may read them
__device__ __forceinline__ void count_up(int* counter) {
    asm volatile("red.release.cta.shared::cta.add.s32 [%0], 1;" ::"r"(smem(counter)) : "memory");
}

// the same without an order: a hint that it is worth looking
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
