// Number formats between accumulators and memory: the exponents of limbs, the format of y, the units of deviations.
#pragma once
#include "sm90/config.cuh"
#include "sm90/wgmma.cuh"

// 16-bit elements of y: bfloat16, if not float16
constexpr int PACKED = ELEMENT == ELEMENT_FLOAT16 ? ELEMENT_FLOAT16 : ELEMENT_BFLOAT16;

// 2^e for -126 <= e <= 127
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float(u32(127 + e) << 23); }

// v 2^e for |e| <= 252, in two steps: 2^e may not be a float.
__device__ __forceinline__ float times_power_of_two(float v, int e) {
    return v * power_of_two(e >> 1) * power_of_two((e + 1) >> 1);
}

// The exponents of w's features `feature` + 8 h.
__device__ __forceinline__ void load_exponents(const int* w_exponents, int n, int feature, int (&of_w)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) of_w[h] = feature + 8 * h < n ? __ldg(w_exponents + feature + 8 * h) : 0;
}

// d = sum * 2^(x_exponent + w_exponent). Element (j, h, e) uses the exponent of x's row `row` + 8 j + e, and of_w[h].
// The result is exact, unless it falls below float32's normal numbers.
__device__ __forceinline__ void unscale(const float (&sum)[ACC], float (&d)[ACC], const int* x_exponents, int m,
                                        int row, const int (&of_w)[2]) {
    int of_x[ACC / 2];
#pragma unroll
    for (int i = 0; i < ACC / 2; ++i) {
        const int r = row + i / 2 * 8 + i % 2;
        of_x[i] = r < m ? __ldg(x_exponents + r) : 0;
    }
    // Multiply by one factor for x and one for w, unless the number in between could leave float32's range: |sum| <
    // 2^48.
    bool mild = max(abs(of_w[0]), abs(of_w[1])) < 64;
#pragma unroll
    for (int i = 0; i < ACC / 2; ++i) mild &= abs(of_x[i]) < 64;
    if (__all_sync(~0u, mild)) {
        const float w[2] = {power_of_two(of_w[0]), power_of_two(of_w[1])};
#pragma unroll
        for (int i = 0; i < ACC; ++i)
            d[i] = sum[i] * power_of_two(of_x[Accumulator::own_column(i)]) * w[Accumulator::row_half(i)];
    } else {
#pragma unroll
        for (int i = 0; i < ACC; ++i) {
            const int e = of_x[Accumulator::own_column(i)] + of_w[Accumulator::row_half(i)];
            d[i] = times_power_of_two(sum[i], max(e, -252));
        }
    }
}

__device__ __forceinline__ u32 pack(float low, float high) { return pack_as<PACKED>(low, high); }
__device__ __forceinline__ float2 unpack(u32 word) { return unpack_as<PACKED>(word); }

// Deviations are stored in units of this power of two, which is near their standard deviation. Otherwise float16 might
// overflow.
__device__ __forceinline__ float deviation_unit(float m2, int rows) {
    if (!IN_UNITS) return 1.0f;
    const int exponent = int(__float_as_uint(m2 / float(rows)) >> 23 & 255) - 127;
    return power_of_two(exponent >> 1);
}

// The centre of deviations, for statistics over `rows` rows: the mean, except in 16 bits (deviation_centre).
__device__ __forceinline__ float centre_of(float mean, float m2, float rows) {
    return FLOAT32 || FEW_ROWS ? mean : deviation_centre(mean, m2 / rows);
}

// y's 16-bit type, or float
#if FLOAT32_OUTPUT || !(ELEMENT == ELEMENT_BFLOAT16 || ELEMENT == ELEMENT_FLOAT16)
using Y = float;
constexpr int KIND_OF_Y = KIND_FLOAT32;
#elif ELEMENT == ELEMENT_FLOAT16
using Y = __half;
constexpr int KIND_OF_Y = KIND_FLOAT16;
#else
using Y = __nv_bfloat16;
constexpr int KIND_OF_Y = KIND_BFLOAT16;
#endif

