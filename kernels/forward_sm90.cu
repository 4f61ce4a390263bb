// forward_sm90: computes the whole forward, Linear -> per-feature scale -> BatchNorm1d, in one launch (Hopper, sm_90a).
//
//   g = x w^T                                   x (m, k), w (n, k), y (m, n), row-major
//   MODE_GEMM:           y = g
//   MODE_INFERENCE:      y = f(a g + c)             a = gamma r s, c = gamma r (s bias - running_mean) + beta
//   MODE_TRAINING:       y = f(a (g - mean) + beta) a = gamma s r, r = 1 / sqrt(s^2 var + eps), mean, var of g over m
//   MODE_RECOMPUTE:      the same; g is computed twice
//   MODE_CLUSTER_BATCH:  the same; one cluster has all m rows of its features
//   f is the activation that the variant is compiled for (common/activation.cuh).
//
// Tiles. A CTA computes one tile at a time: BLOCK_M rows of x by BLOCK_N features. The tile is transposed: w is operand
// A of wgmma and x is operand B. A feature is then a row of the accumulator (sm90/accumulator.cuh), and its statistics
// take only sums within a thread and two shuffles.
//
// Threads. A CTA has three warpgroups. Warpgroups 1 and 2 are the consumers: each computes 64 features of the tile. In
// warpgroup 0, warp 0 is the producer: it fills a pipeline of STAGES shared-memory stages through TMA. In training,
// warp 1 merges statistics, and warps 2 and 3 run the epilogue of deferred tiles. In inference, warps 1 to 3 load a and
// c.
//
// Clusters. Two CTAs with neighbouring features form a cluster. Each loads its own w tile and half of the x tile, and
// multicasts that half to both. In MODE_CLUSTER_BATCH up to 16 CTAs with neighbouring rows form one: each loads its
// own x tile and multicasts a part of the w tile. In MODE_INFERENCE and MODE_GEMM a cluster may have both: CLUSTER by
// CLUSTER_M tiles, whose CTAs load a part of both tiles and multicast them, x to the CTAs beside them and w to those
// above and below. That is less to load, from L2 and for TMA, which is slow where rows do not start on 32 bytes. The
// grid is persistent: cluster q of Q takes tiles q, q + Q, q + 2 Q, ... (TileScheduler).
//
// Split k. Where there are few tiles and k is long, the CTAs of a cluster have SPLIT_K tiles, one below the other. Each
// CTA multiplies all of these tiles over its own range of k. Then the CTAs exchange partial sums (sm90/split_k.cuh),
// and each CTA goes on with one complete tile. It has no other tile, so nothing is deferred. Two such columns of CTAs
// may share x as above, except in MODE_CLUSTER_BATCH.
//
// Training. Batch normalisation needs all m rows of a feature before it can write any of them. For each tile:
//   1. The consumers compute mean and M2 of the tile's rows, feature by feature, from the float32 accumulators.
//   2. They publish these statistics to the workspace `partial`.
//   3. They store the deviations from the tile's own centres to y, in y's format, and start the next tile. This is a
//      deferred tile. The last tile of a CTA is not deferred: it stays in registers until step 5.
//   4. The merger merges statistics over all tiles. The CTAs whose tiles have the same features divide these features
//      among them. A merger merges its share in a fixed order, publishes (centre, a) to the workspace `merged`, and
//      updates the running statistics. If a CTA has several tiles of a block of features, its merger first merges their
//      statistics into one part, so that there is one part for each CTA and not for each tile (Cta::parts).
//   5. Deferred epilogue: when all features of a tile are merged, a warp turns its deviations into y. The deviations
//      are most likely still in L2. This runs beside the mainloop of later tiles. Warps that have no other work left
//      help.
// A centre is the mean, except in 16 bits (deviation_centre). With SAVE_DEVIATIONS, step 5 also writes what a backward
// needs: the deviations from the centres of all rows, in y's type (float16 in units, SAVED_UNIT). The merger writes the
// backward's float64 vectors.
//
// Recompute. Where k is short, computing a tile twice costs less than deferring it: x is read twice and y written once.
// Deferring reads x once, but writes y, reads it and writes it again. A CTA keeps to one block of features:
//   1. The consumers compute the statistics of each tile, and merge them with those of the earlier tiles, in registers.
//   2. After the last tile they publish the result: a feature has one word from each CTA, not from each tile.
//   3. The merger works as above, once.
//   4. The consumers write y of the last tile, which is still in registers. Then they compute the other tiles again,
//      from the last but one to the first, because L2 still holds the end of x. Meanwhile the producer already loads
//      the first of these tiles.
// A warpgroup whose 64 features all lie beyond n multiplies nothing. With SAVE_VECTORS alone the backward computes g
// again (REMAT in skinny_backward.cu): no deviations are stored, and step 4 computes the last tile again, too, so that
// every y is rounded like the backward's u.
//
// Cluster batch. If the batch has few rows, one cluster has all rows of one block of features: CLUSTER_M tiles of x
// whose CTAs each load a part of the w tile, or SPLIT_K tiles whose CTAs each have a range of k. All clusters run in
// one wave.
//   1. The consumers compute a tile's statistics as above, and send them to the shared memory of all CTAs of the
//      cluster.
//   2. Each CTA merges all of these in the order of the rows, and writes y of its tile, which is still in registers.
//   3. The mergers (warps 1 to 3, then 0) of the CTAs that have rows divide the features among them. They update the
//      running statistics of their features, and write what a backward needs.
// With FEW_ROWS one CTA has all rows, and computes and stores everything after the product in float64, as the backward
// of so few rows needs (normalize_few_rows).
// No CTA waits for another cluster. So the launch is an ordinary one, and needs neither a number nor a workspace. A CTA
// without rows still loads its part of w for the others.
//
// Limbs. With ELEMENT_LIMBS, float32 operands come from split_limbs as two float16 matrices and a power of two for each
// row. The tensor core adds three of the four products of limbs, the small ones first, for 32 of k at a time. These
// sums are added in float32 registers; docs/design/limbs.md derives the error. With ELEMENT_LIMBS_RS only x comes as
// limbs. w comes as float32, and the consumers make its limbs in registers (sm90/limbs_rs.cuh), from which wgmma reads
// operand A. This is faster for few rows, where reading w, writing its limbs and reading them takes longer than
// everything else.
//
// MN-major operands (MODE_GEMM). With W_MN_MAJOR, w lies in memory as (k, n); with X_MN_MAJOR, x lies as (k, m). The
// backward needs this for dx = dg w (w is MN-major) and dw = dg^T x (both are). wgmma takes 16-bit operands in either
// layout; a stage holds MN-major ones as columns of 64 rows (SmemOperand). With ELEMENT_LIMBS_RS, w may be MN-major.
//
// Channels first. With CHANNELS_FIRST, x is (samples, k, length) in memory, and y and the deviations are (samples, n,
// length), as in a 1x1 convolution. m counts the rows of all samples. A tile lies in one sample, and the last tile of a
// sample may be short (sm90/samples.cuh). x is MN-major, and the sample is a third dimension of the TMA maps, so a load
// or store never crosses a sample. An accumulator row is a feature, as always, so y is stored as it lies in registers,
// without the transposition. In MODE_RECOMPUTE a CTA has neighbouring tiles, so that the number of rows in its part
// follows from two of them. MODE_GEMM computes dx in this layout, with w MN-major. For dw both operands are (samples,
// features, length). With K_IN_SAMPLES, k runs over the lengths of all samples, in steps that do not cross a sample.
// The steps are split into parts_alone parts of equal size; each part makes an (m, n) matrix of y, and reduce_split_k
// adds these matrices.
//
// The launch ahead. A CTA may begin while the launch ahead still runs. Each role waits for it in Cta::begin, right
// before the role first needs global memory. Until then it computes what needs none: the code that does so runs once in a
// launch, and fetching it takes longer than running it.
//
// Two CTAs on an SM. With OCCUPANCY 2 a CTA has half of an SM, and its pipeline has half of the stages. CTAs of the
// next launch then begin before those of this launch have ended. It pays where tiles are small and one wave of them
// fills the SMs.
//
// Residual. With RESIDUAL, y = f(u + residual), where u is the y that the formulas above give without f. Where y follows
// a mainloop, the producer loads the tile's residual into the next stages, behind the operands. A thread reads the
// elements that it needs when it stages y. The deferred epilogue reads the residual beside the deviations.
//
// Ranks. With RANKS several GPUs share the batch. In step 4 the merger posts the statistics of its share to all ranks.
// Another warp, the joiner, collects what all ranks have posted and goes on with the statistics of the whole batch
// (common/ranks.cuh). The grid leaves some SMs free: a peer may wait for another kernel that has to run here.
//
// Rows of y. With FLAG_VECTOR_Y, rows of y are whole words of 16 bytes, and TMA stores them. Otherwise they start
// anywhere; a warpgroup then stores them from shared memory, 4 bytes a lane, and no tile is deferred.
//
// Words. Every 16-byte word of the workspace carries the launch's number. So a word shows by itself whether it belongs
// to this launch. No flag is ever reset, the workspace may be uninitialised, and words of an aborted launch or of a
// graph's last replay cannot be mistaken for new ones. The number is a time that all CTAs agree on (agree_on_number).
// With FLAG_ALONE all rows of a feature lie in one tile, and no CTA reads what another CTA wrote. Each CTA then takes
// its own number, and the launch is an ordinary one.
//
// No deadlock. Training launches are cooperative, so all CTAs are resident, except with MODE_CLUSTER_BATCH or
// FLAG_ALONE. Publishing a tile (1 to 3) waits only for its operands and for the store of the tile before it. Merging
// (4) runs in its own warp and waits only for publishing. The epilogue (5) waits only for merging. The last tile of a
// CTA waits in registers after its statistics have been published. No wait goes the other way, whatever m, the grid and
// the order of tiles are. With SPLIT_K, the exchange of partial sums waits only for the mainloops of the cluster,
// before step 1. In MODE_RECOMPUTE a CTA publishes once, before it waits for anyone. In MODE_CLUSTER_BATCH a CTA sends
// before it waits, and all CTAs of a cluster are resident together.
//
// Same bits every time. The order of the terms of every sum depends only on the shape and the grid. Timing decides only
// which warp runs an epilogue.
//
// The end. A CTA may end without waiting for others: it has received everything that other CTAs send to it. It does not
// report that it has read its last stages, because nothing more is loaded into them.
//
// Bytes moved. x and w stream through L2 to shared memory. y is written as deviations and rewritten in place; the
// deviations come from L2 if it still holds them. g is never stored; saved deviations are stored once. The workspace
// has 16 bytes for each BLOCK_M rows of a feature, which are written once and read once or twice. MODE_RECOMPUTE
// streams x twice, writes y once, and has 16 bytes of workspace for each CTA and feature. With SPLIT_K,
// x and w are read as often as with tiles of SPLIT_K * BLOCK_M rows, and each of these rows but the CTA's own costs 512
// bytes of exchange. MODE_CLUSTER_BATCH streams x once for each block of features, and w and y once.

