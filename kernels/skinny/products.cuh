// What a team of skinny_backward computes from a tile of dg and a tile of x: dx (with CLUSTER, the CTA's part of dx),
// and the team's part of dw, which stays in registers. No kernels.
//
// A tile of dg, or of x, lies in blocks; a block has 8 pieces (16 bytes each) of all ROWS rows, and `place` gives the
// place of a piece. So wgmma can read dg K-major for dx, and everything else MN-major (sm90/wgmma.cuh), and the pieces
// of 8 rows in one column lie in different banks.
#pragma once
#include "backward/columns.cuh"
#include "common/cluster.cuh"
#include "sm90/wgmma.cuh"

#ifndef FEATURES
#define FEATURES 32
#define INPUTS 32
#define TEAMS 16  // teams of a CTA that multiply; each has its own tiles
#endif
#ifndef REMAT
#define REMAT 0  // 1: the forward stored no deviations; they are computed again, from x and the weight
#endif

constexpr bool BY_FMA = sizeof(T) == 4;
constexpr int OF_T = is_same<T, __half> ? ELEMENT_FLOAT16 : ELEMENT_BFLOAT16;  // how wgmma multiplies
constexpr int WARPGROUPS = FEATURES > 128 ? 2 : 1;       // warpgroups of a team; with FMAs a team is a warp
constexpr int TEAM = BY_FMA ? LANES : WARPGROUPS * 128;  // threads
constexpr int ROWS = BY_FMA ? 16 : 64;                   // rows of a tile
// Whether a second team, the makers, computes dg: where dw leaves registers for one team that multiplies.
constexpr bool MAKERS = REMAT && WARPGROUPS > 1;
constexpr int THREADS_HERE = TEAM * (TEAMS + MAKERS);  // of a CTA
constexpr int DW_ROW = INPUTS + 8;  // pitch of dw in shared memory; the padding prevents bank conflicts of stores

__device__ __forceinline__ int place(int row, int piece) {
    return piece / 8 * (8 * ROWS) + row * 8 + ((piece ^ row) & 7);
}

// Tells the compiler that all lanes have the same number: descriptors of wgmma then stay in uniform registers.
__device__ __forceinline__ int uniform(int number) { return __shfl_sync(~0u, number, 0); }

__device__ __forceinline__ void team_sync(int team) {
    if constexpr (BY_FMA)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM) : "memory");
}

// With CLUSTER, barriers in the shared memory of each CTA for the teams that work on the same rows.
struct ClusterBarriers {
    unsigned long long ready;  // all teams have read the memory that will receive parts of dx
    unsigned long long sent;   // all parts have arrived
};

// Float32, by FMAs. A lane has rows lane / 4 and lane / 4 + 8 of dx, and FEATURES / 8 features of dw (chosen by lane /
// 4). Of both dx and dw it has INPUTS / 4 input features (chosen by lane % 4), in pieces of 4. The weight is stored
// unchanged.
struct ByFma {
    static constexpr int FS = FEATURES / 8, KS = INPUTS / 4;
    // how often loops are unrolled, so that they fit in the instruction cache
    static constexpr int AT_ONCE = BY_FMA ? 8192 / (FEATURES * INPUTS) : 1;
    float dw[FS * KS] = {};

    static __device__ __forceinline__ int input_of(int quarter, int j) { return j / 4 * 16 + quarter * 4 + j % 4; }

    static __device__ void load_weight(const BackwardProblem& p, const float* w, int features, float* shared_weight) {
#pragma unroll
        for (int i = threadIdx.x; i < FEATURES * INPUTS; i += THREADS_HERE) {  // all loads are in flight at once
            const int f = i / INPUTS, k = i % INPUTS;
            shared_weight[i] = f < features && k < p.k ? w[f * p.ldw + k] : 0.0f;
        }
    }

