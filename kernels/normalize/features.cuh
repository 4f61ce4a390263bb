// The code that the portable kernels share: the statistics of a feature, and the constants of y. No kernels.
//
//   mean_j = sum_i g_ij / B     v_j = sum_i (g_ij - mean_j)^2 / B     r = 1 / sqrt(s^2 v + eps)     a = gamma s r
//   running_mean <- (1 - mu) running_mean + mu s (mean + b)
//   running_var  <- (1 - mu) running_var + mu s^2 v B / (B - 1)
//
// The scale s enters only through a and the running statistics: z = s (g + b) is never formed, and b cancels in y.
//
// A thread has VEC columns of a group of rows in registers. It computes the group's mean, then the squared deviations
// from that mean (never E[g^2] - E[g]^2). A CTA pools its groups (n_i, mean_i, M2_i) in float64 about p, a value near
// its first rows:
//   first = sum n_i d_i,  second = sum (M2_i + n_i d_i^2),  d_i = mean_i - p
//   mean = p + first / n,  M2 = second - first^2 / n
// so that threads pool by addition. For float32, p is the first row: the subtraction loses at most a factor n of
// float64's 2^53, since (p - mean)^2 <= M2 by convexity. If g itself is float64, p is a median, which no single row can
// move far. If more than a few bits still cancel (`Moments::far`), the CTA starts again about the mean that it found.
// The order of all sums depends only on the shape and the data; equal rows give exactly M2 = 0.
#pragma once
#include "common/ghost.cuh"
#include "common/renorm.cuh"

#ifndef G_TYPE
#define G_TYPE float
#endif
using G = G_TYPE;

struct ForwardProblem {
    long long m, n, k;           // B, O, I
    long long ldx, ldw;          // row pitches of x and of the weight, in elements
    long long ldg;               // row pitch of g, of the deviations and of rows in the workspace, in elements
    long long y_row, y_col;      // strides of y, in elements
    long long row_threads;       // threads along a row of g
    long long stats_rows;        // rows of g in an item of scale_stats
    long long normalize_rows;    // rows of g in an item of normalize
    long long splits;            // items of scale_stats that share a column block
    long long merge_columns;     // columns in an item of merge_statistics
    long long affine, partials;  // where these start in the workspace, in bytes
    long long flags;             // FLAG_VECTOR_W, FLAG_VECTOR_Y, _CUMULATIVE, _UNITS, _RUNNING, _LIMBS, _ROUNDS
    long long signature;         // with a group: identifies this call (Exchange)
    long long bias, scale, gamma, beta, running_mean, running_var;  // vector codes, see fetch
    double momentum, eps, number;  // number: the scale of all features, if there is no vector
#if RENORM
    long long renorm, warmup;  // the vector code of r_max and d_max; batches before corrections begin
    double r_max, d_max;       // the limits, if there is no vector
#endif
#if GHOST
    long long features, ghost_pitch;  // common/ghost.cuh
#endif
};

constexpr int VEC = 16 / sizeof(G);
constexpr int THREADS = 256;

// The pitch of rows in the workspace, in elements.
__device__ __forceinline__ long long pitch_of_columns(const ForwardProblem& p) { return GHOST ? p.n : p.ldg; }

// The unit of a feature's deviations: a power of two above the spread, by a factor of at most 2, in float32's range; 1
// if the spread is 0. A deviation is at most sqrt(B) + 1 of these units.
__device__ inline double unit_near(double spread) {
    return spread > 0.0 && isfinite(spread) ? ldexp(1.0, max(-126, min(ilogb(spread) + 1, 126))) : 1.0;
}

// The arguments of a feature, with defaults for absent ones.
struct Arguments {
    static constexpr int COUNT = 6;
    double s, gamma, beta, b, mean, var;
    // `from` has the COUNT numbers that `argument` returned, `pitch` apart.
    __device__ Arguments(const double* from, int pitch)
        : s(from[0]),
          gamma(from[pitch]),
          beta(from[2 * pitch]),
          b(from[3 * pitch]),
          mean(from[4 * pitch]),
          var(from[5 * pitch]) {}
};

// Argument `number` of feature c. One function serves all arguments, so that several threads can fetch one each in few
// instructions.
__device__ __forceinline__ double argument(int number, const ForwardProblem& p, long long c, const void* bias,
                                           const void* scale, const void* gamma, const void* beta,
                                           const void* running_mean, const void* running_var) {
    const void* from = running_var;
    long long code = p.running_var;
    double absent = 1.0;
    if (number == 0) from = scale, code = p.scale, absent = p.number;
    if (number == 1) from = gamma, code = p.gamma;
    if (number == 2) from = beta, code = p.beta, absent = 0.0;
    if (number == 3) from = bias, code = p.bias, absent = 0.0;
    if (number == 4) from = running_mean, code = p.running_mean, absent = 0.0;
    if (GHOST && number >= 4) code = 0;  // `track` stores there; track_ghosts reads the caller's vectors
    return fetch(from, code, feature_of(p, c)).or_else(absent);
}