#include "sm90/modes.cuh"
#if !defined(MODE) || MODE != MODE_INFERENCE  // in inference the fetched values are needed before a short mainloop ends
#define CONCURRENT_WITH_MMA 1
#endif
#include "sm90/deferred_epilogue.cuh"
#include "sm90/merger.cuh"
#include "sm90/producer.cuh"
#include "sm90/recompute.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, OCCUPANCY) __cluster_dims__(CLUSTER_CTAS, 1, 1) forward_sm90(
    const __grid_constant__ ForwardSm90Problem p,
    const __grid_constant__ TensorMap x_map,  // boxes of PRODUCT_M / CLUSTER rows x 128 bytes, swizzled
    const __grid_constant__ TensorMap w_map,  // boxes of BLOCK_N / CLUSTER_M rows; MN-major ones: SmemOperand::load
    const __grid_constant__ TensorMap y_map,  // boxes of PASS_M rows x 128 bytes; not used without FLAG_VECTOR_Y
#if SAVE_DEVIATIONS && !FEW_ROWS
    const __grid_constant__ TensorMap deviations_map,  // the same for the deviations, whose pitch is p.ld_deviations
#endif
#if RESIDUAL
    const __grid_constant__ TensorMap residual_map,  // the same for the residual, whose pitch is p.residual_row
