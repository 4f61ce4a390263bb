// The sums of columns over the threads of a CTA that have rows of them, and over the CTAs of a cluster. No kernels.
#pragma once
#include "common/common.cuh"
#include "common/cluster.cuh"

// The sums of a CTA's columns, in float64. A thread brings sums of its VEC columns (Places), as V. They pass through
// shared memory, two sums of each column at a time, to the thread that owns a part of a column's sum; from there on they
// are float64. With float, VEC 8 and row_threads 4, for example, a thread passes 4 words at a time, and 4 threads own
// parts of the same sum. 2 VEC row_threads are at most THREADS, so that a thread owns a part of one sum of each pair. The
// order of the additions depends only on `row_threads` and on how often `add` is called.
// COMPENSATED: see LongSum.
template <int THREADS, int VEC, int SUMS, typename V, bool COMPENSATED = false>
class Totals {
    static constexpr int EACH = 16 / sizeof(V);   // numbers in a word of 16 bytes
    static constexpr int WORDS = 2 * VEC / EACH;  // words of a thread that pass at a time

public:
    struct Memory {
        uint4 words[WORDS][THREADS];
    };
    static_assert(sizeof(Memory) >= SUMS / 2 * THREADS * sizeof(double), "of_column has the same memory");

    __device__ Totals(Memory& memory, int row_threads) : memory(memory) {
        const int thread = int(threadIdx.x), shift = 31 - __clz(row_threads * EACH), groups = THREADS >> shift;
        across = 1 << shift;
        columns = row_threads * VEC;
        at = thread & (across - 1);
        word = (thread >> shift) % WORDS;
        part = (thread >> shift) / WORDS;
        parts = groups / WORDS;
    }
    // Adds the sums that each thread brings. All threads call this.
    __device__ __forceinline__ void add(const V (&sums)[SUMS][VEC]) {
#pragma unroll
        for (int pair = 0; pair < SUMS / 2; ++pair) {
            __syncthreads();  // all threads have read what the memory held before
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                Vector<V, EACH> some;
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    const int number = i * EACH + j;
                    some.at[j] = sums[2 * pair + number / VEC][number % VEC];
                }
                memory.words[i][threadIdx.x] = *reinterpret_cast<const uint4*>(&some);
            }
            __syncthreads();
            const V* number = reinterpret_cast<const V*>(memory.words[word]) + at;
#pragma unroll 4
            for (int j = part * across; j < THREADS * EACH; j += parts * across) {
                double wide;
                widen(number[j], wide);
                own[pair].add(wide);
            }
        }
    }
    // Returns the sums of one column. All threads call this, after all that they add.
    __device__ __forceinline__ void of_column(int column, double (&sums)[SUMS]) {
        double* const totals = reinterpret_cast<double*>(memory.words);  // [SUMS][parts][columns]
        __syncthreads();
        const int first = word * EACH;  // of the 2 VEC numbers of a thread
#pragma unroll
        for (int pair = 0; pair < SUMS / 2; ++pair) {
            const int sum = 2 * pair + first / VEC, of = at / EACH * VEC + first % VEC + at % EACH;
            totals[(sum * parts + part) * columns + of] = own[pair].total();
        }
        __syncthreads();
        LongSum<COMPENSATED> all[SUMS];
#pragma unroll 1
        for (int j = 0; j < parts; ++j)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) all[i].add(totals[(i * parts + j) * columns + column]);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = all[i].total();
    }

private:
    Memory& memory;
    int columns, across, at;  // columns of the CTA; numbers of a row that pass at a time in each word; this thread's
    int word;                 // the word of which this thread owns sums
    int part, parts;          // threads that own a part of the same sum
    LongSum<COMPENSATED> own[SUMS / 2];
};

// The sums of up to WIDEST columns over all CTAs of a cluster, PAIRS pairs of sums for each column. An object serves
// once. With EVERYWHERE each CTA gets the sums of every column; otherwise only CTA column % CLUSTER gets those of a
// column. COMPENSATED: see LongSum. Without a cluster there is nothing to do, and an object takes no memory as a member
// with [[no_unique_address]].
template <int WIDEST, bool EVERYWHERE = true, int PAIRS = 1, bool COMPENSATED = false>
struct ClusterTotals {
#if CLUSTER > 1
    double2 of_rank[CLUSTER][PAIRS][EVERYWHERE ? WIDEST : WIDEST / CLUSTER];
    unsigned long long here;  // a barrier: all sums are here
#endif

    // All threads call this before anything is sent, and before they load anything through L1: waiting for a cluster
    // empties it.
    __device__ __forceinline__ void begin(int rank, int columns) {
#if CLUSTER > 1
        if (threadIdx.x == 0) {
            mbar_init(&here, 1);
            mbar_init_fence();
            const int own = EVERYWHERE ? columns : (columns + CLUSTER - 1 - rank) / CLUSTER;
            mbar_expect(&here, CLUSTER * own * PAIRS * int(sizeof(double2)));
        }
        __syncthreads();
        cluster_arrive();
        cluster_wait();
#endif
    }
    // Turns the sums of the CTA into those of the cluster. All threads call this, each with one column; of the threads
    // with the same column, one has `sends` set. Sums are sent, not fetched, so that a CTA that has received all its
    // sums may end. They are added in the order of the ranks.
    __device__ __forceinline__ void add(int rank, int column, bool sends, double (&sums)[2 * PAIRS]) {
#if CLUSTER > 1
        const int at = EVERYWHERE ? column : column / CLUSTER;
        if (sends)
#pragma unroll 1
            for (int i = 0; i < (EVERYWHERE ? CLUSTER : 1); ++i)
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
                    send(&of_rank[rank][j][at], sums[2 * j], sums[2 * j + 1], &here, EVERYWHERE ? i : column % CLUSTER);
        mbar_wait_sent(&here, 0);
        LongSum<COMPENSATED> all[2 * PAIRS];
#pragma unroll 2
        for (int cta = 0; cta < CLUSTER; ++cta)
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const double2 pair = of_rank[cta][j][at];
                all[2 * j].add(pair.x);
                all[2 * j + 1].add(pair.y);
            }
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) sums[j] = all[j].total();
#endif
    }
};
