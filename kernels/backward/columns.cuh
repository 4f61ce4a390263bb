// What a thread of a backward kernel computes from its VEC columns: their sums, the gradients of size O, and dg. No
// kernels.
#pragma once
#include "backward/rows.cuh"
#include "common/cluster_columns.cuh"
#include "common/ranks.cuh"

constexpr int GROUP = 16;

// The sums of a column: S = sum dy, E = sum dy (d - centre) and, for 16-bit deviations, F = sum d and Q = sum d^2
// (Projection).
constexpr bool ROUNDED = TRAINING && sizeof(D) == 2;
constexpr bool FLOAT64 = sizeof(T) == 8;  // sums of float64 have no bits to spare
constexpr int SUMS = ROUNDED ? 4 : 2;
struct ColumnSums {
    double of[SUMS] = {};
};
// How many sums ranks exchange. A rank with few rows keeps d in float64 and needs no F and Q, but another rank may have
// many rows.
constexpr int POSTS = TRAINING && sizeof(T) == 2 ? 4 : 2;
using BackwardExchange = Exchange<POSTS>;

enum : int { DG_A = 0, DG_MEAN = 1, DG_MEAN_LOW = 2, DG_RATE = 3, DG_ROWS = 4 };  // rows of coefficients, in G

// A sum of a few numbers of G. If T is float64, it also sums the rounding errors.
struct Sum : LongSum<FLOAT64, G> {
    __device__ void add_product(G u, G v) {
        if constexpr (FLOAT64) {
            const G product = u * v;
            add(product);
            low += fma(u, v, -product);
        } else {
            high = fma(u, v, high);
        }
    }
};

// Turns dy into the gradient with respect to u, where y = f(u), for VEC columns from col on.
struct BeforeY {
    Vector<G, VEC> slope = {}, offset = {}, mean = {}, mean_low = {};

    __device__ BeforeY(const BackwardProblem& p, const double* saved, long long col, int inside) {
        if constexpr (ACTIVE && !IDENTITY) {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) {
                    const double* at = saved_of(p, saved, col) + col + j;
                    slope.at[j] = narrow<G>(at[(TRAINING ? SAVED_SLOPE : SAVED_A) * saved_pitch(p)]);
                    offset.at[j] = narrow<G>(at[SAVED_OFFSET * saved_pitch(p)]);
                    if (!TRAINING) {
                        const HighLow<G> parts(at[SAVED_MEAN * p.n]);
                        mean.at[j] = parts.high;
                        mean_low.at[j] = parts.low;
                    }
                }
        }
    }

    __device__ G gradient(int j, G dy, G d) const {
        if constexpr (!ACTIVE) return dy;
        if constexpr (IDENTITY) return Activation<T>::gradient(dy, d);
        const G u = fma(slope.at[j], TRAINING ? d : (d - mean.at[j]) - mean_low.at[j], offset.at[j]);
        const decltype(to_float(T())) rounded = u;  // to the type in which y was computed: for few rows G is wider
        return Activation<T>::gradient(dy, G(rounded));
    }
};

using BackwardTotals = Totals<THREADS, VEC, SUMS, G, FLOAT64>;

// Adds up VEC columns over all rows of a CTA. `most` is the largest number of rows of a thread. LONG: see Walk.
template <bool LONG>
__device__ __forceinline__ void add_rows(Walk<STAGES, BackwardRows>& rows, int most, const G (&centre)[VEC],
                                         const BeforeY& before, BackwardTotals& totals) {
#pragma unroll 1
    for (int first = 0; first < most; first += GROUP) {
        Sum sums_of[SUMS][VEC];
        rows.template down<LONG>(first, min(first + GROUP, rows.count), [&](int, const Row& row) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const G d = element(row.d, j), u = before.gradient(j, element(row.dy, j), d);
                sums_of[0][j].add(u);
                sums_of[1][j].add_product(u, TRAINING ? d : d - centre[j]);
                if constexpr (ROUNDED) {
                    sums_of[2][j].add(d);
                    sums_of[3][j].add_product(d, d);
                }
            }
        });
        G sums[SUMS][VEC];
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
#pragma unroll
            for (int j = 0; j < VEC; ++j) sums[i][j] = sums_of[i][j].total();
        totals.add(sums);
    }
}

