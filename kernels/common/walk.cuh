// How a thread goes over rows of matrices, through a pipeline of its own in shared memory. No kernels.
//
// Loops are unrolled only if a walk is LONG. If there are few rows, a kernel spends most of its time on fetching its
// instructions once.
#pragma once
#include "common/async_copy.cuh"

// Walks over the `count` rows of a thread; STAGES rows are in flight or in shared memory at once. `rows` points at the
// next row to copy: rows.copy(stage) starts its copies, which no other thread reads, and goes on by a row; rows.turn_back(n)
// goes n rows back, and from there on in the other direction. rows.read(stage) returns a row. take(i, row) is called for one row
// after the other.
template <int STAGES, typename Rows>
struct Walk {
    int count;
    Rows rows;

    __device__ Walk(int count, const Rows& rows) : count(count), rows(rows) {
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            if (i < count) this->rows.copy(i);
            commit_copies();
        }
    }
    // Takes the rows from `begin`, a multiple of STAGES, to `end`. LONG means that there are many rows; the unrolled
    // loop then hides latency.
    template <bool LONG = false, typename Take>
    __device__ __forceinline__ void down(int begin, int end, const Take& take) {
        int i = begin;
        if (LONG) {
#pragma unroll 1
            for (; i + STAGES <= end; i += STAGES)
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) step(i + stage, stage, i + stage + STAGES < count, take);
        }
#pragma unroll 1
        for (; i < end; ++i) step(i, unsigned(i) % STAGES, i + STAGES < count, take);
    }
    // Takes the rows from the last to the first, after `down` has taken all. The last STAGES rows are still in shared
    // memory. Another `down` may follow.
    template <typename Take>
    __device__ __forceinline__ void up(const Take& take) {
        rows.turn_back(STAGES + 1);
#pragma unroll 1
        for (int i = count - 1; i >= 0; --i) step(i, unsigned(i) % STAGES, i >= STAGES, take);
        rows.turn_back(STAGES + 1);
    }

    template <typename Take>
    __device__ __forceinline__ void step(int i, int stage, bool more, const Take& take) {
        await_copies<STAGES - 1>();
        take(i, rows.read(stage));
        if (more) rows.copy(stage);
        commit_copies();
    }
};

// How many of the rows first, first + step, ... are below `rows`; step is a power of two.
__device__ inline int count_every(int rows, int first, int step) {
    return max((rows - first + step - 1) >> (31 - __clz(step)), 0);
}
