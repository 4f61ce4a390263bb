// forward_sm90: Linear -> per-feature scale -> BatchNorm1d, the whole forward in one launch (Hopper, sm_90a).
//
//   g = x w^T                                   x (m, k), w (n, k), y (m, n), row-major
//   MODE 0, gemm:       y = g
//   MODE 1, inference:  y = a g + c             a = gamma r s, c = gamma r (s bias - running_mean) + beta
//   MODE 2, training:   y = a (g - mean) + beta a = gamma s r, r = 1 / sqrt(s^2 var + eps), mean and var of g over m
//
// Limbs (ELEMENT 3). float32 operands come from split_limbs as two float16 matrices and a power of two for every row.
// Three of the four products of limbs are added up, the small ones first, by the tensor core for 32 of k at a time and
// beyond that in float32 registers; docs/float32.md derives the error.
//
// Tiles. A CTA works on one tile of BLOCK_M rows of x and BLOCK_N features at a time, transposed: w is wgmma's A and x
// its B, so that a feature is a row of the accumulators and its statistics are sums within a thread and two shuffles.
//
// Across (16-bit, MODE 0). With W_ACROSS the w operand lies as (k, n) in memory, with X_ACROSS x as (k, m): so the
// backward makes dx = dg w (w across) and dw = dg^T x (both across). wgmma takes 16-bit operands either way round; a
// stage then holds them as columns of 64 rows (Operand).
//
// Threads. Three warpgroups. Warpgroups 1 and 2 are the consumers: 64 features of the tile each, with wgmma
// m64nBLOCK_M. In warpgroup 0, warp 0 is the producer, which feeds a ring of STAGES shared-memory stages through TMA; in
// training warp 1 merges statistics, and warps 2 and 3 finish tiles; in inference the three lay out a and c. Two CTAs
// with neighbouring features form a cluster: each loads its own w tile and one half of the x tile, which it multicasts to
// both. The grid is persistent: cluster q of Q takes tiles q, q + Q, q + 2 Q, ... (Order).
//
// Training. Batch normalisation needs all m rows of a feature before it can write any. Each tile:
//   1. consumers take the tile's mean and squared deviations about it, feature by feature, from the float32 accumulators,
//   2. publish them to the workspace `partial`,
//   3. store the deviations from the tile's own means to y, in y's format, and go on with the next tile
//      (the last tile of a CTA stays in registers until step 5);
//   4. merger: the tiles of a block of features share its features out; each merges its share over all tiles of the
//      block, in a fixed order, publishes (mean, a) to the workspace `merged`, and updates the running statistics;
//   5. finishers: when a tile's features are all merged, they turn its deviations, most likely still in L2, into y,
//      beside the main loop of later tiles. Consumers that have run out of tiles help.
// With KEEP, step 5 also writes what a backward needs, g - mean in y's type (float16 in units, see SAVED_UNIT), and the
// merger its float64 vectors.
//
// Flags. Every 16-byte word of the workspace carries the launch's number, so a word says by itself whether it is of
// this launch: no flag is ever reset, the workspace may be uninitialised memory, and what an aborted launch or the last
// replay of a graph left behind cannot be mistaken. The number is a time that all CTAs agree on (agree_on_number).
//
// Where all rows of a feature lie in one tile (FLAG_ALONE), no CTA reads what another has written: each takes a number
// of its own, and the launch is an ordinary one.
//
// No deadlock. Any other training launch is cooperative: all CTAs are resident. Publishing a tile (1 to 3) waits for its
// operands and for the store of the tile before it, nothing else; merging (4), in a warp of its own, waits for publishing
// only; finishing (5) waits for merging only. The last tile of a CTA waits in registers after it has been published. No
// wait goes the other way, whatever m, the grid and the order of the tiles.
//
// Same bits every time. What is added to what depends on the shape and the grid alone; timing decides only which warp
// finishes a row.
//
// Bytes. x and w stream through L2 to shared memory. y is written as deviations and rewritten in place, from L2 while
// it still holds them; g itself is never stored, g - mean once if it is kept. The workspace is 16 bytes per BLOCK_M rows
// and feature, written once, read once or twice.

