// For kernels whose CTAs may form clusters: the size of a cluster, and the rank of this CTA in it. No kernels.
#pragma once
#include "common/warp_roles.cuh"

#ifndef CLUSTER
#define CLUSTER 1  // CTAs of a cluster: 1, 2, 4, 8
#endif
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

__device__ __forceinline__ int rank_in_cluster() {
    int rank = 0;
    if constexpr (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
