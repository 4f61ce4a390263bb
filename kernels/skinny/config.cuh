// What the kernels of narrow.cu are compiled for: operands, and the shape of their tiles.
#pragma once
#include "common/activation.cuh"
#include "common/async_copy.cuh"
#include "normalize/features.cuh"

#ifndef ELEMENT
#define ELEMENT 0
#define FEATURES 32
#define CHUNKS 1
#endif

enum : int { ELEMENT_BFLOAT16 = 0, ELEMENT_FLOAT16 = 1, ELEMENT_TF32 = 2, ELEMENT_LIMBS = 3, ELEMENT_FLOAT32 = 4 };
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
constexpr bool BY_FMA = ELEMENT == ELEMENT_FLOAT32, BY_LIMBS = ELEMENT == ELEMENT_LIMBS;

constexpr int LANES = 32;
// whose tiles are larger take more registers
constexpr int WARPS = BY_FMA || FEATURES > (BY_LIMBS ? 64 : 32) ? 8 : 12;
constexpr int CTA = WARPS * LANES;    // threads
constexpr int WORD = 16 / sizeof(T);  // elements of 16 bytes
constexpr int CHUNK = 4 * WORD;       // elements of a row that its four lanes take at once: 64 bytes
constexpr int LANE_FEATURES = FEATURES / 4;
// of a tile; many reuse what is read of the weight
constexpr int LANE_ROWS = BY_LIMBS ? 2 : BY_FMA && FEATURES == 32 && CHUNKS < 4 ? 8 : 4;
constexpr int ROWS = 8 * LANE_ROWS;                          // of a tile, a warp's
constexpr int BLOCK = WARPS * ROWS;                          // rows of a CTA at once
constexpr int TILE_WORDS = CHUNKS * LANE_ROWS * LANES;       // of 16 bytes
constexpr int PIPELINE_WORDS = (BY_LIMBS ? 72 : 128) * 64;   // of all warps: the limbs of the weight want room
constexpr int STAGES = PIPELINE_WORDS / WARPS / TILE_WORDS;  // parts of tiles on their way or at hand

// How many times CHUNKS chunks a row has: one but for limbs.
template <typename P>
__device__ inline int parts_of(const P& p) {
    return BY_LIMBS ? static_cast<int>((p.k + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK)) : 1;
}
// 16 bytes each, of FEATURES rows of the weight as load_weight leaves them.
template <typename P>
__device__ inline int weight_words(const P& p) {
    return parts_of(p) * CHUNKS * FEATURES * 4;
}

// Feature j of a lane's LANE_FEATURES, `quarter` being its place among the four of a row.
__device__ constexpr int feature_of(int quarter, int j) { return CHUNK * (j / WORD) + WORD * quarter + j % WORD; }

__device__ inline unsigned rounded_to_tf32(unsigned v) {
    unsigned out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(v)));
    return out;
}
