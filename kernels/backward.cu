// backward: from dy and the deviations d that the forward kept, everything of the backward but its two GEMMs.
//
//   dy (m, n) of T, any strides      d (m, n) of D, row pitch ldg, rows on 16 bytes
//   training:   d = (g - mean(g)) / unit, unit a power of two of each feature (1 but for float16)
//   inference:  d = g
//
// backward_sums takes S = sum dy and E = sum dy (d - centre) in one pass, and of them makes the O(O) gradients and the
// coefficients of the next pass; backward_dg is that pass: dg = a (dy - S/B - rate d), in T, as the GEMMs take it.
//   training:   dbeta = S    dgamma = s r D    dscale = gamma eps r^3 D    dbias = 0    rate = s^2 r^2 D / B    D = unit E
//   inference:  dbeta = S    dbias = a S       dg = a dy    centre = running_mean / s - b, or near g
//               dscale = gamma r (E + (centre + b) S)    dgamma = r (s E + (s (centre + b) - running_mean) S)
// The factors are the forward's, in float64: `saved`, rows of n (SAVED_).
// Without a centre the two terms of dgamma would cancel wherever g's mean is large beside its spread.
//
// A CTA takes COLUMNS columns and `stats_rows` rows; a warp reads 512 adjacent bytes of a row of dy, a thread VEC
// columns of every WARPS-th row. It adds GROUP rows in float32, so that a sum of n terms t errs by at most
// GROUP 2^-24 sum |t|, and the groups in float64, in shared memory: registers hold the rows on their way instead. Warps
// and then splits (CTAs of one column block) are added in float64 in an order that depends on the shape alone. The CTA
// that draws a column block's last ticket adds the splits: who that is depends on timing, what it computes does not.
// Tickets start at zero, set by the caller. float64 rows are added with their rounding errors (Knuth's two-sum).
//
// backward_dg runs from the last rows to the first: backward_sums read forwards, so the end is what L2 still holds.
//
// Moves, the minimum for two passes: dy and d twice, dg once (with ACROSS twice); at (16384, 4096) bfloat16 268 MB and 403 MB.
#include "common.cuh"

#ifndef T_TYPE
#define T_TYPE float
#endif
using T = T_TYPE;
#ifndef D_TYPE
#define D_TYPE float
#endif
using D = D_TYPE;
#ifndef G_TYPE
#define G_TYPE float
#endif
using G = G_TYPE;

#ifndef TRAINING
#define TRAINING true
#endif
#ifndef ACROSS
#define ACROSS false
#endif

constexpr int VEC = 16 / sizeof(T);
constexpr int LANES = 32, WARPS = 8;
constexpr int COLUMNS = LANES * VEC;
constexpr int GROUP = 16;
constexpr int FLIGHT = 4;  // rows that a thread has on their way at once

enum : int { DG_A = 0, DG_MEAN = 1, DG_MEAN_LOW = 2, DG_RATE = 3 };  // rows of n in G, pitch ldg

// VEC columns of a row of dy.
template <bool WHOLE>
__device__ inline Vector<T, VEC> load_dy(const T* from, long long step, int inside) {
    if constexpr (WHOLE) {
        return *reinterpret_cast<const Vector<T, VEC>*>(from);
    } else {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) out.at[j] = j < inside ? from[j * step] : T(0.0f);
        return out;
    }
}

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

// A thread's sums in shared memory, [j][lane]: the lanes' words are adjacent.
__device__ inline int slot(int column) { return column % VEC * LANES + column / VEC; }

template <bool WHOLE>
__device__ inline void add_rows(const Problem& p, const T* dy, const D* d, long long row, long long end, long long col,
                                int inside, const G* centre, double* sum, double* dot) {
    constexpr int ROWS = WHOLE ? FLIGHT : 1;
    dy += row * p.y_row + col * p.y_col;
    if (d != nullptr) d += row * p.ldg + col;
    const long long dy_step = WARPS * p.y_row, d_step = WARPS * p.ldg;
    while (row < end) {
        Sum sum_of[VEC], dot_of[VEC];
#pragma unroll 1
        for (int first = 0; first < GROUP; first += ROWS, row += ROWS * WARPS) {
            Vector<T, VEC> dy_at[ROWS];
            Vector<D, VEC> d_at[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool here = row + i * WARPS < end;
                dy_at[i] = {};
                d_at[i] = {};
                if (here) dy_at[i] = load_dy<WHOLE>(dy, p.y_col, inside);
                if (here && d != nullptr) d_at[i] = load<D, VEC>(d, WHOLE ? VEC : inside);
                dy += dy_step;
                if (d != nullptr) d += d_step;
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const G u = to_float(dy_at[i].at[j]);
                    sum_of[j].add(u);
                    const G d_of = to_float(d_at[i].at[j]);
                    dot_of[j].add_product(u, TRAINING ? d_of : d_of - centre[j]);
                }
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            sum[j * LANES] += static_cast<double>(sum_of[j].high) + sum_of[j].low;
            dot[j * LANES] += static_cast<double>(dot_of[j].high) + dot_of[j].low;
        }
    }
}

