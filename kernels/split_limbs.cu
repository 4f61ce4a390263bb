// split_limbs: a float32 matrix as two float16 matrices and a power of two for every row, for forward_sm90's ELEMENT 3.
//
//   a[i][j] = 2^exponents[i] (limbs[0][i][j] + limbs[1][i][j]) + error
//
// a (rows, k), row pitch in elements; limbs (2, rows, pitch), pitch = k rounded up to 8, zeros from column k; exponents
// (rows). The row's largest finite magnitude becomes a number in [2^14, 2^15), so that float16 neither
// overflows nor, down to 2^-16 of it, loses digits: with v the scaled element, limbs[0] = float16(v) and limbs[1] =
// float16(v - limbs[0]), |error| <= max(2^-23 |v|, 2^-25) in scaled terms. A row of zeros has exponent 0. Inf and NaN
// keep out of the maximum and have a second limb of zero, since Inf - Inf would turn Inf into NaN.
//
// Two matrices in one launch: x's rows (m), then the weight's (n), of which either may be absent. ROW_WARPS warps take a
// row, 8 neighbouring elements a lane: two 16-byte reads, one 16-byte write a limb. A row of up to 8192 (ROW_WARPS 8)
// or 1024 elements (1) stays in registers between finding the maximum and splitting; a longer one is read twice, the
// second time from L2. Bytes: 4 read and 4 written an element, the minimum.

#include "common.cuh"

#ifndef ROW_WARPS
#define ROW_WARPS 8  // 1, 8
#endif

constexpr int WARPS = 8;                   // of a CTA
constexpr int ROWS = WARPS / ROW_WARPS;    // of a CTA
constexpr int WIDTH = 8 * 32 * ROW_WARPS;  // elements that the row's lanes take at a time
constexpr int HELD = 4;                    // such pieces in registers
constexpr unsigned INFINITE = 0x7F800000u;

struct Problem {
    long long m, n, k;   // rows of x, rows of the weight, their elements
    long long ldx, ldw;  // row pitches in elements
    long long flags;     // FLAG_VECTOR_X, FLAG_VECTOR_W
};

struct Operand {
    const float* a;
    long long pitch;
    __half* limbs;
    int* exponents;
    long long rows;
    bool vector;
};

__device__ __forceinline__ unsigned magnitude(float v) {
    const unsigned bits = __float_as_uint(v) & 0x7FFFFFFFu;
    return bits < INFINITE ? bits : 0;
}

