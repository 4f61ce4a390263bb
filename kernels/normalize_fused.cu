// normalize_fused: does the work of scale_stats, merge_statistics and normalize in one launch, in training, for up to
// 1024 rows. A CTA has all rows of its columns. It computes their statistics (normalize/features.cuh has the formulas),
// and then y.
//
//   g (m, n) of G, row pitch ldg, rows on 16 bytes      y (m, n) of Y, any strides; it may be g itself
//   With D_TYPE, the deviations of g are saved for a backward: (m, n) of D, row pitch ldg; they may overwrite g. They
//   are g - mean, except in 16 bits (deviation_centre). Float16 ones are in units, one for each feature (SAVED_UNIT).
//
// A thread has 16 bytes of a row of g (VEC columns); `row_threads` threads share a row, and a thread has every
// at_once.rows-th row (Places). Rows come through the thread's own pipeline in shared memory (common/walk.cuh). The
// thread adds its rows in float64, about a value near the first rows; for float64 it adds up the rounding errors, too.
// Several threads then know the moments of a column: one computes the constants of y, another what the backward needs,
// and a third the running statistics.
//
// Bytes moved: g, y and the deviations once, the minimum. Rows that did not fit into the pipelines come from L2 again.
#include "normalize/normalized.cuh"
#include "common/walk.cuh"
#include "common/cluster_columns.cuh"

constexpr bool FLOAT64 = sizeof(G) == 8;
constexpr int STAGES = 4;         // rows that a thread has in flight
constexpr int WIDEST = 16 * VEC;  // columns of a CTA
using ForwardTotals = Totals<THREADS, VEC, 2, double, FLOAT64>;
enum : int { OF_SLOPE = AFFINE_ROWS, OF_INVERSE_UNIT, CONSTANT_ROWS };

// A thread's rows of g: first, first + step, ... (Walk).
struct RowsOfG {
    const G* g;  // of the next row to copy
    long long step;
    uint4* pipeline;  // [stage][THREADS]
    int inside;       // columns

    __device__ __forceinline__ void copy(int stage) {
        if (inside == VEC)
            copy_async(pipeline + stage * THREADS, g);
        else
            copy_async(pipeline + stage * THREADS, g, inside * int(sizeof(G)));
        g += step;
    }
    __device__ __forceinline__ void turn_back(int rows) {
        g -= rows * step;
        step = -step;
    }
    __device__ __forceinline__ Vector<G, VEC> read(int stage) const {
        return *reinterpret_cast<const Vector<G, VEC>*>(pipeline + stage * THREADS);
    }
};