// d may be null where no gradient asks for E. The vectors' codes in p are the gradients': one that is absent is not made.
extern "C" __global__ void __launch_bounds__(LANES* WARPS, 2)
    backward_sums(const Problem p, const T* dy, const D* d, const double* saved, char* workspace, void* to_bias,
                  void* to_scale, void* to_gamma, void* to_beta) {
    __shared__ double sum_of[WARPS][COLUMNS], dot_of[WARPS][COLUMNS];
    __shared__ bool last;

    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const long long block = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
    const long long col = block * COLUMNS + lane * VEC;
    const long long begin = split * p.stats_rows, end = min(begin + p.stats_rows, p.m);
    const int inside = static_cast<int>(max(min(p.n - col, static_cast<long long>(VEC)), 0LL));

    G centre[VEC] = {};
    if (!TRAINING) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) centre[j] = static_cast<G>(saved[SAVED_CENTRE * p.n + col + j]);
    }
    double *const sum = &sum_of[warp][lane], *const dot = &dot_of[warp][lane];
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j * LANES] = dot[j * LANES] = 0.0;
    if (inside == VEC && p.flags & FLAG_VECTOR_Y)
        add_rows<true>(p, dy, d, begin + warp, end, col, inside, centre, sum, dot);
    else
        add_rows<false>(p, dy, d, begin + warp, end, col, inside, centre, sum, dot);
    __syncthreads();

    const long long c = block * COLUMNS + threadIdx.x;  // from here on a thread has one column
    const bool mine = threadIdx.x < COLUMNS && c < p.n;
    double S = 0.0, E = 0.0;
    if (mine) {
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            S += sum_of[i][slot(threadIdx.x)];
            E += dot_of[i][slot(threadIdx.x)];
        }
    }
    if (p.splits > 1) {
        double* partials = reinterpret_cast<double*>(workspace + p.partials);  // (splits, 2, ldg)
        if (mine) {
            __stcg(&partials[(split * 2) * p.ldg + c], S);
            __stcg(&partials[(split * 2 + 1) * p.ldg + c], E);
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
        if (mine) {
            S = E = 0.0;
#pragma unroll 8
            for (long long i = 0; i < p.splits; ++i) {
                S += __ldcg(&partials[(i * 2) * p.ldg + c]);
                E += __ldcg(&partials[(i * 2 + 1) * p.ldg + c]);
            }
        }
    }
    if (!mine) return;

    const auto of = [&](int row) { return saved[row * p.n + c]; };
    const double a = of(SAVED_A), rows = static_cast<double>(p.m);
    store_vector(to_bias, p.bias, c, TRAINING ? 0.0 : a * S);
    store_vector(to_scale, p.scale, c, of(SAVED_SCALE) * (TRAINING ? E : fma(of(SAVED_BIASED), S, E)));
    store_vector(to_gamma, p.gamma, c, of(SAVED_GAMMA) * (TRAINING ? E : fma(of(SAVED_S), E, of(SAVED_Z) * S)));
    store_vector(to_beta, p.beta, c, S);
    if (!TRAINING) return;

    const double mean = S / rows, rate = of(SAVED_RATE) * E / rows;
    G* coefficients = reinterpret_cast<G*>(workspace + p.affine);
    const G mean_high = static_cast<G>(mean);
    coefficients[DG_A * p.ldg + c] = static_cast<G>(a);
    coefficients[DG_MEAN * p.ldg + c] = mean_high;
    coefficients[DG_MEAN_LOW * p.ldg + c] = static_cast<G>(isfinite(mean_high) ? mean - mean_high : 0.0);
    coefficients[DG_RATE * p.ldg + c] = static_cast<G>(rate);
}

