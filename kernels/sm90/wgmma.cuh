// Hopper's tensor core: the instructions (wgmma), their order, and how an operand lies in shared memory. No kernels.
// accumulator.cuh says how a result lies in registers. All code that issues wgmma includes this file: a port replaces
// it.
//
// An operand lies in shared memory with the 128-byte swizzle: in blocks that start on 1024 bytes and have rows of 128
// bytes. Piece p (16 bytes) of row r is stored at place p ^ r % 8.
//   K-major     a row holds 128 bytes of k, and a block has all rows of the product
//   MN-major    a row holds one k and 128 bytes of the product's rows, and a block has all of k
#pragma once
#include "common/elements.cuh"
#include "common/warp_roles.cuh"
#include "sm90/accumulator.cuh"

// The descriptor of an operand at shared-memory address `at`. If it is MN-major, its blocks are `block_bytes` apart. If
// it is K-major, it is one block, and `block_bytes` is ignored.
__device__ __forceinline__ unsigned long long operand_descriptor(unsigned at, int block_bytes) {
    using u64 = unsigned long long;
    return u64((at & 0x3FFFF) >> 4) | u64(block_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Orders ordinary writes to shared memory before reads of it by the tensor core or by TMA.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The accumulators as operands of asm, and their numbers in its text: they are the first operands.
#define D8(i)                                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
#define TO_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TO_32 TO_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_48 TO_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TO_64                                                                                                \
    TO_32                                                                                                    \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TO_80 TO_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TO_96 TO_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TO_128                                                                                                 \
    TO_64                                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "   \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "   \
    "%121, %122, %123, %124, %125, %126, %127"
#define AND ,

// d += a b^T, or d = a b^T where `accumulate` is 0. a has 64 rows and b 2 SIZE; both are descriptors of 32 bytes of k.
// The elements have type ELEMENT_TYPE (an ELEMENT_ value; limbs are float16). TF32 operands must be K-major.
#define WGMMA_SS(N, TYPES, D, A, B, ACCUMULATE, MAJORS, OUTPUTS)                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES \
                 "{" D "}, " A ", " B ", p, 1, 1" MAJORS ";\n}"                                                    \
                 : OUTPUTS                                                                                         \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(A_MN_MAJOR), "n"(B_MN_MAJOR))
#define NO_MAJORS(A, B) ""
#define MAJORS_OF(A, B) ", " A ", " B
#define WGMMA_SS_BY_SIZE(TYPES, MAJORS)                                                                          \
    if constexpr (SIZE == 128)                                                                                   \
        WGMMA_SS(256, TYPES, TO_128, "%128", "%129", "%130", MAJORS("%131", "%132"),                             \
                 D32(0) AND D32(32) AND D32(64) AND D32(96));                                                    \
    else if constexpr (SIZE == 96)                                                                               \
        WGMMA_SS(192, TYPES, TO_96, "%96", "%97", "%98", MAJORS("%99", "%100"), D32(0) AND D32(32) AND D32(64)); \
    else if constexpr (SIZE == 80)                                                                               \
        WGMMA_SS(160, TYPES, TO_80, "%80", "%81", "%82", MAJORS("%83", "%84"),                                   \
                 D32(0) AND D32(32) AND D8(64) AND D8(72));                                                      \
    else if constexpr (SIZE == 64)                                                                               \
        WGMMA_SS(128, TYPES, TO_64, "%64", "%65", "%66", MAJORS("%67", "%68"), D32(0) AND D32(32));              \
    else if constexpr (SIZE == 48)                                                                               \
        WGMMA_SS(96, TYPES, TO_48, "%48", "%49", "%50", MAJORS("%51", "%52"), D32(0) AND D8(32) AND D8(40));     \
    else if constexpr (SIZE == 32)                                                                               \
        WGMMA_SS(64, TYPES, TO_32, "%32", "%33", "%34", MAJORS("%35", "%36"), D32(0));                           \
    else                                                                                                         \
        WGMMA_SS(32, TYPES, TO_16, "%16", "%17", "%18", MAJORS("%19", "%20"), D8(0) AND D8(8))

template <int ELEMENT_TYPE, bool A_MN_MAJOR, bool B_MN_MAJOR, int SIZE>
__device__ __forceinline__ void wgmma(float (&d)[SIZE], unsigned long long a, unsigned long long b, int accumulate) {
    if constexpr (ELEMENT_TYPE == ELEMENT_TF32) {
        WGMMA_SS_BY_SIZE("k8.f32.tf32.tf32 ", NO_MAJORS);
    } else if constexpr (ELEMENT_TYPE == ELEMENT_BFLOAT16) {
        WGMMA_SS_BY_SIZE("k16.f32.bf16.bf16 ", MAJORS_OF);
    } else {
        WGMMA_SS_BY_SIZE("k16.f32.f16.f16 ", MAJORS_OF);
    }
}

// The same for float16, with a in registers ("RS") and b K-major. a has 64 rows by 16 of k; each warp has 16 of these
// rows. A lane has rows lane / 4 and lane / 4 + 8 of its warp: a[0] is the first row at k = 2 (lane % 4) and the next
// k, a[1] is the second row; a[2] and a[3] are the same at k + 8.
#define WGMMA_RS(N, D, A, B, ACCUMULATE, OUTPUTS)                                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE                                                   \
                 ", 0;\n"                                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" D "}, {" A "}, " B ", p, 1, 1, 0;\n}" \
                 : OUTPUTS                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
template <int SIZE>
__device__ __forceinline__ void wgmma_rs(float (&d)[SIZE], const unsigned (&a)[4], unsigned long long b,
                                         int accumulate) {
    if constexpr (SIZE == 64)
        WGMMA_RS(128, TO_64, "%64, %65, %66, %67", "%68", "%69", D32(0) AND D32(32));
    else if constexpr (SIZE == 32)
        WGMMA_RS(64, TO_32, "%32, %33, %34, %35", "%36", "%37", D32(0));
    else
        WGMMA_RS(32, TO_16, "%16, %17, %18, %19", "%20", "%21", D8(0) AND D8(8));
}
#undef WGMMA_RS
#undef WGMMA_SS_BY_SIZE
#undef WGMMA_SS
#undef MAJORS_OF
#undef NO_MAJORS
#undef AND

// Loads operand a of mma and wgmma_rs: 16 rows of 32 bytes, as four matrices of 8 rows of 16 bytes. `row` of lane l is
// row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&a)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(smem(row))
                 : "memory");
}

// The same, with each matrix transposed. `row` is an address in shared memory.
__device__ __forceinline__ void load_matrices_trans(unsigned (&a)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row)
                 : "memory");
}

// Stores four 8 x 8 matrices transposed: `at` of lane l is where column l % 8 of matrix l / 8 goes.
__device__ __forceinline__ void stmatrix_trans(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// The same without the transposition: `at` of lane l is where row l % 8 of matrix l / 8 goes.
__device__ __forceinline__ void stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// Two elements in a word, the first in the low half, as stmatrix takes them and ldmatrix gives them. They are bfloat16
// or float16.
template <int ELEMENT_TYPE>
__device__ __forceinline__ unsigned pack_as(float low, float high) {
    unsigned word;
    if constexpr (ELEMENT_TYPE == ELEMENT_FLOAT16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <int ELEMENT_TYPE>
__device__ __forceinline__ float2 unpack_as(unsigned word) {
    if constexpr (ELEMENT_TYPE != ELEMENT_FLOAT16)
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
    float2 f;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(word));
    return f;
}