struct Shared {
    uint4 pipeline[STAGES * THREADS];
    ForwardTotals::Memory totals;
    double arguments[Arguments::COUNT][WIDEST];
    alignas(16) G constants[CONSTANT_ROWS][WIDEST];
    alignas(16) G pivot[WIDEST];
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    normalize_fused(const __grid_constant__ ForwardProblem p, const G* g, Y* y, const void* bias, const void* scale,
                    const void* gamma, const void* beta, void* running_mean, void* running_var,
                    long long* num_batches_tracked, D* deviations, double* saved
#if RENORM
                    ,
                    const void* renorm
#endif
    ) {
    await_kernel_ahead();
    if (blockIdx.x == 0 && threadIdx.x == 0 && num_batches_tracked != nullptr) *num_batches_tracked += batches_of(p);
    __shared__ Shared memory;
#if RENORM
    // there is no warm-up: the count may have been raised already
    const RenormLimits<double> limits(p, renorm, p.warmup);
#else
    const RenormLimits<double> limits;
#endif

    const Places<THREADS, VEC> at_once(p.row_threads);
    for_each_item(at_once.blocks(p.n), [&](unsigned item) {
        const long long col0 = 1LL * item * at_once.columns, col = col0 + at_once.column;
        const Column place(p, col);
        const RowOfLanes<VEC> lanes(at_once, place);
        const int inside = lanes.inside;
        const int count = inside > 0 ? count_every(int(p.m), at_once.row, at_once.rows) : 0;
        const G* first_g = g + at_once.row * p.ldg + place.at(p.ldg);
        Walk<STAGES, RowsOfG> rows(count,
                                   RowsOfG{first_g, at_once.rows * p.ldg, memory.pipeline + threadIdx.x, inside});
        Vector<G, VEC> pivot = near_first(g + place.at(p.ldg), p.ldg, p.m, inside);

        const auto [column, part, parts] = Sharers<THREADS>(at_once.columns);  // the column whose sums this thread gets
        const long long c = col0 + column;
        if (c < p.n)
#pragma unroll 1
            for (int i = part; i < Arguments::COUNT; i += parts)
                memory.arguments[i][column] = argument(i, p, c, bias, scale, gamma, beta, running_mean, running_var);

        const double m = double(p.m);
        Moments moments;
#pragma unroll 1
        for (bool again = false;; again = true) {
            double sums[2][VEC] = {}, of_column[2];  // sums of d and of d^2
            LongSum<true> long_sums[2][VEC];         // the same for float64, which has no bits to spare
            rows.down(0, count, [&](int, const Vector<G, VEC>& in) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const double d = double(in.at[j]) - pivot.at[j];
                    if constexpr (FLOAT64) {
                        long_sums[0][j].add(d);
                        long_sums[1][j].add(__dmul_rn(d, d));
                    } else {
                        sums[0][j] += d;
                        sums[1][j] = fma(d, d, sums[1][j]);
                    }
                }
            });
            if constexpr (FLOAT64)
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < VEC; ++j) sums[i][j] = long_sums[i][j].total();
            if (at_once.row == 0)
#pragma unroll
                for (int j = 0; j < VEC; ++j) memory.pivot[at_once.column + j] = pivot.at[j];
            ForwardTotals totals(memory.totals, int(p.row_threads));
            totals.add(sums);
            totals.of_column(column, of_column);
            const double about = memory.pivot[column];
            moments = Moments(about, of_column[0], of_column[1], m);
            if (sizeof(G) == 4 || again || !__syncthreads_or(c < p.n && moments.far(about, m))) break;
            if (part == 0) memory.pivot[column] = G(moments.mean);
            __syncthreads();
            pivot = *reinterpret_cast<const Vector<G, VEC>*>(&memory.pivot[at_once.column]);
            rows.up([](int, const Vector<G, VEC>&) {});  // go back to where a pass down begins
            __syncthreads();
        }
        if (c < p.n) {
            const Arguments of(&memory.arguments[0][column], WIDEST);
            const double m2 = moments.m2 * (p.flags & FLAG_LIMBS ? M2_OF_LIMBS : 1.0);
            const Feature found(p, m, moments.mean, m2, of, limits);
            if (part == 0) {
                store_affine(&memory.constants[0][0], WIDEST, column, found.centre, found.a, found.offset);
                if (UNITS) {
                    const double unit = unit_near(sqrt(found.v));
                    memory.constants[OF_SLOPE][column] = G(G(found.a) * unit);
                    memory.constants[OF_INVERSE_UNIT][column] = G(1.0 / unit);
                }
            } else if (part == 1) {
                found.save(p, c, saved);
            } else if (part == 2) {
                found.track(p, c, 0, running_mean, running_var);
            }
        }
        __syncthreads();

        const auto constant = [&](int row) {
            return *reinterpret_cast<const Vector<G, VEC>*>(&memory.constants[row][at_once.column]);
        };
        const Normalize normalize{constant(AFFINE_MEAN),
                                  constant(AFFINE_MEAN_LOW),
                                  constant(AFFINE_A),
                                  constant(AFFINE_BETA),
                                  UNITS ? constant(OF_SLOPE) : Vector<G, VEC>(),
                                  UNITS ? constant(OF_INVERSE_UNIT) : Vector<G, VEC>()};
        const bool vector_y = p.flags & FLAG_VECTOR_Y;
        const bool unaligned = !vector_y && p.y_col == 1 && min(p.n, 1LL * at_once.columns) >= LEAST_WORDS * VEC;
        const long long end = at_once.row + count * at_once.rows;  // a step beyond this thread's last row
        Y* to = y + end * p.y_row + place.at(p.y_row, p.y_col);
        D* deviations_at = deviations + end * p.ldg + place.at(p.ldg);
        rows.up([&](int, const Vector<G, VEC>& in) {
            to -= at_once.rows * p.y_row;
            deviations_at -= at_once.rows * p.ldg;
            normalize(in, deviations_at, [&](const Vector<Y, VEC>& out) {
                if (!unaligned)
                    store_word(to, out, inside, inside == VEC && vector_y, p.y_col);
                else
                    lanes.store(to, out);
            });
        });
    });
}
