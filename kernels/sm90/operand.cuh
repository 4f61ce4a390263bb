// How the two operands of forward_sm90 lie in a stage of the pipeline, and how TMA loads them there.
#pragma once
#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

// An operand in a stage, swizzled (wgmma.cuh); its rows are rows of x or features of w. If it is K-major, it is one
// block; if it is MN-major, it is [rows / COLUMN][BLOCK_K][128 bytes]. Either way a row takes 128 bytes.
template <bool MN_MAJOR, bool IN_SAMPLES = false>
struct SmemOperand {
    static constexpr int BLOCK_BYTES = MN_MAJOR ? BLOCK_K * 128 : 16;  // from column to column; not used if K-major
    static constexpr u64 NEXT = (MN_MAJOR ? MMA_K * 128 : 32) / 16;    // added to a descriptor for the k of one wgmma

    static __device__ __forceinline__ u64 descriptor(const void* tile) {
        return operand_descriptor(smem(tile), BLOCK_BYTES);
    }

    // Loads part `part` of PARTS of the operand, which has ROWS rows from `row` on, for one step of k; with ALL, to the
    // CTAs of `to_ctas`. A K-major operand is divided by rows; an MN-major one by columns and, if there are more parts
    // than these allow, by k. gsbn/_plan/tensor_maps.py divides it in the same way. `z` is the limb or, with
    // IN_SAMPLES, the sample; the contiguous dimension (rows if MN-major, else k) then counts within that sample.
    template <int ROWS, int PARTS, bool ALL = (PARTS > 1)>
    static __device__ __forceinline__ void load(char* tile, const TensorMap* map, u64* bar, int step, int row, int part,
                                                int z, short to_ctas) {
        if constexpr (MN_MAJOR) {
            constexpr int COLUMNS = ROWS / COLUMN, POWER_OF_TWO = COLUMNS & -COLUMNS;
            constexpr int BY_ROWS = PARTS < POWER_OF_TWO ? PARTS : POWER_OF_TWO, BY_K = PARTS / BY_ROWS;
            constexpr int EACH = COLUMNS / BY_ROWS;  // columns of a part
            const int first = part % BY_ROWS * EACH, k = part / BY_ROWS * (BLOCK_K / BY_K);
#pragma unroll
            for (int c = 0; c < EACH; ++c)
                tma_load<ALL, IN_SAMPLES>(tile + (first + c) * BLOCK_BYTES + k * 128, map, bar,
                                          row + (first + c) * COLUMN, step * BLOCK_K + k, z, to_ctas);
        } else {
            const int first = part * (ROWS / PARTS);
            if constexpr (MATRICES == 2)  // the limbs of a step are adjacent in a row: split_limbs.cu
                tma_load<ALL>(tile + first * 128, map, bar, 0, row + first, 2 * step + z, to_ctas);
            else
                tma_load<ALL, IN_SAMPLES>(tile + first * 128, map, bar, step * BLOCK_K, row + first, z, to_ctas);
        }
    }
};
using W = SmemOperand<W_MN_MAJOR, K_IN_SAMPLES>;
using X = SmemOperand<X_MN_MAJOR, CHANNELS_FIRST || K_IN_SAMPLES>;

// d += w x^T over 32 bytes of k, or d = w x^T if `accumulate` is 0; a and b are descriptors of W and X.
template <int SIZE>
__device__ __forceinline__ void multiply_add(float (&d)[SIZE], u64 a, u64 b, int accumulate) {
    wgmma<ELEMENT, W_MN_MAJOR, X_MN_MAJOR>(d, a, b, accumulate);
}
