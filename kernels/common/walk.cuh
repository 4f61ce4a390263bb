// How a thread goes over rows of matrices, through a pipeline of its own in shared memory. No kernels.
//
// Loops are unrolled only if a walk is LONG. If there are few rows, a kernel spends most of its time on fetching its
// instructions once.
#pragma once
#include "common/async_copy.cuh"

// Walks over the `count` rows of a thread; STAGES rows are in flight or in shared memory at once. rows.copy(i, stage)
// starts the copies of row i, which no other thread reads; rows.read(i, stage) returns row i; take(i, row) is called
// for one row after the other.
template <int STAGES, typename Rows>
struct Walk {
    int count;
    Rows rows;

    __device__ Walk(int count, const Rows& rows) : count(count), rows(rows) {
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            if (i < count) rows.copy(i, i);
            commit_copies();
        }
    }
    // Takes the rows from `begin`, a multiple of STAGES, to `end`. LONG means that there are many rows; the unrolled
    // loop then hides latency.
    template <bool LONG = false, typename Take>
    __device__ __forceinline__ void down(int begin, int end, const Take& take) const {
        int i = begin;
        if (LONG) {
#pragma unroll 1
            for (; i + STAGES <= end; i += STAGES)
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) step(i + stage, stage, i + stage + STAGES, take);
        }
#pragma unroll 1
        for (; i < end; ++i) step(i, i % STAGES, i + STAGES, take);
    }
    // Takes the rows from the last to the first. The last STAGES rows are still in shared memory, where `down` left
    // them.
    template <typename Take>
    __device__ __forceinline__ void up(const Take& take) const {
#pragma unroll 1
        for (int i = count - 1; i >= 0; --i) step(i, i % STAGES, i - STAGES, take);
    }

    template <typename Take>
    __device__ __forceinline__ void step(int i, int stage, int next, const Take& take) const {
        await_copies<STAGES - 1>();
        take(i, rows.read(i, stage));
        if (next >= 0 && next < count) rows.copy(next, stage);
        commit_copies();
    }
};

// How many of the rows first, first + step, ... are below `rows`; step is a power of two.
__device__ inline int count_every(int rows, int first, int step) {
    return max((rows - first + step - 1) >> (31 - __clz(step)), 0);
}