#include "sm90_formats.cuh"
#include "sm90_statistics.cuh"
#include "sm90_wgmma.cuh"

struct alignas(1024) Shared {
    char stage[STAGES][STAGE_BYTES];  // w tile, then x tile, limb by limb, all swizzled
    char staging[WARPGROUPS][2]
                [STAGING_BYTES];  // y on its way out, swizzled: one pass is written while the last is read
    union {                       // of a variant one of the three: the others have no size
        float2 constants[MODE == INFERENCE ? BLOCK_N : 1];          // a and c of the features of the tile
        float beta[KEEP ? BLOCK_N : 1];                             // of the CTA's last tile
        Affine arguments[MODE == INFERENCE || KEEP ? 1 : BLOCK_N];  // of the CTA's last tile
    };
    u64 full[STAGES], empty[STAGES], agreed, laid_out;
    u64 launch;                  // training: the launch's number
    Wide momentum;               // the weight of the new running statistics
    int ready;                   // warps that have published (training), laid out constants (inference)
    int stored[WARPGROUPS];      // tiles that each warpgroup has stored: with short k one may run two tiles ahead
    int ticket, finished, laid;  // units of rows handed out, and done; tiles whose coefficients have been laid out
    Finish coef[BLOCK_N];        // of the tile that is being finished
};

// The order in which clusters take blocks of BLOCK_M rows x CLUSTER * BLOCK_N features: in panels of `panel` column
// blocks, row by row inside a panel, so that one reading of x serves a panel. The last columns come one at a time where
// tiles are finished later: less is then left to finish at the end.
struct Order {
    int rows, cols, panel;
    __device__ int count() const { return rows * cols; }
    __device__ void at(int i, int& row, int& col) const {
        const int grouped = (cols - 1) / panel * panel;  // columns in whole panels, at least one left over
        int first = i / (rows * panel) * panel, width = min(panel, cols - first);
        if (MODE == TRAINING && first >= grouped) width = 1, first = i / rows;
        i -= first * rows;
        row = i / width;
        col = first + i % width;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) forward_sm90(
    const __grid_constant__ Problem p,
    const __grid_constant__ TensorMap x_map,  // boxes of BLOCK_M / CLUSTER rows x 128 bytes, swizzled by 128, as all
    const __grid_constant__ TensorMap w_map,  // boxes of BLOCK_N rows x 128 bytes; across: BLOCK_K of k x COLUMN rows
    const __grid_constant__ TensorMap y_map,  // boxes of PASS_M rows x 128 bytes
#if KEEP
    const __grid_constant__ TensorMap kept_map,  // likewise, of g - mean in rows of p.ldg elements
#endif
    char* y,
    Word* partial,  // [feature block][tile row][BLOCK_N]: mean and M2 of a tile's feature
    Word* merged,   // await_merged's
    u64* roll,      // [1 + gridDim.x]: agree_on_number's
    const void* bias, const void* scale, const void* gamma, const void* beta, void* running_mean, void* running_var,
    long long* batches,      // num_batches_tracked, or null; +1
    const int* x_exponents,  // limbs: row i of x is 2^x_exponents[i] times the sum of its limbs, and so on
    const int* w_exponents
#if KEEP
    ,
    char* kept, double* saved  // g - mean (m, n), and rows of n: SAVED_
#endif
) {
    const long long m = p.m, n = p.n, k = p.k, panel = p.panel;
    [[maybe_unused]] const long long y_pitch = p.y_row * Y_BYTES;
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    // the shuffle tells the compiler that a warp's index is the same in all its lanes
    const int warp_index = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), warpgroup = warp_index / 4,
              warp = warp_index % 4;
    const int clusters = gridDim.x / CLUSTER;
    const int steps = (int)((k + BLOCK_K - 1) / BLOCK_K);
    const int blocks = (int)((n + BLOCK_N - 1) / BLOCK_N);  // of features
    [[maybe_unused]] const size_t features = (size_t)blocks * BLOCK_N;
    const Order order = {(int)((m + BLOCK_M - 1) / BLOCK_M), (blocks + CLUSTER - 1) / CLUSTER, (int)panel};
    [[maybe_unused]] const Features f = {bias,        p.bias,        scale,       p.scale,      gamma,
                                         p.gamma,     beta,          p.beta,      running_mean, p.running_mean,
                                         running_var, p.running_var, (float)p.eps};

