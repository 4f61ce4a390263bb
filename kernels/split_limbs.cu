// split_limbs: turns a float32 matrix into two float16 matrices (limbs) and a power of two for every row, for
// forward_sm90's ELEMENT_LIMBS.
//
//   a[i][j] = 2^exponents[i] (limb(0, i, j) + limb(1, i, j)) + error
//
// a (rows, k), row pitch in elements; exponents (rows). A row of limbs lies as [k / SPAN, rounded up][limb][SPAN], with
// zeros from column k on. SPAN elements of a take as many bytes as their limbs, so limbs can be written over a. A row
// is scaled so that its largest finite magnitude lies in [2^14, 2^15): float16 does not overflow then, and loses no
// digits down to 2^-16 of that. If v is the scaled element, limb 0 is float16(v) and limb 1 is float16(v - limb 0), and
// |error| <= max(2^-23 |v|, 2^-25) in scaled terms. A row of zeros has exponent 0. Inf and NaN do not count for the
// maximum, and their second limb is zero, because Inf - Inf would turn Inf into NaN.
//
// One launch serves two matrices: the rows of x (m), then the rows of the weight (n); either may be absent. A lane
// holds HELD pieces of 8 adjacent elements; a piece is two 16-byte reads, and one 16-byte write for each limb. So a CTA
// holds 8192 elements (8192 / WIDTH rows), and loads all of them before it uses any, however short the rows are. Up to
// a WIDTH of 256, a row is one piece in each of 8, 16 or 32 lanes, and a lane has HELD rows. For larger ones, a row is
// 2 or HELD pieces in each lane of a warp; for the largest, HELD pieces in each lane of the CTA. Elements of a row
// beyond 8192 are read twice, the second time from L2. A shorter row is read in full before any of it is written, so
// its limbs may lie where the row does.
//
// Bytes moved: 4 bytes are read and 4 written for each element, the minimum; the last SPAN of a row is written in full.

#include "common/common.cuh"

#ifndef WIDTH
#define WIDTH 8192  // the most elements that a row has: 64, 128, 256, 512, 1024; 8192 serves any length
#endif

constexpr int WARPS = 8;                                            // warps of a CTA
constexpr int HELD = 4;                                             // pieces in the registers of a lane
constexpr int PIECES = WIDTH <= 256 ? 1 : WIDTH <= 512 ? 2 : HELD;  // pieces of one row
constexpr int LANES = WIDTH / (8 * PIECES);                         // lanes that share a row
constexpr int LANE_ROWS = HELD / PIECES;                            // rows that a lane has
constexpr int ABREAST = 32 * WARPS / LANES;                         // adjacent rows of a CTA
constexpr int ROWS = LANE_ROWS * ABREAST;                           // of a CTA at once; gsbn/_plan/variants.py reads it
constexpr int SPAN = 64;  // adjacent elements whose limbs lie together: 128 bytes for each limb
constexpr unsigned INFINITE = 0x7F800000u;

struct SplitLimbsProblem {
    long long m, n, k;   // rows of x, rows of the weight, elements of a row
    long long ldx, ldw;  // row pitches in elements
    long long flags;     // FLAG_VECTOR_X, FLAG_VECTOR_W
};

// In elements of float16: the length of a row of limbs, and the place of an element's first limb in it. The second limb
// lies SPAN further.
__device__ __forceinline__ long long length_of(long long k) { return (k + SPAN - 1) / SPAN * 2 * SPAN; }
__device__ __forceinline__ long long place_of(long long j) { return j / SPAN * 2 * SPAN + j % SPAN; }

struct SplitOperand {
    const float* a;
    long long rows, pitch;
    __half* limbs;
    int* exponents;
    bool vector;
};

__device__ __forceinline__ unsigned magnitude(float v) {
    const unsigned bits = __float_as_uint(v) & 0x7FFFFFFFu;
    return bits < INFINITE ? bits : 0;
}

// Scales by 2^-exponent, in two steps: the factor may be up to 2^163, which is not a float.
struct RowScale {
    int exponent;
    float once, again;

    __device__ void split(float v, __half& high, __half& low) const {
        const float scaled = multiply_no_ftz(multiply_no_ftz(v, once), again);
        high = __float2half_rn(scaled);
        low = __float2half_rn(isfinite(v) ? scaled - __half2float(high) : 0.0f);
    }
};

