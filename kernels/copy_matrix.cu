// copy_matrix: copies matrices with any strides to matrices with any other strides, for a kernel that cannot read or
// write them where they lie.
//
//   from (matrices, rows, cols)  ->  to (matrices, rows, cols), strides in elements, of any sign; those of `from` may be 0
//
// An item of work is a tile of 64 x 64 of a matrix, which passes through shared memory. It is read along the shorter
// stride of `from` and written along the shorter stride of `to`: a warp moves 32 adjacent elements at a time, and a thread
// has 16 elements in flight (Strip).
//
// Bytes moved: each element is read once and written once, the minimum.
#include "common/common.cuh"

#ifndef WORD_TYPE
#define WORD_TYPE unsigned  // an element's bits: unsigned short, unsigned, unsigned long long
#endif
using Word = WORD_TYPE;

constexpr int THREADS = 256, TILE = 64, EACH = TILE * TILE / THREADS, STEP = THREADS / TILE;
constexpr int PITCH = TILE + (sizeof(Word) == 2 ? 2 : 1);  // the elements of a column lie in different banks

struct CopyMatrixProblem {
    long long matrices, rows, cols;
    long long from_matrix, from_row, from_col, to_matrix, to_row, to_col;  // strides
};

// Where a thread's EACH elements of a tile lie in a matrix, and in the tile. Neighbouring threads have elements along the
// shorter of the strides `row` and `col`; a thread's elements lie STEP apart along the other one.
struct Strip {
    long long at, step;  // in the matrix, in elements
    int in_tile, tile_step;
    int count;  // elements within the matrix; they are the first ones

    // `first`: where the tile begins, from the first matrix on; `rows` and `cols` are left from there on.
    __device__ Strip(long long first, long long row, long long col, long long rows, long long cols) : at(first) {
        const bool down = llabs(row) < llabs(col);
        const int along = threadIdx.x % TILE, across = threadIdx.x / TILE;
        at += along * (down ? row : col) + across * (down ? col : row);
        step = STEP * (down ? col : row);
        in_tile = down ? along * PITCH + across : across * PITCH + along;
        tile_step = down ? STEP : STEP * PITCH;
        const int left = int(min(down ? cols : rows, 1LL * TILE)) - across;
        count = along < (down ? rows : cols) ? (left + STEP - 1) / STEP : 0;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_matrix(const __grid_constant__ CopyMatrixProblem p, const Word* from, Word* to) {
    await_kernel_ahead();
    __shared__ Word tile[TILE * PITCH];
    const unsigned tiles_wide = (p.cols + TILE - 1) / TILE, tiles = tiles_wide * ((p.rows + TILE - 1) / TILE);
    for_each_item(p.matrices * tiles, [&](unsigned item) {
        const unsigned matrix = item / tiles, of_matrix = item % tiles;  // a grid is below 2^31
        const long long row0 = of_matrix / tiles_wide * TILE, col0 = of_matrix % tiles_wide * TILE;
        const auto strip = [&](long long pitch, long long row, long long col) {
            return Strip(matrix * pitch + row0 * row + col0 * col, row, col, p.rows - row0, p.cols - col0);
        };
        Word held[EACH];
        Strip read = strip(p.from_matrix, p.from_row, p.from_col);
#pragma unroll
        for (int i = 0; i < EACH; ++i, read.at += read.step)
            if (i < read.count) held[i] = from[read.at];
#pragma unroll
        for (int i = 0; i < EACH; ++i, read.in_tile += read.tile_step)
            if (i < read.count) tile[read.in_tile] = held[i];
        __syncthreads();
        Strip written = strip(p.to_matrix, p.to_row, p.to_col);
#pragma unroll
        for (int i = 0; i < EACH; ++i, written.at += written.step, written.in_tile += written.tile_step)
            if (i < written.count) to[written.at] = tile[written.in_tile];
    });
}
