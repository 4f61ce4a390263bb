// Two float16 limbs of a float32, made in registers (docs/design/limbs.md). No kernels.
#pragma once
#include <cuda_fp16.h>

// What numbers are multiplied by, a power of two, so that the largest magnitude lies in [2^14, 2^15); and by what their
// products come back, times 2^-14: a sum then does not overflow on its way unless it does.
struct LimbScale {
    float there, back;
    __device__ explicit LimbScale(float top) {
        const int e = max(__float_as_int(top) >> 23, 29);  // biased; whoever is smaller still keeps float16's quantum
        there = __uint_as_float(static_cast<unsigned>(268 - e) << 23);
        back = __uint_as_float(static_cast<unsigned>(e - 28) << 23);
    }
};

// Limbs of two neighbours of k that are scaled into float16's range: high, float16, and low, of what that leaves. Of Inf low is
// NaN, and so is what a row with Inf makes, which IEEE arithmetic has as Inf or NaN.
__device__ __forceinline__ void split(float first, float second, unsigned& high, unsigned& low) {
    const __half2 both = __floats2half2_rn(first, second);
    const float2 left = __half22float2(both);
    const __half2 rest = __floats2half2_rn(first - left.x, second - left.y);
    high = *reinterpret_cast<const unsigned*>(&both);
    low = *reinterpret_cast<const unsigned*>(&rest);
}