// The epilogue computes OfU of u. With RESIDUAL the activation follows where y is stored, once the residual is added.
#if RESIDUAL
using OfU = Identity<Y>;
#else
using OfU = Activation<Y>;
#endif

// Two elements of y = f(v) with v = u + residual. u and v are rounded to y's type, as in PyTorch.
__device__ __forceinline__ u32 add_residual(u32 u, u32 residual) {
    const float2 a = unpack(u), b = unpack(residual), v = unpack(pack(a.x + b.x, a.y + b.y));
    return pack(Activation<Y>::of(v.x), Activation<Y>::of(v.y));
}

__device__ __forceinline__ float line(float2 xy, float v) { return fmaf(xy.x, v, xy.y); }

// Whether saved deviations are settled. In float32 nothing is rounded.
constexpr bool SETTLES = SAVE_DEVIATIONS && !FLOAT32 && OfU::JUMPS;
#if ELEMENT == ELEMENT_FLOAT16
using JumpOfU = Jump<OfU, __half>;
#else
using JumpOfU = Jump<OfU, __nv_bfloat16>;
#endif

// Rounds two deviations for the backward.
__device__ __forceinline__ u32 pack_deviations(float low, float high, const JumpOfU& of_low, const JumpOfU& of_high) {
    if constexpr (SETTLES) return pack(of_low.settle(low), of_high.settle(high));
    return pack(low, high);
}

// The epilogue of a deferred deviation d of a feature: y = f(line(to_y, d)). With SAVE_DEVIATIONS, line(to_deviation,
// d) is saved, and to_y applies to it instead of d.
struct Epilogue {
#if SAVE_DEVIATIONS
    float2 to_deviation;
    JumpOfU jump;
#endif
    float2 to_y;
};

// The epilogue for deviations from a tile's centre, in units of `unit_of`. That centre exceeds the centre of all rows
// by `shift`; at the latter, y = f(offset).
__device__ __forceinline__ Epilogue epilogue_of(float unit_of, float shift, float a, float unit, float offset) {
#if SAVE_DEVIATIONS
    const float2 to_y = make_float2(a * unit, offset);
    JumpOfU jump;
    if constexpr (SETTLES) jump = JumpOfU(JumpOfU::least(to_y.x, to_y.y));
    return {make_float2(unit_of / unit, shift / unit), jump, to_y};
#else
    return {make_float2(a * unit_of, fmaf(a, shift, offset))};
#endif
}

// The epilogue of a feature's g, once the statistics are known: y = f(slope d + offset) with d = per_unit (g - centre).
// With SAVE_DEVIATIONS, d is saved; otherwise per_unit is 1.
struct Centred {
    float centre, per_unit, slope, offset;
};

// Turns 16 bytes of deferred deviations into 16 bytes of y and, with SAVE_DEVIATIONS, 16 bytes of deviations.
__device__ __forceinline__ void apply_epilogue(uint4 deferred, const Epilogue (&coef)[VEC_Y], uint4& y,
                                               uint4& deviations) {
    u32 word[4] = {deferred.x, deferred.y, deferred.z, deferred.w}, deviation[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (FLOAT32) {
            float d = __uint_as_float(word[i]);
#if SAVE_DEVIATIONS
            d = line(coef[i].to_deviation, d);
            deviation[i] = __float_as_uint(d);
#endif
            word[i] = __float_as_uint(OfU::of(line(coef[i].to_y, d)));
        } else {
            const Epilogue &even = coef[2 * i], &odd = coef[2 * i + 1];
            float2 d = unpack(word[i]);
#if SAVE_DEVIATIONS
            d = make_float2(line(even.to_deviation, d.x), line(odd.to_deviation, d.y));
            deviation[i] = pack_deviations(d.x, d.y, even.jump, odd.jump);
#endif
            word[i] = pack(OfU::of(line(even.to_y, d.x)), OfU::of(line(odd.to_y, d.y)));
        }
    }
    y = make_uint4(word[0], word[1], word[2], word[3]);
    if constexpr (SAVE_DEVIATIONS) deviations = make_uint4(deviation[0], deviation[1], deviation[2], deviation[3]);
}