// The scaling for a row. `top` has the bits of its largest magnitude, 2^e f with 1 <= f < 2.
__device__ __forceinline__ RowScale scale_of(unsigned top) {
    const int e = top >> 23 ? int(top >> 23) - 127 : -118 - __clz(top), exponent = top ? e - 14 : 0;
    return {exponent, __uint_as_float((127 + (-exponent >> 1)) << 23),
            __uint_as_float((127 + ((1 - exponent) >> 1)) << 23)};
}

// How many of 8 adjacent elements lie before the row's end.
__device__ __forceinline__ int of_eight(long long left) { return int(min(max(left, 0LL), 8LL)); }

__device__ __forceinline__ void read(const float* from, bool vector, int inside, float (&v)[8]) {
    if (vector && inside == 8) {
        const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = e < inside ? from[e] : 0.0f;
    }
}

__device__ __forceinline__ unsigned largest_of(const float (&v)[8], unsigned top) {
#pragma unroll
    for (int e = 0; e < 8; ++e) top = max(top, magnitude(v[e]));
    return top;
}

// Computes the largest magnitude of each row over the lanes that share the row.
__device__ __forceinline__ void share(unsigned (&top)[LANE_ROWS]) {
    if constexpr (LANES < 32) {
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2)
#pragma unroll
            for (int g = 0; g < LANE_ROWS; ++g) top[g] = max(top[g], __shfl_xor_sync(~0u, top[g], apart));
    } else {
#pragma unroll
        for (int g = 0; g < LANE_ROWS; ++g) top[g] = __reduce_max_sync(~0u, top[g]);
    }
    if constexpr (LANES > 32) {
        __shared__ unsigned of_warp[WARPS];
        of_warp[threadIdx.x / 32] = top[0];
        __syncthreads();
        top[0] = __reduce_max_sync(~0u, of_warp[threadIdx.x % WARPS]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    split_limbs(const __grid_constant__ SplitLimbsProblem p, const float* x, __half* x_limbs, int* x_exponents,
                const float* w, __half* w_limbs, int* w_exponents) {
    await_kernel_ahead();
    const long long k = p.k, length = length_of(k), of_x = x_limbs ? (p.m + ROWS - 1) / ROWS : 0,
                    of_w = w_limbs ? (p.n + ROWS - 1) / ROWS : 0;
    for_each_item(of_x + of_w, [&](long long item) {
        const SplitOperand o = item < of_x
                                   ? SplitOperand{x, p.m, p.ldx, x_limbs, x_exponents, (p.flags & FLAG_VECTOR_X) != 0}
                                   : SplitOperand{w, p.n, p.ldw, w_limbs, w_exponents, (p.flags & FLAG_VECTOR_W) != 0};
        const long long row = (item < of_x ? item : item - of_x) * ROWS + threadIdx.x / LANES;
        const long long first = 8 * (threadIdx.x % LANES);

        float v[LANE_ROWS][PIECES][8];
#pragma unroll
        for (int g = 0; g < LANE_ROWS; ++g)
#pragma unroll
            for (int h = 0; h < PIECES; ++h) {
                const long long i = row + g * ABREAST, j = first + 8 * LANES * h;
                read(o.a + i * o.pitch + j, o.vector, i < o.rows ? of_eight(k - j) : 0, v[g][h]);
            }
        unsigned top[LANE_ROWS] = {};
#pragma unroll
        for (int g = 0; g < LANE_ROWS; ++g)
#pragma unroll
            for (int h = 0; h < PIECES; ++h) top[g] = largest_of(v[g][h], top[g]);
        if constexpr (LANES > 32)
            for (long long j = first + WIDTH; j < k; j += 8 * LANES) {
                float beyond[8];
                read(o.a + row * o.pitch + j, o.vector, of_eight(k - j), beyond);
                top[0] = largest_of(beyond, top[0]);
            }
        share(top);

#pragma unroll
        for (int g = 0; g < LANE_ROWS; ++g) {
            const long long i = row + g * ABREAST;
            if (i >= o.rows) break;
            const RowScale scale = scale_of(top[g]);
            if (first == 0) o.exponents[i] = scale.exponent;
            auto split = [&](const float (&from)[8], long long j) {
                if (2 * j >= length) return;
                Vector<__half, 8> high, low;
#pragma unroll
                for (int c = 0; c < 8; ++c) scale.split(from[c], high.at[c], low.at[c]);
                __half* to = o.limbs + i * length + place_of(j);
                *reinterpret_cast<Vector<__half, 8>*>(to) = high;
                *reinterpret_cast<Vector<__half, 8>*>(to + SPAN) = low;
            };
#pragma unroll
            for (int h = 0; h < PIECES; ++h) split(v[g][h], first + 8 * LANES * h);
            if constexpr (LANES > 32)
                for (long long j = first + WIDTH; 2 * j < length; j += 8 * LANES) {
                    float beyond[8];
                    read(o.a + i * o.pitch + j, o.vector, of_eight(k - j), beyond);
                    split(beyond, j);
                }
        }
    });
}

// ---- MN-major operands: the limbs of a matrix's transpose, and of the matrix itself ---------------------------------
//
// The products of the backward sum over rows, so it needs limbs of transposed matrices; of dg it needs both kinds. A
// launch takes up to three matrices (m, n), row pitch lda. take_maxima runs first (it reads 4 bytes for each element):
// an item is BLOCK_COLUMNS columns by `maxima_rows` rows. It computes the largest magnitude of every column and, where
// limbs of rows are wanted, of every row. Items merge these by atomic integer maxima, whose order does not matter; the
// caller sets them to zero. split_tiles runs then (it moves 8 bytes for each element with one kind of limbs, 12 with
// both): an item is a tile of 64 x 64, transposed in shared memory. Limbs of rows may lie where the matrix does: a CTA
// writes them to the bytes that it has read.

constexpr int BLOCK_COLUMNS = 128, TILE = SPAN;

struct Matrices {
    long long m[3], n[3], lda[3];  // rows (0 for no matrix) and columns; row pitches in elements
    long long vector[3];           // whether rows start on 16 bytes
    long long of_columns[3];       // where the maxima and the exponents of the columns start
    long long of_rows[3];          // the same for the rows; -1 if limbs of rows are not wanted
    long long ld_limbs[3];         // row pitch of the limbs of rows, in elements of float16
    long long maxima_rows;         // rows of an item of take_maxima
};

// One of the three matrices.
struct Matrix {
    const float* a;
    int m, n;  // below 2^30
    long long lda;
    bool vector;

    __device__ Matrix(const Matrices& p, int i, const float* a, const float* b, const float* c)
        : a(i == 0   ? a
            : i == 1 ? b
                     : c),
          m(p.m[i]),
          n(p.n[i]),
          lda(p.lda[i]),
          vector(p.vector[i]) {}

    __device__ float4 read_four(int i, int j) const {
        if (i >= m) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float* from = a + i * lda + j;
        if (vector && j + 4 <= n) return *reinterpret_cast<const float4*>(from);
        return make_float4(j < n ? from[0] : 0.0f, j + 1 < n ? from[1] : 0.0f, j + 2 < n ? from[2] : 0.0f,
                           j + 3 < n ? from[3] : 0.0f);
    }
};

__device__ __forceinline__ float at(const float4& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

// Calls work(i, row, column) for each item of `rows` by `columns`, matrix after matrix. i is the number of the matrix;
// the item begins at (row, column).
template <typename Work>
__device__ __forceinline__ void for_each_block(const Matrices& p, int rows, int columns, const Work& work) {
    const auto blocks_wide = [&](int i) { return unsigned((p.n[i] + columns - 1) / columns); };
    const auto count = [&](int i) { return blocks_wide(i) * unsigned((p.m[i] + rows - 1) / rows); };
    const unsigned first = count(0), second = first + count(1);
    for_each_item(second + count(2), [&](long long at) {  // below 2^31, as all items are
        unsigned item = unsigned(at);
        const int i = item < first ? 0 : item < second ? 1 : 2;
        item -= i == 0 ? 0 : i == 1 ? first : second;
        const unsigned wide = blocks_wide(i);
        work(i, int(item / wide) * rows, int(item % wide) * columns);
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    take_maxima(const __grid_constant__ Matrices p, const float* a, const float* b, const float* c, unsigned* maxima) {
    await_kernel_ahead();
    constexpr int FLIGHT = 8;
    __shared__ uint4 of_warp[WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int height = int(p.maxima_rows);
    for_each_block(p, height, BLOCK_COLUMNS, [&](int which, int first, int column) {
        const Matrix matrix(p, which, a, b, c);
        const int j = column + 4 * lane, end = min(first + height, matrix.m);
        const long long of_rows = p.of_rows[which];
        uint4 top = make_uint4(0, 0, 0, 0);
        for (int i = first + warp; i < end; i += FLIGHT * WARPS) {
            float4 v[FLIGHT];
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) v[f] = matrix.read_four(i + f * WARPS < end ? i + f * WARPS : matrix.m, j);
            unsigned of_row = 0;  // lane f has the maximum of row f
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                const uint4 of = {magnitude(v[f].x), magnitude(v[f].y), magnitude(v[f].z), magnitude(v[f].w)};
                top.x = max(top.x, of.x), top.y = max(top.y, of.y), top.z = max(top.z, of.z), top.w = max(top.w, of.w);
                if (of_rows < 0) continue;
                const unsigned all = __reduce_max_sync(~0u, max(max(of.x, of.y), max(of.z, of.w)));
                if (lane == f) of_row = all;
            }
            if (of_rows >= 0 && lane < FLIGHT && i + lane * WARPS < end)
                atomicMax(maxima + of_rows + i + lane * WARPS, of_row);
        }
        of_warp[warp][lane] = top;
        __syncthreads();
        if (warp > 0) return;
        for (int other = 1; other < WARPS; ++other) {
            const uint4 its = of_warp[other][lane];
            top.x = max(top.x, its.x), top.y = max(top.y, its.y), top.z = max(top.z, its.z), top.w = max(top.w, its.w);
        }
        const unsigned four[4] = {top.x, top.y, top.z, top.w};
        for (int e = 0; e < 4; ++e)
            if (j + e < matrix.n) atomicMax(maxima + p.of_columns[which] + j + e, four[e]);
    });
}

// 5 CTAs on an SM: with 4, a small matrix takes 15 % longer
extern "C" __global__ void __launch_bounds__(32 * WARPS, 5)
    split_tiles(const __grid_constant__ Matrices p, const float* a, const float* b, const float* c,
                const unsigned* maxima, int* exponents, __half* a_transposed, __half* b_transposed,
                __half* c_transposed, __half* a_limbs, __half* b_limbs, __half* c_limbs) {
    await_kernel_ahead();
    // [limb][column][pair of rows]; the padding prevents bank conflicts
    __shared__ __half2 transposed[2][TILE][TILE / 2 + 1];
    for_each_block(p, TILE, TILE, [&](int which, int row, int column) {
        const Matrix matrix(p, which, a, b, c);
        const int group = threadIdx.x % 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int j = column + 4 * group;

        float4 v[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) v[half][r] = matrix.read_four(row + 2 * (threadIdx.x / 16 + 16 * half) + r, j);
        const long long of_columns = p.of_columns[which] + j;
        unsigned top[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e] = j + e < matrix.n ? maxima[of_columns + e] : 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const RowScale scale = scale_of(top[e]);
            if (row == 0 && threadIdx.x < 16 && j + e < matrix.n) exponents[of_columns + e] = scale.exponent;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int pair = threadIdx.x / 16 + 16 * half;
                __half high[2], low[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) scale.split(at(v[half][r], e), high[r], low[r]);
                transposed[0][4 * group + e][pair] = __halves2half2(high[0], high[1]);
                transposed[1][4 * group + e][pair] = __halves2half2(low[0], low[1]);
            }
        }
        __syncthreads();  // after this, all of the tile has been read

        const long long of_rows = p.of_rows[which];
        __half* row_limbs = (which == 0 ? a_limbs : which == 1 ? b_limbs : c_limbs) + place_of(column) + 4 * group;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = row + 2 * (threadIdx.x / 16 + 16 * half) + r;
                if (of_rows < 0 || i >= matrix.m) continue;
                const RowScale of_row = scale_of(maxima[of_rows + i]);
                if (column == 0 && group == 0) exponents[of_rows + i] = of_row.exponent;
                Vector<__half, 4> high, low;
#pragma unroll
                for (int e = 0; e < 4; ++e) of_row.split(at(v[half][r], e), high.at[e], low.at[e]);
                *reinterpret_cast<Vector<__half, 4>*>(row_limbs + i * p.ld_limbs[which]) = high;
                *reinterpret_cast<Vector<__half, 4>*>(row_limbs + i * p.ld_limbs[which] + SPAN) = low;
            }

        __half* to = (which == 0 ? a_transposed : which == 1 ? b_transposed : c_transposed) + place_of(row) + 2 * lane;
        const long long length = length_of(matrix.m);
        for (int line = warp; line < 2 * TILE; line += WARPS) {
            const int limb = line % 2, e = line / 2;
            if (column + e < matrix.n)
                *reinterpret_cast<__half2*>(to + (column + e) * length + limb * SPAN) = transposed[limb][e][lane];
        }
    });
}
