// How the kernels of narrow.cu make g = x wᵀ of rows that are short: tiles of rows by FEATURES features. No kernels.
//
// A warp makes a tile by mma (m16n8, sums in float32), or in IEEE float32 by FMAs. In both a lane ends with the same elements
// of g: LANE_ROWS rows, 8 apart, of WORD adjacent features in every 4 WORD. mma gives a lane pairs of features that lie 8
// apart; which feature is called which is for lay_weight to say. No warp needs another's rows, or waits for it.
//
// Limbs are what split_limbs makes of float32 (docs/float32.md), but in registers, and scaled for each row and 32 of k: x is
// read as it is, and nothing but x. Per part of 32 of k the tensor core takes the small products first, from zero, and the
// part is added to g in float32. The smallest one, of both second limbs, is taken, too: where a mean is 1e4 deviations, x's
// first limb is the mean, and its second one the deviation, so that this product has as much of the variance as the weight's
// second limb has of the weight.
#pragma once
#include "activation.cuh"
#include "async_copy.cuh"
#include "features.cuh"

#ifndef ELEMENT
#define ELEMENT 0
#define FEATURES 32
#define CHUNKS 1
#endif

enum : int { ELEMENT_BFLOAT16 = 0, ELEMENT_FLOAT16 = 1, ELEMENT_TF32 = 2, ELEMENT_LIMBS = 3, ELEMENT_FLOAT32 = 4 };
template <int>
struct OperandOf {
    using type = float;
};
template <>
struct OperandOf<ELEMENT_BFLOAT16> {
    using type = __nv_bfloat16;
};
template <>
struct OperandOf<ELEMENT_FLOAT16> {
    using type = __half;
};
using T = OperandOf<ELEMENT>::type;
constexpr bool BY_FMA = ELEMENT == ELEMENT_FLOAT32, BY_LIMBS = ELEMENT == ELEMENT_LIMBS;

constexpr int LANES = 32;
constexpr int WARPS = FEATURES > 32 || BY_FMA || BY_LIMBS ? 8 : 12;  // whose tiles are larger take more registers
constexpr int CTA = WARPS * LANES;                                   // threads
constexpr int WORD = 16 / sizeof(T);                                 // elements of 16 bytes
constexpr int CHUNK = 4 * WORD;  // elements of a row that its four lanes take at once: 64 bytes
constexpr int LANE_FEATURES = FEATURES / 4;
constexpr int LANE_ROWS =
    BY_FMA && FEATURES == 32 && CHUNKS < 4 ? 8 : 4;      // more make more of what is read of the weight
constexpr int ROWS = 8 * LANE_ROWS;                      // of a tile
constexpr int BLOCK = WARPS * ROWS;                      // rows of a CTA at once
constexpr int TILE_WORDS = CHUNKS * LANE_ROWS * LANES;   // of 16 bytes
constexpr int RING_WORDS = (BY_LIMBS ? 64 : 128) * 64;   // of all warps: the limbs of the weight want room
constexpr int STAGES = RING_WORDS / WARPS / TILE_WORDS;  // parts of tiles on their way or at hand

// How many times CHUNKS chunks a row has: one but for limbs.
__device__ inline int parts_of(const Problem& p) {
    return BY_LIMBS ? static_cast<int>((p.k + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK)) : 1;
}
// 16 bytes each, of FEATURES rows of the weight as lay_weight leaves them.
__device__ inline int weight_words(const Problem& p) { return parts_of(p) * CHUNKS * FEATURES * 4; }

// Feature j of a lane's LANE_FEATURES, `quarter` being its place among the four of a row.
__device__ constexpr int feature_of(int quarter, int j) { return CHUNK * (j / WORD) + WORD * quarter + j % WORD; }

__device__ inline unsigned rounded_to_tf32(unsigned v) {
    unsigned out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(v)));
    return out;
}