// Everything that follows from mean and M2 of a feature over `rows` rows. M2 has already been corrected by M2_OF_LIMBS.
struct Feature {
    Arguments of;
    double rows, mean, m2, v;
    Correction<double> by;
    double a, offset, centre;  // y = a (g - centre) + offset

    __device__ Feature(const ForwardProblem& p, double rows, double mean, double m2, const Arguments& of,
                       const RenormLimits<double>& limits)
        : of(of),
          rows(rows),
          mean(mean),
          m2(m2),
          v(m2 / rows * (p.flags & FLAG_LIMBS ? M2_AS_MADE : 1.0)),
          a(of.gamma * of.s * (1.0 / sqrt(of.s * of.s * v + p.eps))),
          offset(of.beta),
          centre(p.flags & FLAG_ROUNDS ? deviation_centre(mean, v) : mean) {
        if constexpr (RENORM) {
            by = Correction<double>(limits, of.s * of.s * v + p.eps, of.s * (mean + of.b) - of.mean,
                                    sqrt(of.var + p.eps));
            a *= by.ratio;
            offset = fma(of.gamma, by.shift, of.beta);
        }
        if (centre != mean) offset -= G(a) * (mean - centre);
    }

    // Stores what the backward needs, if there is one.
    __device__ __forceinline__ void save(const ForwardProblem& p, long long c, double* saved) const {
        if (saved == nullptr) return;
        const double unit = p.flags & FLAG_UNITS ? unit_near(sqrt(v)) : 1.0;
        store_saved(saved_of(p, saved, c), saved_pitch(p), c, of.s, of.gamma, v, p.eps, mean - centre, unit, G(a),
                    G(offset), by.ratio, by.shift);
    }
    // Updates the running statistics, if there are any. `batches` is the count before this batch. With GHOST it stores
    // the statistics of this ghost batch instead.
    __device__ __forceinline__ void track(const ForwardProblem& p, long long c, long long batches, void* running_mean,
                                          void* running_var) const {
        if (p.running_mean == 0) return;
        const double mu = p.flags & FLAG_CUMULATIVE ? 1.0 / double(batches + 1) : p.momentum;
        const double to_mean = of.s * (mean + of.b), to_var = of.s * of.s * (m2 / (rows - 1.0));
        if constexpr (GHOST) {  // track_ghosts updates the running statistics, ghost batch after ghost batch
            static_cast<double*>(running_mean)[c] = to_mean;
            static_cast<double*>(running_var)[c] = to_var;
            return;
        }
        store_vector(running_mean, p.running_mean, c, (1.0 - mu) * of.mean + mu * to_mean);
        store_vector(running_var, p.running_var, c, (1.0 - mu) * of.var + mu * to_var);
    }
};

// A value near the first `rows` rows of VEC columns. For float32 it is the first row. For float64 it is the median of
// the means of three groups of four rows (the mean of four equal rows is exact), or the mean of all rows if there are
// at most 16.
__device__ __forceinline__ Vector<G, VEC> near_first(const G* from, long long pitch, long long rows, int inside) {
    if (sizeof(G) == 4) return load<G, VEC>(from, inside);
    const int groups = rows <= 16 ? 1 : 3, of_group = rows <= 16 ? int(rows) : 4;
    const G inverse = G(1) / of_group;
    Vector<G, VEC> mean[3] = {};
#pragma unroll
    for (int group = 0; group < 3; ++group)
        for (int i = 0; i < of_group && group < groups; ++i) {
            const Vector<G, VEC> at = load<G, VEC>(from + (group * of_group + i) * pitch, inside);
#pragma unroll
            for (int j = 0; j < VEC; ++j) mean[group].at[j] += at.at[j] * inverse;
        }
    if (groups == 1) return mean[0];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        const G a = mean[0].at[j], b = mean[1].at[j];
        mean[0].at[j] = fmax(fmin(a, b), fmin(fmax(a, b), mean[2].at[j]));
    }
    return mean[0];
}

// 1 / n for the number n of rows of a group. A float64 division takes about twenty instructions, each of which waits
// for the one before.
__constant__ double RECIPROCAL[] = {0.0,      1.0,      1.0 / 2,  1.0 / 3,  1.0 / 4,  1.0 / 5,
                                    1.0 / 6,  1.0 / 7,  1.0 / 8,  1.0 / 9,  1.0 / 10, 1.0 / 11,
                                    1.0 / 12, 1.0 / 13, 1.0 / 14, 1.0 / 15, 1.0 / 16};

// Adds a group of `count` >= 1 rows, which lie `step` elements apart, to `first` and `second`.
template <int GROUP>
__device__ __forceinline__ void add_group(const G* from, long long step, int count, int inside,
                                          const Vector<G, VEC>& pivot, double (&first)[VEC], double (&second)[VEC]) {
    static_assert(GROUP < sizeof(RECIPROCAL) / sizeof(double), "a reciprocal for every number of rows");
    Vector<G, VEC> at[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) at[i] = load<G, VEC>(from + i * step, i < count ? inside : 0);
    const double inverse = RECIPROCAL[count];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        G centre = 0;  // terms are scaled before they are added, so that the sum overflows only if the mean does
#pragma unroll
        for (int i = 0; i < GROUP; ++i) centre = fma(at[i].at[j], G(inverse), centre);
        G left = 0, squares = 0;  // left: the sum of the d, which is not 0 because `centre` is rounded
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const G d = i < count ? at[i].at[j] - centre : G(0);
            left += d;
            squares += d * d;
        }
        const double shift = left * inverse;
        const double d = double(centre) - pivot.at[j] + shift;
        first[j] += count * d;
        second[j] += squares - shift * left + count * d * d;
    }
}

