// What a thread of backward.cu makes of its VEC columns: their sums, the gradients of size O, dg. No kernels.
#pragma once
#include "backward_rows.cuh"

constexpr int GROUP = 16;

enum : int { DG_A = 0, DG_MEAN = 1, DG_MEAN_LOW = 2, DG_RATE = 3, DG_ROWS = 4 };  // of coefficients, in G

// A sum of G: of a few float32 as it comes, of float64 with what its roundings left over.
struct Sum {
    G high = 0, low = 0;
    __device__ void add(G v) {
        if constexpr (sizeof(G) == 8) {
            const G sum = high + v, back = sum - high;
            low += (high - (sum - back)) + (v - back);
            high = sum;
        } else {
            high += v;
        }
    }
    __device__ void add_product(G u, G v) {
        if constexpr (sizeof(G) == 8) {
            const G product = u * v;
            add(product);
            low += fma(u, v, -product);
        } else {
            high = fma(u, v, high);
        }
    }
};

// The gradient with respect to u, y = f(u), of VEC columns from col on.
struct BeforeY {
    Vector<G, VEC> slope = {}, offset = {}, m = {}, m_low = {};

    __device__ BeforeY(const Problem& p, const double* saved, long long col, int inside) {
        if constexpr (ACTIVE) {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) {
                    const double* at = saved + col + j;
                    slope.at[j] = static_cast<G>(at[(TRAINING ? SAVED_SLOPE : SAVED_A) * p.n]);
                    offset.at[j] = static_cast<G>(at[SAVED_OFFSET * p.n]);
                    if (!TRAINING) {
                        const Parts<G> parts(at[SAVED_M * p.n]);
                        m.at[j] = parts.high;
                        m_low.at[j] = parts.low;
                    }
                }
        }
    }

    __device__ G gradient(int j, G dy, G d) const {
        if constexpr (!ACTIVE) return dy;
        const G u = fma(slope.at[j], TRAINING ? d : (d - m.at[j]) - m_low.at[j], offset.at[j]);
        // of few rows G is wider than what y was made of
        return Activation<T>::gradient(dy, static_cast<G>(static_cast<decltype(to_float(T()))>(u)));
    }
};

// All rows are added to sum[j] and dot[j], j < VEC.
__device__ inline void add_rows(Rows& rows, const G* centre, const BeforeY& before, double (&sum)[VEC],
                                double (&dot)[VEC]) {
    while (rows.left > 0) {
        Sum sum_of[VEC], dot_of[VEC];
#pragma unroll 1
        for (int first = 0; first < GROUP && rows.left > 0; first += STAGES) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                Vector<T, VEC> dy_at;
                Vector<D, VEC> d_at;
                rows.take(i, dy_at, d_at);
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const G d_of = to_float(d_at.at[j]), u = before.gradient(j, to_float(dy_at.at[j]), d_of);
                    sum_of[j].add(u);
                    dot_of[j].add_product(u, TRAINING ? d_of : d_of - centre[j]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            sum[j] += static_cast<double>(sum_of[j].high) + sum_of[j].low;
            dot[j] += static_cast<double>(dot_of[j].high) + dot_of[j].low;
        }
    }
}

// What is subtracted from VEC columns of d: nothing in training.
__device__ inline void load_centre(const Problem& p, const double* saved, long long col, int inside, G (&centre)[VEC]) {
    if (!TRAINING) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) centre[j] = static_cast<G>(saved[SAVED_CENTRE * p.n + col + j]);
    }
}

// S and E of the split rows, of the CTA's `columns` columns from col0 on: then(c, column, S, E), by a thread each. THREADS /
// columns threads share a column, each with every so many splits, in float64; what they make of them, in `scratch` (2,
// THREADS) in shared memory, is added in their order. Without any, which float64 leaves no room for, a thread has a column
// alone.
template <typename Then>
__device__ inline void merge_splits(const Problem& p, const char* workspace, int columns, long long col0,
                                    double* scratch, const Then& then) {
    constexpr int AT_ONCE = 16;  // splits whose sums are on their way
    const int parts = scratch == nullptr ? 1 : THREADS / columns, column = threadIdx.x % columns,
              part = threadIdx.x / columns;
    const long long c = col0 + column;
    double S = 0.0, E = 0.0;
    if (part < parts && c < p.n) {
        const double* partials = reinterpret_cast<const double*>(workspace) + c;
        for (long long first = part; first < p.splits; first += AT_ONCE * parts) {
            double S_of[AT_ONCE], E_of[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const long long split = first + i * parts;
                S_of[i] = split < p.splits ? partials[split * 2 * p.n] : 0.0;
                E_of[i] = split < p.splits ? partials[(split * 2 + 1) * p.n] : 0.0;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                S += S_of[i];
                E += E_of[i];
            }
        }
    }
    if (parts > 1) {
        if (part < parts) {
            scratch[threadIdx.x] = S;
            scratch[THREADS + threadIdx.x] = E;
        }
        __syncthreads();
        if (part == 0)
            for (int i = column + columns; i < THREADS; i += columns) {
                S += scratch[i];
                E += scratch[THREADS + i];
            }
    }
    if (part == 0 && c < p.n) then(c, column, S, E);
}

