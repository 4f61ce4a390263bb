// normalize: computes y = f(a ((g - mean) - mean_low) + beta) for each feature, in one pass over g (f:
// common/activation.cuh).
//
//   g (m, n) of G, row pitch ldg, rows on 16 bytes      y (m, n) of Y, any strides; it may be g itself
//   With D_TYPE, the deviations of g are saved for a backward: (m, n) of D, row pitch ldg; they may overwrite g. They
//   are g - mean, except in 16 bits (deviation_centre). Float16 ones are in units, one for each feature (SAVED_UNIT).
//
// merge_statistics has left the constants of each feature in the workspace. With RUNNING (inference), each CTA computes
// the constants of its columns from the running statistics. For few rows, normalize_fused computes statistics and y in
// one launch.
//
// An item of work is a block of columns and `normalize_rows` rows. A thread keeps the constants of its VEC columns (16
// bytes of g) in registers and takes every at_once.rows-th row (Places), with UNROLL rows in flight. Items run from the
// last rows to the first: scale_stats read g from the start, so L2 still holds the end. The first thread also counts
// the batch: every kernel that reads num_batches_tracked ran in an earlier launch. Rows of y may start on any
// element (common/row_words.cuh).
//
// Bytes moved: g, y and the deviations once, the minimum; at (16384, 4096) in float32 537 MB, plus 268 MB for the
// deviations.
#include "common/walk.cuh"
#include "normalize/normalized.cuh"

#ifndef RUNNING
#define RUNNING false
#endif

constexpr int UNROLL = 4;
constexpr int CTAS = SAVE_DEVIATIONS ? 3 : 4;  // the least number on an SM: as many as fit without spilling
constexpr int WIDEST = 32 * VEC;               // columns of a block

// Takes a thread's rows of g, AT_ONCE at once if its words can be read whole: if all its columns exist, or if g is not
// y, so that rows of g are padded. store_y(address, word of y) stores y.
template <int AT_ONCE, typename Store>
__device__ __forceinline__ void take_rows(const Normalize& normalize, int rows, int inside, bool whole_words,
                                          const G* from, long long from_step, Y* to, long long to_step, D* deviations,
                                          const Store& store_y) {
    const auto put = [&](const Vector<G, VEC>& in) {
        normalize(in, deviations, [&](const Vector<Y, VEC>& out) { store_y(to, out); });
        to += to_step;
        deviations += from_step;
    };
    for (; whole_words && rows >= AT_ONCE; rows -= AT_ONCE) {
        Vector<G, VEC> in[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, from += from_step) in[i] = *reinterpret_cast<const Vector<G, VEC>*>(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) put(in[i]);
    }
    for (; rows > 0; --rows, from += from_step) put(load<G, VEC>(from, inside));
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    normalize(const __grid_constant__ ForwardProblem p, const G* g, Y* y, const char* workspace, const void* bias,
              const void* scale, const void* gamma, const void* beta, void* running_mean, void* running_var,
              long long* num_batches_tracked, D* deviations, double* saved) {
    await_kernel_ahead();
    const Places<THREADS, VEC> at_once(p.row_threads);
    if (blockIdx.x == 0 && threadIdx.x == 0 && num_batches_tracked != nullptr) *num_batches_tracked += batches_of(p);

    const unsigned blocks = at_once.blocks(p.n);
    const long long items = blocks * ((p.m + p.normalize_rows - 1) / p.normalize_rows);
    for_each_item(items, [&](unsigned item) {
        const unsigned at = unsigned(items) - 1 - item;
        const long long first_col = 1LL * at_once.columns * (at % blocks);
        const long long col = first_col + at_once.column;
        const long long begin = at / blocks * p.normalize_rows, end = min(begin + p.normalize_rows, p.m);
        const Column place(p, col);
        const RowOfLanes<VEC> lanes(at_once, place);
        const int inside = lanes.inside;

        const G* affine = reinterpret_cast<const G*>(workspace + p.affine) + col;
        const long long row = begin + at_once.row;
        long long pitch = pitch_of_columns(p);
        const long long from_step = at_once.rows * p.ldg, to_step = at_once.rows * p.y_row;
        const G* from = g + row * p.ldg + place.at(p.ldg);
        if constexpr (RUNNING) {
            __shared__ __align__(16) G made[AFFINE_ROWS * WIDEST];
            __shared__ double arguments[Arguments::COUNT][WIDEST];
            const auto [column, part, parts] = Sharers<THREADS>(at_once.columns);
            const long long c = first_col + column;
#pragma unroll 1
            for (int i = part; c < p.n && i < Arguments::COUNT; i += parts)
                arguments[i][column] = argument(i, p, c, bias, scale, gamma, beta, running_mean, running_var);
            __syncthreads();
            if (part == 0 && c < p.n)
                store_running(p, c, Arguments(&arguments[0][column], WIDEST), g, made, WIDEST, column,
                              begin == 0 ? saved : nullptr);
            __syncthreads();
            affine = made + at_once.column;
            pitch = WIDEST;
        }
        if (inside == 0) return;

        const auto constant = [&](int row) { return load<G, VEC>(affine + row * pitch, inside); };
        Normalize normalize{
            constant(AFFINE_MEAN), constant(AFFINE_MEAN_LOW), constant(AFFINE_A), constant(AFFINE_BETA), {}, {}};
        if (UNITS) {
            const double* of_ghost = saved_of(p, saved, col) + col;
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                if (j < inside) {
                    normalize.inverse_unit.at[j] = 1.0 / of_ghost[SAVED_UNIT * saved_pitch(p) + j];
                    normalize.slope.at[j] = of_ghost[SAVED_SLOPE * saved_pitch(p) + j];
                }
        }

        const int rows = count_every(int(end - begin), at_once.row, at_once.rows);
        Y* to = y + row * p.y_row + place.at(p.y_row, p.y_col);
        D* deviations_at = deviations + row * p.ldg + place.at(p.ldg);
        const bool vector_y = p.flags & FLAG_VECTOR_Y, whole = inside == VEC;
        const bool unaligned = !vector_y && p.y_col == 1 && p.n >= LEAST_WORDS * VEC;  // so a row has enough threads
        if (unaligned)  // with more rows at once, registers would spill
            take_rows<UNROLL / 2>(normalize, rows, inside, true, from, from_step, to, to_step, deviations_at,
                                  [&](Y* at, const Vector<Y, VEC>& out) { lanes.store(at, out); });
        else
            take_rows<UNROLL>(
                normalize, rows, inside, whole || !vector_y, from, from_step, to, to_step, deviations_at,
                [&](Y* at, const Vector<Y, VEC>& out) { store_word(at, out, inside, whole && vector_y, p.y_col); });
    });
}
