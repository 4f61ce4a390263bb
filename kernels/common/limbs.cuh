// Two float16 limbs of a float32, made in registers (docs/design/limbs.md). No kernels.
#pragma once
#include <cuda_fp16.h>

// `there` is a power of two that brings the largest magnitude into [2^14, 2^15). `back` is 2^-14 times the number that
// undoes this: with that factor, a sum overflows on its way only if its result does.
struct LimbScale {
    float there, back;
    __device__ explicit LimbScale(float top) {
        // biased exponent; the minimum costs no digits: float16's least number divides all
        const int e = max(__float_as_int(top) >> 23, 29);
        there = __uint_as_float(unsigned(268 - e) << 23);
        back = __uint_as_float(unsigned(e - 28) << 23);
    }
};

// The limbs of two adjacent k that have been scaled into float16's range: `high` has them rounded to float16, and `low`
// has the rest, rounded to float16. For Inf, `low` is NaN; so a row with Inf gives NaN, where IEEE arithmetic gives Inf
// or NaN.
__device__ __forceinline__ void split(float first, float second, unsigned& high, unsigned& low) {
    const __half2 both = __floats2half2_rn(first, second);
    const float2 left = __half22float2(both);
    const __half2 rest = __floats2half2_rn(first - left.x, second - left.y);
    high = *reinterpret_cast<const unsigned*>(&both);
    low = *reinterpret_cast<const unsigned*>(&rest);
}
