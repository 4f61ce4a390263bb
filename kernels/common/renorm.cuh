// Batch renormalisation (Ioffe 2017), in the variants with RENORM: in training
//   y = gamma (ratio (z - mean of z) / sigma + shift) + beta,   z = s (g + b),   sigma^2 = s^2 v + eps
//   ratio = clip(sigma / sigma', 1 / r_max, r_max),   shift = clip((mean of z - running_mean) / sigma', -d_max, d_max)
// with sigma'^2 = running_var + eps. The running statistics are those before this batch: a thread that computes a
// feature's correction reads them before any thread updates them. ratio and shift are the paper's r and d, letters that
// mean something else here; the backward takes them as constants. No kernels.
#pragma once
#include "common/common.cuh"

template <typename R>
__device__ __forceinline__ R clip(R v, R low, R high) {
    return v < low ? low : v > high ? high : v;  // NaN stays NaN
}

template <typename R>
struct RenormLimits {
    R r_max = R(1), d_max = R(0);  // no correction
#if RENORM
    // Reads the limits from the caller's array, or takes them from p. `batches` is the count before this batch.
    template <typename P>
    __device__ RenormLimits(const P& p, const void* renorm, long long batches) {
        if (p.warmup > 0 && batches < p.warmup) return;
        r_max = fetch(renorm, p.renorm, 0).or_else(R(p.r_max));
        d_max = fetch(renorm, p.renorm, 1).or_else(R(p.d_max));
    }
#else
    RenormLimits() = default;
#endif
};

template <typename R>
struct Correction {
    R ratio = R(1), shift = R(0);
    Correction() = default;
    // `square`: sigma^2; `distance`: the mean of z minus running_mean; `running`: sigma'
    __device__ Correction(const RenormLimits<R>& limits, R square, R distance, R running)
        : ratio(clip(sqrt(square) / running, R(1) / limits.r_max, limits.r_max)),
          shift(clip(distance / running, -limits.d_max, limits.d_max)) {}
};
