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
// backward_fused is both where rows are few: a CTA takes all rows of NARROW_COLUMNS columns (64 bytes of a row), so that
// their sums need nobody else's, and reads them once more, backwards, from L2. No tickets, no workspace.
//
// Moves, the minimum for two passes: dy and d twice, dg once (with ACROSS twice); at (16384, 4096) bfloat16 268 MB and 403 MB.
// backward_fused moves dy, d and dg once, and dy and d once more from L2.
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
constexpr int THREADS = LANES * WARPS;
constexpr int GROUP = 16;
constexpr int FLIGHT = 4;  // rows that a thread has on their way at once
constexpr int NARROW = 4;  // threads along a row of backward_fused
constexpr int NARROW_COLUMNS = NARROW * VEC, NARROW_ROWS = THREADS / NARROW;

enum : int { DG_A = 0, DG_MEAN = 1, DG_MEAN_LOW = 2, DG_RATE = 3, DG_ROWS = 4 };  // of coefficients, in G

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

// A thread's rows row, row + DOWN, ... < end are added to sum[j APART] and dot[j APART], j < VEC.
template <bool WHOLE, int DOWN, int APART>
__device__ inline void add_rows(const Problem& p, const T* dy, const D* d, long long row, long long end, long long col,
                                int inside, const G* centre, double* sum, double* dot) {
    constexpr int ROWS = WHOLE ? FLIGHT : 1;
    dy += row * p.y_row + col * p.y_col;
    if (d != nullptr) d += row * p.ldg + col;
    const long long dy_step = DOWN * p.y_row, d_step = DOWN * p.ldg;
    while (row < end) {
        Sum sum_of[VEC], dot_of[VEC];
#pragma unroll 1
        for (int first = 0; first < GROUP; first += ROWS, row += ROWS * DOWN) {
            Vector<T, VEC> dy_at[ROWS];
            Vector<D, VEC> d_at[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool here = row + i * DOWN < end;
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
            sum[j * APART] += static_cast<double>(sum_of[j].high) + sum_of[j].low;
            dot[j * APART] += static_cast<double>(dot_of[j].high) + dot_of[j].low;
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

// Of feature c, everything of size O: its gradients, and in training the coefficients of dg, rows of `pitch`, at `at`.
__device__ inline void store_feature(const Problem& p, const double* saved, long long c, double S, double E,
                                     void* to_bias, void* to_scale, void* to_gamma, void* to_beta, G* coefficients,
                                     long long pitch, long long at) {
    const auto of = [&](int row) { return saved[row * p.n + c]; };
    const double a = of(SAVED_A), rows = static_cast<double>(p.m);
    store_vector(to_bias, p.bias, c, TRAINING ? 0.0 : a * S);
    store_vector(to_scale, p.scale, c, of(SAVED_SCALE) * (TRAINING ? E : fma(of(SAVED_BIASED), S, E)));
    store_vector(to_gamma, p.gamma, c, of(SAVED_GAMMA) * (TRAINING ? E : fma(of(SAVED_S), E, of(SAVED_Z) * S)));
    store_vector(to_beta, p.beta, c, S);
    if (!TRAINING) return;

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

    __device__ Coefficients(const Problem& p, const double* saved, const G* coefficients, long long pitch, long long at,
                            long long col, int inside) {
        if (TRAINING) {
            a = load<G, VEC>(coefficients + DG_A * pitch + at, inside);
            mean = load<G, VEC>(coefficients + DG_MEAN * pitch + at, inside);
            mean_low = load<G, VEC>(coefficients + DG_MEAN_LOW * pitch + at, inside);
            rate = load<G, VEC>(coefficients + DG_RATE * pitch + at, inside);
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
            const G u = to_float(dy.at[j]);
            const G centred = TRAINING ? fma(-rate.at[j], to_float(d.at[j]), (u - mean.at[j]) - mean_low.at[j]) : u;
            from_float(a.at[j] * centred, out.at[j]);
        }
        return out;
    }
};

// FLIGHT rows of dg, row, row + DOWN, ... < end: all of them in whole accesses, or as they come. `then` gets each.
template <int DOWN, typename Then>
__device__ inline void write_rows(const Problem& p, const Coefficients& of, const T* dy, const D* d, T* dg,
                                  long long row, long long end, long long col, int inside, bool whole,
                                  const Then& then) {
    if (whole) {
        Vector<T, VEC> dy_in[FLIGHT];
        Vector<D, VEC> d_in[FLIGHT] = {};
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            const long long r = row + i * DOWN;
            dy_in[i] = load_dy<true>(dy + r * p.y_row + col, 1, VEC);
            if (TRAINING) d_in[i] = *reinterpret_cast<const Vector<D, VEC>*>(d + r * p.ldg + col);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
            const Vector<T, VEC> out = of.dg(dy_in[i], d_in[i]);
            then(out, i);
            *reinterpret_cast<Vector<T, VEC>*>(dg + (row + i * DOWN) * p.ldx + col) = out;
        }
    } else {
        for (int i = 0; i < FLIGHT && row + i * DOWN < end; ++i) {
            const long long r = row + i * DOWN;
            Vector<D, VEC> d_in = {};
            if (TRAINING) d_in = load<D, VEC>(d + r * p.ldg + col, inside);
            const Vector<T, VEC> out = of.dg(load_dy<false>(dy + r * p.y_row + col * p.y_col, p.y_col, inside), d_in);
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) dg[r * p.ldx + col + j] = out.at[j];
            then(out, i);
        }
    }
}

// d may be null where no gradient asks for E. The vectors' codes in p are the gradients': one that is absent is not made.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
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
    load_centre(p, saved, col, inside, centre);
    double *const sum = &sum_of[warp][lane], *const dot = &dot_of[warp][lane];
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j * LANES] = dot[j * LANES] = 0.0;
    if (inside == VEC && p.flags & FLAG_VECTOR_Y)
        add_rows<true, WARPS, LANES>(p, dy, d, begin + warp, end, col, inside, centre, sum, dot);
    else
        add_rows<false, WARPS, LANES>(p, dy, d, begin + warp, end, col, inside, centre, sum, dot);
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
    if (mine)
        store_feature(p, saved, c, S, E, to_bias, to_scale, to_gamma, to_beta,
                      reinterpret_cast<G*>(workspace + p.affine), p.ldg, c);
}

