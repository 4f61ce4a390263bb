// copy_matrix: a matrix of any strides as adjacent rows, for a kernel that cannot read it as it lies.
//
//   from (rows, cols), strides in elements, of any sign, 0 included  ->  to (rows, cols), C-contiguous
//
// An item of work is a tile of 64 x 64, which passes through shared memory: it is read along the shorter stride and
// written along rows, a warp taking 32 adjacent elements each time, 16 of them a thread on their way at once.
//
// Moves each element in and out once, the minimum.
#include "common.cuh"

#ifndef WORD_TYPE
#define WORD_TYPE unsigned  // an element's bits: unsigned short, unsigned, unsigned long long
#endif
using Word = WORD_TYPE;

constexpr int THREADS = 256, TILE = 64, EACH = TILE * TILE / THREADS;
constexpr int PITCH = TILE + (sizeof(Word) == 2 ? 2 : 1);  // a column of the tile lies in different banks

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_matrix(const Word* from, long long row_stride, long long col_stride, Word* to, long long rows,
                long long cols) {
    await_kernel_ahead();
    __shared__ Word tile[TILE][PITCH];
    const bool down = llabs(row_stride) < llabs(col_stride);
    const long long across = (cols + TILE - 1) / TILE, height = (rows + TILE - 1) / TILE;
    for_each_item(across * height, [&](long long item) {
        const long long row0 = item / across * TILE, col0 = item % across * TILE;
        Word held[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int outer = (i * THREADS + threadIdx.x) / TILE, inner = threadIdx.x % TILE;
            const long long row = row0 + (down ? inner : outer), col = col0 + (down ? outer : inner);
            held[i] = row < rows && col < cols ? from[row * row_stride + col * col_stride] : Word(0);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int outer = (i * THREADS + threadIdx.x) / TILE, inner = threadIdx.x % TILE;
            tile[down ? inner : outer][down ? outer : inner] = held[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int r = (i * THREADS + threadIdx.x) / TILE, c = threadIdx.x % TILE;
            if (row0 + r < rows && col0 + c < cols) to[(row0 + r) * cols + col0 + c] = tile[r][c];
        }
    });
}
