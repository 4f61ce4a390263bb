// copy_matrix: copies matrices with any strides to matrices with any other strides, for a kernel that cannot read or
// write them where they lie.
//
//   from (matrices, rows, cols)  ->  to (matrices, rows, cols), strides in elements, of any sign; those of `from` may be 0
//
// An item of work is a tile of 64 x 64 of a matrix, which passes through shared memory. It is read along the shorter stride of
// `from` and written along the shorter stride of `to`: a warp moves 32 adjacent elements at a time, and a thread has 16
// elements in flight.
//
// Bytes moved: each element is read once and written once, the minimum.
#include "common/common.cuh"

#ifndef WORD_TYPE
#define WORD_TYPE unsigned  // an element's bits: unsigned short, unsigned, unsigned long long
#endif
using Word = WORD_TYPE;

constexpr int THREADS = 256, TILE = 64, EACH = TILE * TILE / THREADS;
constexpr int PITCH = TILE + (sizeof(Word) == 2 ? 2 : 1);  // the elements of a column lie in different banks

struct CopyMatrixProblem {
    long long matrices, rows, cols;
    long long from_matrix, from_row, from_col, to_matrix, to_row, to_col;  // strides
};

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_matrix(const __grid_constant__ CopyMatrixProblem p, const Word* from, Word* to) {
    await_kernel_ahead();
    __shared__ Word tile[TILE][PITCH];
    const bool read_down = llabs(p.from_row) < llabs(p.from_col), write_down = llabs(p.to_row) < llabs(p.to_col);
    const unsigned tiles_wide = (p.cols + TILE - 1) / TILE, tiles = tiles_wide * ((p.rows + TILE - 1) / TILE);
    for_each_item(p.matrices * tiles, [&](unsigned item) {
        const unsigned matrix = item / tiles, of_matrix = item % tiles;  // a grid is below 2^31
        const long long row0 = of_matrix / tiles_wide * TILE, col0 = of_matrix % tiles_wide * TILE;
        const Word* const of = from + matrix * p.from_matrix;
        Word* const into = to + matrix * p.to_matrix;
        // the row and the column of a thread's element in the tile
        const auto row_of = [](int i, bool down) {
            return down ? threadIdx.x % TILE : (i * THREADS + threadIdx.x) / TILE;
        };
        const auto col_of = [](int i, bool down) {
            return down ? (i * THREADS + threadIdx.x) / TILE : threadIdx.x % TILE;
        };
        Word held[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long row = row0 + row_of(i, read_down), col = col0 + col_of(i, read_down);
            held[i] = row < p.rows && col < p.cols ? of[row * p.from_row + col * p.from_col] : Word(0);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) tile[row_of(i, read_down)][col_of(i, read_down)] = held[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int r = row_of(i, write_down), c = col_of(i, write_down);
            if (row0 + r < p.rows && col0 + c < p.cols)
                into[(row0 + r) * p.to_row + (col0 + c) * p.to_col] = tile[r][c];
        }
    });
}
