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
    __shared__ unsigned largest[WARPS];
    const long long m = x_limbs ? p.m : 0, n = w_limbs ? p.n : 0, k = p.k, pitch = (k + 7) / 8 * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long i = static_cast<long long>(blockIdx.x) * ROWS + warp / ROW_WARPS;
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

    // top = 2^e f with 1 <= f < 2
    const int e = top >> 23 ? static_cast<int>(top >> 23) - 127 : -118 - __clz(top), exponent = top ? e - 14 : 0;
    if (first == 0) o.exponents[i] = exponent;
    // 2^-exponent, up to 2^163, is no float: two steps.
    const float once = __uint_as_float((127 + (-exponent >> 1)) << 23),
                again = __uint_as_float((127 + ((1 - exponent) >> 1)) << 23);

    auto split = [&](const float (&from)[8], long long j) {
        if (j >= k) return;
        Vector<__half, 8> high, low;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float scaled = times(times(from[c], once), again);
            high.at[c] = __float2half_rn(scaled);
            const float rest = scaled - __half2float(high.at[c]);
            low.at[c] = __float2half_rn(isfinite(from[c]) ? rest : 0.f);
        }
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
}
