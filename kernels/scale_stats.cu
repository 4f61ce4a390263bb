// scale_stats: the batch statistics of g and all that follows from them, in one pass over g.
//
//   g (m, n) of G (float or double), row pitch ldg, rows on 16 bytes
//   m_j = mean_i g_ij     v_j = mean_i (g_ij - m_j)^2     r = 1 / sqrt(s^2 v + eps)     a = gamma s r
//   running_mean <- (1 - mu) running_mean + mu s (m + b)
//   running_var  <- (1 - mu) running_var + mu s^2 v B / (B - 1)
//
// The scale enters through a and the running statistics alone: z = s (g + b) is never formed, and b cancels in y.
//
// An item of work is a block of columns and `stats_rows` rows; a thread has VEC columns, `along` threads a row (Places), of
// every so many rows. It holds GROUP rows in registers, takes their mean, then the squared deviations about that mean
// (never E[g^2] - E[g]^2). A CTA pools its groups (n_i, mean_i, M2_i) in float64 about p, the mean of its first PIVOT rows:
//   first = sum n_i d_i,  second = sum (M2_i + n_i d_i^2),  d_i = mean_i - p
//   mean = p + first / n,  M2 = second - first^2 / n
// so that threads pool by addition. The subtraction cancels at most n / PIVOT of float64's 2^53, since
// PIVOT (p - mean)^2 <= M2 by convexity. The splits of a column, far apart perhaps, then merge without any:
//   m = sum n_i mean_i / B,  M2 = sum M2_i + sum n_i (mean_i - m)^2
// All in an order that depends on the shape alone; equal rows give exactly M2 = 0.
//
// Where ranks share the batch (`posted`), scale_stats ends with mean and M2 of its own rows; merge_statistics takes them to
// the other ranks, and goes on with those of all (ranks.cuh).
//
// The CTA that draws a column block's last ticket adds that block's partial sums: who that is depends on timing, what
// it computes does not. Tickets start at zero, set by the caller.
//
// Moves: g once, and per column 16 bytes a split: at (16384, 4096) 268 MB + 1 MB.
#include "ranks.cuh"

#ifndef G_TYPE
#define G_TYPE float
#endif
using G = G_TYPE;

struct Problem {
    long long m, n;                       // B, O
    long long ldg;                        // row pitch of g, and of the rows in the workspace, in elements
    long long along;                      // threads along a row of g
    long long stats_rows;                 // rows of g in an item
    long long splits;                     // items that share a column block
    long long affine, partials, tickets;  // where they start in the workspace, in bytes
    long long flags;                      // FLAG_CUMULATIVE, FLAG_UNITS
    long long signature;                  // what this call is, of a group
    long long bias, scale, gamma, beta, running_mean, running_var;  // vector codes, see fetch
    double momentum, eps, number;  // number: the scale of all features, where there is no vector
};

constexpr int VEC = 16 / sizeof(G);
constexpr int THREADS = 256;
constexpr int GROUP = 16;
constexpr int PIVOT = sizeof(G) == 8 ? GROUP : 1;

// A power of two of float32 within a factor of 2 above the spread: a deviation is at most sqrt(B) of them. 1 for none.
__device__ inline double unit_near(double spread) {
    return spread > 0.0 && isfinite(spread) ? ldexp(1.0, max(-126, min(ilogb(spread) + 1, 126))) : 1.0;
}

// The arguments of feature c, on their way.
struct Arguments {
    Fetched s, gamma, beta, b, mean, var;

    __device__ Arguments(const Problem& p, long long c, const void* bias, const void* scale, const void* gamma,
                         const void* beta, const void* running_mean, const void* running_var)
        : s(fetch(scale, p.scale, c)),
          gamma(fetch(gamma, p.gamma, c)),
          beta(fetch(beta, p.beta, c)),
          b(fetch(bias, p.bias, c)),
          mean(fetch(running_mean, p.running_mean, c)),
          var(fetch(running_var, p.running_var, c)) {}
};

