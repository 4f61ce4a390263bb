// copy_matrix: copies matrices with any strides to matrices with any other strides, for a kernel that cannot read or
// write them where they lie. On the way float32 may become a 16-bit type, or a 16-bit type float32.
//
//   from (matrices, rows, cols)  ->  to (matrices, rows, cols), strides in elements, of any sign; those of `from` may be 0
//
// An item of work is a tile of 64 x 64 of a matrix, which passes through shared memory. `to` is written along its rows:
// the planner swaps rows and columns of both matrices if columns of `to` have the shorter stride. `from` is read along
// its shorter stride. 16 threads move a line of a tile in vectors of four elements (float64: 32 threads, two elements), a
// thread has vectors of four lines in flight, and makes 4 x 4 elements into vectors along the other side. Where lines do
// not start or end on vectors, the elements of neighbouring threads are adjacent instead.
//
// Bytes moved: each element is read once and written once, the minimum.
#include "common/common.cuh"

#ifndef FROM_TYPE
#define FROM_TYPE unsigned  // elements of `from` and `to`; if both have one type, an unsigned integer of its size
#define TO_TYPE unsigned
#define TURNED 1       // columns of `from` have the shorter stride
#define FROM_VECTOR 1  // the shorter stride is 1, and lines start and end on vectors, up to 16 bytes
#define TO_VECTOR 1
#define EACH 4  // elements of a vector
#endif
using From = FROM_TYPE;
using To = TO_TYPE;

constexpr int THREADS = 256, TILE = 64, LANES = TILE / EACH, GROUPS = THREADS / LANES, LINES = TILE / GROUPS;
constexpr int CTAS = sizeof(To) < 8 && (TURNED || FROM_VECTOR) ? 8 : 4;  // on an SM; 8 leave a thread 32 registers

struct CopyMatrixProblem {
    long long matrices, rows, cols;
    long long from_matrix, from_row, from_col, to_matrix, to_row, to_col;  // strides
};

template <typename A, typename B>
__device__ void convert(A v, B& out) {
    if constexpr (sizeof(A) == sizeof(B))
        out = v;
    else if constexpr (sizeof(A) > sizeof(B))
        from_float(v, out);
    else
        out = to_float(v);
}

// A vector as it moves, in one access. As elements of 16 bits, the compiler would move it in pieces.
template <int BYTES>
struct OfBytes;
template <>
struct OfBytes<8> {
    using type = unsigned long long;
};
template <>
struct OfBytes<16> {
    using type = uint4;
};
template <typename T>
using VectorWord = typename OfBytes<sizeof(T) * EACH>::type;

// Where the elements are that a thread reads of a line of a tile: adjacent or, unless FROM_VECTOR, LANES apart.
__device__ __forceinline__ int place(int lane, int i) { return FROM_VECTOR ? lane * EACH + i : i * LANES + lane; }

// A tile in shared memory: rows of LANES vectors. They are rotated by a number that differs for the rows of the threads
// that write vectors of one column of vectors at a time, so that these lie in different banks.
struct Tile {
    Vector<To, EACH> at[TILE * LANES];

    __device__ Vector<To, EACH>& vector(int row, int lane) {
        return at[row * LANES + (lane + row + row / EACH) % LANES];
    }
    __device__ To& element(int row, int col) { return vector(row, col / EACH).at[col % EACH]; }
};

// Reads a tile of `rows` by `cols`, which begins at `from`. A thread has parts of LINES lines; if TURNED, EACH of them are
// adjacent columns, so that it can make vectors of them, else they are rows.
__device__ __forceinline__ void read_tile(Tile& tile, const CopyMatrixProblem& p, const From* from, int rows,
                                          int cols) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int lines = TURNED ? cols : rows, size = TURNED ? rows : cols;
    const long long pitch = TURNED ? p.from_col : p.from_row, stride = TURNED ? p.from_row : p.from_col;
    const auto line_of = [&](int i) {
        return TURNED ? (i / EACH * GROUPS + group) * EACH + i % EACH : i * GROUPS + group;
    };
    Vector<From, EACH> held[LINES];  // all loads come before any use of what they load
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        const From* line = from + line_of(i) * pitch;
        if constexpr (FROM_VECTOR) {
            using Word = VectorWord<From>;
            Word word = {};
            if (line_of(i) < lines && lane * EACH < size) word = *reinterpret_cast<const Word*>(line + lane * EACH);
            *reinterpret_cast<Word*>(&held[i]) = word;
        } else {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int at = place(lane, j);
                held[i].at[j] = From(0.0f);
                if (line_of(i) < lines && at < size) held[i].at[j] = line[at * stride];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        Vector<To, EACH> v;
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            convert(TURNED ? held[i / EACH * EACH + j].at[i % EACH] : held[i].at[j], v.at[j]);
        if constexpr (TURNED) {
            tile.vector(place(lane, i % EACH), line_of(i) / EACH) = v;
        } else if constexpr (FROM_VECTOR) {
            tile.vector(line_of(i), lane) = v;
        } else {
#pragma unroll
            for (int j = 0; j < EACH; ++j) tile.element(line_of(i), place(lane, j)) = v.at[j];
        }
    }
}

// Writes the tile; a thread has a vector or, unless TO_VECTOR, one element of each of its rows.
__device__ __forceinline__ void write_tile(Tile& tile, const CopyMatrixProblem& p, To* to, int rows, int cols) {
    constexpr int AT_ONCE = TO_VECTOR ? EACH : 1, SHARERS = TILE / AT_ONCE, STEP = THREADS / SHARERS;
    const int col = threadIdx.x % SHARERS * AT_ONCE;
    to += TO_VECTOR ? col : col * p.to_col;
#pragma unroll TO_VECTOR ? LINES : 4
    for (int i = 0; i < TILE / STEP; ++i) {
        const int row = threadIdx.x / SHARERS + i * STEP;
        To* at = to + row * p.to_row;
        if constexpr (TO_VECTOR) {
            using Word = VectorWord<To>;
            const Word word = *reinterpret_cast<const Word*>(&tile.vector(row, col / EACH));
            if (row < rows && col < cols) *reinterpret_cast<Word*>(at) = word;
        } else {
            const To v = tile.element(row, col);
            if (row < rows && col < cols) *at = v;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    copy_matrix(const __grid_constant__ CopyMatrixProblem p, const From* from, To* to) {
    await_kernel_ahead();
    __shared__ Tile tile;
    const unsigned tiles_wide = (p.cols + TILE - 1) / TILE, tiles = tiles_wide * ((p.rows + TILE - 1) / TILE);
    for_each_item(p.matrices * tiles, [&](unsigned item) {
        const unsigned matrix = item / tiles, of_matrix = item % tiles;  // a grid is below 2^31
        const long long row0 = of_matrix / tiles_wide * TILE, col0 = of_matrix % tiles_wide * TILE;
        const int rows = int(min(p.rows - row0, 1LL * TILE)), cols = int(min(p.cols - col0, 1LL * TILE));
        read_tile(tile, p, from + matrix * p.from_matrix + row0 * p.from_row + col0 * p.from_col, rows, cols);
        __syncthreads();
        write_tile(tile, p, to + matrix * p.to_matrix + row0 * p.to_row + col0 * p.to_col, rows, cols);
    });
}
