// A CTA of forward_sm90: its shared memory, the order of its tiles, and the data that its warps work with.
#pragma once
#include "sm90/formats.cuh"
#include "sm90/statistics.cuh"

// Whether consumers need only beta of a feature's arguments, because the merger publishes a.
constexpr bool LOADS_BETA = MODE == MODE_RECOMPUTE || (MODE == MODE_TRAINING && SAVE_DEVIATIONS);

constexpr bool WITH_LOWS = MODE == MODE_INFERENCE && BY_LIMBS;

struct Shared {                       // starts on 1024 bytes, because swizzled stages must
    char stage[STAGES][STAGE_BYTES];  // w tile, then x tile, limb by limb, all swizzled
    // y before TMA stores it, swizzled; a pass is written while another is stored
    char staging[WARPGROUPS][STAGINGS][STAGING_BYTES];
    // a variant uses one of these three
    union {
        float2 constants[2][MODE == MODE_INFERENCE ? BLOCK_N : 1];  // a and c of this run and of the next (Run)
        // of the CTA's last tile; in MODE_RECOMPUTE the features' jumps replace it (Jump::from)
        float beta[LOADS_BETA ? BLOCK_N : 1];
        Arguments arguments[MODE == MODE_INFERENCE || LOADS_BETA ? 1 : BLOCK_N];  // of the CTA's last tile
    };
    u64 full[STAGES], empty[STAGES], agreed, arguments_ready;
    u64 launch;                // training: the number of the launch
    StatisticsType momentum;   // weight of the batch in the running statistics
    int ready;                 // training: how many times a warp has published
    int constants_ready[2];    // inference: how many times a warp has loaded constants into each slot
    int stored[WARPGROUPS];    // tiles that each consumer warpgroup has stored
    int ticket, merged_tiles;  // deferred epilogue: pieces handed out; tiles known to be merged
    Centred centred[MODE == MODE_RECOMPUTE ? BLOCK_N : 1];  // the epilogue's coefficients
#if FEW_ROWS
    double2 of_all_rows[BLOCK_N];  // mean and variance
    double inverse_m;              // 1 / m
#else
    float2 gathered[MODE == MODE_CLUSTER_BATCH ? CLUSTER_CTAS : 1]
                   [MODE == MODE_CLUSTER_BATCH ? BLOCK_N : 1];  // mean and M2 from each CTA of the cluster
#endif
    u64 here[WARPGROUPS];  // barriers: all of these statistics that a warpgroup needs have arrived
    u64 drained, summed;   // barriers of SPLIT_K: all CTAs have read their stages; all partial sums are here
#if RENORM
    RenormLimits<float> limits;
    Running running[MODE == MODE_CLUSTER_BATCH ? BLOCK_N : 1];  // for the CTA's tile
#endif
    __nv_bfloat16 lows[2][WITH_LOWS ? BLOCK_N : 1];  // `low` of the constants; float32 would not fit
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the planner gives less than is used");

struct Tile {
    int row, block;  // in units of BLOCK_M rows of x and of BLOCK_N features
};

// The order in which clusters take tiles of ROWS_OF_CLUSTER * BLOCK_M rows by CLUSTER * BLOCK_N features. The columns
// of tiles form panels of `panel` columns. Clusters take a panel row by row, so that one reading of x serves a panel.
// In MODE_TRAINING the last columns are taken one at a time, so that less is left for the deferred epilogue at the
// end. In MODE_CLUSTER_BATCH cluster i has all rows of block i. MODE_RECOMPUTE uses OwnTiles.
struct TileScheduler {
    int rows, cols, panel, grouped;
    u64 of_panel, of_columns, of_rest;
    __device__ int groups() const { return (rows + ROWS_OF_CLUSTER - 1) / ROWS_OF_CLUSTER; }
    __device__ int count() const { return groups() * cols; }
    // tile i, for the CTA of this rank in its cluster
    __device__ Tile at(int i, int rank) const {
        if constexpr (MODE == MODE_CLUSTER_BATCH) return {rank, i};
        const int height = groups();
        int r = 0, c = i;
        if (height > 1) {
            const int first = quotient(i, of_panel) * panel;
            if (MODE == MODE_TRAINING && first >= grouped) {
                c = quotient(i, of_rest), r = i - c * height;
            } else {
                i -= first * height;
                r = quotient(i, first < grouped ? of_columns : of_rest);
                c = first + i - r * (first < grouped ? panel : cols - grouped);
            }
        }
        return {r * ROWS_OF_CLUSTER + rank % ROWS_OF_CLUSTER, c * CLUSTER + rank / ROWS_OF_CLUSTER};
    }
};

// The tiles of a cluster in MODE_RECOMPUTE, where a cluster keeps to one column. The clusters of a column divide its
// rows of tiles into parts, as evenly as possible: the first longer_parts parts have one more. Part i has the rows i, i
// + parts, ...; with CHANNELS_FIRST it has neighbouring rows, so that its number of rows of x follows from two tiles.
struct OwnTiles {
    int col, part;
    int first, step, count;  // the rows of tiles that the cluster has: first, first + step, ...

