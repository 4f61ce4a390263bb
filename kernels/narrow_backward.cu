// narrow_backward: of many rows that are short, dg, dx = dg w and dw = dgᵀ x from one reading of dy, d and x; dg is never
// written. It takes the place of backward_dg and of two products. narrow_weight adds up what its CTAs made of dw.
//
//   dy (m, n) of T, row pitch dy_row      d (m, n) of T, row pitch ldd      x (m, k), row pitch ldx: rows on 16 bytes
//   weight (n, k), row pitch ldw, n <= FEATURES, k <= INPUTS      dx (m, k), contiguous, or null      dw (n, k), contiguous
//
// dg is made as backward_dg makes it, from the sums in the workspace, and rounded to T; the first CTA writes the gradients of
// size O. A CTA has narrow_rows rows. Each of its warps takes tiles of ROWS of them through a ring of its own: a lane copies
// there the pieces of dy and d that it will make dg of, and puts dg in dy's place; the warp then multiplies it, by the weight
// for dx, and by the rows of x for dw, whose sums stay in registers to the end. 16 bits by mma, float32 by FMAs.
//
// Moves dy, d and x once, dx once, and FEATURES INPUTS floats a CTA: at (1000000, 32, 32) in bfloat16 256 MB. backward_dg and two
// products move 448 MB.
#include "backward_columns.cuh"

#ifndef FEATURES
#define FEATURES 32
#define INPUTS 32
#endif

constexpr bool BY_FMA = sizeof(T) == 4;
constexpr int ROWS = BY_FMA ? 16 : 32;                      // of a tile
constexpr int OF_DY = FEATURES / VEC, OF_X = INPUTS / VEC;  // pieces of 16 bytes in a row
constexpr int TILE = ROWS * (2 * OF_DY + OF_X);             // pieces of a tile: dy, then dg; d; x
constexpr int TILES = 192 * 1024 / 16 / WARPS / TILE;       // on their way or at hand
static_assert(TILES >= 2, "a tile on its way while another is multiplied");

extern __shared__ __align__(128) uint4 narrow_shared[];

// Where piece `piece` of a row lies among the COUNT of it: pieces of 8 rows that are read at once meet in no bank.
template <int COUNT>
__device__ __forceinline__ int place(int row, int piece) {
    return row * COUNT + (piece ^ (COUNT == 4 ? row >> 1 & 3 : row & 7));
}

