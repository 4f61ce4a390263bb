// forward_sm90: Linear -> per-feature scale -> BatchNorm1d, the whole forward in one launch (Hopper, sm_90a).
//
//   g = x w^T                                   x (m, k), w (n, k), y (m, n), row-major
//   MODE_GEMM:       y = g
//   MODE_INFERENCE:  y = f(a g + c)             a = gamma r s, c = gamma r (s bias - running_mean) + beta
//   MODE_TRAINING:   y = f(a (g - mean) + beta) a = gamma s r, r = 1 / sqrt(s^2 var + eps), mean and var of g over m
//   MODE_RECOMPUTE:  the same, g being made twice
//   MODE_CLUSTER_BATCH:      the same, all m rows being in one cluster
//   f is the activation that the variant is compiled for (common/activation.cuh).
//
// Limbs (ELEMENT_LIMBS). float32 operands come from split_limbs as two float16 matrices and a power of two for every row.
// Three of the four products of limbs are added up, the small ones first, by the tensor core for 32 of k at a time and
// beyond that in float32 registers; docs/float32.md derives the error. With ELEMENT_LIMBS_RS that is so for x alone: w comes as it
// is, and the consumers make its limbs in registers (sm90/limbs_rs.cuh), of which wgmma takes its A. Where rows are few,
// reading the weight, writing its limbs and reading them again takes longer than all else. In MODE_GEMM w may lie across.
//
// Tiles. A CTA works on one tile of BLOCK_M rows of x and BLOCK_N features at a time, transposed: w is wgmma's A and x
// its B, so that a feature is a row of the accumulators and its statistics are sums within a thread and two shuffles.
//
// Across (16-bit, MODE_GEMM). With W_MN_MAJOR the w operand lies as (k, n) in memory, with X_MN_MAJOR x as (k, m): so the
// backward makes dx = dg w (w across) and dw = dg^T x (both across). wgmma takes 16-bit operands either way round; a
// stage then holds them as columns of 64 rows (Operand).
//
// Threads. Three warpgroups. Warpgroups 1 and 2 are the consumers: 64 features of the tile each, with wgmma
// m64nBLOCK_M. In warpgroup 0, warp 0 is the producer, which feeds a ring of STAGES shared-memory stages through TMA; in
// training warp 1 merges statistics, and warps 2 and 3 finish deferred tiles; in inference the three lay out a and c. Two CTAs
// with neighbouring features form a cluster: each loads its own w tile and one half of the x tile, which it multicasts to
// both; in MODE_CLUSTER_BATCH up to sixteen with neighbouring rows do, each of which loads its own x tile and multicasts a part of the w
// tile. The grid is persistent: cluster q of Q takes tiles q, q + Q, q + 2 Q, ... (TileScheduler).
//
// Sharing k. Where tiles are few and k is long, the CTAs of a cluster have SPLIT_K tiles, one below the other. Each multiplies
// all of these over its range of k, and they send each other their sums (sm90/split_k.cuh): from then on a CTA has its tile as
// if it had made it alone. It has no other, so that none is deferred. Two columns of them may share x as above, but in MODE_CLUSTER_BATCH.
//
// Training. Batch normalisation needs all m rows of a feature before it can write any. Each tile:
//   1. consumers take the tile's mean and squared deviations about it, feature by feature, from the float32 accumulators,
//   2. publish them to the workspace `partial`,
//   3. store the deviations from the tile's own means to y, in y's format, and go on with the next tile
//      (the last tile of a CTA stays in registers until step 5);
//   4. merger: the tiles of a block of features share its features out; each merges its share over all tiles of the
//      block, in a fixed order, publishes (mean, a) to the workspace `merged`, and updates the running statistics.
//      Where a CTA has several tiles of a block, its merger first makes one part of them, so that there are as many parts
//      as CTAs and not as tiles (Cta::parts);
//   5. finishers: when a tile's features are all merged, they turn its deviations, most likely still in L2, into y,
//      beside the main loop of later tiles. Warps that have nothing else left to do help.
// With SAVE_DEVIATIONS, step 5 also writes what a backward needs, g - mean in y's type (float16 in units, see SAVED_UNIT), and the
// merger its float64 vectors.
//
// Recomputing. Where k is short a tile costs less to make again than to park: x is read twice and y written once, where
// parking reads x once, and writes y, reads it and writes it again. A CTA keeps to one block of features. Over its tiles,
// in their order:
//   1. consumers take a tile's statistics as above, and merge them with those of the tiles before in registers,
//   2. and after the last tile publish them, so that a feature has a word from each CTA and not from each tile;
//   3. merger: as above, once;
//   4. consumers finish the last tile, which is still in registers, and make the others again, from the last but one to the
//      first, for y: x's end is what L2 still holds. The producer loads the first of them meanwhile.
// 64 features of a CTA's block that lie beyond n are not multiplied.
//
// A batch in one cluster. A batch of few rows fits a cluster: one block of features, and CLUSTER tiles of x whose CTAs load a part of the w
// tile each for all of them, or SPLIT_K tiles whose CTAs share k; in one wave of clusters.
//   1. consumers take a tile's statistics as above, and send them to all CTAs of the cluster, into their shared memory;
//   2. each merges all, in the order of the rows, and finishes its tile, which is still in registers;
//   3. mergers, warps 1 to 3 and then 0: the CTAs that have rows share the features' running statistics, and what a
//      backward needs, out.
// No CTA waits for one of another cluster, so the launch is an ordinary one, without a number and without a workspace. CTAs
// that have no rows load their part of w for the others.
//
// Two on an SM. With OCCUPANCY 2 a CTA has half of an SM, its ring half of the stages: CTAs of the next launch are there, and
// have begun, before those of this one have ended. That pays where a tile is small, and one wave of them fills the SMs.
//
// Ranks. With RANKS the batch is spread over several GPUs: in step 4 the merger posts the statistics of its share to all
// of them, and another warp, the joiner, collects what all have posted, and goes on with the statistics of the whole batch
// (common/ranks.cuh). The grid leaves some SMs free, since a peer may be waiting for another kernel to run here.
//
// Rows of y. With FLAG_VECTOR_Y they are whole words of 16 bytes, and stored by TMA. Else they start anywhere, and a warpgroup
// stores them from shared memory, 4 bytes a lane; tiles are then not deferred in them.
//
// Flags. Every 16-byte word of the workspace carries the launch's number, so a word says by itself whether it is of
// this launch: no flag is ever reset, the workspace may be uninitialised memory, and what an aborted launch or the last
// replay of a graph left behind cannot be mistaken. The number is a time that all CTAs agree on (agree_on_number).
//
// Where all rows of a feature lie in one tile (FLAG_ALONE), no CTA reads what another has written: each takes a number
// of its own, and the launch is an ordinary one.
//
// No deadlock. But for MODE_CLUSTER_BATCH, any other training launch is cooperative: all CTAs are resident. Publishing a tile (1 to 3)
// waits for its operands and for the store of the tile before it, nothing else; merging (4), in a warp of its own, waits
// for publishing only; finishing (5) waits for merging only. The last tile of a CTA waits in registers after it has been
// published. No wait goes the other way, whatever m, the grid and the order of the tiles. Sums wait for the main loops of
// the cluster alone, and come before step 1. To recompute, a CTA publishes once, before it waits for anyone. In MODE_CLUSTER_BATCH it
// sends before it waits, and all of a cluster are resident together.
//
// Same bits every time. What is added to what depends on the shape and the grid alone; timing decides only which warp
// finishes a row.
//
// The end. A CTA ends by itself: all that others send it, it has waited for, and it tells nobody that it has read the last
// stages of its ring, into which nothing more is loaded.
//
// Bytes. x and w stream through L2 to shared memory. y is written as deviations and rewritten in place, from L2 while
// it still holds them; g itself is never stored, g - mean once if it is kept. The workspace is 16 bytes per BLOCK_M rows
// and feature, written once, read once or twice. To recompute, x streams twice, y is written once, and the workspace is 16
// bytes per CTA and feature. CTAs that share k read x and w no more often than tiles of SPLIT_K * BLOCK_M rows, and send 512
// bytes for each of these rows, once. In MODE_CLUSTER_BATCH x streams once for each block of features, w and y once.