// All that follows from mean and M2 of feature c over `rows` rows. `batches`: the count before this one.
__device__ __forceinline__ void store_feature(const Problem& p, long long c, double rows, double mean, double m2,
                                              const Arguments& of, long long batches, bool tracked, char* workspace,
                                              void* running_mean, void* running_var, double* saved) {
    const double v = m2 / rows, s = of.s.or_else(p.number), r = 1.0 / sqrt(s * s * v + p.eps);
    const double gamma = of.gamma.or_else(1.0), a = gamma * s * r;
    const double beta = of.beta.or_else(0.0), unit = p.flags & FLAG_UNITS ? unit_near(sqrt(v)) : 1.0;
    store_affine(reinterpret_cast<G*>(workspace + p.affine), p.ldg, c, mean, a, beta);
    if (saved != nullptr) store_saved(saved, p.n, c, s, gamma, v, p.eps, unit, static_cast<G>(a), static_cast<G>(beta));
    if (p.running_mean != 0 && tracked) {
        const double mu = p.flags & FLAG_CUMULATIVE ? 1.0 / static_cast<double>(batches + 1) : p.momentum;
        const double to_mean = s * (mean + of.b.or_else(0.0)), to_var = s * s * (m2 / (rows - 1.0));
        store_vector(running_mean, p.running_mean, c, (1.0 - mu) * of.mean.or_else(0.0) + mu * to_mean);
        store_vector(running_var, p.running_var, c, (1.0 - mu) * of.var.or_else(0.0) + mu * to_var);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scale_stats(const __grid_constant__ Problem p, const G* g, char* workspace, const void* bias, const void* scale,
                const void* gamma, const void* beta, void* running_mean, void* running_var,
                const long long* num_batches_tracked, double* saved, double* posted) {
    await_kernel_ahead();
    if (posted != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
        posted[ROWS_AT] = static_cast<double>(p.m);
        posted[CALL_AT] = static_cast<double>(p.signature);
    }
    __shared__ double first_of[THREADS * VEC], second_of[THREADS * VEC];  // [row][column] of Places
    __shared__ G pivot_of[32 * VEC];
    __shared__ bool last;

    const Places<THREADS, VEC> at_once(p.along);
    for_each_item((p.n + at_once.columns - 1) / at_once.columns * p.splits, [&](long long item) {
        const long long block = item / p.splits, split = item % p.splits;
        const long long col = block * at_once.columns + at_once.column;
        const long long begin = split * p.stats_rows, end = min(begin + p.stats_rows, p.m);
        const int inside = at_once.used() ? static_cast<int>(max(min(p.n - col, static_cast<long long>(VEC)), 0LL)) : 0;

        Vector<G, VEC> pivot = {};
        const int pivots = static_cast<int>(min(end - begin, static_cast<long long>(PIVOT)));
        for (int i = 0; i < pivots; ++i) {
            const Vector<G, VEC> at = load<G, VEC>(g + (begin + i) * p.ldg + col, inside);
#pragma unroll
            for (int j = 0; j < VEC; ++j) pivot.at[j] += at.at[j] / pivots;
        }
        double first[VEC] = {}, second[VEC] = {};
        const long long step = at_once.rows * p.ldg;
        for (long long row0 = begin + at_once.row; row0 < end; row0 += GROUP * at_once.rows) {
            const int left = static_cast<int>(min(end - row0, static_cast<long long>(GROUP * at_once.rows)));
            const int count = left == GROUP * at_once.rows ? GROUP : (left + at_once.rows - 1) / at_once.rows;
            const G* from = g + row0 * p.ldg + col;
            Vector<G, VEC> at[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) at[i] = load<G, VEC>(from + i * step, i < count ? inside : 0);
            const double inverse = count == GROUP ? 1.0 / GROUP : 1.0 / count;
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                G centre = 0;  // summed already scaled: no overflow where the mean itself has none
#pragma unroll
                for (int i = 0; i < GROUP; ++i) centre = fma(at[i].at[j], static_cast<G>(inverse), centre);
                G left = 0, squares = 0;  // left: what the rounding of centre left over
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    const G d = i < count ? at[i].at[j] - centre : G(0);
                    left += d;
                    squares += d * d;
                }
                const double shift = left * inverse;
                const double d = static_cast<double>(centre) - pivot.at[j] + shift;
                first[j] += count * d;
                second[j] += squares - shift * left + count * d * d;
            }
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            first_of[threadIdx.x * VEC + j] = first[j];
            second_of[threadIdx.x * VEC + j] = second[j];
            if (at_once.row == 0) pivot_of[at_once.column + j] = pivot.at[j];
        }
        __syncthreads();

        const long long c = block * at_once.columns + threadIdx.x;  // from here on a thread has one column
        const bool mine = threadIdx.x < at_once.columns && c < p.n;
        double mean = 0.0, m2 = 0.0;
        if (mine) {
            double sum = 0.0, squares = 0.0;
#pragma unroll 8
            for (int i = threadIdx.x; i < at_once.rows * at_once.columns; i += at_once.columns) {
                sum += first_of[i];
                squares += second_of[i];
            }
            const double shift = sum / static_cast<double>(end - begin), spread = squares - sum * shift;
            mean = pivot_of[threadIdx.x] + shift;
            m2 = spread < 0.0 ? 0.0 : spread;  // a rounding below zero is zero; NaN stays NaN
        }

        if (p.splits > 1) {
            double* partials = reinterpret_cast<double*>(workspace + p.partials);  // (splits, 2, ldg)
            if (mine) {
                __stcg(&partials[(split * 2) * p.ldg + c], mean);
                __stcg(&partials[(split * 2 + 1) * p.ldg + c], m2);
            }
            __threadfence();  // the partials before the ticket
            __syncthreads();
            if (threadIdx.x == 0) {
                unsigned* tickets = reinterpret_cast<unsigned*>(workspace + p.tickets);
                last = atomicAdd(&tickets[block], 1u) == p.splits - 1;
            }
            __syncthreads();
            if (!last) return;
            __threadfence();  // the ticket before the others' partials
        }
        if (!mine) return;
        const Arguments of(p, c, bias, scale, gamma, beta, running_mean, running_var);
        // normalize, a later launch, is what raises the count: here every CTA still reads the old one.
        const long long batches = p.flags & FLAG_CUMULATIVE ? *num_batches_tracked : 0;

        if (p.splits > 1) {
            const double* partials = reinterpret_cast<const double*>(workspace + p.partials);
            const double mean_0 = __ldcg(&partials[c]);  // the means are summed from the first: equal ones stay exact
            double sum = 0.0;
#pragma unroll 8
            for (long long i = 0; i < p.splits; ++i) {
                const double n_i = min(p.stats_rows, p.m - i * p.stats_rows);
                sum += n_i * (__ldcg(&partials[(i * 2) * p.ldg + c]) - mean_0);
            }
            mean = mean_0 + sum / p.m;
            m2 = 0.0;
#pragma unroll 8
            for (long long i = 0; i < p.splits; ++i) {
                const double n_i = min(p.stats_rows, p.m - i * p.stats_rows);
                const double d = __ldcg(&partials[(i * 2) * p.ldg + c]) - mean;
                m2 += __ldcg(&partials[(i * 2 + 1) * p.ldg + c]) + n_i * d * d;
            }
        }
        if (posted != nullptr) {
            posted[FEATURES_AT + 2 * c] = mean;
            posted[FEATURES_AT + 2 * c + 1] = m2;
        } else {
            store_feature(p, c, static_cast<double>(p.m), mean, m2, of, batches, true, workspace, running_mean,
                          running_var, saved);
        }
    });
}

