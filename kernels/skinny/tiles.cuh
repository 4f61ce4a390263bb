// How the skinny kernels compute g = x wᵀ of short rows, in tiles of ROWS rows by FEATURES features, and how they store
// rows of any layout. No kernels.
//
// A warp computes a tile by mma (m16n8, sums in float32) or by FMAs in IEEE float32, and waits for no other warp. With
// limbs, four warps compute a tile together (skinny/limbs.cuh). In every case a lane ends with the same elements of g:
// LANE_ROWS rows, 8 apart, and in each of them WORD adjacent features of every 4 WORD. The tensor core gives a lane
// pairs of features that lie 8 apart; load_weight permutes the features so that they become adjacent.
#pragma once
#include "common/row_words.cuh"
#include "skinny/limbs.cuh"

// Writes FEATURES rows of the weight to shared memory, from row `first` on. For FMAs the layout is [k][feature]. For
// mma, a word has what a lane needs for 8 features and one chunk: 4 bytes from every 16 bytes of its feature's row.
// Beyond n and k there are zeros.
template <typename P>
__device__ inline void load_weight(const P& p, const T* w, int first, uint4* weight) {
    constexpr int PIECES = 4 * CHUNKS;  // pieces of a row, 16 bytes each
    for (int i = threadIdx.x; i < FEATURES * PIECES; i += CTA) {
        const int feature = i / PIECES, piece = i % PIECES, k = piece * WORD;
        const T* from = w + (first + feature) * p.ldw + k;
        const int inside = first + feature < p.n ? int(max(min(p.k - k, 1LL * WORD), 0LL)) : 0;
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
            const int column = place / WORD * 2 + place % 2;  // number among the eight of an mma
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

__device__ inline void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA(what)                                                               \
    asm(what " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (ELEMENT == ELEMENT_BFLOAT16) MMA("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
    if constexpr (ELEMENT == ELEMENT_FLOAT16) MMA("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32");
    if constexpr (ELEMENT == ELEMENT_TF32) MMA("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32");
#undef MMA
}

using Word = Vector<T, WORD>;  // what a lane reads or writes at once

// A lane's elements of a tile: [i][j] is row lane / 4 + 8 i and feature feature_of(lane % 4, j).
using OfLane = float[LANE_ROWS][LANE_FEATURES];

// The tiles of a warp, one after the other: every WARPS-th tile of its CTA's rows, which are p.stats_rows rows from cta
// * p.stats_rows on. If BACKWARDS, the order is from the last tile to the first. The rows come through the warp's own
// pipeline; the constructor starts the first copies. All warps have equally many tiles; some warps have a last tile
// without rows.
template <bool BACKWARDS>
struct Tiles {
    const T* x;
    const uint4* weight;
    uint4* pipeline;
    const T* from;         // the next part of a tile to copy, at this lane's first row and 16 bytes
    long long row0;        // the first row of that tile
    long long first;       // the first row of the warp's first tile
    int part, parts;       // the number of that part; how many parts a tile has
    long long begin, end;  // the CTA's rows
    int tiles;             // how many tiles a warp has
    long long k;           // elements of a row
    long long ldx, step;   // row pitch; rows from tile to tile
    int bytes, lane;       // bytes: how many a row has from this lane's first 16 on
    bool whole;            // every lane has all of its 16 bytes

    template <typename P>
    __device__ Tiles(const P& p, const T* x, unsigned cta, const uint4* weight, uint4* pipelines)
        : x(x),
          weight(weight),
          part(0),
          parts(parts_of(p)),
          begin(cta * p.stats_rows),
          end(min(begin + p.stats_rows, p.m)),
          tiles(int((end - begin + BLOCK_ROWS - 1) / BLOCK_ROWS)),
          k(p.k),
          ldx(p.ldx),
          step(BACKWARDS ? -BLOCK_ROWS : BLOCK_ROWS),
          lane(threadIdx.x % LANES),
          whole(p.k == parts * CHUNKS * CHUNK) {
        const int warp = threadIdx.x / LANES, quarter = lane % 4;
        pipeline = pipelines + warp * STAGES * TILE_WORDS;
        row0 = begin + warp * ROWS + (BACKWARDS ? 1LL * BLOCK_ROWS * (tiles - 1) : 0);
        bytes = int(p.k - quarter * WORD) * int(sizeof(T));
        from = x + (row0 + lane / 4) * ldx + quarter * WORD;
        first = row0;
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage) issue_copies(stage);
    }

    // The place of a quarter (16 bytes) of a row, among those of 8 rows. Rows that are read together lie in different
    // banks.
    __device__ static int place(int row, int quarter) { return row * 4 + (quarter ^ (row >> 1 & 3)); }

    __device__ void issue_copies(int stage) {
        uint4* to = pipeline + stage * TILE_WORDS + place(lane / 4, lane % 4);
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

    // g += x wᵀ by FMAs in IEEE float32.
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

    // g = x wᵀ by mma.
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

    // Calls then(g, first row, whether all rows exist) for every tile. With limbs, the caller must still multiply g by
    // each feature's `back` (load_limbs); `centres`, if not null, are subtracted from the columns of x.
    template <typename Then>
    __device__ __forceinline__ void for_each(const Then& then, const float* centres = nullptr) {
        long long row = first;
        int stage = 0;
        const auto taken = [&] {  // this lane has read its words of a part
            issue_copies(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        };
        [[maybe_unused]] const OrderedBarrier turns;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile, row += step) {
            OfLane g;
            if constexpr (BY_FMA || BY_LIMBS)
#pragma unroll
                for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < LANE_FEATURES; ++j) g[i][j] = 0.0f;
            if constexpr (BY_LIMBS) {
#pragma unroll 1
                for (int at_part = 0; at_part < parts; ++at_part) {
                    await_copies<STAGES - 1>();
                    const uint4* const rows = pipeline + stage * TILE_WORDS + place(lane / 4, lane % 4);
                    const int column = at_part * (CHUNKS * CHUNK) + lane % 4 * WORD;
                    const LimbsOfX limbs(rows, centres == nullptr ? nullptr : centres + column);
                    float sums[2 * LANE_FEATURES];
                    if (parts < 0) __trap();  // without a branch here, the compiler makes limbs behind the barrier
                    turns.await();
                    limbs.begin(sums, weight + at_part * LIMB_WORDS);
                    turns.pass();
                    taken();
                    limbs.end(sums, g);
                }
            } else {
                await_copies<STAGES - 1>();
                __syncwarp();
                const uint4* rows = pipeline + stage * TILE_WORDS;
                if constexpr (BY_FMA)
                    add_products(rows, g);
                else
                    multiply(rows, g);
                __syncwarp();  // all lanes have read
                taken();
            }
            then(g, row, row + ROWS <= end);
        }
        if constexpr (BY_LIMBS) turns.end();
        await_copies<0>();
    }
};

// Stores rows of a tile word by word, from the first word of a row to the last, to rows of n elements that may start
// anywhere, and whose columns lie `col` elements apart. All lanes of a warp call `store` for each of a lane's words:
// its row i, feature `at` of the CTA.
struct AnyRows {
    long long n, col;
    Word ahead[LANE_ROWS] = {};  // the rotated word of the last lane of the row, which the first lane needs next

    // `left`: how many elements of the row exist from `to` on; 0 if there is no such row.
    __device__ __forceinline__ void store(int i, int at, T* to, const Word& v, int left) {
        Straddle<T, WORD> straddle;
        if (col == 1 && n >= LEAST_WORDS * WORD) {
            const int lane = threadIdx.x % LANES, from = lane % 4 == 0 ? lane + 3 : lane - 1;
            const unsigned shift = unsigned(size_t(to) % sizeof(Word));
            const Word own = rotated(v, shift), given = shuffled(~0u, own, from);
            straddle = Straddle<T, WORD>(shift, at > 0, min(left, FEATURES - at));
            if (straddle.stores_first) store_joined(to, chosen(lane % 4 == 0, ahead[i], given), own, shift);
            ahead[i] = given;
        }
        straddle.store_rest(to, v, left, col);
    }
};

// The work of a CTA: its block of FEATURES features, the first feature of the block, and the CTA's number among the
// p.splits CTAs of the block.
struct CtaWork {
    unsigned block, cta;
    int first;
    template <typename P>
    __device__ explicit CtaWork(const P& p) {
        const unsigned blocks = unsigned((p.n + FEATURES - 1) / FEATURES);
        block = blockIdx.x % blocks;
        cta = blockIdx.x / blocks;
        first = int(block) * FEATURES;
    }
};

// Undoes the scaling of limbs.
__device__ __forceinline__ void bring_back(OfLane& g, int lane, const float* backs) {
    if constexpr (BY_LIMBS)
#pragma unroll
        for (int j = 0; j < LANE_FEATURES; ++j)
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i) g[i][j] *= backs[feature_of(lane % 4, j)];
}

template <typename P>
__device__ inline void load_operand(const P& p, const T* w, int first, uint4* weight, float* backs) {
    if constexpr (BY_LIMBS) {
        if (p.flags & FLAG_VECTOR_W && p.k % 4 == 0)
            load_limbs<true>(p, w, first, weight, backs);
        else
            load_limbs<false>(p, w, first, weight, backs);
    } else
        load_weight(p, w, first, weight);
}
