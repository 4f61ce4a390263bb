// How a thread walks over rows of matrices through a ring of its own in shared memory. No kernels.
//
// Loops are not unrolled unless a walk is LONG: where rows are few, most of a kernel's time is that of fetching its instructions,
// once.
#pragma once
#include "common/async_copy.cuh"

// A thread's `count` rows, SLOTS of them on their way or in shared memory at once. rows.ask(i, slot) starts the copies of row i,
// which nobody else reads, and rows.read(i, slot) is what came; take(i, that) is called for one row after the other.
template <int SLOTS, typename Rows>
struct Walk {
    int count;
    Rows rows;

    __device__ Walk(int count_, const Rows& rows_) : count(count_), rows(rows_) {
#pragma unroll 1
        for (int i = 0; i < SLOTS; ++i) {
            if (i < count) rows.ask(i, i);
            commit_copies();
        }
    }
    // From row `begin`, a multiple of SLOTS, to `end`. LONG: many rows, of which several at once hide what each waits for, and
    // are worth their instructions.
    template <bool LONG = false, typename Take>
    __device__ __forceinline__ void down(int begin, int end, const Take& take) const {
        int i = begin;
        if (LONG) {
#pragma unroll 1
            for (; i + SLOTS <= end; i += SLOTS)
#pragma unroll
                for (int slot = 0; slot < SLOTS; ++slot) step(i + slot, slot, i + slot + SLOTS, take);
        }
#pragma unroll 1
        for (; i < end; ++i) step(i, i % SLOTS, i + SLOTS, take);
    }
    // And back: the last SLOTS rows are where the way down left them.
    template <typename Take>
    __device__ __forceinline__ void up(const Take& take) const {
#pragma unroll 1
        for (int i = count - 1; i >= 0; --i) step(i, i % SLOTS, i - SLOTS, take);
    }

    template <typename Take>
    __device__ __forceinline__ void step(int i, int slot, int next, const Take& take) const {
        await_copies<SLOTS - 1>();
        take(i, rows.read(i, slot));
        if (next >= 0 && next < count) rows.ask(next, slot);
        commit_copies();
    }
};

// How many of `rows` are those of offset `first` and every `step` on; step is a power of two.
__device__ inline int count_every(int rows, int first, int step) {
    return max((rows - first + step - 1) >> (31 - __clz(step)), 0);
}