// dg (m, n) of T, row pitch ldx, rows on 16 bytes. In inference it needs neither d nor any sum.
// With ACROSS also its transpose, across (n, m), row pitch ldw, through a tile in shared memory: what cuBLAS wants of TF32.
extern "C" __global__ void __launch_bounds__(THREADS)
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

    const Coefficients of(p, saved, reinterpret_cast<const G*>(workspace + p.affine), p.ldg, col, col, inside);
    const auto turn = [&](const Vector<T, VEC>& out, int i) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            if constexpr (ACROSS) tile[slot(lane * VEC + j)][i * WARPS + warp] = out.at[j];
    };

    for (long long row0 = begin; row0 < end; row0 += TILE) {
        write_rows<WARPS>(p, of, dy, d, dg, row0 + warp, end, col, inside, whole && row0 + TILE <= end, turn);
        if constexpr (ACROSS) {
            __syncthreads();
            for (int c = warp; c < COLUMNS && col0 + c < p.n; c += WARPS)
                if (row0 + lane < end) across[(col0 + c) * p.ldw + row0 + lane] = tile[slot(c)][lane];
            __syncthreads();
        }
    }
}

// backward_sums and backward_dg of NARROW_COLUMNS columns and all rows; dg may be null where nobody wants it.
extern "C" __global__ void __launch_bounds__(THREADS, TRAINING ? 2 : 1)
    backward_fused(const Problem p, const T* dy, const D* d, const double* saved, T* dg, void* to_bias, void* to_scale,
                   void* to_gamma, void* to_beta) {
    __shared__ double sum_of[VEC][THREADS], dot_of[VEC][THREADS];
    __shared__ alignas(VEC * sizeof(G)) G stored[DG_ROWS][NARROW_COLUMNS];

    const int across_row = threadIdx.x % NARROW * VEC, down = threadIdx.x / NARROW;
    const long long col0 = static_cast<long long>(blockIdx.x) * NARROW_COLUMNS, col = col0 + across_row;
    const int inside = static_cast<int>(max(min(p.n - col, static_cast<long long>(VEC)), 0LL));
    const bool whole = inside == VEC && p.flags & FLAG_VECTOR_Y;

    G centre[VEC] = {};
    load_centre(p, saved, col, inside, centre);
    double *const sum = &sum_of[0][threadIdx.x], *const dot = &dot_of[0][threadIdx.x];
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j * THREADS] = dot[j * THREADS] = 0.0;
    if (whole)
        add_rows<true, NARROW_ROWS, THREADS>(p, dy, d, down, p.m, col, inside, centre, sum, dot);
    else
        add_rows<false, NARROW_ROWS, THREADS>(p, dy, d, down, p.m, col, inside, centre, sum, dot);
    __syncthreads();

    constexpr int PARTS = 8;  // threads that add up a column
    if (threadIdx.x < NARROW_COLUMNS * PARTS) {
        const int of_block = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
        double S = 0.0, E = 0.0;
#pragma unroll
        for (int i = part; i < NARROW_ROWS; i += PARTS) {
            S += sum_of[of_block % VEC][i * NARROW + of_block / VEC];
            E += dot_of[of_block % VEC][i * NARROW + of_block / VEC];
        }
#pragma unroll
        for (int bit = 1; bit < PARTS; bit *= 2) {
            S += __shfl_xor_sync(0xFFFFFFFF, S, bit);
            E += __shfl_xor_sync(0xFFFFFFFF, E, bit);
        }
        if (part == 0 && col0 + of_block < p.n)
            store_feature(p, saved, col0 + of_block, S, E, to_bias, to_scale, to_gamma, to_beta, &stored[0][0],
                          NARROW_COLUMNS, of_block);
    }
    if (dg == nullptr) return;
    __syncthreads();

    const Coefficients of(p, saved, &stored[0][0], NARROW_COLUMNS, across_row, col, inside);
    constexpr int TILE = FLIGHT * NARROW_ROWS;
    for (long long row0 = (p.m - 1) / TILE * TILE; row0 >= 0; row0 -= TILE) {
        write_rows<NARROW_ROWS>(p, of, dy, d, dg, row0 + down, p.m, col, inside, whole && row0 + TILE <= p.m,
                                [](const Vector<T, VEC>&, int) {});
    }
}
