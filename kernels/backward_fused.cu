// backward_fused: does the work of backward_sums and backward_dg (backward.cu has the formulas) in one launch, for up
// to 1024 rows for each CTA. A CTA or, with CLUSTER, a cluster has all rows of its columns. So their sums need no
// others, except those of other ranks (common/ranks.cuh). The CTAs of a cluster take rows in turn, and exchange their
// sums.
//
//   dy (m, n) of T: rows on 16 bytes, or columns of stride 0
//   d (m, n) of D, row pitch ldd, rows on 16 bytes, or null
//   dg (m, n) of T, row pitch lddg, rows on 16 bytes, or null if it is not wanted
//
// A thread has 16 bytes of a row of dy (VEC columns); `row_threads` threads share a row, and a thread has every
// at_once.rows-th row (Places). Rows come through the thread's own pipeline in shared memory (common/walk.cuh). After
// the rows are summed (common/cluster_columns.cuh), several threads know the sums of a column: one computes the
// coefficients of its dg, and each of the others computes a gradient of size O. Sums are computed as in
// backward_sums.cu: GROUP rows in float32, everything else in float64.
//
// Bytes moved: dy and d are read once and dg is written once, the minimum. Rows that did not fit into the pipelines are
// read once more, from L2.
#include "backward/columns.cuh"

constexpr int WIDEST = 16 * VEC;  // columns of a CTA
// Rows of factors in shared memory. With CLUSTER as many as RENORM needs: the planner gives all variants the same memory.
constexpr int FACTOR_ROWS = CLUSTER == 1 ? 0 : SAVED_SHIFT + 1;

struct Shared {
    uint4 pipeline[STAGES * WORDS * THREADS];
    BackwardTotals::Memory totals;
    alignas(VEC * sizeof(G)) G coefficients[DG_ROWS][WIDEST];
#if CLUSTER > 1
    double factors[FACTOR_ROWS][WIDEST];
#endif
    [[no_unique_address]] ClusterTotals<WIDEST, true, SUMS / 2, FLOAT64> of_cluster;
};
// Read by gsbn/_plan/variants.py: the pipelines, the sums of threads, the coefficients and the factors, the sums of the
// cluster.
constexpr int TOTALS_BYTES = 2 * VEC * sizeof(G) * THREADS;
constexpr int FEATURE_BYTES = DG_ROWS * sizeof(G) + 8 * FACTOR_ROWS;
constexpr int CLUSTER_BYTES = CLUSTER == 1 ? 0 : 16 + 8 * SUMS * CLUSTER * WIDEST;
constexpr int SHARED_BYTES =
    (16 * STAGES * WORDS * THREADS + TOTALS_BYTES + WIDEST * FEATURE_BYTES + CLUSTER_BYTES + 63) / 64 * 64;
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives less than is used");

extern "C" __global__ void __launch_bounds__(THREADS, TRAINING ? 2 : 1) IN_CLUSTERS
    backward_fused(const __grid_constant__ BackwardProblem p, const T* dy, const D* d, const double* saved, T* dg,
                   void* to_bias, void* to_scale, void* to_gamma, void* to_beta, unsigned* zeros, Ranks* ranks) {
    extern __shared__ uint4 dynamic[];
    Shared& memory = *reinterpret_cast<Shared*>(dynamic);

    const Places<THREADS, VEC> at_once(p.row_threads);
    const int rank = rank_in_cluster(), first_row = rank * at_once.rows + at_once.row, step = CLUSTER * at_once.rows;
    memory.of_cluster.begin(rank, at_once.columns);
    const auto work = [&](unsigned item) {
        const long long col0 = 1LL * item * at_once.columns, col = col0 + at_once.column;
        const Column place(p, col);
        const int inside = place.inside<VEC>();
        const int count = inside > 0 ? count_every(int(p.m), first_row, step) : 0;
        const BackwardRows of_thread(p, dy, d, first_row, step, place, inside, memory.pipeline);
        await_kernel_ahead(ranks != nullptr);
        Walk<STAGES, BackwardRows> rows(count, of_thread);

        const auto [column, part, parts] = Sharers<THREADS>(at_once.columns);  // the column whose sums this thread gets
        const long long c = col0 + column;
        Factors of{saved_of(p, saved, c) + c, saved_pitch(p), c};
#if CLUSTER > 1  // L1 would lose them while the CTAs of the cluster wait for each other
        if (c < p.n) of.copy(&memory.factors[0][column], WIDEST, part, parts);
        of = {&memory.factors[0][column], WIDEST, c};
#else
        if (c < p.n) of.prefetch(part, parts);
#endif
        const BeforeY before(p, saved, col, inside);
        G centre[VEC] = {};
        load_centre(p, saved, col, inside, centre);

        BackwardTotals totals(memory.totals, int(p.row_threads));
        add_rows<false>(rows, count_every(int(p.m), rank * at_once.rows, step), centre, before, totals);
        ColumnSums all;
        totals.of_column(column, all.of);
        memory.of_cluster.add(rank, column, part == 0, all.of);
        if (c < p.n) {
            Projection by(double(p.m), of, all.of);
            double own_E = by.E;  // E of this rank's rows
            if (TRAINING && ranks != nullptr) {
                const BackwardExchange exchange(ranks, nullptr, 0, p.signature);
                if (part == 0) post_sums(exchange, p, d, of, all);
                double of_ranks[POSTS];
                const double rows = collect_sums(exchange, of, of_ranks);
                by = Projection(rows, of, of_ranks);
                own_E = by.of_part(all.of[0], all.of[1]);
            }
            if (part == 0) store_coefficients(of, by, &memory.coefficients[0][0], WIDEST, column);
#pragma unroll 1
            for (int i = parts - 1 - part; rank == 0 && i < GRADIENTS; i += parts)
                store_gradient(i, p, of, all.of[0], own_E, to_bias, to_scale, to_gamma, to_beta);
        }
        if (dg == nullptr) return;
        __syncthreads();

        const Coefficients make(before, &memory.coefficients[0][0], WIDEST, at_once.column, p, saved, col, inside);
        const long long dg_step = step * p.lddg;
        T* to = dg + first_row * p.lddg + place.at(p.lddg) + count * dg_step;
        rows.up([&](int, const Row& row) {
            to -= dg_step;
            store_dg(to, make.dg(row), inside);
        });
    };
    if constexpr (CLUSTER == 1)
        for_each_item(at_once.blocks(p.n), work);
    else
        work(blockIdx.x / CLUSTER);  // there are as many clusters as blocks of columns
    clear(zeros, p.words);
    if (ranks == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) BackwardExchange(ranks, nullptr, 0, p.signature).leave(gridDim.x);
}
