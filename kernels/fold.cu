// fold: folds batch normalisation with frozen statistics into the linear layer. It computes in float64 and rounds once.
//
//   w (n, k) of T, row pitch ldw  ->  w_folded (n, k) of T, contiguous      w_folded = (gamma r s) w
//   b_folded (n) of T = gamma r (s b - running_mean) + beta                r = 1 / sqrt(running_var + eps)
//
// A CTA has one row of w; its threads take THREADS columns at a time. Bytes moved: w is read once and w_folded is
// written once, the minimum.
#include "common/common.cuh"

#ifndef X_TYPE
#define X_TYPE float
#endif
using T = X_TYPE;

struct FoldProblem {
    long long k, ldw;                                               // features of x; row pitch of w, in elements
    long long bias, scale, gamma, beta, running_mean, running_var;  // vector codes, see fetch
    double eps, number;  // number: the scale of all features, where there is no vector
};

constexpr int THREADS = 256;

__device__ inline void round_to(double v, float& out) { out = float(v); }
__device__ inline void round_to(double v, double& out) { out = v; }

extern "C" __global__ void __launch_bounds__(THREADS)
    fold(const __grid_constant__ FoldProblem p, const T* w, T* w_folded, T* b_folded, const void* bias,
         const void* scale, const void* gamma, const void* beta, const void* running_mean, const void* running_var) {
    await_kernel_ahead();
    const long long row = blockIdx.x;
    const double s = fetch(scale, p.scale, row).or_else(p.number);
    const double r = 1.0 / sqrt(fetch(running_var, p.running_var, row).or_else(1.0) + p.eps);
    const double a = fetch(gamma, p.gamma, row).or_else(1.0) * r;
    if (threadIdx.x == 0) {
        const double b = fetch(bias, p.bias, row).or_else(0.0);
        const double mean = fetch(running_mean, p.running_mean, row).or_else(0.0);
        round_to(a * (s * b - mean) + fetch(beta, p.beta, row).or_else(0.0), b_folded[row]);
    }
    for (long long col = threadIdx.x; col < p.k; col += THREADS) {
        round_to(a * s * double(to_float(w[row * p.ldw + col])), w_folded[row * p.k + col]);
    }
}
