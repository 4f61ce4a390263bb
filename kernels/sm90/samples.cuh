// CHANNELS_FIRST: how rows that lie in samples are divided into tiles, and tiles among CTAs. No kernels.
#pragma once
#include "sm90/config.cuh"

// A tile lies in one sample: x and y are (samples, features, length), so rows beyond a sample are far away. The last
// tile of each sample may be short. In MODE_RECOMPUTE part i of `parts` has the tiles [first(i), first(i + 1)).
struct Samples {
    int length, tiles, parts;  // rows of a sample; tiles of all samples; CTAs that share the tiles

    struct Place {
        int sample, first;  // of a tile: its sample, and its first row in that
    };
    __device__ __forceinline__ Place place(int tile) const {
        const int each = (length + BLOCK_M - 1) / BLOCK_M;
        return {tile / each, tile % each * BLOCK_M};
    }
    __device__ __forceinline__ int rows_of(int tile) const { return min(length - place(tile).first, BLOCK_M); }
    // rows of all tiles before this one; of all there are for `tiles` itself
    __device__ __forceinline__ int rows_before(int tile) const {
        const Place at = place(tile);
        return at.sample * length + at.first;
    }
    __device__ __forceinline__ int first(int part) const { return (int)((long long)tiles * part / parts); }
    __device__ __forceinline__ int rows_between(int from, int to) const { return rows_before(to) - rows_before(from); }
};