// FEATURES rows of the weight in shared memory, from row `first` on: for FMAs [k][feature]; for mma what a lane wants for 8
// features and a chunk, 16 bytes, of which 4 come from each 16 of its feature's row. Zeros beyond n and k.
__device__ inline void lay_weight(const Problem& p, const T* w, int first, uint4* weight) {
    constexpr int PIECES = 4 * CHUNKS;  // of a row, 16 bytes each
    for (int i = threadIdx.x; i < FEATURES * PIECES; i += CTA) {
        const int feature = i / PIECES, piece = i % PIECES, k = piece * WORD;
        const T* from = w + (first + feature) * p.ldw + k;
        const int inside = first + feature < p.n ? static_cast<int>(max(min(p.k - k, 1LL * WORD), 0LL)) : 0;
        const bool at_once = inside == WORD && p.flags & FLAG_VECTOR_W;
        Vector<T, WORD> v;
        if (at_once) v = *reinterpret_cast<const Vector<T, WORD>*>(from);
#pragma unroll
        for (int j = 0; j < WORD; ++j) {
            if (!at_once) v.at[j] = j < inside ? from[j] : T(0.0f);
            if constexpr (BY_FMA) reinterpret_cast<float*>(weight)[(k + j) * FEATURES + feature] = to_float(v.at[j]);
        }
        if constexpr (!BY_FMA) {
            const int place = feature % CHUNK, eight = feature / CHUNK * (WORD / 2) + place % WORD / 2;
            const int column = place / WORD * 2 + place % 2;  // of mma's eight
            unsigned* to =
                reinterpret_cast<unsigned*>(weight + (piece / 4 * (FEATURES / 8) + eight) * LANES + column * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned bits = reinterpret_cast<const unsigned*>(&v)[j];
                to[j * 4 + piece % 4] = ELEMENT == ELEMENT_TF32 ? rounded_to_tf32(bits) : bits;
            }
        }
    }
}

// The bits of a float32 as two float16 of two numbers that lie below 2^15, what the first one left in the second. Where the
// first is not finite the second is no NaN.
__device__ inline void split(float v0, float v1, unsigned& high, unsigned& low) {
    const __half2 of = __floats2half2_rn(v0, v1);
    const float2 back = __half22float2(of);
    const __half2 rest = __hmin2(__floats2half2_rn(v0 - back.x, v1 - back.y), __float2half2_rn(1024.0f));
    high = *reinterpret_cast<const unsigned*>(&of);
    low = *reinterpret_cast<const unsigned*>(&rest);
}

// What numbers are multiplied by, a power of two, so that the largest, of these bits, lies in [2^14, 2^15); and by what their
// products come back, times 2^-14: g then does not overflow on its way unless it does.
struct Scale {
    float there, back;
    __device__ explicit Scale(unsigned top) {
        const int e = max(static_cast<int>(top >> 23), 29);  // biased; whoever is smaller still keeps float16's quantum
        there = __uint_as_float(static_cast<unsigned>(268 - e) << 23);
        back = __uint_as_float(static_cast<unsigned>(e - 28) << 23);
    }
};

// The same as lay_weight of limbs, and for each feature what its sums come back by. For mma 16 bytes of a chunk: both limbs
// of k = t, 4 + t and of 8 + t, 12 + t.
__device__ inline void lay_limbs(const Problem& p, const T* w, int first, uint4* weight, float* back) {
    constexpr int SHARE = CTA / FEATURES;  // threads, neighbours, that share a feature
    const int feature = threadIdx.x / SHARE, steps = parts_of(p) * CHUNKS * 4, n = static_cast<int>(p.n) - first;
    const T* row = w + (first + feature) * p.ldw;
    const auto read = [&](int step) {
        const int inside = feature < n ? static_cast<int>(max(min(p.k - 4 * step, 4LL), 0LL)) : 0;
        Vector<T, 4> v = {};
        if (inside == 4 && p.flags & FLAG_VECTOR_W) return *reinterpret_cast<const Vector<T, 4>*>(row + 4 * step);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < inside) v.at[j] = row[4 * step + j];
        return v;
    };
    unsigned top = 0;
#pragma unroll 8
    for (int step = threadIdx.x % SHARE; step < steps; step += SHARE) {
        const Vector<T, 4> v = read(step);
#pragma unroll
        for (int j = 0; j < 4; ++j) top = max(top, __float_as_uint(to_float(v.at[j])) & 0x7FFFFFFFu);
    }
