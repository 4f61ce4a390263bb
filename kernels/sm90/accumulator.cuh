// The accumulator of wgmma: which elements of a 64 x N result a thread of the warpgroup has. No kernels.
//
// Warp w has rows 16 w to 16 w + 15. A thread has N / 2 elements: in rows r and r + 8 of its warp (r = lane / 4), it
// has two adjacent columns of every 8. The drawing shows (index of the element) - 4 j for the 8 columns from 8 j on:
//
//      column      8 j             8 j + 2         8 j + 4         8 j + 6
//      row r       0 | 1           0 | 1           0 | 1           0 | 1
//      row r + 8   2 | 3           2 | 3           2 | 3           2 | 3
//      lane        4 r             4 r + 1         4 r + 2         4 r + 3
//
// So element i = 4 j + 2 h + e of a thread lies in row r + 8 h and in column 8 j + 2 (lane % 4) + e.
//
// forward_sm90 computes the transposed product: there a row of the accumulator is a feature, and a column is a row of
// x.
#pragma once

struct Accumulator {
    // the index of an element
    static __device__ __forceinline__ constexpr int at(int j, int h, int e) { return 4 * j + 2 * h + e; }
    // h of element i: which of the thread's two rows it lies in
    static __device__ __forceinline__ constexpr int row_half(int i) { return i / 2 % 2; }
    // which of the thread's own columns element i lies in
    static __device__ __forceinline__ constexpr int own_column(int i) { return i / 4 * 2 + i % 2; }
    // element i of a lane lies in column eight(i) + first_column(lane) + odd(i)
    static __device__ __forceinline__ constexpr int eight(int i) { return i / 4 * 8; }
    static __device__ __forceinline__ constexpr int odd(int i) { return i % 2; }
    static __device__ __forceinline__ constexpr int first_column(int lane) { return 2 * (lane & 3); }
};