    // `to` is the first of `left` rows of dx, of k elements each, or null
    __device__ __forceinline__ void take(const uint4* dg, uint4*, const uint4* x, const float* weight, float* to,
                                         int left, int k, ClusterBarriers&, int) {
        const int f0 = threadIdx.x % LANES / 4, k0 = threadIdx.x % 4;
        if (to != nullptr) {
            float sums[2][KS] = {};
#pragma unroll AT_ONCE
            for (int piece = 0; piece < FEATURES / 4; ++piece) {
                Vector<float, 4> a[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    a[i] = *reinterpret_cast<const Vector<float, 4>*>(dg + place(f0 + 8 * i, piece));
#pragma unroll
                for (int l = 0; l < 4; ++l)
#pragma unroll
                    for (int j = 0; j < KS; j += 4) {
                        const auto b = *reinterpret_cast<const Vector<float, 4>*>(weight + (piece * 4 + l) * INPUTS +
                                                                                  input_of(k0, j));
#pragma unroll
                        for (int i = 0; i < 2; ++i)
#pragma unroll
                            for (int h = 0; h < 4; ++h) sums[i][j + h] = fmaf(a[i].at[l], b.at[h], sums[i][j + h]);
                    }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = f0 + 8 * i;
                if (row >= left) continue;
#pragma unroll
                for (int j = 0; j < KS; ++j)
                    if (input_of(k0, j) < k) to[row * k + input_of(k0, j)] = sums[i][j];
            }
        }
#pragma unroll AT_ONCE
        for (int row = 0; row < ROWS; ++row) {
            Vector<float, 4> b[KS / 4];
#pragma unroll
            for (int j = 0; j < KS / 4; ++j)
                b[j] = *reinterpret_cast<const Vector<float, 4>*>(x + place(row, k0 + 4 * j));
#pragma unroll
            for (int i = 0; i < FS / 4; ++i) {
                const auto a = *reinterpret_cast<const Vector<float, 4>*>(dg + place(row, f0 + 8 * i));
#pragma unroll
                for (int l = 0; l < 4; ++l)
#pragma unroll
                    for (int j = 0; j < KS; ++j)
                        dw[(4 * i + l) * KS + j] = fmaf(a.at[l], b[j / 4].at[j % 4], dw[(4 * i + l) * KS + j]);
            }
        }
    }

    // dw (FEATURES, INPUTS), rows of DW_ROW
    __device__ void leave(float* to) const {
        const int f0 = threadIdx.x % LANES / 4, k0 = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < FS; ++i)
#pragma unroll
            for (int j = 0; j < KS; ++j) to[(i / 4 * 32 + f0 * 4 + i % 4) * DW_ROW + input_of(k0, j)] = dw[i * KS + j];
    }
};

// 16 bits, by wgmma. A product has 64 rows of dx, or 64 features of dw (if there are only 32, half of the result is
// dropped), by all INPUTS. Without CLUSTER a lane stores 8 adjacent input features of dx in every 32 at once: the
// weight's columns are permuted so that it gets these or, if g needs them as they are, four lanes transpose them. If
// there are two warpgroups, they divide the input features of dx and the features of dw.
struct ByWgmma {
    static constexpr bool PERMUTES = CLUSTER == 1 && !REMAT;
    static constexpr int OF_DX = INPUTS / WARPGROUPS, OF_DW = FEATURES / WARPGROUPS;
    static constexpr int BLOCKS = (OF_DW + 63) / 64, SIZE = INPUTS / 2, DX_SIZE = OF_DX / 2;
    float dw[BLOCKS][SIZE] = {};

    static __device__ __forceinline__ int group() { return uniform(threadIdx.x % TEAM / 128); }

