// The tiles of dy, d and x that a team of skinny_backward or skinny_sums works with, in its part of shared memory. TMA
// loads them. No kernels.
#pragma once
#include "common/tma.cuh"
#include "skinny/products.cuh"

static_assert(!REMAT || (!BY_FMA && FEATURES >= 64), "g comes from wgmma, 64 features at a time");

constexpr int OF_DY = FEATURES / VEC, OF_X = INPUTS / VEC;                     // pieces of 16 bytes in a row
constexpr int DY = (OF_DY + 7) / 8 * 8 * ROWS, X = (OF_X + 7) / 8 * 8 * ROWS;  // pieces of a tile, in whole blocks
constexpr int X_AT = REMAT ? DY : 2 * DY;                                      // dy, then dg; d; x
constexpr int TILE = X_AT + X;
// words of all pipelines, 16 bytes each
constexpr int PIPELINE_WORDS = (WARPGROUPS == 1 ? 192 : REMAT && INPUTS > 64 ? 144 : 160) * 1024 / 16;
constexpr int WEIGHT_BYTES = FEATURES * (BY_FMA ? 4 * INPUTS : INPUTS < 64 ? 128 : 2 * INPUTS);
constexpr int SHARED_BYTES = 16 * PIPELINE_WORDS + WEIGHT_BYTES;  // read by gsbn/_plan/variants.py
constexpr int TILES = PIPELINE_WORDS / TEAMS / TILE;              // tiles of a team that are being loaded or used
static_assert(TILES >= 2, "one tile is loaded while another is multiplied");

// Begins to load a tile, from row row0 and column col0 of dy and d on. Rows beyond a matrix, and its columns beyond the
// last, become zeros. A box has 128 bytes of ROWS rows, swizzled as `place` says.
__device__ __forceinline__ void load_tile(const TensorMap* dy, const TensorMap* d, const TensorMap* x, uint4* to,
                                          unsigned long long* full, int col0, long long row0) {
    constexpr int BOX = 8 * ROWS, COLUMNS = 8 * VEC;  // pieces and columns of a box
    mbar_expect(full, 16 * TILE);
#pragma unroll
    for (int i = 0; i < DY / BOX; ++i) {
        tma_load(to + i * BOX, dy, full, col0 + i * COLUMNS, int(row0));
        if constexpr (!REMAT) tma_load(to + DY + i * BOX, d, full, col0 + i * COLUMNS, int(row0));
    }
#pragma unroll
    for (int i = 0; i < X / BOX; ++i) tma_load(to + X_AT + i * BOX, x, full, i * COLUMNS, int(row0));
}