#endif
    char* y,
    Word* partial,  // [feature block][part][BLOCK_N]: mean and M2 of a feature over some rows (RowParts)
    Word* merged,   // statistics over all rows: await_merged has the layout
    u64* epoch,     // [1 + gridDim.x]: for agree_on_number
    const void* bias, const void* scale, const void* gamma, const void* beta, void* running_mean, void* running_var,
    long long* batches,      // num_batches_tracked, or null; it is increased by 1
    const int* x_exponents,  // limbs: row i of x is 2^x_exponents[i] times the sum of its limbs; w likewise
    const int* w_exponents
#if SAVE_DEVIATIONS
    ,
    char* deviations  // (m, n), with FEW_ROWS in float64
#endif
#if SAVE_VECTORS
    ,
    double* saved  // rows of n: SAVED_
#endif
#if RANKS
    ,
    Ranks* ranks
#endif
#if RENORM
    ,
    const void* renorm  // r_max and d_max, or null
#endif
#if RESIDUAL
    ,
    const char* residual  // (m, n)
#endif
) {
    const long long m = p.m, n = p.n, k = p.k, y_pitch = p.y_row * Y_BYTES;
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw);
    // the shuffle tells the compiler that all lanes of a warp have the same index
    const int warp_index = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp_index / 4, warp = warp_index % 4;
    const int clusters = gridDim.x / CLUSTER_CTAS, part = cluster_part();
    const int all_steps = int((k + BLOCK_K - 1) / BLOCK_K);
    const int first_step = all_steps * part / SPLIT_K,
              steps = K_IN_SAMPLES ? all_steps / int(p.parts_alone) : all_steps * (part + 1) / SPLIT_K - first_step;
    const int blocks = int((n + BLOCK_N - 1) / BLOCK_N);
    const size_t features = size_t(blocks) * BLOCK_N;
