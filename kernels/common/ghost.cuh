// Ghost batches (Hoffer, Hubara and Soudry 2017), in the variants with GHOST: each run of m rows has its own
// statistics. Such a kernel sees n columns: each ghost batch has `ghost_pitch` columns, which are its features and
// padding to 16 bytes of x's dtype. So no thread's columns belong to two ghost batches. Only the addresses differ from
// those of a plain call: in matrices, in the caller's vectors, and in what a forward saves. No kernels.
#pragma once
#include "common/common.cuh"

#ifndef GHOST
#define GHOST 0
#endif

// Where column `col` of a kernel lies in a matrix: its feature, and the row with which its ghost batch begins.
struct Column {
    long long first_row = 0, feature, left;  // left: how many features there are from this one on

    template <typename P>
    __device__ __forceinline__ Column(const P& p, long long col) : feature(col), left(p.n - col) {
#if GHOST
        const unsigned pitch = unsigned(p.ghost_pitch), ghost = unsigned(col) / pitch;
        first_row = ghost * p.m;
        feature = col - 1LL * ghost * pitch;
        left = left > 0 ? p.features - feature : 0;
#endif
    }
    // How many of VEC columns from this one on exist.
    template <int VEC>
    __device__ __forceinline__ int inside() const {
        return int(max(min(left, 1LL * VEC), 0LL));
    }
    // The offset in a matrix of these pitches, in elements.
    __device__ __forceinline__ long long at(long long row_pitch, long long col_pitch = 1) const {
        return first_row * row_pitch + feature * col_pitch;
    }
};

// The element of the caller's vectors that belongs to column c. A column of padding gets the last element.
template <typename P>
__device__ __forceinline__ long long feature_of(const P& p, long long c) {
#if GHOST
    return min(1LL * (unsigned(c) % unsigned(p.ghost_pitch)), p.features - 1);
#else
    return c;
#endif
}

// For each ghost batch, a forward saves SAVED_ROWS rows of `saved_pitch` numbers (SAVED_). Row i of column c lies at
// saved_of(...) + i * saved_pitch + c.
template <typename P>
__device__ __forceinline__ long long saved_pitch(const P& p) {
#if GHOST
    return p.ghost_pitch;
#else
    return p.n;
#endif
}
template <typename P, typename Saved>
__device__ __forceinline__ Saved* saved_of(const P& p, Saved* saved, long long c) {
#if GHOST
    const unsigned pitch = unsigned(p.ghost_pitch), ghost = unsigned(c) / pitch;
    return saved + 1LL * ghost * (SAVED_ROWS - 1) * pitch;
#else
    return saved;
#endif
}

// How many ghost batches there are.
template <typename P>
__device__ __forceinline__ long long ghosts_of(const P& p) {
    return unsigned(p.n) / unsigned(p.ghost_pitch);
}

// By how much a call raises num_batches_tracked: each ghost batch counts.
template <typename P>
__device__ __forceinline__ long long batches_of(const P& p) {
#if GHOST
    return ghosts_of(p);
#else
    return 1;
#endif
}