#include "sm90/modes.cuh"
#if !defined(MODE) || MODE != MODE_INFERENCE  // which wants what it fetches before a short mainloop ends
#define CONCURRENT_WITH_MMA 1
#endif
#include "sm90/deferred_epilogue.cuh"
#include "sm90/merger.cuh"
#include "sm90/producer.cuh"
#include "sm90/recompute.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, OCCUPANCY) __cluster_dims__(CLUSTER_CTAS, 1, 1) forward_sm90(
    const __grid_constant__ ForwardSm90Problem p,
    const __grid_constant__ TensorMap x_map,  // boxes of PRODUCT_M / X_SHARERS rows x 128 bytes, swizzled, as all
    const __grid_constant__ TensorMap w_map,  // of BLOCK_N / W_SHARERS rows; across: BLOCK_K of k x 128 bytes
    const __grid_constant__ TensorMap y_map,  // boxes of PASS_M rows x 128 bytes; any without FLAG_VECTOR_Y
#if SAVE_DEVIATIONS
    const __grid_constant__ TensorMap deviations_map,  // likewise, of g - mean in rows of p.ld_deviations elements
#endif
    char* y,
    Word* partial,  // [feature block][part][BLOCK_N]: mean and M2 of a feature in some rows (RowParts)
    Word* merged,   // await_merged's
    u64* epoch,     // [1 + gridDim.x]: agree_on_number's
    const void* bias, const void* scale, const void* gamma, const void* beta, void* running_mean, void* running_var,
    long long* batches,      // num_batches_tracked, or null; +1
    const int* x_exponents,  // limbs: row i of x is 2^x_exponents[i] times the sum of its limbs, and so on
    const int* w_exponents