__device__ __forceinline__ unsigned address_of(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Four matrices of 8 rows of 16 bytes, whose rows lie where the lanes say; across: each turned.
template <bool ACROSS_ROWS>
__device__ __forceinline__ void load_matrices(unsigned (&a)[4], const uint4* row) {
    if constexpr (ACROSS_ROWS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(address_of(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(address_of(row))
                     : "memory");
}

__device__ __forceinline__ void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA(what)                                                               \
    asm(what " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (is_same<T, __half>)
        MMA("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32");
    else
        MMA("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
#undef MMA
}

// Input feature j of a lane's INPUTS / 4, as narrow_tiles.cuh has features.
__device__ constexpr int input_of(int quarter, int j) { return 4 * VEC * (j / VEC) + VEC * quarter + j % VEC; }

// The weight in shared memory: for FMAs [feature][input]; for mma, which sums over features, 8 bytes a lane of 16 features and
// 8 inputs, which are those of input_of. Zeros beyond n and k.
__device__ inline void lay_weight(const Problem& p, const T* w, T* laid) {
    for (int i = threadIdx.x; i < FEATURES * INPUTS; i += THREADS) {
        const int f = i / INPUTS, k = i % INPUTS;
        const T v = f < p.n && k < p.k ? w[f * p.ldw + k] : T(0.0f);
        if constexpr (BY_FMA) {
            laid[i] = v;
        } else {
            const int of = k % (4 * VEC), eight = k / (4 * VEC) * (VEC / 2) + of % VEC / 2;
            const int lane = (of / VEC * 2 + of % 2) * 4 + f % 8 / 2;
            laid[((f / 16 * (INPUTS / 8) + eight) * LANES + lane) * 4 + f % 16 / 8 * 2 + f % 2] = v;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    narrow_backward(const __grid_constant__ Problem p, const T* dy, const T* d, const T* x, const T* w,
                    const double* saved, const char* workspace, float* partials, T* dx, void* to_bias, void* to_scale,
                    void* to_gamma, void* to_beta) {
    await_kernel_ahead();
    constexpr int MERGE = 16;  // splits whose sums are on their way at once
    __shared__ alignas(16) G stored[DG_ROWS][FEATURES];
    T* weight = reinterpret_cast<T*>(narrow_shared);
    uint4* rings = narrow_shared + FEATURES * INPUTS * static_cast<int>(sizeof(T)) / 16;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    uint4* ring = rings + warp * TILES * TILE;

    const long long begin = blockIdx.x * p.narrow_rows, end = min(begin + p.narrow_rows, p.m);
    const int of_dy = lane % OF_DY, of_x = lane % OF_X;  // a lane's columns, in pieces
    const int inside = static_cast<int>(max(min(p.n - of_dy * VEC, 1LL * VEC), 0LL)) * static_cast<int>(sizeof(T));
    const int inside_x = static_cast<int>(max(min(p.k - of_x * VEC, 1LL * VEC), 0LL)) * static_cast<int>(sizeof(T));
    const auto ask = [&](int stage, long long row0) {
        uint4* to = ring + stage * TILE;
#pragma unroll
        for (int i = lane / OF_DY; i < ROWS; i += LANES / OF_DY) {
            const int bytes = row0 + i < end ? inside : 0;
            const long long row = bytes > 0 ? row0 + i : 0, col = bytes > 0 ? of_dy * VEC : 0;
            copy_async(to + place<OF_DY>(i, of_dy), dy + row * p.dy_row + col, bytes);
            copy_async(to + ROWS * OF_DY + place<OF_DY>(i, of_dy), d + row * p.ldd + col, bytes);
        }
#pragma unroll
        for (int i = lane / OF_X; i < ROWS; i += LANES / OF_X) {
            const int bytes = row0 + i < end ? inside_x : 0;
            const T* from = bytes > 0 ? x + (row0 + i) * p.ldx + of_x * VEC : x;
            copy_async(to + 2 * ROWS * OF_DY + place<OF_X>(i, of_x), from, bytes);
        }
        commit_copies();
    };
    long long asked = begin + warp * ROWS;
#pragma unroll 1
    for (int i = 0; i < TILES; ++i, asked += WARPS * ROWS) ask(i, asked);

    lay_weight(p, w, weight);
    if (threadIdx.x < FEATURES && threadIdx.x < p.n) {
        const double* sums = reinterpret_cast<const double*>(workspace) + threadIdx.x;
        double S = 0.0, E = 0.0;
        for (long long first = 0; first < p.splits; first += MERGE) {
            double S_of[MERGE], E_of[MERGE];
#pragma unroll
            for (int i = 0; i < MERGE; ++i) {
                const bool here = first + i < p.splits;
                S_of[i] = here ? sums[(first + i) * 2 * p.n] : 0.0;
                E_of[i] = here ? sums[((first + i) * 2 + 1) * p.n] : 0.0;
            }
#pragma unroll
            for (int i = 0; i < MERGE; ++i) {
                S += S_of[i];
                E += E_of[i];
            }
        }
        store_feature(p, saved, threadIdx.x, S, E, blockIdx.x == 0, to_bias, to_scale, to_gamma, to_beta, &stored[0][0],
                      FEATURES, threadIdx.x);
    }
    __syncthreads();
    const Coefficients of(p, saved, &stored[0][0], FEATURES, of_dy * VEC, of_dy * VEC,
                          inside / static_cast<int>(sizeof(T)));

    // 16 bits: [features by 16][inputs by 8][mma's]; float32: FEATURES / 8 features of lane / 4 by INPUTS / 4 inputs.
    float dw[FEATURES * INPUTS / LANES] = {};
    int stage = 0;
#pragma unroll 1
    for (long long row0 = begin + warp * ROWS; row0 < end; row0 += WARPS * ROWS, asked += WARPS * ROWS) {
        await_copies<TILES - 1>();
        uint4* dg = ring + stage * TILE;
        const uint4* rows_of_x = dg + 2 * ROWS * OF_DY;
#pragma unroll
        for (int i = lane / OF_DY; i < ROWS; i += LANES / OF_DY) {
            uint4* at = dg + place<OF_DY>(i, of_dy);
            Vector<T, VEC> out = of.dg(*reinterpret_cast<const Vector<T, VEC>*>(at),
                                       *reinterpret_cast<const Vector<T, VEC>*>(at + ROWS * OF_DY));
            if (row0 + i >= end) out = {};  // zeros of dy are no zeros of dg
            *at = *reinterpret_cast<const uint4*>(&out);
        }
        __syncwarp();

        if constexpr (BY_FMA) {
            constexpr int FS = FEATURES / 8, KS = INPUTS / 4;
            const int f0 = lane / 4, k0 = lane % 4;
            // dx: rows lane / 4 and 8 more, inputs input_of(lane % 4, ...)
            float sums[2][KS] = {};
#pragma unroll 2
            for (int piece = 0; piece < (dx == nullptr ? 0 : OF_DY); ++piece) {
                Vector<float, 4> a[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    a[i] = *reinterpret_cast<const Vector<float, 4>*>(dg + place<OF_DY>(f0 + 8 * i, piece));
#pragma unroll
                for (int l = 0; l < 4; ++l)
#pragma unroll
                    for (int j = 0; j < KS; j += 4) {
                        const auto b = *reinterpret_cast<const Vector<float, 4>*>(
                            reinterpret_cast<const float*>(weight) + (piece * 4 + l) * INPUTS + input_of(k0, j));
#pragma unroll
                        for (int i = 0; i < 2; ++i)
#pragma unroll
                            for (int h = 0; h < 4; ++h) sums[i][j + h] = fmaf(a[i].at[l], b.at[h], sums[i][j + h]);
                    }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long long row = row0 + f0 + 8 * i;
                if (row >= end || dx == nullptr) continue;
#pragma unroll
                for (int j = 0; j < KS; j += 4)
#pragma unroll
                    for (int h = 0; h < 4; ++h)
                        if (input_of(k0, j) + h < p.k)
                            reinterpret_cast<float*>(dx)[row * p.k + input_of(k0, j) + h] = sums[i][j + h];
            }
            // dw: pieces of 4 features and of 4 inputs, 8 and 4 apart
#pragma unroll 2
            for (int row = 0; row < ROWS; ++row) {
                Vector<float, 4> b[KS / 4];
#pragma unroll
                for (int j = 0; j < KS / 4; ++j)
                    b[j] = *reinterpret_cast<const Vector<float, 4>*>(rows_of_x + place<OF_X>(row, k0 + 4 * j));
#pragma unroll
                for (int i = 0; i < FS / 4; ++i) {
                    const auto a = *reinterpret_cast<const Vector<float, 4>*>(dg + place<OF_DY>(row, f0 + 8 * i));
#pragma unroll
                    for (int l = 0; l < 4; ++l)
#pragma unroll
                        for (int j = 0; j < KS; ++j)
                            dw[(4 * i + l) * KS + j] = fmaf(a.at[l], b[j / 4].at[j % 4], dw[(4 * i + l) * KS + j]);
                }
            }
        } else {
            // dx
            const uint2* laid = reinterpret_cast<const uint2*>(weight) + lane;
#pragma unroll
            for (int half = 0; half < ROWS / 16 && dx != nullptr; ++half) {
                float sums[INPUTS / 8][4] = {};
#pragma unroll
                for (int step = 0; step < FEATURES / 16; ++step) {
                    unsigned a[4];
                    load_matrices<false>(a, dg + place<OF_DY>(half * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
                    for (int eight = 0; eight < INPUTS / 8; ++eight) {
                        const uint2 b = laid[(step * (INPUTS / 8) + eight) * LANES];
                        mma(sums[eight], a, b.x, b.y);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const long long row = row0 + half * 16 + lane / 4 + 8 * i;
                    if (row >= end) continue;
#pragma unroll
                    for (int j = 0; j < INPUTS / 4; j += VEC) {
                        const int at = input_of(lane % 4, j);
                        Vector<T, VEC> out;
#pragma unroll
                        for (int h = 0; h < VEC; ++h) from_float(sums[(j + h) / 2][2 * i + (j + h) % 2], out.at[h]);
                        if (at + VEC <= p.k && p.k % VEC == 0) {
                            store_whole(dx + row * p.k + at, out);
                        } else {
#pragma unroll
                            for (int h = 0; h < VEC; ++h)
                                if (at + h < p.k) dx[row * p.k + at + h] = out.at[h];
                        }
                    }
                }
            }
            // dw
#pragma unroll
            for (int half = 0; half < ROWS / 16; ++half) {
                unsigned b[INPUTS / 16][4];
#pragma unroll
                for (int i = 0; i < INPUTS / 16; ++i)
                    load_matrices<true>(b[i], rows_of_x + place<OF_X>(half * 16 + lane % 16, 2 * i + lane / 16));
#pragma unroll
                for (int i = 0; i < FEATURES / 16; ++i) {
                    unsigned a[4];
                    load_matrices<true>(a,
                                        dg + place<OF_DY>(half * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
#pragma unroll
                    for (int j = 0; j < INPUTS / 8; ++j) {
                        float (&sum)[4] = *reinterpret_cast<float (*)[4]>(dw + (i * (INPUTS / 8) + j) * 4);
                        mma(sum, a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                    }
                }
            }
        }
        __syncwarp();  // all lanes have read
        ask(stage, asked);
        stage = stage + 1 == TILES ? 0 : stage + 1;
    }
    await_copies<0>();
    __syncthreads();  // all rings are free

    float* of_warps = reinterpret_cast<float*>(rings);  // [WARPS][FEATURES][INPUTS]
    float* own = of_warps + warp * FEATURES * INPUTS;
    if constexpr (BY_FMA) {
        constexpr int FS = FEATURES / 8, KS = INPUTS / 4;
#pragma unroll
        for (int i = 0; i < FS; ++i)
#pragma unroll
            for (int j = 0; j < KS; ++j)
                own[(i / 4 * 32 + lane / 4 * 4 + i % 4) * INPUTS + j / 4 * 16 + lane % 4 * 4 + j % 4] = dw[i * KS + j];
    } else {
#pragma unroll
        for (int i = 0; i < FEATURES / 16; ++i)
#pragma unroll
            for (int j = 0; j < INPUTS / 8; ++j)
#pragma unroll
                for (int h = 0; h < 4; ++h)
                    own[(i * 16 + lane / 4 + h / 2 * 8) * INPUTS + j * 8 + lane % 4 * 2 + h % 2] =
                        dw[(i * (INPUTS / 8) + j) * 4 + h];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < FEATURES * INPUTS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < WARPS; ++j) sum += of_warps[j * FEATURES * INPUTS + i];
        partials[1LL * blockIdx.x * FEATURES * INPUTS + i] = sum;
    }
}

// dw of the sums of `splits` CTAs, in float64 and in their order; eight threads share an element.
extern "C" __global__ void __launch_bounds__(THREADS)
    narrow_weight(const __grid_constant__ Problem p, const float* partials, void* to_weight) {
    await_kernel_ahead();
    constexpr int SHARE = 8, AT_ONCE = THREADS / SHARE;
    __shared__ double sums[THREADS];
    const int i = blockIdx.x * AT_ONCE + threadIdx.x % AT_ONCE, part = threadIdx.x / AT_ONCE;
    double sum = 0.0;
#pragma unroll 8
    for (long long j = part; j < p.narrow_ctas; j += SHARE) sum += partials[j * FEATURES * INPUTS + i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    const int f = i / INPUTS, k = i % INPUTS;
    if (part > 0 || f >= p.n || k >= p.k) return;
    for (int j = 1; j < SHARE; ++j) sum += sums[threadIdx.x + j * AT_ONCE];
    store_vector(to_weight, p.to_weight, f * p.k + k, sum);
}
