// The code that normalize and normalize_fused share: it computes y, of Y_TYPE, and with D_TYPE also the deviations of
// g. No kernels.
#pragma once
#include "common/activation.cuh"
#include "normalize/features.cuh"

#ifndef Y_TYPE
#define Y_TYPE float
#endif
using Y = Y_TYPE;
#ifdef D_TYPE
constexpr bool SAVE_DEVIATIONS = true;
#else
constexpr bool SAVE_DEVIATIONS = false;
#define D_TYPE float
#endif
using D = D_TYPE;
constexpr bool UNITS = SAVE_DEVIATIONS && in_units<D>;

// Computes y, and the deviations, of VEC columns.
struct Normalize {
    Vector<G, VEC> mean, mean_low, a, offset;
    Vector<G, VEC> slope, inverse_unit;  // with UNITS: the backward computes u = slope d / unit + offset
    long long y_col;
    int inside;  // columns that exist
    bool whole;  // y is written by whole words

    // For a row of g; `y` and `deviations` point at the first of the columns.
    __device__ __forceinline__ void operator()(const Vector<G, VEC>& in, Y* y, D* deviations) const {
        Vector<Y, VEC> out;
        Vector<D, VEC> deviation_vec;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const G d = (in.at[j] - mean.at[j]) - mean_low.at[j];
            G u = fma(a.at[j], d, offset.at[j]);
            if (SAVE_DEVIATIONS)
                deviation_vec.at[j] =
                    deviation<Y, D>(in.at[j], mean.at[j], mean_low.at[j], UNITS ? d * inverse_unit.at[j] : d,
                                    UNITS ? slope.at[j] : a.at[j], offset.at[j], u);
            from_float(Activation<Y>::of(u), out.at[j]);
        }
        if (whole) {
            *reinterpret_cast<Vector<Y, VEC>*>(y) = out;
            if (SAVE_DEVIATIONS) *reinterpret_cast<Vector<D, VEC>*>(deviations) = deviation_vec;
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) {
                    y[j * y_col] = out.at[j];
                    if (SAVE_DEVIATIONS) deviations[j] = deviation_vec.at[j];
                }
        }
    }
};