    if (threadIdx.x == 0) {
        tma_prefetch(&x_map), tma_prefetch(&w_map), tma_prefetch(&y_map);
        for (int s = 0; s < STAGES; s++) {
            mbar_init(&sh.full[s], 1);
            mbar_init(&sh.empty[s], CLUSTER * CONSUMERS / 32);  // every consumer warp of every CTA
        }
        mbar_init(&sh.agreed, 1);
        mbar_init(&sh.laid_out, 32);
        sh.ready = sh.ticket = sh.finished = sh.laid = 0;
        for (int half = 0; half < WARPGROUPS; half++) sh.stored[half] = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    await_kernel_ahead();

#if MODE == 2
    // Step 5. Units of rows are handed out by a ticket, over all tiles of this CTA but the last, in their order.
    auto finish_unit = [&](int unit, int nap) {
        const u64 launch = *(volatile u64*)&sh.launch;  // read anew rather than held in registers, here and below
        constexpr int ACROSS = BLOCK_N / CHUNK;         // lanes along a row
        const int lane = lane_id(), within = lane % ACROSS * CHUNK;  // first of this lane's columns in the block
        int row, block;
        order.at(cluster_id() + unit / UNITS * clusters, row, block);
        block = block * CLUSTER + cluster_rank();
        const int feature = block * BLOCK_N + within;
        // The first unit's warp lays out y = a (d + tile mean - mean) + beta = a d + b for all.
        if (unit % UNITS == 0) {
            if (block < blocks) {
                // first in this CTA, then one word of all, then all: polling must not crowd the main loop out of L2
                for (int half = 0; half < WARPGROUPS; half++) wait_count(&sh.stored[half], unit / UNITS + 1, nap);
                await(merged + (size_t)block * BLOCK_N, launch, nap);
            }
            wait_count(&sh.finished, unit, SHORT_NAP);  // the last tile's coefficients are no longer read
#pragma unroll 1
            for (int i = lane; i < BLOCK_N; i += 32) {
                if (block * BLOCK_N + i < n) {
                    const Merged all = await_merged(merged, features, (size_t)block * BLOCK_N + i, launch);
                    const float2 own = await(partial + ((size_t)block * order.rows + row) * BLOCK_N + i, launch);
                    const float unit_of = deviation_unit(own.y, min((int)m - row * BLOCK_M, BLOCK_M));
                    const float b = fetch(f.beta, f.beta_code, block * BLOCK_N + i).or_else(0.f);
                    const float shift = own.x - all.mean;
                    sh.coef[i].of[TO_Y] = make_float2(all.a * unit_of, fmaf(all.a, shift, b));
#if KEEP
                    sh.coef[i].of[TO_KEPT] = make_float2(unit_of / all.unit, shift / all.unit);
#endif
                }
            }
            __syncwarp();
            if (lane == 0) count_up(&sh.laid);
        } else {
            wait_count(&sh.laid, unit / UNITS + 1, nap);
        }
        Finish coef[CHUNK];
#pragma unroll
        for (int e = 0; e < CHUNK; e++) coef[e] = sh.coef[within + e];
        // deviations are read past L1, which might hold older lines
        constexpr int STEP = 32 / ACROSS, BATCH = KEEP ? 4 : 8;  // KEEP's coefficients take the other registers
        const int first = row * BLOCK_M + unit % UNITS * UNIT + lane / ACROSS;
        const int end = feature < n ? (int)m - first : 0;
        char* at = y + (size_t)first * y_pitch + (size_t)feature * Y_BYTES;
        const size_t step = STEP * y_pitch;
#if KEEP
        const size_t kept_pitch = p.ldg * Y_BYTES;
        char* keep_at = kept + (size_t)first * kept_pitch + (size_t)feature * Y_BYTES;
#endif
        auto finish = [&](int i, uint4 d) {  // i rows of the warp after the first
            *(uint4*)(at + i * step) = apply(d, coef, TO_Y);
#if KEEP
            *(uint4*)(keep_at + i * (STEP * kept_pitch)) = apply(d, coef, TO_KEPT);
#endif
        };
        if (end >= UNIT) {
#pragma unroll 1
            for (int r = 0; r < UNIT / STEP; r += BATCH) {
                uint4 d[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) d[i] = __ldcg((const uint4*)(at + (r + i) * step));
#pragma unroll
                for (int i = 0; i < BATCH; i++) finish(r + i, d[i]);
            }
        } else {
#pragma unroll 1
            for (int r = 0; r * STEP < min(end, UNIT); r++) finish(r, __ldcg((const uint4*)(at + r * step)));
        }
        __syncwarp();
        if (lane == 0) count_up(&sh.finished);
    };
    auto finish_tiles = [&](int nap) {
        const int finishing = (order.count() - 1 - cluster_id()) / clusters * UNITS;
        while (true) {
            int unit;
            if (lane_id() == 0) unit = atomicAdd(&sh.ticket, 1);
            unit = __shfl_sync(0xFFFFFFFF, unit, 0);
            if (unit >= finishing) break;
            finish_unit(unit, nap);
        }
    };
#endif

    if (warpgroup == 0) {
        give_registers<HELPER_REGISTERS>();
        const int lane = lane_id(), rank = cluster_rank();
        if (warp == 0) {
            if (lane == 0) {
                // ---- producer
                int s = 0, phase = 0;
                for (int i = cluster_id(); i < order.count(); i += clusters) {
                    int row, col;
                    order.at(i, row, col);
                    // a CTA of a pair loads half of the rows of x, or one limb of all
                    const int x_limb = MATRICES == 2 ? rank : 0, w_row = (col * CLUSTER + rank) * BLOCK_N;
                    const int x_row = row * BLOCK_M + (MATRICES == 1 ? rank * (BLOCK_M / CLUSTER) : 0);
#pragma unroll 1
                    for (int step = 0; step < steps; step++) {
                        mbar_wait(&sh.empty[s], phase ^ 1);
                        mbar_expect(&sh.full[s], STAGE_BYTES);
                        char* w_tile = sh.stage[s];
                        char* x_part = w_tile + W_BYTES + rank * (X_BYTES / CLUSTER);
                        W::load<BLOCK_N, false>(w_tile, &w_map, &sh.full[s], step, w_row, 0);
                        X::load<BLOCK_M / CLUSTER, (CLUSTER > 1)>(x_part, &x_map, &sh.full[s], step, x_row, x_limb);
                        if (++s == STAGES) s = 0, phase ^= 1;
                    }
                }
            }
        }
#if MODE == 1
        else if (warp <= LAYING_WARPS) {
            // ---- constants, beside the main loop
            int nth = 0;
            for (int i; (i = cluster_id() + nth * clusters) < order.count(); nth++) {
                int row, col;
                order.at(i, row, col);
                const int first = (col * CLUSTER + rank) * BLOCK_N;
                for (int half = 0; half < WARPGROUPS; half++) wait_count(&sh.stored[half], nth, LONG_NAP);
                for (int c = 32 * (warp - 1) + lane; c < BLOCK_N; c += 32 * LAYING_WARPS)
                    sh.constants[c] = first + c < n ? f.frozen(first + c) : make_float2(0.f, 0.f);
                __syncwarp();
                if (lane == 0) count_up(&sh.ready);
            }
        }
#endif
#if MODE == 2
        else if (warp == 1) {
            // ---- merger
            const long long count = batches ? *(volatile long long*)batches + 1 : 1;
            const u64 number = p.flags & FLAG_ALONE ? later_than(now()) : agree_on_number(roll, lane);
            if (lane == 0) {
                sh.launch = number;
                sh.momentum = p.flags & FLAG_CUMULATIVE ? (Wide)1 / (Wide)count : (Wide)p.momentum;
                mbar_arrive(&sh.agreed);
                if (batches && blockIdx.x == 0) *batches = count;  // all CTAs that need it have read it
            }
            __syncwarp();
            const int share = share_of(order.rows), lanes = lanes_of(order.rows);
            const Wide unbiased = (Wide)m / (Wide)(m - 1);
            int nth = 0;
            for (int i; (i = cluster_id() + nth * clusters) < order.count(); nth++) {
                int row, block;
                order.at(i, row, block);
                block = block * CLUSTER + rank;
                if (block >= blocks) continue;
#pragma unroll 1
                for (int base = 0; base < share; base += 32 / lanes) {
                    const int lane = lane_id(), member = lane % lanes;  // anew: less to hold beside finish_unit
                    const int c = row * share + base + lane / lanes, feature = block * BLOCK_N + c;
                    const bool speaks = member == 0 && base + lane / lanes < share && c < BLOCK_N;
                    const bool mine = speaks && feature < n, running = mine && (f.running_mean_code & 7) != KIND_ABSENT;
                    // the arguments travel while the partials are not there yet
                    Affine u = {1.f, 1.f, 0.f};
                    Wide b = 0, rm = 0, rv = 0;
                    if (mine) u = f.affine(feature);
                    if (running) {
                        b = fetch(f.bias, f.bias_code, feature).or_else((Wide)0);
                        rm = fetch(f.running_mean, f.running_mean_code, feature).or_else((Wide)0);
                        rv = fetch(f.running_var, f.running_var_code, feature).or_else((Wide)0);
                    }
                    // first in this CTA, then one word of all, then all; meanwhile, finish what can be finished without a wait
                    const int nap = i + clusters >= order.count() ? SHORT_NAP : LONG_NAP;
                    while (look(&sh.ready) < (nth + 1) * (CONSUMERS / 32)) {
                        int unit = -1;
                        if (lane == 0) {
                            const int next = *(volatile int*)&sh.ticket;
                            if (next < *(volatile int*)&sh.laid * UNITS &&
                                atomicCAS(&sh.ticket, next, next + 1) == next)
                                unit = next;
                        }
                        unit = __shfl_sync(0xFFFFFFFF, unit, 0);
                        if (unit < 0)
                            __nanosleep(nap);
                        else
                            finish_unit(unit, nap);
                    }
                    __syncwarp();
                    if (row * share >= BLOCK_N) break;  // more tiles than features: those before have merged them all
                    const u64 launch = *(volatile u64*)&sh.launch;
                    const Word* words = partial + (size_t)block * order.rows * BLOCK_N;
                    await(words + (size_t)(order.rows - 1) * BLOCK_N, launch, nap);
                    float mean, var;
                    merge_feature<4>(words + min(c, BLOCK_N - 1), order.rows, (int)m, launch, member, lanes, mean, var);
                    if (speaks) publish(merged + (size_t)block * BLOCK_N + c, mean, u.slope(var, f.eps), launch);
#if KEEP
                    if (speaks && ELEMENT == 1)
                        publish(merged + features + (size_t)block * BLOCK_N + c, deviation_unit(var, 1), 0.f, launch);
#endif
                    if (running) {
                        const Wide weight = sh.momentum, s = u.scale;
                        rm = (1 - weight) * rm + weight * (s * (mean + b));
                        rv = (1 - weight) * rv + weight * (s * s * var * unbiased);
                        store_vector(f.running_mean, f.running_mean_code, feature, rm);
                        store_vector(f.running_var, f.running_var_code, feature, rv);
                    }
#if KEEP
                    if (mine) store_saved(saved, n, feature, u.scale, u.gamma, var, p.eps, deviation_unit(var, 1));
#endif
                }
            }
        } else {
            // ---- finishers
            if (warp == 2) {  // what the consumers need for the CTA's last tile, which they finish themselves
                int row, block;
                order.at((order.count() - 1 - cluster_id()) / clusters * clusters + cluster_id(), row, block);
                block = block * CLUSTER + cluster_rank();
#pragma unroll
                for (int c = lane; c < BLOCK_N; c += 32)
                    if (block * BLOCK_N + c < n) {
#if KEEP
                        sh.beta[c] = fetch(f.beta, f.beta_code, block * BLOCK_N + c).or_else(0.f);
#else
                        sh.arguments[c] = f.affine(block * BLOCK_N + c);
#endif
                    }
                mbar_arrive(&sh.laid_out);
            }
            mbar_wait(&sh.agreed, 0);
            finish_tiles(LONG_NAP);
        }
#endif
    } else {
        // ---- consumers
        take_registers<CONSUMER_REGISTERS>();
        const int half = warpgroup - 1, lane = lane_id(), rank = cluster_rank();
        const bool storer = warp == 0 && lane == 0;  // one thread of the warpgroup issues its TMA stores
        int s = 0, phase = 0, nth = 0;
        float d[ACC];
        // ---- d to y, through shared memory, where it is turned: rows of 128 bytes, 16-byte chunk c of row r at c ^ (r & 7)
        auto store = [&](const TensorMap& map, const float (&d)[ACC], int row, int block) {
            const int lane = lane_id();  // anew, as in the epilogue
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) {
                char* staging = sh.staging[half][pass & 1];
                const float* e = d + pass * (ACC / PASSES);
                if (storer) tma_store_wait_read<1>();  // the last store but one
                warpgroup_sync(half);
#if ELEMENT >= 2
#pragma unroll
                for (int i = 0; i < ACC / PASSES; i++) {  // i = 4 j + 2 h + e
                    const int r = i / 4 * 8 + 2 * (lane & 3) + i % 2, c = (warp & 1) * 4 + i / 2 % 2 * 2 + lane / 16;
                    *(float*)(staging + warp / 2 * (PASS_M * 128) + r * 128 + ((c ^ (r & 7)) << 4) +
                              (lane / 4 & 3) * 4) = e[i];
                }
#else
                const u32 line = smem(staging) + (lane / 16 * 8 + (lane & 7)) * 128 +
                                 (((2 * warp + (lane / 8 & 1)) ^ (lane & 7)) << 4);
#pragma unroll
                for (int j = 0; j < PASS_M / 8; j += 2)
                    stmatrix_trans(line + j * (8 * 128), pack(e[4 * j], e[4 * j + 1]), pack(e[4 * j + 2], e[4 * j + 3]),
                                   pack(e[4 * j + 4], e[4 * j + 5]), pack(e[4 * j + 6], e[4 * j + 7]));
#endif
                fence_async();
                warpgroup_sync(half);
                if (storer) {
                    if (block < blocks)
                        for (int box = 0; box < BOXES; box++)
                            tma_store(&map, staging + box * (PASS_M * 128),
                                      block * BLOCK_N + 64 * half + box * (64 / BOXES), row * BLOCK_M + pass * PASS_M);
                    tma_store_commit();
                }
            }
            if (PASSES & 1) {  // an odd number would leave the slots out of step
                if (storer) tma_store_wait_read<0>();
                warpgroup_sync(half);
            }
        };

        for (int i; (i = cluster_id() + nth * clusters) < order.count(); nth++) {
            int row, block;
            order.at(i, row, block);
            block = block * CLUSTER + rank;

            // ---- g: the main loop
            auto release = [&](int stage) {
                if (lane < CLUSTER) mbar_arrive_at(&sh.empty[stage], lane);
            };
            auto after = [&](int step) {
#if MODE == 2
                // the last tile's store has long arrived: a wait for it costs nothing here
                if (step == min(4, steps - 1) && storer && nth > 0) {
                    tma_store_wait();
                    count_up(&sh.stored[half]);
                }
#endif
                if (++s == STAGES) s = 0, phase ^= 1;
            };
#if ELEMENT != 3
            // one stage's wgmmas stay in flight while the next stage's are issued
            int before = 0;  // the stage before s
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                mbar_wait(&sh.full[s], phase);
                const u64 a = W::descriptor(sh.stage[s] + half * (64 * 128)), b = X::descriptor(sh.stage[s] + W_BYTES);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < BLOCK_K / MMA_K; j++) wgmma(d, a + W::NEXT * j, b + X::NEXT * j, step | j);
                wgmma_commit();
                if (step > 0) {
                    wgmma_wait<1>();
                    release(before);
                }
                before = s;
                after(step);
            }
            wgmma_wait<0>();
            release(before);
#else
            // The tensor core truncates as it adds, and always towards zero: the sum of a part of a stage starts anew,
            // takes the small products first, and is added to `sum`, which rounds. The other warpgroup's wgmmas run
            // meanwhile.
            constexpr int PARTS = 2;  // of a stage of limbs, each with a sum of its own
            float sum[ACC];
#pragma unroll
            for (int i = 0; i < ACC; i++) sum[i] = 0.f;
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                mbar_wait(&sh.full[s], phase);
                const u64 a = W::descriptor(sh.stage[s] + half * (64 * 128)), b = X::descriptor(sh.stage[s] + W_BYTES);
                constexpr u64 A_LOW = BLOCK_N * 128 / 16, B_LOW = BLOCK_M * 128 / 16;
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    constexpr int STEPS = BLOCK_K / MMA_K / PARTS;
                    const u64 a_part = a + W::NEXT * STEPS * part, b_part = b + X::NEXT * STEPS * part;
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < STEPS; j++) wgmma(d, a_part + A_LOW + W::NEXT * j, b_part + X::NEXT * j, j);
#pragma unroll
                    for (int j = 0; j < STEPS; j++) wgmma(d, a_part + W::NEXT * j, b_part + B_LOW + X::NEXT * j, 1);