#if CHANNELS_FIRST
    const int rows_of_tiles = int(p.tiles);
#else
    const int rows = MODE == MODE_CLUSTER_BATCH ? BLOCK_M * CLUSTER_M : BLOCK_M;  // there a cluster counts once
    const int splits = K_IN_SAMPLES ? int(p.parts_alone) : 1;
    const int rows_of_tiles = splits * int((m + rows - 1) / rows);
#endif
    const TileScheduler scheduler = {rows_of_tiles,   (blocks + CLUSTER - 1) / CLUSTER,
                                     int(p.panel),    int(p.grouped),
                                     u64(p.of_panel), u64(p.of_columns),
                                     u64(p.of_rest)};
    const Features f = {.bias = {bias, p.bias},
                        .scale = {scale, p.scale},
                        .gamma = {gamma, p.gamma},
                        .beta = {beta, p.beta},
                        .running_mean = {running_mean, p.running_mean},
                        .running_var = {running_var, p.running_var},
                        .eps = float(p.eps),
                        .number = float(p.number),
#if RENORM
                        .renorm = renorm
#endif
    };
#if FEW_ROWS
    const ForBackward for_backward = {.deviations = deviations, .vectors = saved};
#elif SAVE_DEVIATIONS
    const ForBackward for_backward = {&deviations_map, deviations, saved};
#elif SAVE_VECTORS
    const ForBackward for_backward = {.vectors = saved};
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
#if RESIDUAL
                     .residual_map = residual_map,
                     .residual = residual,
#endif
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
                     .scheduler = scheduler,
                     .own_tiles = MODE == MODE_RECOMPUTE ? OwnTiles(p, scheduler.cols) : OwnTiles()};

    if (threadIdx.x == 0) {
        tma_prefetch(&x_map), tma_prefetch(&w_map), tma_prefetch(&y_map);
        for (int s = 0; s < STAGES; ++s) {
            mbar_init(&sh.full[s], 1);
            mbar_init(&sh.empty[s], SHARERS * CONSUMERS / 32);  // every consumer warp of these CTAs arrives
        }
        mbar_init(&sh.agreed, 1);
        mbar_init(&sh.arguments_ready, 32);
        if constexpr (SPLIT_K > 1) {
            mbar_init(&sh.drained, SPLIT_K * CONSUMERS / 32);
            mbar_init(&sh.summed, 1);
            mbar_expect(&sh.summed, SENT_BYTES);
        }
        if constexpr (MODE == MODE_CLUSTER_BATCH)
            for (int half = 0; half < WARPGROUPS; ++half)
                mbar_init(&sh.here[half], CLUSTER_CTAS == 1 || FEW_ROWS ? 64 : 1);
        sh.ready = sh.constants_ready[0] = sh.constants_ready[1] = sh.ticket = sh.merged_tiles = 0;
        for (int half = 0; half < WARPGROUPS; ++half) sh.stored[half] = 0;
        mbar_init_fence();
    }
    cluster_begin();
    if (warpgroup == 0) {
        give_registers<HELPER_REGISTERS>();
        const int lane = lane_id(), rank = cluster_rank();
        if (warp == 0) {
            if (lane == 0) cta.produce(rank);
        } else if constexpr (MODE == MODE_INFERENCE) {
            if (warp <= CONSTANT_WARPS) cta.load_constants(warp, lane, rank);
        } else if constexpr (TRAINS) {
            cta.begin();
            if (warp == 2) cta.load_last_tile_arguments(lane);
            if (MODE != MODE_CLUSTER_BATCH && warp == 1) {
                cta.merge(lane, rank, 0);
            } else {  // with RANKS, two roles in one warp would make the consumers spill
#if RANKS
                if (warp == 2) cta.join(lane, rank);
#endif
            }
        }
        if constexpr (MODE == MODE_CLUSTER_BATCH) {
            __syncwarp();
            cta.begin();  // most lanes of warp 0 have loaded nothing, and so have not waited yet
            cta.merge(lane, rank, (warp + 3) % MERGERS);  // warp 0 comes last, when it has loaded everything
        }
        if constexpr (DEFERS) {
            __syncwarp();
            cta.begin();
            mbar_wait(&sh.agreed, 0);
            // by now warp 0 has loaded everything
            cta.epilogue_of_deferred_tiles(warp == 0 ? SHORT_BACKOFF : LONG_BACKOFF);
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        cta.begin();
        const Consumer consumer = {cta, warpgroup - 1, warp, lane_id(), cluster_rank()};
        if constexpr (MODE == MODE_RECOMPUTE)
            Recomputer{consumer}.run();
        else
            Consumer(consumer).run();
    }
    if (cta.independent() && threadIdx.x == 0) await_kernel_ahead();
}
