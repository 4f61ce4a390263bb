// The macros of a variant of forward_sm90, which the planner passes, and the sizes that follow from them.
// gsbn/_plan/sm90_variants.py reads THREADS, BLOCK_N, COLUMN and SHARED_BYTES from here.
#pragma once
#include "common/activation.cuh"
#include "common/elements.cuh"
#include "common/ranks.cuh"
#include "sm90/modes.cuh"

#ifndef ELEMENT  // the planner passes all of these or none
#define ELEMENT ELEMENT_BFLOAT16
#define MODE MODE_TRAINING
#define BLOCK_M 256        // rows of x in a tile: 32, 64, 128, 256; 16 with SPLIT_K; 96, 160, 192 with CLUSTER_M
#define STAGES 4           // stages of the pipeline in shared memory
#define OCCUPANCY 1        // CTAs on an SM: 1, 2
#define CLUSTER 2          // CTAs that share an x tile: 1, 2; in 16 bits in MODE_INFERENCE and MODE_GEMM also 4
#define CLUSTER_M 1        // CTAs that share a w tile: 1, 2, 4, 8, in these; 1 to 16 in MODE_CLUSTER_BATCH
#define SPLIT_K 1          // CTAs that share the k of as many tiles, one below the other: 1, 2, 4, 8
#define SAVE_DEVIATIONS 0  // 1, only in modes that train: also write the deviations
#define SAVE_VECTORS 0     // 1 with SAVE_DEVIATIONS; alone, in MODE_RECOMPUTE: the backward computes g again
#define X_MN_MAJOR 0       // 1: x is (k, m) in memory, row-major
#define W_MN_MAJOR 0       // 1: w is (k, n)
#define FLOAT32_OUTPUT 0   // 1: y is float32 though x and w have 16 bits
#define RANKS 0            // 1, only in MODE_TRAINING: ranks share the batch
#endif
#ifndef CHANNELS_FIRST
#define CHANNELS_FIRST 0  // 1: x is (samples, k, length) in memory and y (samples, n, length); X_MN_MAJOR is then 1
#endif
#ifndef K_IN_SAMPLES
#define K_IN_SAMPLES 0  // 1: x is (samples, m, length), w (samples, n, length); k has all lengths; y is (splits, m, n)
#endif
#ifndef RESIDUAL
#define RESIDUAL 0  // 1, in 16 bits: y = f(u + residual)
#endif
#ifndef FEW_ROWS
#define FEW_ROWS 0  // 1, in 16 bits in MODE_CLUSTER_BATCH: up to 16 rows, whose deviations are saved in float64
#endif

struct ForwardSm90Problem {
    long long m, n, k;        // rows of x, features, terms of a product's sum
    long long y_row;          // row pitch of y, in elements; with samples, the length of a sample
    long long ld_deviations;  // row pitch of the deviations, in elements
    // The order of tiles (TileScheduler): columns of tiles in a panel, and in all whole panels; the reciprocals, for
    // quotient(), of the number of tiles of a panel, of its columns, and of the columns that are left (in
    // MODE_TRAINING, of the rows)
    long long panel, grouped, of_panel, of_columns, of_rest;
    // MODE_TRAINING: how many parts the rows have for the first in_panels blocks of features, and for the others
    // (RowParts). MODE_RECOMPUTE: all blocks have parts_alone parts; the last two fields say how many tiles a part has
    // (OwnTiles). K_IN_SAMPLES: k has parts_alone splits
    long long in_panels, parts_in_panels, parts_alone, tiles_of_part, longer_parts;
    long long flags;      // FLAG_VECTOR_Y, FLAG_CUMULATIVE, FLAG_ALONE; in MODE_GEMM FLAG_INDEPENDENT
    long long signature;  // with a group: identifies this call (Exchange)
#if CHANNELS_FIRST
    long long tiles, tiles_of_sample, of_sample;  // rows of tiles in all; tiles of a sample, their reciprocal (Samples)
#endif
    long long bias, scale, gamma, beta, running_mean, running_var;  // vector codes, see fetch
    double momentum, eps, number;  // number: the scale of all features, if there is no vector
#if RESIDUAL
    long long residual_row;  // row pitch of the residual, in elements
#endif
#if RENORM
    long long renorm, warmup;  // the vector code of r_max and d_max; batches before corrections begin
    double r_max, d_max;       // the limits, if there is no vector
#endif
};

using u32 = unsigned;
using u64 = unsigned long long;

