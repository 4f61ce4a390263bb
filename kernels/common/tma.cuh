// Hopper's TMA, which copies boxes of a matrix between global and shared memory. No kernels.
#pragma once
#include "common/warp_roles.cuh"

struct alignas(64) TensorMap {
    char bytes[128];
};

// Loads the box whose first element is column x of row y; its bytes count at the barrier.
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, unsigned long long* bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(smem(to)),
        "l"(map), "r"(x), "r"(y), "r"(smem(bar))
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int col, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(smem(from)), "r"(col), "r"(row)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(smem(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Stores `bytes` that lie together on both sides: a multiple of 16, on 16 bytes.
__device__ __forceinline__ void tma_store(void* to, const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// The first function waits until all but the last PENDING stores of this thread have read shared memory; the second one
// waits until all stores have reached global memory.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