#pragma unroll
                    for (int j = 0; j < STEPS; j++) wgmma(d, a_part + W::NEXT * j, b_part + X::NEXT * j, 1);
                    wgmma_commit();
                    wgmma_wait<0>();
                    if (part == PARTS - 1) release(s);
#pragma unroll
                    for (int i = 0; i < ACC; i++) sum[i] += d[i];
                }
                after(step);
            }
#endif

            // d[4 j + 2 h + e] is feature 64 half + 16 warp + lane / 4 + 8 h, row 8 j + 2 (lane % 4) + e of the tile;
            // a thread has two features, h = 0, 1
            const int lane = lane_id();  // anew: what hangs on it shall not take registers in the main loop
            const int within = 64 * half + 16 * warp + lane / 4;
            [[maybe_unused]] const int feature = block * BLOCK_N + within;
            if (block < blocks) {
#if ELEMENT == 3
                unscale(sum, d, x_exponents, (int)m, row * BLOCK_M + 2 * (lane & 3), w_exponents, (int)n, feature);
#endif
#if MODE == 1
                wait_count(&sh.ready, (nth + 1) * LAYING_WARPS, SHORT_NAP);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float2 ac = sh.constants[within + 8 * h];
#pragma unroll
                    for (int j = 0; j < ACC / 4; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) d[4 * j + 2 * h + e] = fmaf(ac.x, d[4 * j + 2 * h + e], ac.y);
                }