// Adds all of a thread's rows from `row` to `end`, in groups.
template <int GROUP>
__device__ __forceinline__ void add_rows(const G* from, long long row, long long end, int at_once, long long pitch,
                                         int inside, const Vector<G, VEC>& pivot, double (&first)[VEC],
                                         double (&second)[VEC]) {
    const long long step = at_once * pitch;
    for (; row < end; row += GROUP * at_once, from += GROUP * step) {
        const int left = int(min(end - row, 1LL * (GROUP * at_once)));
        const int count = left == GROUP * at_once ? GROUP : (left + at_once - 1) / at_once;
        add_group<GROUP>(from, step, count, inside, pivot, first, second);
    }
}

struct Moments {
    double mean, m2;
    Moments() = default;
    // Computes them from the sums over `rows` rows about a pivot.
    __device__ Moments(double pivot, double first, double second, double rows) {
        const double shift = first / rows, spread = second - first * shift;
        mean = pivot + shift;
        m2 = spread < 0.0 ? 0.0 : spread;  // a rounding below zero is zero; NaN stays NaN
    }
    // Whether the subtraction has cancelled bits that a float64 G needs. Never true for float32: float64 has 29 bits to
    // spare.
    __device__ bool far(double pivot, double rows) const {
        return sizeof(G) == 8 && rows * (mean - pivot) * (mean - pivot) > m2;
    }
};

// The centre that a backward subtracts from g so that its sums do not cancel: `middle` if that is near a few rows
// sampled from the batch, otherwise the first of these rows. `middle` is the g for which z equals the running mean (if
// s = 0, for which g + b is zero). For float32 the centre is rounded to a 256th of the spread: if it had more digits
// than g, g - centre would be rounded in the same direction in all rows.
__device__ inline double centre_near(double middle, const G* g, const ForwardProblem& p) {
    const double first = isfinite(*g) ? *g : 0.0;
    double spread = 0.0;
    const long long step = max(p.m / 8, 1LL);  // not the first eight rows: they may be padding
    for (long long i = step; i < p.m; i += step) spread = fmax(spread, fabs(g[i * p.ldg] - first));
    if (!(fabs(middle - first) <= 4.0 * spread)) return first;
    if (sizeof(G) == 8) return middle;
    const double unit = unit_near(spread) / 256.0;
    return double(G(rint(middle / unit) * unit));
}

// The constants of feature c from the running statistics, for inference.
//   y = gamma r s (g - mean) + beta,   mean = running_mean / s - b,   r = 1 / sqrt(running_var + eps)
// s may be 0, or so small that `mean` overflows G or that gamma r s is subnormal and would be flushed to zero. The mean
// is then taken as 0, and its contribution is added to beta.
__device__ __forceinline__ void store_running(const ForwardProblem& p, long long c, const Arguments& of, const G* g,
                                              G* affine, long long pitch, long long at, double* saved) {
    const double s = of.s, b = of.b, r = 1.0 / sqrt(of.var + p.eps), gamma_r = of.gamma * r;
    const double middle = (s == 0.0 ? 0.0 : of.mean / s) - b;
    constexpr double LEAST = sizeof(G) == 8 ? 2.2250738585072014e-308 : 1.1754943508222875e-38;  // normal number
    const double a = gamma_r * s;
    const bool within = s != 0.0 && isfinite(G(middle)) && (fabs(a) >= LEAST || gamma_r == 0.0);
    const double mean = within ? middle : 0.0;
    const double offset = (within ? 0.0 : gamma_r * fma(s, b, -of.mean)) + of.beta;
    store_affine(affine, pitch, at, mean, a, offset);
    if (saved == nullptr) return;
    const double centre = centre_near(middle, g + c, p), biased = centre + b;
    // In float64 the rounding error of this sum, times the number of rows, would be most of dgamma's error.
    const double rest = isfinite(biased) ? rest_of_sum(centre, b, biased) : 0.0;
    saved[SAVED_A * p.n + c] = a;
    saved[SAVED_SCALE * p.n + c] = gamma_r;
    saved[SAVED_GAMMA * p.n + c] = r;
    saved[SAVED_CENTRE * p.n + c] = centre;
    saved[SAVED_BIASED * p.n + c] = biased;
    saved[SAVED_Z * p.n + c] = fma(s, rest, fma(s, biased, -of.mean));
    saved[SAVED_S * p.n + c] = s;
    saved[SAVED_MEAN * p.n + c] = mean;
    saved[SAVED_OFFSET * p.n + c] = G(offset);
}