#pragma unroll
    for (int apart = SHARE / 2; apart > 0; apart /= 2) top = max(top, __shfl_xor_sync(~0u, top, apart));
    const Scale scale(top);
    if (threadIdx.x % SHARE == 0) back[feature] = scale.back * 0x1p28f;
    const int place = feature % CHUNK, eight = feature / CHUNK * (WORD / 2) + place % WORD / 2;
    const int column = place / WORD * 2 + place % 2;
    __half* laid = reinterpret_cast<__half*>(weight);
#pragma unroll 4
    for (int step = threadIdx.x % SHARE; step < steps; step += SHARE) {
        const Vector<T, 4> v = read(step);
        const int chunk = step / 4, quarter = step % 4;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            unsigned limbs[2];
            split(to_float(v.at[j]) * scale.there, to_float(v.at[j + 1]) * scale.there, limbs[0], limbs[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                __half* to = laid + ((chunk * (FEATURES / 8) + eight) * LANES + column * 4 + j) * 8 + i * 4 + quarter;
                to[0] = reinterpret_cast<const __half*>(&limbs[i])[0];
                to[8] = reinterpret_cast<const __half*>(&limbs[i])[1];
            }
        }
    }
}

__device__ inline void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA(what)                                                               \
    asm(what " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (ELEMENT == ELEMENT_BFLOAT16) MMA("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
    if constexpr (ELEMENT == ELEMENT_FLOAT16 || BY_LIMBS) MMA("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32");
    if constexpr (ELEMENT == ELEMENT_TF32) MMA("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32");
#undef MMA
}

