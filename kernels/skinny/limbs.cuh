// The skinny kernels' products by limbs of float32. No kernels.
//
// The limbs are those of split_limbs (docs/design/limbs.md), but they are made in registers, for each row and every 32
// of k: only x itself is read from memory. For every 32 of k (a part) the tensor core takes the small products first,
// from zero, and the sum is added to g in float32.
//
// A warpgroup multiplies 64 rows by all FEATURES. A lane has two rows of x, 8 apart, in operand A of wgmma; of each row
// it has its own 16 bytes, which are four adjacent k of every 16. The weight lies in shared memory as sm90/wgmma.cuh
// describes; a row has a feature's first limbs of 32 of k, then its second limbs. load_limbs orders the features so
// that a lane gets adjacent features of g (wgmma gives it pairs that are 8 columns apart), and orders k so that it fits
// the k of each lane.
#pragma once
#include "common/limbs.cuh"
#include "skinny/config.cuh"
#include "sm90/wgmma.cuh"

constexpr int LIMB_WORDS = FEATURES * 8;  // words of 32 of k of the weight

// Writes the limbs of FEATURES rows of the weight, from row `first` on, to shared memory, and the factor that undoes
// each feature's scaling to `back`. Beyond n and k it writes zeros. With WORDS, rows can be read four elements at a
// time.
template <bool WORDS, typename P>
__device__ inline void load_limbs(const P& p, const T* w, int first, uint4* weight, float* back) {
    constexpr int SHARE = 8;  // neighbouring threads that share a feature
    constexpr int BATCH = 8;  // reads of a thread in flight
    const int steps = parts_of(p) * 8, share = threadIdx.x % SHARE, n = int(p.n) - first;
    for (int feature = threadIdx.x / SHARE; feature < FEATURES; feature += CTA / SHARE) {
        const T* row = w + (first + feature) * p.ldw;
        const int k = feature < n ? int(p.k) : 0;
        Vector<T, 4> v[BATCH];
        const auto read = [&](int batch) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int at = 4 * (batch + i * SHARE + share);
                v[i] = {};
                if constexpr (WORDS) {
                    if (at < k) v[i] = *reinterpret_cast<const Vector<T, 4>*>(row + at);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (at + j < k) v[i].at[j] = row[at + j];
                }
            }
        };
        float top = 0.0f;
#pragma unroll 1
        for (int batch = (steps - 1) / (BATCH * SHARE) * (BATCH * SHARE); batch >= 0; batch -= BATCH * SHARE) {
            read(batch);
#pragma unroll
            for (int i = 0; i < BATCH * 4; ++i) top = fmaxf(top, fabsf(to_float(v[i / 4].at[i % 4])));
        }
#pragma unroll
        for (int apart = SHARE / 2; apart > 0; apart /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
        const LimbScale scale(top);
        if (share == 0) back[feature] = scale.back * 0x1p28f;
        const int place = feature % 16;
        const int column = feature - place + place % 4 / 2 * 8 + place / 4 * 2 + place % 2;  // the column of wgmma
        unsigned* column_words = reinterpret_cast<unsigned*>(weight + column * 8);
#pragma unroll 1
        for (int batch = 0; batch < steps; batch += BATCH * SHARE) {
            if (batch > 0) read(batch);  // the first batch was read last
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int step = batch + i * SHARE + share;
                if (step >= steps) break;
                unsigned* of_part = column_words + step / 8 * LIMB_WORDS * 4 + step % 4;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int number = step % 8 / 4 * 2 + half;  // of these 16 bytes in their row
                    const auto scaled = [&](int j) { return to_float(v[i].at[2 * half + j]) * scale.there; };
                    unsigned high, low;
                    split(scaled(0), scaled(1), high, low);
                    of_part[(number ^ column % 8) * 4] = high;
                    of_part[((number + 4) ^ column % 8) * 4] = low;
                }
            }
        }
    }
    fence_async();
}

// Lets the warpgroups multiply in turn, so that one makes limbs while another multiplies. Without it, all would do the
// same thing at the same time.
struct OrderedBarrier {
    static constexpr int TEAMS = CTA / 128;
    int team;
    __device__ OrderedBarrier() : team(threadIdx.x / 128) {
        if (BY_LIMBS && team == TEAMS - 1) pass();
    }
    __device__ void await() const { asm volatile("bar.sync %0, 256;" ::"r"(1 + team) : "memory"); }
    __device__ void pass() const { asm volatile("bar.arrive %0, 256;" ::"r"(1 + (team + 1) % TEAMS) : "memory"); }
    __device__ void end() const {
        if (BY_LIMBS && team == 0) await();
    }
};

// The limbs of a lane's two rows of x in one part.
struct LimbsOfX {
    unsigned high[CHUNKS][4], low[CHUNKS][4];
    float back[LANE_ROWS];

    // `at`: the lane's 16 bytes of its first row; `centres`: those of the same columns, if they are subtracted
    __device__ __forceinline__ explicit LimbsOfX(const uint4* at, const float* centres = nullptr) {
        float v[LANE_ROWS][CHUNKS][4];
#pragma unroll
        for (int i = 0; i < LANE_ROWS * CHUNKS; ++i)
            *reinterpret_cast<uint4*>(v[i % LANE_ROWS][i / LANE_ROWS]) = at[i * LANES];
        if (centres != nullptr)
#pragma unroll
            for (int i = 0; i < CHUNKS * 4; ++i)
#pragma unroll
                for (int j = 0; j < LANE_ROWS; ++j) v[j][i / 4][i % 4] -= centres[i / 4 * CHUNK + i % 4];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            float top = 0.0f;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
                for (int j = 0; j < 4; ++j) top = fmaxf(top, fabsf(v[i][chunk][j]));
            }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const LimbScale scale(top);
            back[i] = scale.back;
#pragma unroll
            for (int j = 0; j < CHUNKS * 2; ++j)
                split(v[i][j / 2][j % 2 * 2] * scale.there, v[i][j / 2][j % 2 * 2 + 1] * scale.there,
                      high[j / 2][j % 2 * 2 + i], low[j / 2][j % 2 * 2 + i]);
        }
    }

    // Issues three products with a part of the weight. `sums` is their sum after `end` has waited.
    __device__ __forceinline__ void begin(float (&sums)[2 * LANE_FEATURES], const uint4* weight) const {
        const unsigned long long w = operand_descriptor(smem(weight), 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 3 * CHUNKS; ++i) {
            const int chunk = i % CHUNKS, product = i / CHUNKS;
            const bool high_x = product > 0, high_w = product != 1;
            wgmma_rs(sums, high_x ? high[chunk] : low[chunk], w + 2 * chunk + (high_w ? 0 : 4), i);
        }
        wgmma_commit();
    }

    // Waits, and adds `sums` to g.
    __device__ __forceinline__ void end(float (&sums)[2 * LANE_FEATURES], float (&g)[LANE_ROWS][LANE_FEATURES]) const {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 2 * LANE_FEATURES; ++i) {
            const int row = Accumulator::row_half(i);
            float& to = g[row][Accumulator::own_column(i)];
            to = fmaf(sums[i], back[row], to);
        }
    }
};