// merge_statistics: of mean and M2 of every rank's rows those of all, and what scale_stats makes of them; a thread has one
// column. `posted` are this rank's own, as scale_stats left them (not read where it has no rows, p.m = 0), which go to the
// others, unless another library has `gathered` them already. Moves two letters, 32 bytes, a feature to each rank.
//
// It waits for the other ranks. A CTA takes its columns in the order in which every rank's CTAs take them, and posts before
// it waits, so that no two ranks wait for each other, however many CTAs each has.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_statistics(const __grid_constant__ Problem p, const double* posted, Ranks* ranks, const double* gathered,
                     char* workspace, const void* bias, const void* scale, const void* gamma, const void* beta,
                     void* running_mean, void* running_var, long long* num_batches_tracked, double* saved) {
    await_kernel_ahead(true);
    __shared__ bool counted;
    const Exchange exchange(ranks, gathered, FEATURES_AT + 2 * p.n, p.signature);
    const long long batches = num_batches_tracked != nullptr ? *num_batches_tracked : 0;
    if (threadIdx.x == 0) {
        counted = true;
        if (blockIdx.x == 0 && gathered == nullptr) exchange.post_header(static_cast<double>(p.m));
    }
    __syncthreads();
    for_each_item((p.n + THREADS - 1) / THREADS, [&](long long item) {
        const long long c = item * THREADS + threadIdx.x;
        if (c >= p.n) return;
        if (gathered == nullptr) {
            const bool rows = p.m > 0;
            exchange.post_feature(c, rows ? posted[FEATURES_AT + 2 * c] : 0.0,
                                  rows ? posted[FEATURES_AT + 2 * c + 1] : 0.0);
        }
        const Arguments of(p, c, bias, scale, gamma, beta, running_mean, running_var);
        const Whole<double> all = exchange.statistics<double>(c);
        const bool tracked = all.right && all.rows > 1.0;
        if (!tracked) counted = false;
        store_feature(p, c, fmax(all.rows, 1.0), all.mean, all.m2, of, batches, tracked, workspace, running_mean,
                      running_var, saved);
    });
    __syncthreads();
    if (threadIdx.x == 0 && exchange.leave(gridDim.x) && num_batches_tracked != nullptr && counted)
        *num_batches_tracked = batches + 1;  // every CTA has read it
}