    OwnTiles() = default;
    __device__ explicit OwnTiles(const ForwardSm90Problem& p, int cols) {
        part = quotient(cluster_id(), p.of_rest), col = cluster_id() - part * cols;
        const int of_part = int(p.tiles_of_part), longer = int(p.longer_parts);
        first = CHANNELS_FIRST ? part * of_part + min(part, longer) : part;
        step = CHANNELS_FIRST ? 1 : int(p.parts_alone);
        count = of_part + (part < longer);
    }
    // All tiles but the last come a second time, in reverse order: the rows that were read last are still in L2. With
    // REMAT the last tile does so, too: its y is then rounded like all others, as the backward expects.
    __device__ __forceinline__ int row(int nth) const {
        return first + (nth < count ? nth : 2 * count - 2 + REMAT - nth) * step;
    }
    __device__ __forceinline__ int visits() const { return 2 * count - 1 + REMAT; }
};

// A run: consecutive tiles of a CTA that have the same features. In inference the constants are loaded once for each
// run.
struct Run {
    int block = -1, number = -1;
    __device__ __forceinline__ bool ends_before(int next) {
        if (next == block) return false;
        block = next, ++number;
        return true;
    }
};

struct ForBackward {  // with SAVE_DEVIATIONS: the deviations (m, n); with SAVE_VECTORS: SAVED_ vectors of n
    const TensorMap* map;
    char* deviations;
    double* vectors;
};

// The data that a CTA works with, and the roles of its warps. `nth` is the number of a tile of the CTA, from 0 on. A
// CTA's last tile may lie beyond the features, in block `blocks`, or with SPLIT_K beyond the rows.
struct Cta {
    const ForwardSm90Problem& p;
    const TensorMap &x_map, &w_map, &y_map;
#if RESIDUAL
    const TensorMap& residual_map;
    const char* residual;
#endif
    const ForBackward for_backward;
    char* y;
    Word *partial, *merged;
    u64* epoch;
    const Features f;
    long long* batches;
    const int *x_exponents, *w_exponents;
    Ranks* const ranks;
    Shared& sh;
    const long long m, n, y_pitch;                  // y_pitch in bytes
    const int clusters, first_step, steps, blocks;  // steps of k of this CTA; blocks of features
    const size_t features;
    const TileScheduler scheduler;
    const OwnTiles own_tiles;

    __device__ __forceinline__ Samples samples() const { return samples_of(p); }

    // K_IN_SAMPLES: rows of tiles come split by split.
    struct OfSplit {
        int split, row;
    };
    __device__ __forceinline__ OfSplit of_split(int row) const {
        const int rows = scheduler.rows / int(p.parts_alone);
        return {row / rows, row % rows};
    }

    // How many tiles this CTA has.
    __device__ __forceinline__ int tiles() const {
        if constexpr (MODE == MODE_RECOMPUTE) return own_tiles.count;
        return (scheduler.count() - 1 - cluster_id()) / clusters + 1;
    }

    // How many products this CTA computes.
    __device__ __forceinline__ int products() const { return MODE == MODE_RECOMPUTE ? own_tiles.visits() : tiles(); }

    __device__ __forceinline__ bool is_there(int row, int block) const {
        return block < blocks && (SPLIT_K == 1 || MODE == MODE_CLUSTER_BATCH || row < scheduler.rows);
    }

