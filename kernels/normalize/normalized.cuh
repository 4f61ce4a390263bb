// The code that normalize and normalize_fused share: it computes y, of Y_TYPE, and with D_TYPE also the deviations of
// g. No kernels.
#pragma once
#include "common/activation.cuh"
#include "common/row_words.cuh"
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

    // For a row of g. `deviations` points at the first of the columns; store_y(word of y) stores y.
    template <typename Store>
    __device__ __forceinline__ void operator()(const Vector<G, VEC>& in, D* deviations, const Store& store_y) const {
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
        store_y(out);
        if (SAVE_DEVIATIONS) *reinterpret_cast<Vector<D, VEC>*>(deviations) = deviation_vec;  // rows are padded
    }
};