// What a backward subtracts from a feature of g so that its sums do not cancel: `middle`, where z is the running mean (for
// s = 0: where g + b is zero), if that lies among the first rows; else the first of them, which is no further from the
// others than they are.
__device__ inline double centre_near(double middle, const G* g, const Problem& p) {
    const double first = isfinite(*g) ? *g : 0.0;
    double spread = 0.0;
    for (long long i = 1; i < min(p.m, 8LL); ++i) spread = fmax(spread, fabs(g[i * p.ldg] - first));
    return fabs(middle - first) <= 4.0 * spread ? static_cast<double>(static_cast<G>(middle)) : first;
}

// running_affine: the same constants from the running statistics, for inference; a thread has one column.
//   y = gamma r s (g - m) + beta,   m = running_mean / s - b,   r = 1 / sqrt(running_var + eps)
// Where s is 0, or so near that m is out of G's range or gamma r s below its normal numbers, which are flushed to zero
// with all that they multiply, m is 0 and what it stands for moves into beta.
extern "C" __global__ void __launch_bounds__(THREADS)
    running_affine(const __grid_constant__ Problem p, char* workspace, const void* bias, const void* scale,
                   const void* gamma, const void* beta, const void* running_mean, const void* running_var, const G* g,
                   double* saved) {
    await_kernel_ahead();
    for_each_item((p.n + THREADS - 1) / THREADS, [&](long long item) {
        const long long c = item * THREADS + threadIdx.x;
        if (c >= p.n) return;
        const Fetched s_at = fetch(scale, p.scale, c), gamma_at = fetch(gamma, p.gamma, c),
                      beta_at = fetch(beta, p.beta, c);
        const Fetched b_at = fetch(bias, p.bias, c), mean_at = fetch(running_mean, p.running_mean, c);
        const Fetched var_at = fetch(running_var, p.running_var, c);
        const double s = s_at.or_else(p.number), r = 1.0 / sqrt(var_at.or_else(1.0) + p.eps);
        const double b = b_at.or_else(0.0), mean = mean_at.or_else(0.0), gamma_r = gamma_at.or_else(1.0) * r;
        const double middle = (s == 0.0 ? 0.0 : mean / s) - b;
        constexpr double LEAST = sizeof(G) == 8 ? 2.2250738585072014e-308 : 1.1754943508222875e-38;  // normal number
        const double a = gamma_r * s;
        const bool within = s != 0.0 && isfinite(static_cast<G>(middle)) && (fabs(a) >= LEAST || gamma_r == 0.0);
        const double m = within ? middle : 0.0;
        const double offset = (within ? 0.0 : gamma_r * fma(s, b, -mean)) + beta_at.or_else(0.0);
        store_affine(reinterpret_cast<G*>(workspace + p.affine), p.ldg, c, m, a, offset);
        if (saved != nullptr) {
            const double centre = centre_near(middle, g + c, p);
            saved[SAVED_A * p.n + c] = a;
            saved[SAVED_SCALE * p.n + c] = gamma_r;
            saved[SAVED_GAMMA * p.n + c] = r;
            saved[SAVED_CENTRE * p.n + c] = centre;
            saved[SAVED_BIASED * p.n + c] = centre + b;
            saved[SAVED_Z * p.n + c] = fma(s, centre + b, -mean);
            saved[SAVED_S * p.n + c] = s;
            saved[SAVED_M * p.n + c] = m;
            saved[SAVED_OFFSET * p.n + c] = static_cast<G>(offset);
        }
    });
}
