// CHANNELS_FIRST: how rows that lie in samples are divided into tiles. No kernels.
#pragma once
#include "sm90/config.cuh"

// A tile lies in one sample: x and y are (samples, features, length), so rows beyond a sample are far away. The last
// tile of each sample may be short.
struct Samples {
    int length, each;  // rows of a sample; tiles of a sample
    u64 of_sample;     // the reciprocal of `each`
    // MODE_RECOMPUTE: neighbouring tiles make a part. A part has of_part tiles; the first `longer` parts have one more.
    int of_part, longer;

    struct Place {
        int sample, first;  // of a tile: its sample, and its first row in the sample
    };
    __device__ __forceinline__ Place place(int tile) const {
        const int sample = quotient(tile, of_sample);
        return {sample, (tile - sample * each) * BLOCK_M};
    }
    __device__ __forceinline__ int rows_of(int tile) const { return min(length - place(tile).first, BLOCK_M); }
    // rows of all tiles before this one; for the number after the last tile, all rows
    __device__ __forceinline__ int rows_before(int tile) const {
        const Place at = place(tile);
        return at.sample * length + at.first;
    }
    __device__ __forceinline__ int first(int part) const { return part * of_part + min(part, longer); }
    __device__ __forceinline__ int rows_between(int from, int to) const { return rows_before(to) - rows_before(from); }
};

__device__ __forceinline__ Samples samples_of(const ForwardSm90Problem& p) {
#if CHANNELS_FIRST
    return {int(p.y_row), int(p.tiles_of_sample), u64(p.of_sample), int(p.tiles_of_part), int(p.longer_parts)};
#else
    return {};
#endif
}
