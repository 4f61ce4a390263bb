// What every use of the tensor core of Hopper has in common: its order, where an operand lies, the text of its operands. No
// kernels.
//
// An operand lies in shared memory swizzled by 128 bytes: blocks on 1024 bytes of rows of 128 bytes, the 16 bytes of number
// p in row r lying at p ^ r % 8. Along k a row is 128 bytes of k, and a block has all rows of the product; across k
// (MN-major) a row has one k and 128 bytes of the product's rows, and a block all of k.
#pragma once

// Of an operand at `at`, blocks being so many bytes apart; along k there is but one, and what is passed is not looked at.
__device__ __forceinline__ unsigned long long operand_descriptor(unsigned at, int block_bytes) {
    using u64 = unsigned long long;
    return (u64)((at & 0x3FFFF) >> 4) | (u64)(block_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// between ordinary writes to shared memory and reads of it by the tensor core or by TMA
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define D8(i)                                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

// The numbers of the accumulators, which are the instruction's first operands.
#define TO_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TO_32 TO_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_64                                                                                                \
    TO_32                                                                                                    \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
