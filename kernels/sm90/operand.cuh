// The tensor core: how an operand lies in a stage and is loaded there, and the instruction that multiplies two of them.
#pragma once
#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

// An operand in a stage (sm90/wgmma.cuh), its rows being those of x or features of w: along k one block, or ACROSS
// [rows / COLUMN][BLOCK_K][128 bytes]. So many rows are 128 times as many bytes either way, and whole columns may be split
// off.
template <bool MN_MAJOR>
struct SmemOperand {
    static constexpr int LEADING = MN_MAJOR ? BLOCK_K * 128 : 16;  // bytes from column to column; unused along k
    static constexpr u64 NEXT =
        (MN_MAJOR ? MMA_K * 128 : 32) / 16;  // from one wgmma's k to the next's, for a descriptor

    static __device__ __forceinline__ u64 descriptor(const void* tile) {
        return operand_descriptor(smem(tile), LEADING);
    }

    // ROWS rows from `row` on, at one step of k; to all CTAs of the cluster at once with ALL
    template <int ROWS, bool ALL>
    static __device__ __forceinline__ void load(char* to, const TensorMap* map, u64* bar, int step, int row, int limb) {
#pragma unroll
        for (int r = 0; r < (MN_MAJOR ? ROWS : 1); r += COLUMN) {
            const int x = MN_MAJOR ? row + r : step * BLOCK_K, y = MN_MAJOR ? step * BLOCK_K : row;
            if constexpr (MATRICES == 2)  // both limbs of a step lie next to each other in a row: split_limbs.cu
                tma_load<ALL>(to, map, bar, 0, y, 2 * step + limb);
            else
                tma_load<ALL>(to + r * 128, map, bar, x, y, limb);
        }
    }
};
typedef SmemOperand<W_MN_MAJOR> W;
typedef SmemOperand<X_MN_MAJOR> X;

// The text of the instruction. Its last two numbers say whether A and B lie across k, which wgmma calls transposed.
#define TEXT_OF(macro) #macro
#define TEXT(macro) TEXT_OF(macro)
#if ELEMENT == 2  // TF32, which lies along k only
#define MMA_SHAPE(N) "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 "
#define MMA_TAIL ", p, 1, 1;\n}"
#else
#define MMA_TAIL ", p, 1, 1, " TEXT(W_MN_MAJOR) ", " TEXT(X_MN_MAJOR) ";\n}"
#if ELEMENT == 0  // BFLOAT16
#define MMA_SHAPE(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "
#else
#define MMA_SHAPE(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 "
#endif
#endif
#define TO_128                                                                                                 \
    TO_64                                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "   \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "   \
    "%121, %122, %123, %124, %125, %126, %127"

// d += a b^T, or d = a b^T when `accumulate` is 0. A template, so that only the branch of its own size is compiled.
template <int SIZE>
__device__ __forceinline__ void wgmma(float (&d)[SIZE], u64 a, u64 b, int accumulate) {
    if constexpr (SIZE == 128)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" MMA_SHAPE(256) "{" TO_128 "}, %128, %129" MMA_TAIL
                     : D32(0), D32(32), D32(64), D32(96)
                     : "l"(a), "l"(b), "r"(accumulate));
    else if constexpr (SIZE == 64)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" MMA_SHAPE(128) "{" TO_64 "}, %64, %65" MMA_TAIL
                     : D32(0), D32(32)
                     : "l"(a), "l"(b), "r"(accumulate));
    else if constexpr (SIZE == 32)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" MMA_SHAPE(64) "{" TO_32 "}, %32, %33" MMA_TAIL
                     : D32(0)
                     : "l"(a), "l"(b), "r"(accumulate));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n" MMA_SHAPE(32) "{" TO_16 "}, %16, %17" MMA_TAIL
                     : D8(0), D8(8)
                     : "l"(a), "l"(b), "r"(accumulate));
}