constexpr bool BY_LIMBS = ELEMENT == ELEMENT_LIMBS || ELEMENT == ELEMENT_LIMBS_RS;
constexpr bool OF_16_BITS = ELEMENT == ELEMENT_BFLOAT16 || ELEMENT == ELEMENT_FLOAT16;  // x and w; else float32
constexpr bool TRAINS = MODE == MODE_TRAINING || MODE == MODE_RECOMPUTE || MODE == MODE_CLUSTER_BATCH;
constexpr bool FLOAT32 = !OF_16_BITS || FLOAT32_OUTPUT;             // y is float32; else y has x's type
constexpr bool IN_UNITS = ELEMENT == ELEMENT_FLOAT16 && !FEW_ROWS;  // deviations are stored in units (deviation_unit)
constexpr bool DEFERS = MODE == MODE_TRAINING && SPLIT_K == 1;      // tiles wait in y for their statistics
constexpr bool REMAT = SAVE_VECTORS && !SAVE_DEVIATIONS;            // the backward computes g again (skinny_backward)
static_assert(!REMAT || (MODE == MODE_RECOMPUTE && OF_16_BITS && !CHANNELS_FIRST), "as skinny_backward needs");
static_assert(!RENORM || SAVE_DEVIATIONS, "RENORM is for training with a backward");
static_assert(!(X_MN_MAJOR || FLOAT32_OUTPUT) || ((MODE == MODE_GEMM || CHANNELS_FIRST) && OF_16_BITS),
              "X_MN_MAJOR and FLOAT32_OUTPUT are for products of 16 bits");
static_assert(!K_IN_SAMPLES ||
                  (MODE == MODE_GEMM && OF_16_BITS && FLOAT32_OUTPUT && SPLIT_K == 1 && !X_MN_MAJOR && !W_MN_MAJOR),
              "K_IN_SAMPLES makes partial products of K-major operands");
static_assert(!CHANNELS_FIRST || (X_MN_MAJOR && !FLOAT32_OUTPUT && SPLIT_K == 1 && !RANKS && MODE != MODE_TRAINING &&
                                  MODE != MODE_CLUSTER_BATCH),
              "with CHANNELS_FIRST no tile is deferred or divided");
static_assert(!RESIDUAL || (OF_16_BITS && MODE != MODE_GEMM && SPLIT_K == 1 && !CHANNELS_FIRST && !RANKS && !RENORM),
              "the planner adds other residuals in a launch of their own");
static_assert(!W_MN_MAJOR || (MODE == MODE_GEMM && (OF_16_BITS || ELEMENT == ELEMENT_LIMBS_RS)),
              "W_MN_MAJOR is for products of 16 bits or by LIMBS_RS");
static_assert(SPLIT_K == 1 || (MODE != MODE_RECOMPUTE && !RANKS), "with SPLIT_K a CTA has one tile");
static_assert(!FEW_ROWS || (MODE == MODE_CLUSTER_BATCH && CLUSTER_M == 1 && OF_16_BITS && SAVE_DEVIATIONS &&
                            !RESIDUAL && !RENORM),
              "with FEW_ROWS one CTA has all rows");

// The type in which running statistics are updated. With limbs, with ranks and with FEW_ROWS, results are so exact that
// roundings to float32 would be visible.
#if ELEMENT == ELEMENT_LIMBS || ELEMENT == ELEMENT_LIMBS_RS || RANKS || FEW_ROWS
using StatisticsType = double;
#else
using StatisticsType = float;
#endif

// Threads: the warps of warpgroup 0 are helpers, those of the other warpgroups are consumers.
constexpr int WARPGROUPS = 2;                // warpgroups of consumers
constexpr int CONSUMERS = 128 * WARPGROUPS;  // threads
constexpr int THREADS = 128 + CONSUMERS;
constexpr int MERGERS = MODE == MODE_CLUSTER_BATCH ? 4 : 1;  // warps that merge statistics
constexpr int CONSTANT_WARPS = 3;                            // warps that load the constants of inference

// Registers of a thread, chosen so that neither role spills. The 384 threads start with 168 each, or with 80 if two
// CTAs share an SM. A kernel that asks for more registers than there are hangs.
constexpr int HELPER_REGISTERS = OCCUPANCY == 2                                           ? 64
                                 : ELEMENT == ELEMENT_TF32 || ELEMENT == ELEMENT_LIMBS_RS ? 136
                                                                                          : 152;
constexpr int CONSUMER_REGISTERS = (3 * (OCCUPANCY == 2 ? 80 : 168) - HELPER_REGISTERS) / 2;

// The cluster: the CTA of rank r has neighbours with other features, whose ranks differ by multiples of
// ROWS_OF_CLUSTER. With SPLIT_K it has part r % SPLIT_K of k.
constexpr int CLUSTER_CTAS = CLUSTER * CLUSTER_M * SPLIT_K;
constexpr int SHARERS = CLUSTER + CLUSTER_M - 1;      // all CTAs with which a CTA shares a tile, and itself
constexpr int ROWS_OF_CLUSTER = CLUSTER_M * SPLIT_K;  // tiles of a cluster, one below the other
static_assert(CLUSTER_M == 1 ||
                  (SPLIT_K == 1 && !CHANNELS_FIRST &&
                   (MODE == MODE_CLUSTER_BATCH ? CLUSTER == 1
                                               : (MODE == MODE_INFERENCE || MODE == MODE_GEMM) && OF_16_BITS)),
              "CLUSTER_M is for MODE_CLUSTER_BATCH, and in 16 bits for inference and products");