    static __device__ void load_weight(const BackwardProblem& p, const T* w, int features, T* shared_weight) {
        constexpr int OF_ROW = INPUTS / VEC, PIECES = FEATURES * OF_ROW;
        constexpr int AT_ONCE = PIECES / THREADS_HERE < 4 ? 1 : 4;      // pieces of a thread that are in flight
        constexpr bool EQUAL = PIECES % (AT_ONCE * THREADS_HERE) == 0;  // all threads have as many pieces
        struct Piece {
            int feature, input, inside;
            __device__ Piece(int i, int features, int k)
                : feature(i / OF_ROW),
                  input(i % OF_ROW * VEC),
                  inside(feature < features ? max(min(k - input, VEC), 0) : 0) {}
        };
        const auto put = [&](const Piece& to, const uint4& v) {
            const unsigned words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int h = 0; h < VEC; h += 2) {
                const int k = to.input, f = to.feature;
                const int column = PERMUTES ? k / 32 * 32 + h * 4 + k % 32 / 4 : k + h;
                T* at =
                    shared_weight + column / 64 * (64 * FEATURES) + f * 64 + ((column / 8 ^ f) & 7) * 8 + column % 8;
                *reinterpret_cast<unsigned*>(at) = words[h / 2];
            }
        };
        const bool whole = (reinterpret_cast<unsigned long long>(w) | p.ldw * sizeof(T)) % 16 == 0 && p.k % VEC == 0;
#pragma unroll 1
        for (int i = threadIdx.x; whole && i < PIECES; i += AT_ONCE * THREADS_HERE) {
            uint4 v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const Piece of(i + j * THREADS_HERE, features, int(p.k));
                v[j] = {};
                if (of.inside > 0) v[j] = *reinterpret_cast<const uint4*>(w + of.feature * p.ldw + of.input);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (EQUAL || i + j * THREADS_HERE < PIECES) put(Piece(i + j * THREADS_HERE, features, int(p.k)), v[j]);
        }
#pragma unroll 1
        for (int i = threadIdx.x; !whole && i < PIECES; i += THREADS_HERE) {
            const Piece of(i, features, int(p.k));
            Vector<T, VEC> v = {};
#pragma unroll
            for (int h = 0; h < VEC; ++h)
                if (h < of.inside) v.at[h] = w[of.feature * p.ldw + of.input + h];
            put(of, *reinterpret_cast<const uint4*>(&v));
        }
    }

    // Of four lanes, lane i has columns 8 j + 2 i and the next, for j = 0 to 3. It gets columns 8 i to 8 i + 7.
    static __device__ __forceinline__ void transpose_in_quad(Vector<T, VEC>& of_row) {
        unsigned* words = reinterpret_cast<unsigned*>(&of_row);
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & bit) continue;
                const bool upper = threadIdx.x & bit;
                const unsigned got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + bit], bit);
                if (upper)
                    words[i] = got;
                else
                    words[i + bit] = got;
            }
    }

    // b is MN-major in both products: rows of the weight, and rows of x.
    template <bool A_MN_MAJOR, int NUMBERS>
    static __device__ __forceinline__ void multiply(float (&d)[NUMBERS], unsigned long long a, unsigned long long b,
                                                    int accumulate) {
        wgmma<OF_T, A_MN_MAJOR, true>(d, a, b, accumulate);
    }

    // With CLUSTER the other CTAs send their parts to `room` after the team has read dg and x. `room` has 4 bytes for
    // each element of dx, and may overlap x.
    __device__ __forceinline__ void take(const uint4* dg, uint4* room, const uint4* x, const T* weight, T* to, int left,
                                         int k, ClusterBarriers& barriers, int phase) {
        constexpr int NEXT_K = 16 * 128 / 16, BLOCK = ROWS * 128;  // added to a descriptor by 16 of k; bytes of a block
        const auto dg_k_major = operand_descriptor(smem(dg), 16), dg_mn_major = operand_descriptor(smem(dg), BLOCK);
        const int input0 = group() * OF_DX;
        const T* const own = weight + input0 / 64 * (64 * FEATURES) + input0 % 64;
        const auto of_x = operand_descriptor(smem(x), BLOCK), of_w = operand_descriptor(smem(own), FEATURES * 128);
        wgmma_fence();
        // dx is computed even if it is not wanted: with a branch here, each wgmma would wait for the one before
        float dx[DX_SIZE];
#pragma unroll
        for (int i = 0; i < FEATURES / 16; ++i)
            multiply<false>(dx, dg_k_major + (i / 4 * (BLOCK / 16) + i % 4 * 2), of_w + NEXT_K * i, i);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                multiply<true>(dw[block], dg_mn_major + ((group() * BLOCKS + block) * (BLOCK / 16) + NEXT_K * i),
                               of_x + NEXT_K * i, 1);
        wgmma_commit();
        if constexpr (CLUSTER > 1) {
            wgmma_wait<0>();
            if (to != nullptr) add_up(dx, room, to, left, k, barriers, phase);
            return;
        }
        wgmma_wait<1>();
        if (to != nullptr) {
            const int lane = threadIdx.x % LANES, row0 = threadIdx.x % 128 / LANES * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = row0 + 8 * i;
                if (PERMUTES && row >= left) continue;
#pragma unroll
                for (int j = 0; j < OF_DX; j += 32) {
                    const int at = input0 + j + lane % 4 * VEC;
                    Vector<T, VEC> out;
#pragma unroll
                    for (int h = 0; h < VEC; ++h) from_float(dx[Accumulator::at(j / 8 + h / 2, i, h % 2)], out.at[h]);
                    if (!PERMUTES) {
                        transpose_in_quad(out);
                        if (row >= left) continue;
                    }
                    if (at + VEC <= k && k % VEC == 0) {
                        store_whole(to + row * k + at, out);
                    } else {
#pragma unroll
                        for (int h = 0; h < VEC; ++h)
                            if (at + h < k) to[row * k + at + h] = out.at[h];
                    }
                }
            }
        }
        wgmma_wait<0>();
    }

    // Adds dx of a tile over the CTAs of the cluster. From all CTAs, CTA i receives OWN elements of every thread, from
    // element i OWN on, and adds them in the order of the ranks.
    __device__ __forceinline__ void add_up(const float (&dx)[DX_SIZE], uint4* room, T* to, int left, int k,
                                           ClusterBarriers& barriers, int phase) {
        constexpr int OWN = DX_SIZE / CLUSTER, PIECES = OWN / 4;  // elements of a thread; pieces of 16 bytes
        static_assert(OWN % 4 == 0, "a CTA gets whole pieces");
        const int member = threadIdx.x % TEAM, rank = rank_in_cluster();
        const auto piece = [&](int cta, int i) { return room + (cta * PIECES + i) * TEAM + member; };
        team_sync(threadIdx.x / TEAM);  // all threads of the team have read dg and x
        if (member == 0) {
            mbar_expect(&barriers.sent, TEAM * DX_SIZE * 4);
#pragma unroll
            for (int cta = 0; cta < CLUSTER; ++cta) mbar_arrive_at(&barriers.ready, cta);
        }
        mbar_wait_sent(&barriers.ready, phase);
#pragma unroll
        for (int cta = 0; cta < CLUSTER; ++cta)
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const float* of = dx + cta * OWN + 4 * i;
                send(piece(rank, i), of[0], of[1], of[2], of[3], &barriers.sent, cta);
            }
        mbar_wait_sent(&barriers.sent, phase);
        const int lane = member % LANES, row0 = member % 128 / LANES * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            Vector<float, 4> sum = {};
