// The sizes of a variant of the kernels in skinny.cu and skinny_product.cu: operands, tiles, shared memory.
// gsbn/_plan/variants.py reads them.
#pragma once
#include "common/activation.cuh"
#include "common/async_copy.cuh"
#include "common/elements.cuh"
#include "normalize/features.cuh"

#ifndef ELEMENT
#define ELEMENT ELEMENT_BFLOAT16
#define FEATURES 32
#define CHUNKS 1
#endif

#ifndef ANY_ROWS
#define ANY_ROWS 0  // 1: rows of the result may start on any element, and need not be whole words
#endif

// The type of an operand's elements.
template <int>
struct TypeOf {
    using type = float;
};
template <>
struct TypeOf<ELEMENT_BFLOAT16> {
    using type = __nv_bfloat16;
};
template <>
struct TypeOf<ELEMENT_FLOAT16> {
    using type = __half;
};
using T = TypeOf<ELEMENT>::type;
constexpr bool OF_16_BITS = ELEMENT == ELEMENT_BFLOAT16 || ELEMENT == ELEMENT_FLOAT16;
constexpr bool BY_FMA = ELEMENT == ELEMENT_FLOAT32, BY_LIMBS = ELEMENT == ELEMENT_LIMBS;

// Warps and their tiles of g: of a tile, a lane has LANE_ROWS rows by LANE_FEATURES features. Larger tiles take more
// registers and leave fewer warps; with more rows, a lane reuses what it reads of the weight more often.
constexpr int LANES = 32;
constexpr int WARPS = BY_FMA || FEATURES > (BY_LIMBS ? 64 : 32) ? 8 : 12;
constexpr int CTA = WARPS * LANES;  // threads
constexpr int LANE_FEATURES = FEATURES / 4;
constexpr int LANE_ROWS = BY_LIMBS ? 2 : BY_FMA && FEATURES == 32 && CHUNKS < 4 ? 8 : 4;
constexpr int ROWS = 8 * LANE_ROWS;                    // rows of a warp's tile
constexpr int TILE_ROWS = BY_LIMBS ? 4 * ROWS : ROWS;  // of the warps that share a tile: with limbs, a warpgroup
constexpr int BLOCK_ROWS = WARPS * ROWS;               // rows of a CTA at once

// Memory is read in words of 16 bytes. Four lanes read a row, 64 bytes of it at a time.
constexpr int WORD = 16 / sizeof(T);                    // elements of a word
constexpr int CHUNK = 4 * WORD;                         // elements that the four lanes of a row read at once
constexpr int TILE_WORDS = CHUNKS * LANE_ROWS * LANES;  // words in a stage of a warp's pipeline

// Shared memory: the weight, then the pipelines of all warps, and in 16 bits the tiles of y that skinny_normalize stores.
// The limbs of the weight leave less for the pipelines.
constexpr int LIMBS_BYTES = 128 * 1024;
constexpr int K_AT_ONCE = LIMBS_BYTES / (4 * FEATURES);  // elements of the weight's rows whose limbs fit
constexpr int WEIGHT_BYTES = BY_LIMBS ? LIMBS_BYTES : 64 * FEATURES * CHUNKS;
constexpr int PIPELINE_WORDS = (BY_LIMBS ? 72 : 128) * 64;
constexpr int STAGING_AT = WEIGHT_BYTES + 16 * PIPELINE_WORDS;
constexpr int STAGINGS = 2;                                          // buffers of STAGING_BYTES for each warp
constexpr int STAGING_BYTES = OF_16_BITS ? 2 * ROWS * FEATURES : 0;  // a tile of y
constexpr int SHARED_BYTES = STAGING_AT + WARPS * STAGINGS * STAGING_BYTES;
constexpr int STAGES = PIPELINE_WORDS / WARPS / TILE_WORDS;

// How many parts of CHUNKS chunks a row has: one; with limbs, one or more.
template <typename P>
__device__ inline int parts_of(const P& p) {
    return BY_LIMBS ? int((p.k + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK)) : 1;
}
// How many words FEATURES rows of the weight take in shared memory (load_weight).
template <typename P>
__device__ inline int weight_words(const P& p) {
    return parts_of(p) * CHUNKS * FEATURES * 4;
}

// Feature j of a lane's LANE_FEATURES; `quarter` is the lane's number among the four that share a row.
__device__ constexpr int feature_of(int quarter, int j) { return CHUNK * (j / WORD) + WORD * quarter + j % WORD; }

__device__ inline unsigned rounded_to_tf32(unsigned v) {
    unsigned out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(v)));
    return out;
}