// dg (m, n) of T, row pitch ldx, rows on 16 bytes. In inference it needs neither d nor any sum.
// With ACROSS also its transpose, across (n, m), row pitch ldw, through a tile in shared memory: what cuBLAS wants of TF32.
extern "C" __global__ void __launch_bounds__(LANES* WARPS)
    backward_dg(const Problem p, const T* dy, const D* d, const double* saved, const char* workspace, T* dg,
                T* across) {
    constexpr int TILE = FLIGHT * WARPS;  // rows of the CTA at once
    static_assert(!ACROSS || TILE == LANES, "a warp writes a run of the transpose");
    __shared__ T tile[ACROSS ? COLUMNS : 1][TILE + 1];

    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const long long blocks = (p.n + COLUMNS - 1) / COLUMNS;
    const long long at = gridDim.x - 1 - static_cast<long long>(blockIdx.x);
    const long long col0 = at % blocks * COLUMNS, col = col0 + lane * VEC;
    const long long begin = at / blocks * p.normalize_rows, end = min(begin + p.normalize_rows, p.m);
    const int inside = static_cast<int>(max(min(p.n - col, static_cast<long long>(VEC)), 0LL));
    const bool whole = inside == VEC && p.flags & FLAG_VECTOR_Y;

    Vector<G, VEC> a = {}, mean = {}, mean_low = {}, rate = {};
    if (TRAINING) {
        const G* coefficients = reinterpret_cast<const G*>(workspace + p.affine) + col;
        a = load<G, VEC>(coefficients + DG_A * p.ldg, inside);
        mean = load<G, VEC>(coefficients + DG_MEAN * p.ldg, inside);
        mean_low = load<G, VEC>(coefficients + DG_MEAN_LOW * p.ldg, inside);
        rate = load<G, VEC>(coefficients + DG_RATE * p.ldg, inside);
    } else {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if (j < inside) a.at[j] = static_cast<G>(saved[SAVED_A * p.n + col + j]);
    }
    const auto apply = [&](const Vector<T, VEC>& dy_in, const Vector<D, VEC>& d_in, int i) {
        Vector<T, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const G u = to_float(dy_in.at[j]);
            const G centred = TRAINING ? fma(-rate.at[j], to_float(d_in.at[j]), (u - mean.at[j]) - mean_low.at[j]) : u;
            from_float(a.at[j] * centred, out.at[j]);
            if constexpr (ACROSS) tile[slot(lane * VEC + j)][i * WARPS + warp] = out.at[j];
        }
        return out;
    };

    for (long long row0 = begin; row0 < end; row0 += TILE) {
        const long long row = row0 + warp;
        if (whole && row0 + TILE <= end) {
            Vector<T, VEC> dy_in[FLIGHT];
            Vector<D, VEC> d_in[FLIGHT] = {};
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) {
                dy_in[i] = load_dy<true>(dy + (row + i * WARPS) * p.y_row + col, 1, VEC);
                if (TRAINING) d_in[i] = *reinterpret_cast<const Vector<D, VEC>*>(d + (row + i * WARPS) * p.ldg + col);
            }
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i)
                *reinterpret_cast<Vector<T, VEC>*>(dg + (row + i * WARPS) * p.ldx + col) = apply(dy_in[i], d_in[i], i);
        } else {
            for (int i = 0; i < FLIGHT && row + i * WARPS < end; ++i) {
                const long long r = row + i * WARPS;
                Vector<D, VEC> d_in = {};
                if (TRAINING) d_in = load<D, VEC>(d + r * p.ldg + col, inside);
                const Vector<T, VEC> out =
                    apply(load_dy<false>(dy + r * p.y_row + col * p.y_col, p.y_col, inside), d_in, i);
#pragma unroll
                for (int j = 0; j < VEC; ++j)
                    if (j < inside) dg[r * p.ldx + col + j] = out.at[j];
            }
        }
        if constexpr (ACROSS) {
            __syncthreads();
            for (int c = warp; c < COLUMNS && col0 + c < p.n; c += WARPS)
                if (row0 + lane < end) across[(col0 + c) * p.ldw + row0 + lane] = tile[slot(c)][lane];
            __syncthreads();
        }
    }
}
