// What every use of the tensor core of Hopper has in common: its order, where an operand lies, the text of its operands; and
// operands that are registers. No kernels.
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

// What mma and wgmma_rs take of 16 rows and 32 bytes of each: of four matrices of 8 rows of 16 bytes, whose rows
// lie where the lanes say.
__device__ __forceinline__ void load_matrices(unsigned (&a)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// d += a bᵀ of float16, or d = a bᵀ when `accumulate` is 0, a being in registers and b along k: of a's 64 rows by 16 of k a
// lane has rows lane / 4 and lane / 4 + 8 of its warp's 16. a[0] is of the first of these and k = 2 (lane % 4) and the next,
// a[1] of the second; a[2] and a[3] of k + 8.
template <int SIZE>
__device__ __forceinline__ void wgmma_rs(float (&d)[SIZE], const unsigned (&a)[4], unsigned long long b,
                                         int accumulate) {
#define MMA_OF_REGISTERS(N, NUMBERS, A, B, ACCUMULATE, LIST)                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE                                      \
                 ", 0;\n"                                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NUMBERS "}, {" A "}, " B \
                 ", p, 1, 1, 0;\n}"                                                                  \
                 : LIST                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define AND ,
    if constexpr (SIZE == 64)
        MMA_OF_REGISTERS(128, TO_64, "%64, %65, %66, %67", "%68", "%69", D32(0) AND D32(32));
    else if constexpr (SIZE == 32)
        MMA_OF_REGISTERS(64, TO_32, "%32, %33, %34, %35", "%36", "%37", D32(0));
    else
        MMA_OF_REGISTERS(32, TO_16, "%16, %17, %18, %19", "%20", "%21", D8(0) AND D8(8));
#undef AND
#undef MMA_OF_REGISTERS
}