    // Whether there is an nth tile for this CTA to multiply (`has`), and which tile it is (`tile`).
    __device__ __forceinline__ bool has(int nth) const {
        if constexpr (MODE == MODE_RECOMPUTE) return nth < own_tiles.visits();
        return cluster_id() + nth * clusters < scheduler.count();
    }
    __device__ __forceinline__ Tile tile(int nth, int rank) const {
        if constexpr (MODE == MODE_RECOMPUTE) return {own_tiles.row(nth), own_tiles.col * CLUSTER + rank};
        return scheduler.at(cluster_id() + nth * clusters, rank);
    }

    // Whether y follows from the CTA's nth product at once. Other tiles are deferred, or come again in MODE_RECOMPUTE.
    __device__ __forceinline__ bool stores_y(int nth) const {
        if constexpr (MODE == MODE_RECOMPUTE) return nth >= tiles() - !REMAT;
        return !DEFERS || nth == tiles() - 1;
    }

    // How many stages this CTA's operands and residuals take, one after the other.
    __device__ __forceinline__ int stages_used() const {
        return products() * steps + (DEFERS ? 1 : tiles()) * RESIDUAL_STAGES;
    }

    // The parts of the rows of a block's features. Each tile is a part or, if merges_tiles(block), all tiles of the
    // block that a CTA has are one part. MODE_TRAINING merges tiles where a CTA has several: fewer parts are then
    // merged at the end, when all CTAs wait.
    __device__ __forceinline__ RowParts parts(int block) const {
        const int tiles = MODE == MODE_CLUSTER_BATCH ? (int(m) + BLOCK_M - 1) / BLOCK_M : scheduler.rows;
        const int count = MODE == MODE_CLUSTER_BATCH ? tiles : part_count(block);
        const int each = count == tiles ? 1 : tiles / count, rest = tiles - each * count, most = each + (rest > 0);
        return {count,
                int(m),
                (rest ? rest : count) - 1,
                float(most * BLOCK_M),
                float(most * BLOCK_M - (tiles * BLOCK_M - int(m))),
                float(each * BLOCK_M),
#if CHANNELS_FIRST
                samples()
#endif
        };
    }
    __device__ __forceinline__ int part_count(int block) const {
        return int(block < p.in_panels ? p.parts_in_panels : p.parts_alone);
    }
    __device__ __forceinline__ bool merges_tiles(int block) const {
        return DEFERS && part_count(block) != scheduler.rows;
    }

    // The statistics of the parts of a block's features, [part][BLOCK_N]. The statistics of merged tiles lie behind
    // those of all single tiles.
    __device__ __forceinline__ Word* words_of(int block) const {
        size_t before = size_t(block) * (MODE == MODE_RECOMPUTE ? int(p.parts_alone) : scheduler.rows);
        if (merges_tiles(block)) {
            const int in_panels = min(block, int(p.in_panels));
            before =
                size_t(blocks) * scheduler.rows + in_panels * p.parts_in_panels + (block - in_panels) * p.parts_alone;
        }
        return partial + before * BLOCK_N;
    }

    __device__ __forceinline__ bool independent() const { return MODE == MODE_GEMM && p.flags & FLAG_INDEPENDENT; }
    // Every warp calls this right before it first reads or writes global memory. What it does before that runs beside
    // the launch ahead. Once the launch ahead has ended, a second call costs nothing.
    __device__ __forceinline__ void begin() const {
        if (independent())
            let_next_kernel_begin();
        else
            await_kernel_ahead(RANKS);
    }

    __device__ void produce(int rank) const;                             // loads x and w
    __device__ void load_constants(int warp, int lane, int rank) const;  // inference: a and c of each tile
    template <typename V>
    __device__ void lay_out_constants(int slot, int block, int warp, int lane) const;
    __device__ void merge(int lane, int rank, int which) const;  // training: the statistics of a share of the features
    // the same, over the CTA's own tiles
    __device__ void merge_own_tile(Welford (&own)[BLOCK_N / 32], int nth, int row, int block, int backoff) const;
    __device__ void join(int lane, int rank) const;                 // RANKS: that share's statistics over all ranks
    __device__ void load_last_tile_arguments(int lane) const;       // training: what the consumers need for its y
    __device__ void epilogue_of_deferred_tiles(int backoff) const;  // training: turns deferred deviations into y
    __device__ void epilogue_of_deferred_rows(int piece, int backoff) const;  // the same for one piece
    __device__ void load_epilogue(Epilogue (&coef)[VEC_Y], int row, int block, int backoff) const;
    __device__ void epilogue_meanwhile(int backoff) const;  // RANKS: one such piece, or a sleep
};