// mma's a of 16 rows and 32 bytes of each: of four matrices of 8 rows of 16 bytes, whose rows lie where the lanes say.
__device__ inline void load_matrices(unsigned (&a)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// What a lane has of a tile: element [i][j] is of row lane / 4 + 8 i and feature feature_of(lane % 4, j).
using OfLane = float[LANE_ROWS][LANE_FEATURES];

// A warp's tiles, one after the other: every WARPS of its CTA's rows, p.stats_rows of them from cta * p.stats_rows on; from the
// last to the first if BACKWARDS. They come through a ring of the warp's own.
template <bool BACKWARDS>
struct Tiles {
    const T* x;
    const uint4* weight;
    uint4* ring;
    const T* from;         // of the next part of a tile to ask for, at this lane's first row and 16 bytes
    long long row0;        // its first row
    int part, parts;       // which of those of a tile
    long long begin, end;  // the CTA's rows
    long long ldx, step;   // row pitch; rows from tile to tile
    int bytes, lane;       // of a row from this lane's first 16 on
    bool whole;            // no lane has less than 16

    __device__ Tiles(const Problem& p, const T* x_, unsigned cta, const uint4* weight_, uint4* rings)
        : x(x_),
          weight(weight_),
          part(0),
          parts(parts_of(p)),
          begin(cta * p.stats_rows),
          end(min(begin + p.stats_rows, p.m)),
          ldx(p.ldx),
          step(BACKWARDS ? -BLOCK : BLOCK),
          lane(threadIdx.x % LANES),
          whole(p.k == parts * CHUNKS * CHUNK) {
        const int warp = threadIdx.x / LANES, quarter = lane % 4;
        ring = rings + warp * STAGES * TILE_WORDS;
        row0 = BACKWARDS ? begin + ((end - begin - 1) / ROWS - warp) * ROWS : begin + warp * ROWS;
        bytes = static_cast<int>(p.k - quarter * WORD) * static_cast<int>(sizeof(T));
        from = x + (row0 + lane / 4) * ldx + quarter * WORD;
    }

    // Where 16 bytes lie among those of 8 rows, so that the rows that are read at once meet in no bank.
    __device__ static int place(int row, int quarter) { return row * 4 + (quarter ^ (row >> 1 & 3)); }

    __device__ void ask(int stage) {
        uint4* to = ring + stage * TILE_WORDS + place(lane / 4, lane % 4);
        if (row0 >= begin && row0 + ROWS <= end && whole) {
            const T* row = from;
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i, row += 8 * ldx)
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    copy_async(to + (chunk * LANE_ROWS + i) * LANES, row + chunk * CHUNK);
        } else if (row0 >= begin && row0 < end) {
            const T* row = from;
#pragma unroll 1
            for (int i = 0; i < LANE_ROWS; ++i, row += 8 * ldx)
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const int inside = row0 + lane / 4 + i * 8 < end ? max(min(bytes - chunk * 64, 16), 0) : 0;
                    copy_async(to + (chunk * LANE_ROWS + i) * LANES, inside > 0 ? row + chunk * CHUNK : x, inside);
                }
        }
        from += CHUNKS * CHUNK;
        bytes -= CHUNKS * 64;
        if (++part == parts) {
            row0 += step;
            from += step * ldx - parts * CHUNKS * CHUNK;
            bytes += parts * CHUNKS * 64;
            part = 0;
        }
        commit_copies();
    }

    // Adds what 32 of k, part number `at_part`, make of g through limbs.
    __device__ __forceinline__ void add_limbs(const uint4* rows, int at_part, OfLane& g) const {
        const int at = place(lane % 8, lane / 16), next = place(lane % 8, lane / 16 + 2);
        unsigned high[LANE_ROWS / 2][CHUNKS][4], low[LANE_ROWS / 2][CHUNKS][4];
        float back[LANE_ROWS];
#pragma unroll
        for (int i = 0; i < LANE_ROWS / 2; ++i) {
            unsigned a[2 * CHUNKS][4], top[2] = {0, 0};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const uint4* of = rows + (chunk * LANE_ROWS + 2 * i + lane / 8 % 2) * LANES;
                load_matrices(a[2 * chunk], of + at);
                load_matrices(a[2 * chunk + 1], of + next);
            }
#pragma unroll
            for (int j = 0; j < 8 * CHUNKS; ++j) top[j % 2] = max(top[j % 2], a[j / 4][j % 4] & 0x7FFFFFFFu);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                top[j] = max(top[j], __shfl_xor_sync(~0u, top[j], 1));
                top[j] = max(top[j], __shfl_xor_sync(~0u, top[j], 2));
                const Scale scale(top[j]);
                back[2 * i + j] = scale.back;
#pragma unroll
                for (int l = 0; l < 2 * CHUNKS; ++l)  // two of this row's four numbers of a chunk
                    split(__uint_as_float(a[l][j]) * scale.there, __uint_as_float(a[l][j + 2]) * scale.there,
                          high[i][l / 2][l % 2 * 2 + j], low[i][l / 2][l % 2 * 2 + j]);
            }
        }
        const uint4* w = weight + at_part * CHUNKS * (FEATURES / 8) * LANES + lane;
        constexpr int AT_ONCE = 2;  // times 8 features: instructions that do not wait for each other
#pragma unroll
        for (int eight = 0; eight < FEATURES / 8; eight += AT_ONCE) {
            uint4 of[AT_ONCE][CHUNKS];
            float sums[AT_ONCE][LANE_ROWS / 2][4] = {};
#pragma unroll
            for (int l = 0; l < AT_ONCE * CHUNKS; ++l)
                of[l / CHUNKS][l % CHUNKS] = w[(l % CHUNKS * (FEATURES / 8) + eight + l / CHUNKS) * LANES];
#pragma unroll
            for (int step = 0; step < 4 * CHUNKS; ++step) {
                const int chunk = step % CHUNKS;
                const bool high_x = step >= 2 * CHUNKS, high_w = step / CHUNKS % 2;
#pragma unroll
                for (int l = 0; l < AT_ONCE * LANE_ROWS / 2; ++l) {
                    const int i = l % (LANE_ROWS / 2);
                    const uint4 word = of[l / (LANE_ROWS / 2)][chunk];
                    mma(sums[l / (LANE_ROWS / 2)][i], high_x ? high[i][chunk] : low[i][chunk], high_w ? word.x : word.z,
                        high_w ? word.y : word.w);
                }
            }
#pragma unroll
            for (int l = 0; l < AT_ONCE * LANE_ROWS * 2; ++l) {
                const int at = l / (LANE_ROWS * 2), i = l / 4 % (LANE_ROWS / 2), j = l % 4;
                float& to = g[2 * i + j / 2][2 * (eight + at) + j % 2];
                to = fmaf(sums[at][i][j], back[2 * i + j / 2], to);
            }
        }
    }

    // Adds g in IEEE float32.
    __device__ __forceinline__ void add_products(const uint4* rows, OfLane& g) const {
        const float* w = reinterpret_cast<const float*>(weight) + lane % 4 * WORD;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk, rows += LANE_ROWS * LANES)