// Loads the centres that are subtracted from VEC columns of d. In training, and without a norm, there are none.
__device__ inline void load_centre(const BackwardProblem& p, const double* saved, long long col, int inside,
                                   G (&centre)[VEC]) {
    if (!TRAINING && !IDENTITY) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) centre[j] = G(saved[SAVED_CENTRE * p.n + col + j]);
    }
}

// Merges the sums of all splits for the CTA's `columns` columns from col0 on, in float64. For each column, one thread
// calls then(c, column, sums). THREADS / columns threads share the splits of a column; their sums are added in a fixed
// order through `scratch` (SUMS, THREADS) in shared memory. If `scratch` is null, one thread has all splits of a
// column: float64 leaves no room for scratch.
template <typename Then>
__device__ inline void merge_splits(const BackwardProblem& p, const char* workspace, int columns, long long col0,
                                    double* scratch, const Then& then) {
    constexpr int AT_ONCE = 16 / SUMS;  // splits whose sums are in flight at once
    const auto [column, part, sharers] = Sharers<THREADS>(columns);
    const int parts = scratch == nullptr ? 1 : sharers;
    const long long c = col0 + column, step = parts * SUMS * p.n;
    ColumnSums sums;
    LongSum<FLOAT64> long_sums[SUMS];
    if (part < parts && c < p.n) {
        const double* at = reinterpret_cast<const double*>(workspace) + part * SUMS * p.n + c;
#pragma unroll 1
        for (int left = count_every(int(p.splits), part, parts); left > 0; left -= AT_ONCE) {
            ColumnSums next[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, at += step)
#pragma unroll
                for (int j = 0; j < SUMS; ++j) next[i].of[j] = i < left ? at[j * p.n] : 0.0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                for (int j = 0; j < SUMS; ++j) long_sums[j].add(next[i].of[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < SUMS; ++j) sums.of[j] = long_sums[j].total();
    if (parts > 1) {
        if (part < parts)
#pragma unroll
            for (int j = 0; j < SUMS; ++j) scratch[j * THREADS + threadIdx.x] = sums.of[j];
        __syncthreads();
        if (part == 0)
#pragma unroll 4
            for (int i = column + columns; i < THREADS; i += columns)
#pragma unroll
                for (int j = 0; j < SUMS; ++j) sums.of[j] += scratch[j * THREADS + i];
    }
    if (part == 0 && c < p.n) then(c, column, sums);
}

// The numbers that the forward saved for feature c, one in each row (SAVED_).
struct Factors {
    const double* first;  // the number of row 0
    long long pitch, c;
    // how many rows are needed, apart from SAVED_SHIFT
    static constexpr int ROWS = IDENTITY ? 0 : SAVED_OF_MEAN + 1;

    __device__ double operator()(int row) const { return first[row * pitch]; }
    // Loads the rows into L1, so that they are there once the sums are known. Thread `part` of the `parts` that share the
    // feature has every parts-th row.
    __device__ void prefetch(int part = 0, int parts = 1) const {
#pragma unroll 1
        for (int row = part; row < ROWS; row += parts)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(first + row * pitch));
        if (RENORM && part == 0) asm volatile("prefetch.global.L1 [%0];" ::"l"(first + SAVED_SHIFT * pitch));
    }
    // Copies the rows to shared memory in the same way.
    __device__ void copy(double* to, int to_pitch, int part, int parts) const {
#pragma unroll 1
        for (int row = part; row < ROWS; row += parts) to[row * to_pitch] = (*this)(row);
        if (RENORM && part == 0) to[SAVED_SHIFT * to_pitch] = (*this)(SAVED_SHIFT);
    }
};

// Computes S and E of a column from the sums over all `rows`.
//
// Deviations that are rounded to 16 bits have neither the mean 0 nor the variance v that the forward computed. In dg of
// an outlier, two terms cancel almost completely: dy and its projection on d. They cancel only if r belongs to the same
// deviations; otherwise dg is their rounding error. So the formulas use d - e and its own r' = t r:
//   e = F/B     V = Q/B - e^2     t = 1 / sqrt(eps r^2 + s^2 r^2 V)     E = t (sum dy d - e S)
//   dg = a (dy - S/B - t rate (d - e) E/B)
// Here s^2 r^2 is in units of the deviations (SAVED_RATE).
struct Projection {
    double rows, S, E, centre = 0.0, stretch = 1.0;  // centre is e, stretch is t

    template <int COUNT>
    __device__ Projection(double rows, const Factors& of, const double (&sums)[COUNT]) : rows(rows), S(sums[0]) {
        if constexpr (COUNT == 4) {
            const double inverse = 1.0 / rows;
            centre = sums[2] * inverse;
            const double square = of(SAVED_REST) + of(SAVED_RATE) * (sums[3] * inverse - centre * centre);
            stretch = rsqrtf(float(square));
            stretch *= 1.5 - 0.5 * square * stretch * stretch;  // Newton's step: from 22 bits to 44
        }
        E = COUNT == 4 ? of_part(S, sums[1]) : sums[1];
    }
    // E of a part of the rows, from the S and E of that part.
    __device__ double of_part(double S, double E) const { return POSTS == 4 ? stretch * (E - centre * S) : E; }
};

constexpr int GRADIENTS = 4;  // gradients of size O: bias, scale, gamma, beta

// Stores gradient `number` of feature c. One function serves all four: each is computed only once, so the code should
// be short.
__device__ __forceinline__ void store_gradient(int number, const BackwardProblem& p, const Factors& of, double S,
                                               double E, void* to_bias, void* to_scale, void* to_gamma, void* to_beta) {
    double value = S;
    void* to = to_beta;
    long long code = p.to_beta;
    if (IDENTITY && number > 0) return;
    if (number == 0) {
        value = TRAINING ? 0.0 : IDENTITY ? S : of(SAVED_A) * S;
        to = to_bias;
        code = p.to_bias;
    } else if (number == 1) {
        value = of(SAVED_SCALE) * (TRAINING ? E : fma(of(SAVED_BIASED), S, E));
        to = to_scale;
        code = p.to_scale;
    } else if (number == 2) {
        value = of(SAVED_GAMMA) * (TRAINING ? E : fma(of(SAVED_S), E, of(SAVED_Z) * S));
        if (RENORM) value = fma(of(SAVED_SHIFT), S, value);
        to = to_gamma;
        code = p.to_gamma;
    }
    store_vector(to, code, of.c, value);
}

__device__ inline void store_gradients(const BackwardProblem& p, const Factors& of, double S, double E, void* to_bias,
                                       void* to_scale, void* to_gamma, void* to_beta) {
#pragma unroll 1
    for (int number = 0; number < GRADIENTS; ++number)
        store_gradient(number, p, of, S, E, to_bias, to_scale, to_gamma, to_beta);
}

// In training, stores the coefficients of a feature's dg in column `at` of `coefficients`, whose rows have this pitch.
__device__ inline void store_coefficients(const Factors& of, const Projection& by, G* coefficients, long long pitch,
                                          long long at) {
    if (!TRAINING) return;
    const double a = of(SAVED_A);
    const double rate = by.stretch * of(SAVED_RATE) * by.E / by.rows, mean = by.S / by.rows - by.centre * rate;
    const G mean_high = G(mean);
    coefficients[DG_A * pitch + at] = G(a);
    coefficients[DG_MEAN * pitch + at] = mean_high;
    coefficients[DG_MEAN_LOW * pitch + at] = G(isfinite(mean_high) ? mean - mean_high : 0.0);
    coefficients[DG_RATE * pitch + at] = G(rate);
}

// Stores everything of size O for feature c: the gradients, if `gradients` is true, and the coefficients.
__device__ inline void store_feature(const BackwardProblem& p, const Factors& of, const ColumnSums& sums,
                                     bool gradients, void* to_bias, void* to_scale, void* to_gamma, void* to_beta,
                                     G* coefficients, long long pitch, long long at) {
    const Projection by(double(p.m), of, sums.of);
    if (gradients) store_gradients(p, of, by.S, by.E, to_bias, to_scale, to_gamma, to_beta);
    store_coefficients(of, by, coefficients, pitch, at);
}

// Turns sums over deviations into the sums over deviations that are `unit` times as large.
__device__ inline void scale_sums(double (&sums)[POSTS], double unit) {
#pragma unroll
    for (int j = 1; j < POSTS; ++j) sums[j] *= j == 3 ? unit * unit : unit;
}

// Turns sums over deviations d of `rows` rows into the sums over d - by.
__device__ inline void shift_sums(double (&sums)[POSTS], double rows, double by) {
    sums[1] -= by * sums[0];
    if constexpr (POSTS == 4) {
        sums[3] -= by * (2.0 * sums[2] - rows * by);
        sums[2] -= rows * by;
    }
}

// Computes what this rank posts for a feature: its sums, with deviations from the mean in units of g. Ranks may have
// different centres: those of few rows keep deviations in float64, from the mean.
__device__ inline void sums_to_post(const BackwardProblem& p, const D* d, const Factors& of, const ColumnSums& sums,
                                    double (&posts)[POSTS]) {
#pragma unroll
    for (int j = 0; j < POSTS; ++j) posts[j] = j < SUMS ? sums.of[j] : 0.0;
    if constexpr (SUMS < POSTS)
#pragma unroll 1
        for (long long row = 0; row < p.m; ++row) {  // few rows
            const double deviation = double(to_float(d[row * p.ldd + of.c]));
            posts[2] += deviation;
            posts[3] += deviation * deviation;
        }
    scale_sums(posts, of(SAVED_UNIT));
    shift_sums(posts, double(p.m), of(SAVED_OF_MEAN));
}

// Posts this rank's sums of a feature, and with the first feature also the header.
__device__ inline void post_sums(const BackwardExchange& exchange, const BackwardProblem& p, const D* d,
                                 const Factors& of, const ColumnSums& sums) {
    double posts[POSTS];
    sums_to_post(p, d, of, sums, posts);
    if (of.c == 0) exchange.post_header(double(p.m));
    exchange.post_feature(of.c, posts);
}

// Collects the sums of a feature over all ranks, with this rank's centre and units. Returns the rows of all ranks.
__device__ inline double collect_sums(const BackwardExchange& exchange, const Factors& of, double (&all)[POSTS]) {
    const double rows = exchange.sums(of.c, all);
    shift_sums(all, rows, -of(SAVED_OF_MEAN));
    scale_sums(all, 1.0 / of(SAVED_UNIT));
    return rows;
}

// Computes dg of the VEC columns from col on. In training the coefficients lie in shared memory, where
// store_coefficients wrote them; column `at` of `coefficients` belongs to col.
struct Coefficients {
    Vector<G, VEC> a = {}, mean = {}, mean_low = {}, rate = {};
    BeforeY before;

    // in training
    __device__ Coefficients(const BeforeY& before, const G* coefficients, long long pitch, long long at)
        : before(before) {
        const auto row = [&](int i) { return *reinterpret_cast<const Vector<G, VEC>*>(coefficients + i * pitch + at); };
        a = row(DG_A);
        mean = row(DG_MEAN);
        mean_low = row(DG_MEAN_LOW);
        rate = row(DG_RATE);
    }
    __device__ Coefficients(const BeforeY& before, const G* coefficients, long long pitch, long long at,
                            const BackwardProblem& p, const double* saved, long long col, int inside)
        : before(before) {
        if (TRAINING) {
            *this = Coefficients(before, coefficients, pitch, at);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) a.at[j] = IDENTITY ? G(1) : G(saved[SAVED_A * p.n + col + j]);
        }
    }

    __device__ Vector<T, VEC> dg(const Row& row) const {
        Vector<G, VEC> wide;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const G d = element(row.d, j), u = before.gradient(j, element(row.dy, j), d);
            const G centred = TRAINING ? fma(-rate.at[j], d, (u - mean.at[j]) - mean_low.at[j]) : u;
            wide.at[j] = a.at[j] * centred;
        }
        return rounded<T>(wide);
    }
};

// Stores the first `inside` columns of dg.
__device__ __forceinline__ void store_dg(T* to, const Vector<T, VEC>& out, int inside) {
    if (inside == VEC) {
        store_whole(to, out);
    } else {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) to[j] = out.at[j];
    }
}