#endif
#if MODE == 2
                const int rows = min((int)m - row * BLOCK_M, BLOCK_M);
                float mean[2], m2[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float sum[4] = {0.f, 0.f, 0.f, 0.f};  // rows past m are zero: TMA fills them
#pragma unroll
                    for (int j = 0; j < ACC / 4; j++)
                        sum[j % 2 * 2] += d[4 * j + 2 * h], sum[j % 2 * 2 + 1] += d[4 * j + 2 * h + 1];
                    mean[h] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
                    mean[h] += __shfl_xor_sync(0xFFFFFFFF, mean[h], 1);
                    mean[h] += __shfl_xor_sync(0xFFFFFFFF, mean[h], 2);
                    mean[h] /= (float)rows;
#pragma unroll
                    for (int j = 0; j < ACC / 4; j++) d[4 * j + 2 * h] -= mean[h], d[4 * j + 2 * h + 1] -= mean[h];
                }
                if (rows < BLOCK_M) {
#pragma unroll
                    for (int j = 0; j < ACC / 4; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (8 * j + 2 * (lane & 3) + e >= rows) d[4 * j + e] = d[4 * j + 2 + e] = 0.f;
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                    for (int j = 0; j < ACC / 4; j++) {
                        sum[j % 2 * 2] = fmaf(d[4 * j + 2 * h], d[4 * j + 2 * h], sum[j % 2 * 2]);
                        sum[j % 2 * 2 + 1] = fmaf(d[4 * j + 2 * h + 1], d[4 * j + 2 * h + 1], sum[j % 2 * 2 + 1]);
                    }
                    m2[h] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
                    m2[h] += __shfl_xor_sync(0xFFFFFFFF, m2[h], 1);
                    m2[h] += __shfl_xor_sync(0xFFFFFFFF, m2[h], 2);
                }
                mbar_wait(&sh.agreed, 0);
                const u64 launch = sh.launch;
                const int h = lane & 1;  // of four lanes with the same two features, two speak for one each
                const float own = h ? mean[1] : mean[0];
                if ((lane & 2) == 0)
                    publish(partial + ((size_t)block * order.rows + row) * BLOCK_N + within + 8 * h, own,
                            h ? m2[1] : m2[0], launch);
                if (lane == 0) hint(&sh.ready);
                if (cluster_id() + (nth + 1) * clusters >= order.count()) {
                    // the CTA's last tile: wait for the others and finish it here
                    mbar_wait(&sh.laid_out, 0);
                    // d = xy.x d + xy.y, where this thread has xy of feature h
                    auto map_features = [&](float2 xy) {
                        const float2 other =
                            make_float2(__shfl_xor_sync(0xFFFFFFFF, xy.x, 1), __shfl_xor_sync(0xFFFFFFFF, xy.y, 1));
                        const float2 xy0 = h ? other : xy, xy1 = h ? xy : other;
#pragma unroll
                        for (int j = 0; j < ACC / 4; j++)
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                d[4 * j + e] = fmaf(xy0.x, d[4 * j + e], xy0.y);
                                d[4 * j + 2 + e] = fmaf(xy1.x, d[4 * j + 2 + e], xy1.y);
                            }
                    };
#if KEEP
                    const Merged all = await_merged(merged, features, (size_t)block * BLOCK_N + within + 8 * h, launch);
                    map_features(make_float2(1.f / all.unit, (own - all.mean) / all.unit));
                    store(kept_map, d, row, block);
                    map_features(make_float2(all.a * all.unit, sh.beta[within + 8 * h]));
#else
                    const Affine u = sh.arguments[within + 8 * h];
                    float2 all;                       // mean and a
                    if (lanes_of(order.rows) == 1) {  // few tiles share a feature: merging them here saves a round trip
                        float var;
                        const Word* words = partial + (size_t)block * order.rows * BLOCK_N + within + 8 * h;
                        merge_feature<4>(words, order.rows, (int)m, launch, 0, 1, all.x, var);
                        all.y = u.slope(var, f.eps);
                    } else {
                        all = await(merged + (size_t)block * BLOCK_N + within + 8 * h, launch);
                    }
                    map_features(make_float2(all.y, all.y * (own - all.x) + u.beta));
#endif
                } else if (ELEMENT == 1) {
                    const float in_units[2] = {1.f / deviation_unit(m2[0], rows), 1.f / deviation_unit(m2[1], rows)};
#pragma unroll
                    for (int i = 0; i < ACC; i++) d[i] *= in_units[i / 2 % 2];
                }
#endif
            }

            store(y_map, d, row, block);
#if MODE == 1
            if (storer) count_up(&sh.stored[half]);  // and with it, the constants have been read
#endif
        }
#if MODE == 2
        finish_tiles(SHORT_NAP);
#endif
        if (storer) tma_store_wait_read<0>();  // shared memory outlives the stores that read it
    }
    cluster_sync();  // no CTA leaves while its neighbour may still write to it
}