// What the forward left of feature c, a row (SAVED_) each.
struct Factors {
    const double* saved;
    long long n, c;
    static constexpr int ROWS = TRAINING ? SAVED_RATE + 1 : SAVED_S + 1;  // that gradients and coefficients want
    __device__ double operator()(int row) const { return saved[row * n + c]; }
    // Brings them into L1, so that who has sums does not wait for memory again; in registers there is no room for them.
    __device__ void ask() const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) asm volatile("prefetch.global.L1 [%0];" ::"l"(saved + i * n + c));
    }
};

// The gradients of size O, of feature c, whose rows of SAVED_ `of` gives.
template <typename Of>
__device__ inline void store_gradients(const Problem& p, const Of& of, long long c, double S, double E, void* to_bias,
                                       void* to_scale, void* to_gamma, void* to_beta) {
    store_vector(to_bias, p.to_bias, c, TRAINING ? 0.0 : of(SAVED_A) * S);
    store_vector(to_scale, p.to_scale, c, of(SAVED_SCALE) * (TRAINING ? E : fma(of(SAVED_BIASED), S, E)));
    store_vector(to_gamma, p.to_gamma, c, of(SAVED_GAMMA) * (TRAINING ? E : fma(of(SAVED_S), E, of(SAVED_Z) * S)));
    store_vector(to_beta, p.to_beta, c, S);
}

// Of feature c, everything of size O: its gradients, if `gradients`, and in training the coefficients of dg, rows of
// `pitch`, at `at`.
template <typename Of>
__device__ inline void store_feature(const Problem& p, const Of& of, long long c, double S, double E, bool gradients,
                                     void* to_bias, void* to_scale, void* to_gamma, void* to_beta, G* coefficients,
                                     long long pitch, long long at) {
    if (gradients) store_gradients(p, of, c, S, E, to_bias, to_scale, to_gamma, to_beta);
    if (!TRAINING) return;

    const double a = of(SAVED_A), rows = static_cast<double>(p.m);
    const double mean = S / rows, rate = of(SAVED_RATE) * E / rows;
    const G mean_high = static_cast<G>(mean);
    coefficients[DG_A * pitch + at] = static_cast<G>(a);
    coefficients[DG_MEAN * pitch + at] = mean_high;
    coefficients[DG_MEAN_LOW * pitch + at] = static_cast<G>(isfinite(mean_high) ? mean - mean_high : 0.0);
    coefficients[DG_RATE * pitch + at] = static_cast<G>(rate);
}

// dg of the VEC columns from col on: in training of what store_feature left at `coefficients`, of which col is `at`.
struct Coefficients {
    Vector<G, VEC> a = {}, mean = {}, mean_low = {}, rate = {};
    BeforeY before;

    // in training
    __device__ Coefficients(const BeforeY& before_, const G* coefficients, long long pitch, long long at, int inside)
        : before(before_) {
        a = load<G, VEC>(coefficients + DG_A * pitch + at, inside);
        mean = load<G, VEC>(coefficients + DG_MEAN * pitch + at, inside);
        mean_low = load<G, VEC>(coefficients + DG_MEAN_LOW * pitch + at, inside);
        rate = load<G, VEC>(coefficients + DG_RATE * pitch + at, inside);
    }
    __device__ Coefficients(const Problem& p, const double* saved, const G* coefficients, long long pitch, long long at,
                            long long col, int inside)
        : before(p, saved, col, inside) {
        if (TRAINING) {
            *this = Coefficients(before, coefficients, pitch, at, inside);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) a.at[j] = static_cast<G>(saved[SAVED_A * p.n + col + j]);
        }
    }

    __device__ Vector<T, VEC> dg(const Vector<T, VEC>& dy, const Vector<D, VEC>& d) const {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const G d_of = to_float(d.at[j]), u = before.gradient(j, to_float(dy.at[j]), d_of);
            const G centred = TRAINING ? fma(-rate.at[j], d_of, (u - mean.at[j]) - mean_low.at[j]) : u;
            from_float(a.at[j] * centred, out.at[j]);
        }
        return out;
    }
};

// dg of the next STAGES rows, to `to` and every `step` elements on, which moves with them. `then` gets each.
template <typename Then>
__device__ inline void write_rows(const Coefficients& of, Rows& rows, T*& to, long long step, const Then& then) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i, to += step) {
        Vector<T, VEC> dy_at;
        Vector<D, VEC> d_at;
        if (!rows.take(i, dy_at, d_at)) break;
        const Vector<T, VEC> out = of.dg(dy_at, d_at);
        then(out, i);
        if (rows.whole) {
            store_whole(to, out);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < rows.inside) to[j] = out.at[j];
        }
    }
}