#pragma unroll
            for (int cta = 0; cta < CLUSTER; ++cta) {
                const auto part = *reinterpret_cast<const Vector<float, 4>*>(piece(cta, i));
#pragma unroll
                for (int j = 0; j < 4; ++j) sum.at[j] += part.at[j];
            }
            const int column = group() * OF_DX + (rank * PIECES + i) * 8 + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = row0 + 8 * j;
                if (row >= left) continue;
                Vector<T, 2> out;
                from_float(sum.at[2 * j], out.at[0]);
                from_float(sum.at[2 * j + 1], out.at[1]);
                T* const there = to + row * k + column;
                if (column + 2 <= k && k % 2 == 0) {
                    *reinterpret_cast<Vector<T, 2>*>(there) = out;
                } else {
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        if (column + h < k) there[h] = out.at[h];
                }
            }
        }
    }

    // dw (FEATURES, INPUTS), rows of DW_ROW
    __device__ void leave(float* to) const {
        const int lane = threadIdx.x % LANES;
        const int f0 = group() * OF_DW + threadIdx.x % 128 / LANES * 16 + lane / 4;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < SIZE; i += 2) {
                const int f = block * 64 + f0 + 8 * Accumulator::row_half(i);
                if (f < FEATURES)
                    *reinterpret_cast<float2*>(to + f * DW_ROW + Accumulator::eight(i) +
                                               Accumulator::first_column(lane)) =
                        make_float2(dw[block][i], dw[block][i + 1]);
            }
    }
};

template <bool, typename A, typename B>
struct Either {
    using type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
    using type = B;
};
using Products = Either<BY_FMA, ByFma, ByWgmma>::type;