// A stage holds BLOCK_K of k for BLOCK_N features and PRODUCT_M rows.
constexpr int MATRICES = BY_LIMBS ? 2 : 1;  // matrices of an operand; with LIMBS_RS, the float32 w takes as many bytes
static_assert(MATRICES == 1 || CLUSTER <= 2, "of two CTAs that share limbs of x, each loads one");
constexpr int OPERAND_BYTES = ELEMENT == ELEMENT_TF32 ? 4 : 2;
constexpr int BLOCK_N = 64 * WARPGROUPS;      // features in a tile
constexpr int BLOCK_K = 128 / OPERAND_BYTES;  // elements in a row of 128 bytes, which the swizzle needs
constexpr int MMA_K = 32 / OPERAND_BYTES;     // k of one wgmma
constexpr int PRODUCT_M = SPLIT_K * BLOCK_M;  // rows of x that a CTA multiplies
constexpr int COLUMN = 64;                    // rows of an MN-major operand that lie side by side in 128 bytes
constexpr int W_BYTES = MATRICES * BLOCK_N * 128;
constexpr int X_BYTES = MATRICES * PRODUCT_M * 128;
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
static_assert(!X_MN_MAJOR || PRODUCT_M % COLUMN == 0, "an MN-major tile has whole columns");

// The residual of a tile takes one stage, or one for each warpgroup of consumers: 64 features as rows of 128 bytes.
constexpr int RESIDUAL_BYTES = BLOCK_M * 128;  // of a warpgroup
constexpr int RESIDUAL_STAGES = !RESIDUAL ? 0 : WARPGROUPS * RESIDUAL_BYTES > STAGE_BYTES ? WARPGROUPS : 1;
static_assert(RESIDUAL_BYTES <= STAGE_BYTES && RESIDUAL_STAGES < STAGES, "a residual fits into stages");

// Accumulators of a thread (accumulator.cuh).
constexpr int ACC = BLOCK_M / 2;            // of a tile
constexpr int PRODUCT_ACC = PRODUCT_M / 2;  // accumulators of a product

// The store of y: a warpgroup stores PASS_M rows of its 64 features at a time, as rows of 128 bytes.
constexpr int Y_BYTES = FLOAT32 ? 4 : 2;  // bytes of an element of y
constexpr int VEC_Y = 16 / Y_BYTES;       // columns of y in a 16-byte access
constexpr int MOST_M = FLOAT32 ? 32 : 64;
// with 96, 160 or 192 rows, passes of 32 leave room for one more stage
constexpr int PASS_M = BLOCK_M & (BLOCK_M - 1) ? 32 : BLOCK_M < MOST_M ? BLOCK_M : MOST_M;
constexpr int PASSES = BLOCK_M / PASS_M;
constexpr int BOXES = FLOAT32 ? 2 : 1;  // TMA stores in a pass, side by side
constexpr int STAGING_BYTES = BOXES * PASS_M * 128;
constexpr int STAGINGS = MODE == MODE_CLUSTER_BATCH ? 1 : 2;  // buffers of STAGING_BYTES in a warpgroup

// The deferred epilogue: a warp takes DEFERRED_ROWS rows of a tile at a time.
constexpr int DEFERRED_ROWS = BLOCK_M < 64 ? BLOCK_M : 64;
constexpr int DEFERRED_PIECES = BLOCK_M / DEFERRED_ROWS;  // of a tile

// Shared memory of a CTA, at least the size of struct Shared (cta.cuh). A feature has its arguments (12 bytes) or the
// constants of two runs (8 bytes each, or 10 with limbs); in MODE_RECOMPUTE beta and the coefficients of y (4 + 16); in
// MODE_CLUSTER_BATCH also mean and M2 from each CTA, with RENORM 8 more bytes (Running), and with FEW_ROWS mean and
// variance in float64 instead. 256 bytes are for barriers and counters, 64 for the limits of RENORM.
constexpr int FEATURE_BYTES = MODE == MODE_RECOMPUTE               ? 20
                              : FEW_ROWS                           ? 32
                              : MODE == MODE_CLUSTER_BATCH         ? 16 + 8 * CLUSTER_CTAS + 4 * RENORM
                              : MODE == MODE_INFERENCE && BY_LIMBS ? 20
                                                                   : 16;
constexpr int SHARED_BYTES =
    STAGES * STAGE_BYTES + WARPGROUPS * STAGINGS * STAGING_BYTES + BLOCK_N * FEATURE_BYTES + 256 + 64 * RENORM;

// How long a waiting warp sleeps between two looks. A warp that waits beside a mainloop sleeps long, because each of
// its instructions costs the tensor core of its quarter of the SM a cycle or two.
constexpr int LONG_BACKOFF = 1500, SHORT_BACKOFF = 20;  // ns