#if SAVE_DEVIATIONS
    ,
    char* deviations, double* saved  // g - mean (m, n), and rows of n: SAVED_
#endif
#if RANKS
    ,
    Ranks* ranks
#endif
) {
    const long long m = p.m, n = p.n, k = p.k, panel = p.panel, y_pitch = p.y_row * Y_BYTES;
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    // the shuffle tells the compiler that a warp's index is the same in all its lanes
    const int warp_index = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp_index / 4,
              warp = warp_index % 4;
    const int clusters = gridDim.x / CLUSTER_CTAS, part = cluster_part();
    const int all_steps = (int)((k + BLOCK_K - 1) / BLOCK_K);
    const int first_step = all_steps * part / SPLIT_K, steps = all_steps * (part + 1) / SPLIT_K - first_step;
    const int blocks = (int)((n + BLOCK_N - 1) / BLOCK_N);
    const size_t features = (size_t)blocks * BLOCK_N;
    const int rows = BLOCK_M * W_SHARERS;  // of a cluster's tile
    const TileScheduler scheduler = {(int)((m + rows - 1) / rows), (blocks + X_SHARERS - 1) / X_SHARERS, (int)panel};
    const Features f = {.bias = bias,
                        .bias_code = p.bias,
                        .scale = scale,
                        .scale_code = p.scale,
                        .gamma = gamma,
                        .gamma_code = p.gamma,
                        .beta = beta,
                        .beta_code = p.beta,
                        .running_mean = running_mean,
                        .running_mean_code = p.running_mean,
                        .running_var = running_var,
                        .running_var_code = p.running_var,
                        .eps = (float)p.eps,
                        .number = (float)p.number};
#if SAVE_DEVIATIONS
    const ForBackward for_backward = {&deviations_map, deviations, saved};
#else
    const ForBackward for_backward = {};
#endif
#if !RANKS
    Ranks* const ranks = nullptr;
#endif
    const Cta cta = {.p = p,
                     .x_map = x_map,
                     .w_map = w_map,
                     .y_map = y_map,
                     .for_backward = for_backward,
                     .y = y,
                     .partial = partial,
                     .merged = merged,
                     .epoch = epoch,
                     .f = f,
                     .batches = batches,
                     .x_exponents = x_exponents,
                     .w_exponents = w_exponents,
                     .ranks = ranks,
                     .sh = sh,
                     .m = m,
                     .n = n,
                     .y_pitch = y_pitch,
                     .clusters = clusters,
                     .first_step = first_step,
                     .steps = steps,
                     .blocks = blocks,
                     .features = features,
                     .scheduler = scheduler};

    if (threadIdx.x == 0) {
        tma_prefetch(&x_map), tma_prefetch(&w_map), tma_prefetch(&y_map);
        for (int s = 0; s < STAGES; s++) {
            mbar_init(&sh.full[s], 1);
            mbar_init(&sh.empty[s], CLUSTER * CONSUMERS / 32);  // every consumer warp of every CTA
        }
        mbar_init(&sh.agreed, 1);
        mbar_init(&sh.arguments_ready, 32);
        if constexpr (SPLIT_K > 1) {
            mbar_init(&sh.drained, SPLIT_K * CONSUMERS / 32);
            mbar_init(&sh.summed, 1);
            mbar_expect(&sh.summed, SENT_BYTES);
        }
        if constexpr (MODE == MODE_CLUSTER_BATCH)
            for (int half = 0; half < WARPGROUPS; half++) mbar_init(&sh.here[half], CLUSTER_CTAS == 1 ? 64 : 1);
        sh.ready = sh.constants_ready[0] = sh.constants_ready[1] = sh.ticket = sh.merged_tiles = 0;
        for (int half = 0; half < WARPGROUPS; half++) sh.stored[half] = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_begin();
    const bool independent = MODE == MODE_GEMM && p.flags & FLAG_INDEPENDENT;
    if (independent)
        let_next_kernel_begin();
    else
        await_kernel_ahead(RANKS);

    if (warpgroup == 0) {
        give_registers<HELPER_REGISTERS>();
        const int lane = lane_id(), rank = cluster_rank();
        if (warp == 0) {
            if (lane == 0) cta.produce(rank);
        } else if constexpr (MODE == MODE_INFERENCE) {
            if (warp <= CONSTANT_WARPS) cta.load_constants(warp, lane, rank);
        } else if constexpr (TRAINS) {
            if (warp == 2) cta.load_last_tile_arguments(lane);
            if constexpr (MODE == MODE_TRAINING) {
                if (warp == 1) {
                    cta.merge_training(lane, rank);
                } else {  // with RANKS the consumers spill where join follows merge_training
#if RANKS
                    if (warp == 2) cta.join(lane, rank);
#endif
                }
            }
            if constexpr (MODE == MODE_RECOMPUTE)
                if (warp == 1) cta.merge_recompute(lane, rank);
        }
        if constexpr (MODE == MODE_CLUSTER_BATCH) {
            __syncwarp();
            cta.merge_cluster_batch(lane, rank, (warp + 3) % MERGERS);  // warp 0 comes last: it has loaded all
        }
        if constexpr (DEFERS) {
            __syncwarp();
            mbar_wait(&sh.agreed, 0);
            cta.epilogue_of_deferred_tiles(warp == 0 ? SHORT_BACKOFF : LONG_BACKOFF);  // warp 0 has loaded all
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const Consumer consumer = {cta, warpgroup - 1, warp, lane_id(), cluster_rank()};
        if constexpr (MODE == MODE_RECOMPUTE)
            Recomputer{consumer}.run();
        else
            Consumer(consumer).run();
    }
    if (independent && threadIdx.x == 0) await_kernel_ahead();
}
