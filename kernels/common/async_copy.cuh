// Asynchronous copies from global to shared memory, from Ampere on; older GPUs use ordinary copies. No kernels.
#pragma once

// Copies 16 bytes. Bytes beyond `inside` are not read; zeros take their place.
__device__ inline void copy_async(uint4* to, const void* from, int inside = 16) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(inside) : "memory");
#else
    uint4 whole = {};
    if (inside == 16) whole = *static_cast<const uint4*>(from);
    for (int i = 0; inside < 16 && i < inside; ++i)
        reinterpret_cast<char*>(&whole)[i] = static_cast<const char*>(from)[i];
    *to = whole;
#endif
}

// Copies 4 bytes, or writes zero if `inside` is 0.
__device__ inline void copy_async(float* to, const float* from, int inside = 4) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(inside) : "memory");
#else
    *to = inside == 4 ? *from : 0.0f;
#endif
}

// Makes a group of the copies that were issued since the last call.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups but the last PENDING have arrived.
template <int PENDING>
__device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
