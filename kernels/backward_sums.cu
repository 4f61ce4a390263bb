// backward_sums: computes the sums of each column of dy and d (ColumnSums in backward/columns.cuh; backward.cu has the
// formulas). It is the first of two passes.
//
//   dy (m, n) of T: rows on 16 bytes, or columns of stride 0
//   d (m, n) of D, row pitch ldd, rows on 16 bytes, or null if no gradient needs E
//   workspace (splits, SUMS, n): the sums of each split's rows, in float64
//   With RESIDUAL: kept (m, n) of T, rows on 16 bytes, and dv (m, n) of T, contiguous, n a multiple of VEC. The forward
//   was y = f(v) with v = u + residual, and kept is v or a y that tells f'(v). dv = dy f'(v), in T, is the residual's
//   gradient; the sums are those of dv.
//
// A CTA has a block of columns and sums_rows rows. A thread has VEC columns of every at_once.rows-th of these rows;
// `row_threads` threads share a row (Places). Rows come through the thread's own pipeline in shared memory
// (BackwardRows). GROUP rows are added in float32, so that a sum of n terms t errs by at most GROUP 2^-24 sum |t|. The
// sums of groups, of threads and of the CTAs of a cluster are then added in float64, in an order that depends only on
// the shape. A split is the rows of a CTA or, with CLUSTER, of a cluster, so that merge_splits has few splits to read.
// For float64 the sums include their rounding errors (Knuth's two-sum).
//
// Bytes moved: dy, d and kept are read once, and dv is written once, the minimum; at (16384, 4096) in bfloat16 268 MB
// without RESIDUAL, 537 MB with it.
#include "backward/columns.cuh"

struct Shared {
    uint4 pipeline[STAGES * WORDS * THREADS];
    BackwardTotals::Memory totals;
    [[no_unique_address]] ClusterTotals<LANES * VEC, false, SUMS / 2, FLOAT64> of_cluster;
};
// Read by gsbn/_plan/variants.py.
constexpr int CLUSTER_BYTES = CLUSTER == 1 ? 0 : 16 + 8 * SUMS * LANES * VEC;
constexpr int SHARED_BYTES =
    (16 * STAGES * WORDS * THREADS + 2 * VEC * sizeof(G) * THREADS + CLUSTER_BYTES + 63) / 64 * 64;
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives less than is used");

extern "C" __global__ void __launch_bounds__(THREADS, 2) IN_CLUSTERS
    backward_sums(const __grid_constant__ BackwardProblem p, const T* dy, const D* d, const double* saved,
                  char* workspace, unsigned* zeros
#if RESIDUAL
                  ,
                  const T* kept, T* dv
#endif
    ) {
    extern __shared__ uint4 dynamic[];
    Shared& memory = *reinterpret_cast<Shared*>(dynamic);

    const Places<THREADS, VEC> at_once(p.row_threads);
    const int rank = rank_in_cluster();
    memory.of_cluster.begin(rank, at_once.columns);
    const unsigned splits = unsigned(p.splits), ctas = splits * CLUSTER;  // CTAs of a block of columns
    const auto work = [&](unsigned item) {
        const long long block = item / ctas, split = item % ctas / CLUSTER;
        const long long col = block * at_once.columns + at_once.column;
        const long long begin = item % ctas * p.sums_rows;
        // the last CTAs of a cluster may have no rows
        const int height = int(max(min(p.sums_rows, p.m - begin), 0LL));
        const Column place(p, col);
        const int inside = place.inside<VEC>();

        const int count = inside > 0 ? count_every(height, at_once.row, at_once.rows) : 0;
        BackwardRows of(p, dy, d, begin + at_once.row, at_once.rows, place, inside, memory.pipeline);
#if RESIDUAL
        of.with_residual(p, kept, dv, begin + at_once.row, at_once.rows, place);
#endif
        await_kernel_ahead();
        Walk<STAGES, BackwardRows> rows(count, of);
        G centre[VEC] = {};
        load_centre(p, saved, col, inside, centre);
        BackwardTotals totals(memory.totals, int(p.row_threads));
        add_rows<true>(rows, count_every(height, 0, at_once.rows), centre, BeforeY(p, saved, col, inside), totals);
        const auto [column, part, parts] = Sharers<THREADS>(at_once.columns);  // from here on a thread has one column
        const long long c = block * at_once.columns + column;
        ColumnSums all;
        totals.of_column(column, all.of);
        memory.of_cluster.add(rank, column, part == 0, all.of);
        if (part > 0 || c >= p.n || column % CLUSTER != rank) return;
        double* partials = reinterpret_cast<double*>(workspace) + split * SUMS * p.n + c;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) partials[i * p.n] = all.of[i];
    };
    if constexpr (CLUSTER == 1)
        for_each_item(at_once.blocks(p.n) * p.splits, work);
    else
        work(blockIdx.x);
    clear(zeros, p.words);
}