// Without .ftz, which CuPy compiles with: subnormal elements have digits, too.
__device__ __forceinline__ float times(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// What 2^-exponent makes of an element: in two steps, since up to 2^163 it is no float.
struct Scale {
    int exponent;
    float once, again;

    __device__ void split(float v, __half& high, __half& low) const {
        const float scaled = times(times(v, once), again);
        high = __float2half_rn(scaled);
        low = __float2half_rn(isfinite(v) ? scaled - __half2float(high) : 0.f);
    }
};

// Of the bits of the largest magnitude, 2^e f with 1 <= f < 2.
__device__ __forceinline__ Scale scale_of(unsigned top) {
    const int e = top >> 23 ? static_cast<int>(top >> 23) - 127 : -118 - __clz(top), exponent = top ? e - 14 : 0;
    return {exponent, __uint_as_float((127 + (-exponent >> 1)) << 23),
            __uint_as_float((127 + ((1 - exponent) >> 1)) << 23)};
}

__device__ __forceinline__ void read(const Operand& o, const float* row, long long j, long long k, float (&v)[8]) {
    if (o.vector && j + 8 <= k) {
        const float4 low = *reinterpret_cast<const float4*>(row + j),
                     high = *reinterpret_cast<const float4*>(row + j + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = j + e < k ? row[j + e] : 0.f;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    split_limbs(const __grid_constant__ Problem p, const float* x, __half* x_limbs, int* x_exponents, const float* w,
                __half* w_limbs, int* w_exponents) {
    await_kernel_ahead();
    __shared__ unsigned largest[WARPS];
    const long long m = x_limbs ? p.m : 0, n = w_limbs ? p.n : 0, k = p.k, pitch = (k + 7) / 8 * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for_each_item((m + n + ROWS - 1) / ROWS, [&](long long item) {
        long long i = item * ROWS + warp / ROW_WARPS;
        if (ROW_WARPS == 1 && i >= m + n) return;
        const Operand o = i < m ? Operand{x, p.ldx, x_limbs, x_exponents, m, (p.flags & FLAG_VECTOR_X) != 0}
                                : Operand{w, p.ldw, w_limbs, w_exponents, n, (p.flags & FLAG_VECTOR_W) != 0};
        i -= i < m ? 0 : m;
        const float* row = o.a + i * o.pitch;
        const long long first = 8 * (threadIdx.x % (32 * ROW_WARPS));

        float v[HELD][8];
        unsigned top = 0;
#pragma unroll
        for (int h = 0; h < HELD; h++) { read(o, row, first + h * WIDTH, k, v[h]); }
#pragma unroll
        for (int h = 0; h < HELD; h++)
#pragma unroll
            for (int e = 0; e < 8; e++) top = max(top, magnitude(v[h][e]));
        for (long long j = first + HELD * WIDTH; j < k; j += WIDTH) {
            float beyond[8];
            read(o, row, j, k, beyond);
#pragma unroll
            for (int e = 0; e < 8; e++) top = max(top, magnitude(beyond[e]));
        }
        top = __reduce_max_sync(0xFFFFFFFFu, top);
        if (ROW_WARPS > 1) {
            if (lane == 0) largest[warp] = top;
            __syncthreads();
            top = __reduce_max_sync(0xFFFFFFFFu, largest[lane % WARPS]);
        }

        const Scale scale = scale_of(top);
        if (first == 0) o.exponents[i] = scale.exponent;

        auto split = [&](const float (&from)[8], long long j) {
            if (j >= k) return;
            Vector<__half, 8> high, low;
#pragma unroll
            for (int c = 0; c < 8; c++) scale.split(from[c], high.at[c], low.at[c]);
            __half* to = o.limbs + i * pitch + j;
            *reinterpret_cast<Vector<__half, 8>*>(to) = high;
            *reinterpret_cast<Vector<__half, 8>*>(to + o.rows * pitch) = low;
        };
#pragma unroll
        for (int h = 0; h < HELD; h++) split(v[h], first + h * WIDTH);
        for (long long j = first + HELD * WIDTH; j < k; j += WIDTH) {
            float beyond[8];
            read(o, row, j, k, beyond);
            split(beyond, j);
        }
    });
}

// ---- across: the limbs of a matrix's transpose ---------------------------------------------------------------------
//
// The backward sums over rows, not along them. a (m, n), row pitch lda, gives the limbs (2, n, pitch) of its transpose,
// pitch = m rounded up to 8, and an exponent for every column. column_maxima first: 4 bytes read an element, by items of
// 128 columns and `maxima_rows` rows, merged by integer maxima, whose order does not matter. maxima start at zero, set by
// the caller. Then split_columns, 8 bytes: an item is a tile of 64 x 64, turned in shared memory.

constexpr int BLOCK_COLUMNS = 128, TILE = 64;

struct Columns {
    long long m, n, lda;    // rows and columns of a, its row pitch in elements
    long long maxima_rows;  // rows of an item of column_maxima
    long long vector_a;     // whether rows of a start on 16 bytes
};

__device__ __forceinline__ float4 read_four(const Columns& p, const float* a, long long i, long long j) {
    if (i >= p.m) return make_float4(0.f, 0.f, 0.f, 0.f);
    const float* from = a + i * p.lda + j;
    if (p.vector_a && j + 4 <= p.n) return *reinterpret_cast<const float4*>(from);
    return make_float4(j < p.n ? from[0] : 0.f, j + 1 < p.n ? from[1] : 0.f, j + 2 < p.n ? from[2] : 0.f,
                       j + 3 < p.n ? from[3] : 0.f);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    column_maxima(const __grid_constant__ Columns p, const float* a, unsigned* maxima) {
    await_kernel_ahead();
    constexpr int FLIGHT = 8;
    __shared__ uint4 of_warp[WARPS][32];
    const long long blocks = (p.n + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for_each_item(blocks * ((p.m + p.maxima_rows - 1) / p.maxima_rows), [&](long long item) {
        const long long j = item % blocks * BLOCK_COLUMNS + 4 * lane;
        const long long first = item / blocks * p.maxima_rows, end = min(first + p.maxima_rows, p.m);
        uint4 top = make_uint4(0, 0, 0, 0);
        for (long long i = first + warp; i < end; i += FLIGHT * WARPS) {
            float4 v[FLIGHT];
#pragma unroll
            for (int f = 0; f < FLIGHT; f++) v[f] = read_four(p, a, i + f * WARPS < end ? i + f * WARPS : p.m, j);
#pragma unroll
            for (int f = 0; f < FLIGHT; f++) {
                top.x = max(top.x, magnitude(v[f].x)), top.y = max(top.y, magnitude(v[f].y));
                top.z = max(top.z, magnitude(v[f].z)), top.w = max(top.w, magnitude(v[f].w));
            }
        }
        of_warp[warp][lane] = top;
        __syncthreads();
        if (warp > 0) return;
        for (int other = 1; other < WARPS; other++) {
            const uint4 its = of_warp[other][lane];
            top.x = max(top.x, its.x), top.y = max(top.y, its.y), top.z = max(top.z, its.z), top.w = max(top.w, its.w);
        }
        const unsigned four[4] = {top.x, top.y, top.z, top.w};
        for (int c = 0; c < 4; c++)
            if (j + c < p.n) atomicMax(maxima + j + c, four[c]);
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 5)  // five on an SM: with four, a small matrix takes 15 % more
    split_columns(const __grid_constant__ Columns p, const float* a, const unsigned* maxima, __half* limbs,
                  int* exponents) {
    await_kernel_ahead();
    __shared__ __half2 turned[2][TILE][TILE / 2 + 1];  // [limb][column][pair of rows]; one more against bank conflicts
    const unsigned across = static_cast<unsigned>((p.n + TILE - 1) / TILE);  // below 2^31, as all items are
    for_each_item(across * ((p.m + TILE - 1) / TILE), [&](long long item) {
        const unsigned tile = static_cast<unsigned>(item);
        const long long column = 1LL * (tile % across) * TILE, row = 1LL * (tile / across) * TILE;
        const long long pitch = (p.m + 7) / 8 * 8;
        const int group = threadIdx.x % 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const long long j = column + 4 * group;

        Scale scale[4];
#pragma unroll
        for (int c = 0; c < 4; c++) scale[c] = scale_of(j + c < p.n ? maxima[j + c] : 0);
        if (row == 0 && threadIdx.x < 16)
            for (int c = 0; c < 4; c++)
                if (j + c < p.n) exponents[j + c] = scale[c].exponent;

        float4 v[2][2];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++) v[half][r] = read_four(p, a, row + 2 * (threadIdx.x / 16 + 16 * half) + r, j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int pair = threadIdx.x / 16 + 16 * half;
            const float first[4] = {v[half][0].x, v[half][0].y, v[half][0].z, v[half][0].w};
            const float second[4] = {v[half][1].x, v[half][1].y, v[half][1].z, v[half][1].w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                __half high[2], low[2];
                scale[c].split(first[c], high[0], low[0]), scale[c].split(second[c], high[1], low[1]);
                turned[0][4 * group + c][pair] = __halves2half2(high[0], high[1]);
                turned[1][4 * group + c][pair] = __halves2half2(low[0], low[1]);
            }
        }
        __syncthreads();
        if (row + 2 * lane >= pitch) return;
        for (int line = warp; line < 2 * TILE; line += WARPS) {
            const int limb = line / TILE, c = line % TILE;
            if (column + c < p.n)
                *reinterpret_cast<__half2*>(limbs + (limb * p.n + column + c) * pitch + row + 2 * lane) =
                    turned[limb][c][lane];
        }
    });
}