#pragma unroll 2
            for (int quarter = 0; quarter < 4; ++quarter) {
                Vector<float, 4> a[LANE_ROWS];
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i)
                    a[i] = *reinterpret_cast<const Vector<float, 4>*>(rows + i * LANES + place(lane / 4, quarter));
#pragma unroll
                for (int k = 0; k < 4; ++k, w += FEATURES)
#pragma unroll
                    for (int j = 0; j < LANE_FEATURES; j += WORD) {
                        const auto of = *reinterpret_cast<const Vector<float, 4>*>(w + j * 4);
#pragma unroll
                        for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                            for (int l = 0; l < 4; ++l) g[i][j + l] = fmaf(a[i].at[k], of.at[l], g[i][j + l]);
                    }
            }
    }

    // g by mma of numbers as they are.
    __device__ __forceinline__ void multiply(const uint4* rows, OfLane& g) const {
        const int at = place(lane % 8, lane / 16), next = place(lane % 8, lane / 16 + 2);
        float sums[LANE_ROWS / 2][FEATURES / 8][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            unsigned a[LANE_ROWS / 2][2][4];
#pragma unroll
            for (int i = 0; i < LANE_ROWS / 2; ++i) {
                const uint4* of = rows + (chunk * LANE_ROWS + 2 * i + lane / 8 % 2) * LANES;
                load_matrices(a[i][0], of + at);
                load_matrices(a[i][1], of + next);
            }
            if constexpr (ELEMENT == ELEMENT_TF32)
#pragma unroll
                for (int i = 0; i < LANE_ROWS * 4; ++i)
                    a[i / 8][i / 4 % 2][i % 4] = rounded_to_tf32(a[i / 8][i / 4 % 2][i % 4]);
#pragma unroll
            for (int eight = 0; eight < FEATURES / 8; ++eight) {
                const uint4 w = weight[(chunk * (FEATURES / 8) + eight) * LANES + lane];
#pragma unroll
                for (int i = 0; i < LANE_ROWS / 2; ++i) {
                    mma(sums[i][eight], a[i][0], w.x, w.y);
                    mma(sums[i][eight], a[i][1], w.z, w.w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < LANE_FEATURES; ++j) g[i][j] = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
    }

    // then(g, first row, whether all of its rows are there) of every tile. g of limbs is still to be multiplied by what
    // lay_limbs left for its feature.
    template <typename Then>
    __device__ void for_each(const Then& then) {
        long long row = row0;
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage) ask(stage);
        int stage = 0;
#pragma unroll 1
        for (; BACKWARDS ? row >= begin : row < end; row += step) {
            OfLane g;
            if constexpr (BY_FMA || BY_LIMBS)
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < LANE_FEATURES; ++j) g[i][j] = 0.0f;
#pragma unroll 1
            for (int at_part = 0; at_part < (BY_LIMBS ? parts : 1); ++at_part) {
                await_copies<STAGES - 1>();
                __syncwarp();
                const uint4* rows = ring + stage * TILE_WORDS;
                if constexpr (BY_LIMBS)
                    add_limbs(rows, at_part, g);
                else if constexpr (BY_FMA)
                    add_products(rows, g);
                else
                    multiply(rows, g);
                __syncwarp();  // all lanes have read
                ask(stage);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            then(g, row, row + ROWS <= end);
        }
        await_copies<0>();
    }
};
