// The tiles of dy, d and x that a team of skinny_backward or skinny_sums works with, in its part of shared memory. No
// kernels.
#pragma once
#include "skinny/products.cuh"

static_assert(!REMAT || (!BY_FMA && FEATURES >= 64), "g comes from wgmma, 64 features at a time");

constexpr int THREADS_HERE = TEAM * TEAMS;
constexpr int OF_DY = FEATURES / VEC, OF_X = INPUTS / VEC;                     // pieces of 16 bytes in a row
constexpr int DY = (OF_DY + 7) / 8 * 8 * ROWS, X = (OF_X + 7) / 8 * 8 * ROWS;  // pieces of a tile, in whole blocks
constexpr int X_AT = REMAT ? DY : 2 * DY;                                      // dy, then dg; d; x
constexpr int TILE = X_AT + X;
// words of all pipelines, 16 bytes each
constexpr int PIPELINE_WORDS = (WARPGROUPS == 1 ? 192 : REMAT && INPUTS > 64 ? 144 : 160) * 1024 / 16;
constexpr int WEIGHT_BYTES = FEATURES * (BY_FMA ? 4 * INPUTS : INPUTS < 64 ? 128 : 2 * INPUTS);
constexpr int SHARED_BYTES = 16 * PIPELINE_WORDS + WEIGHT_BYTES;  // read by gsbn/_plan/variants.py
constexpr int TILES = PIPELINE_WORDS / TEAMS / TILE;              // tiles of a team that are being copied or used
static_assert(TILES >= 2, "one tile is copied while another is multiplied");

// Which pieces (16 bytes) of a row a thread copies: the same of every tile, in some of its rows.
struct Pieces {
    static constexpr int STEP = TEAM / OF_DY, STEP_X = TEAM / OF_X;  // the thread's rows of a tile lie so far apart

    int of_dy, of_x;       // the numbers of its pieces
    int inside, inside_x;  // how many of their columns exist
    int at_dy, at_x;       // where they begin in a row; 0 if none exists
    int first, first_x;    // the first of its rows
    bool whole;            // no piece exists in part

    __device__ __forceinline__ Pieces(const BackwardProblem& p, int member, int features)
        : of_dy(member % OF_DY),
          of_x(member % OF_X),
          inside(max(min(features - of_dy * VEC, VEC), 0)),
          inside_x(int(max(min(p.k - of_x * VEC, 1LL * VEC), 0LL))),
          at_dy(inside > 0 ? of_dy * VEC : 0),
          at_x(inside_x > 0 ? of_x * VEC : 0),
          first(member / OF_DY),
          first_x(member / OF_X),
          whole(features % VEC == 0 && p.k % VEC == 0) {}
};

// Starts the copies of a tile's `left` rows from row0 on, to a stage of a team's pipeline. dy and d begin at the CTA's
// first column.
__device__ __forceinline__ void copy_tile(const BackwardProblem& p, const T* dy, const T* d, const T* x, uint4* to,
                                          const Pieces& own, long long row0, int left) {
    constexpr int STEP = Pieces::STEP, STEP_X = Pieces::STEP_X;
    const T* from_dy = dy + (row0 + own.first) * p.dy_row + own.at_dy;
    const T* from_d = d + (row0 + own.first) * p.ldd + own.at_dy;
    const T* from_x = x + (row0 + own.first_x) * p.ldx + own.at_x;
    const auto copy_all = [&](bool whole) {
        const auto copy = [&](uint4* at, const T* from, const T* any, int i, int columns) {
            if (whole) {
                copy_async_if(at, from, columns > 0);
            } else {
                const bool there = i < left;
                copy_async(at, there ? from : any, there ? columns * int(sizeof(T)) : 0);
            }
        };
#pragma unroll
        for (int i = own.first; i < ROWS; i += STEP, from_dy += STEP * p.dy_row, from_d += STEP * p.ldd) {
            copy(to + place(i, own.of_dy), from_dy, dy, i, own.inside);
            if constexpr (!REMAT) copy(to + DY + place(i, own.of_dy), from_d, d, i, own.inside);
        }
#pragma unroll
        for (int i = own.first_x; i < ROWS; i += STEP_X, from_x += STEP_X * p.ldx)
            copy(to + X_AT + place(i, own.of_x), from_x, x, i, own.inside_x);
    };
    if (left == ROWS && own.whole)
        copy_all(true);
    else
        copy_all(false);
    commit_copies();
}
