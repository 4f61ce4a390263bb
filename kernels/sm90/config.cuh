// What a variant of forward_sm90 is compiled for: the macros that the planner passes, and the sizes that follow from them.
#pragma once
#include "common/activation.cuh"
#include "common/ranks.cuh"

// Of x and w. From TF32 on they are float32: LIMBS as two of float16, LIMBS_RS the same, but w as it is.
enum Element { BFLOAT16, FLOAT16, TF32, LIMBS, LIMBS_RS };
enum Mode { GEMM, INFERENCE, TRAINING, RECOMPUTE, CLUSTER_BATCH };  // the last two train, too

#ifndef ELEMENT  // the planner (gsbn/_plan/sm90_variants.py) passes all of these or none
#define ELEMENT 0
#define MODE 2
#define BLOCK_M 256        // rows of x in a tile: 32, 64, 128, 256; 16 with SPLIT_K
#define STAGES 4           // of the ring in shared memory
#define SHARED 227 * 1024  // bytes of shared memory
#define CLUSTER 2          // CTAs that share an x tile, or in CLUSTER_BATCH a w tile: 1, 2; 4, 8, 16 in CLUSTER_BATCH
#define OCCUPANCY 1        // CTAs on an SM: 1, 2
#define SPLIT_K \
    1  // CTAs that share the k of as many tiles, one below the other: 1, 2, 4, 8; CLUSTER is 1 in CLUSTER_BATCH
#define SAVE_DEVIATIONS 0  // 1, in all that trains: write g - mean, too
#define W_MN_MAJOR 0       // 1: w is (k, n) in memory, row-major
#define X_MN_MAJOR 0       // 1: x is (k, m)
#define FLOAT32_OUTPUT 0   // 1: y is float32 though x and w have 16 bits
#define RANKS 0            // 1, in training: ranks share the batch
#endif

struct ForwardSm90Problem {
    long long m, n, k;        // B, O, I
    long long y_row;          // row pitch of y, in elements
    long long ld_deviations;  // and of what is kept
    long long panel;          // column blocks that are taken row by row, see TileScheduler
    // TRAINING: parts of the rows of the first blocks of features, whose columns come in panels, and of the others
    long long in_panels, parts_in_panels, parts_alone;
    long long flags;      // FLAG_VECTOR_Y, FLAG_CUMULATIVE, FLAG_ALONE; in GEMM FLAG_INDEPENDENT
    long long signature;  // what this call is, of a group
    long long bias, scale, gamma, beta, running_mean, running_var;  // vector codes, see fetch
    double momentum, eps, number;  // number: the scale of all features, where there is no vector
};

typedef unsigned int u32;
typedef unsigned long long u64;

#if ELEMENT >= 3 || RANKS  // limbs
typedef double
    StatisticsType;  // what updates the running statistics: limbs are so exact that float32's roundings would show
#else
typedef float StatisticsType;
#endif

constexpr int WARPGROUPS = 2;                // of consumers
constexpr int CONSUMERS = 128 * WARPGROUPS;  // threads
constexpr int THREADS = 128 + CONSUMERS;
// of warpgroup 0: neither side spills
constexpr int HELPER_REGISTERS = OCCUPANCY == 2 ? 64 : ELEMENT == TF32 || ELEMENT == LIMBS_RS ? 136 : 152;
// 384 threads start with 168 each, or where two CTAs share an SM with 80; to ask for more waits for ever
constexpr int CONSUMER_REGISTERS = (3 * (OCCUPANCY == 2 ? 80 : 168) - HELPER_REGISTERS) / 2;
constexpr bool DEFERS = MODE == TRAINING && SPLIT_K == 1;    // tiles wait in y for their statistics
constexpr int MERGERS = MODE == CLUSTER_BATCH ? 4 : 1;       // that merge statistics: others have nothing to finish
constexpr int CONSTANT_WARPS = 3;                            // warps that lay out constants in inference
constexpr bool FLOAT32 = ELEMENT >= TF32 || FLOAT32_OUTPUT;  // y is float32, else ELEMENT
constexpr bool IN_UNITS = ELEMENT == FLOAT16;  // deviations are deferred and kept in units (deviation_unit)
constexpr bool BY_LIMBS = ELEMENT >= LIMBS;
constexpr int MATRICES = BY_LIMBS ? 2 : 1;  // that make up an operand; w as it is takes their bytes
constexpr int Y_BYTES = FLOAT32 ? 4 : 2;    // of an element of y
constexpr int OPERAND_BYTES = ELEMENT == TF32 ? 4 : 2;
constexpr int BLOCK_N = 64 * WARPGROUPS;           // features in a tile
constexpr int BLOCK_K = 128 / OPERAND_BYTES;       // one 128-byte swizzle atom
constexpr int MMA_K = 32 / OPERAND_BYTES;          // k of one wgmma
constexpr int W_BYTES = MATRICES * BLOCK_N * 128;  // of one stage
constexpr int PRODUCT_M = SPLIT_K * BLOCK_M;       // rows of x that a CTA multiplies
constexpr int X_BYTES = MATRICES * PRODUCT_M * 128;
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int X_SHARERS =
    MODE == CLUSTER_BATCH ? 1 : CLUSTER;  // CTAs that load a part of an x tile each, for all of them
constexpr int W_SHARERS = MODE == CLUSTER_BATCH ? CLUSTER : 1;  // and of a w tile
constexpr int COLUMN = 64;  // rows that lie side by side, in 128 bytes, of an operand that lies across
static_assert(!(X_MN_MAJOR || FLOAT32_OUTPUT) || (MODE == GEMM && ELEMENT < TF32), "only 16-bit operands, multiplied");
static_assert(!W_MN_MAJOR || (MODE == GEMM && (ELEMENT < TF32 || ELEMENT == LIMBS_RS)), "and w as it is");
static_assert(SPLIT_K == 1 || (MODE != RECOMPUTE && !RANKS && !(MODE == CLUSTER_BATCH && CLUSTER > 1)),
              "a CTA has one tile");
static_assert(!X_MN_MAJOR || PRODUCT_M / X_SHARERS % COLUMN == 0, "a CTA loads whole columns");
constexpr int CLUSTER_CTAS = CLUSTER * SPLIT_K;  // the CTA of rank r is of side r / SPLIT_K and part r % SPLIT_K
constexpr int ACC = BLOCK_M / 2;                 // accumulators a thread, of a tile
constexpr int PRODUCT_ACC = PRODUCT_M / 2;       // and of a product
constexpr int MOST_M = FLOAT32 ? 32 : 64;
constexpr int PASS_M = BLOCK_M < MOST_M ? BLOCK_M : MOST_M;  // rows that a warpgroup stores at a time, 64 features each
constexpr int PASSES = BLOCK_M / PASS_M;
constexpr int BOXES = FLOAT32 ? 2 : 1;  // TMA stores of 128-byte rows side by side in a pass
constexpr int STAGING_BYTES = BOXES * PASS_M * 128;
constexpr int STAGINGS = MODE == CLUSTER_BATCH ? 1 : 2;     // buffers of so many bytes a warpgroup
constexpr int CHUNK = 16 / Y_BYTES;                         // columns of y in a 16-byte access
constexpr int DEFERRED_ROWS = BLOCK_M < 64 ? BLOCK_M : 64;  // rows that a finishing warp takes at a time
constexpr int DEFERRED_PIECES = BLOCK_M / DEFERRED_ROWS;    // of a tile

// Whoever waits beside a main loop naps long: every instruction costs the tensor core of its quarter a cycle or two.
constexpr int LONG_BACKOFF = 1500, SHORT_BACKOFF = 20;  // ns
