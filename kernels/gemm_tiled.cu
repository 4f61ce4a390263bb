// gemm_tiled: computes g = x w^T on the ordinary arithmetic units of any GPU. It serves calls that cuBLAS cannot serve
// (a dimension over 2^31), and is a yardstick that does not depend on a vendor's library.
//
//   x (m, k) of T, row pitch ldx      w (n, k) of T, row pitch ldw      g (m, n) of C, row pitch ldg, g on 16 bytes
//   T: float, __half, __nv_bfloat16 with G = float;  double with G = double;  C is G or T
//   With X_MN_MAJOR x lies as (k, m), pitch ldx; with W_MN_MAJOR w as (k, n). The backward computes dx = dg w (w
//   MN-major) and dw = dg^T x (both) with this kernel.
//
// An item of work is one BLOCK_M x BLOCK_N tile of g; a thread computes THREAD_M x THREAD_N of it in registers. Both
// operands pass through shared memory as [k][row], so that a thread reads its fragments as words of 16 bytes. The next
// BLOCK_K columns are loaded into registers while the current ones are multiplied; there are two buffers, and one
// barrier a step.
//
// Accuracy: a plain sum over k errs by about u sqrt(k/6) norm-wise. After every PROMOTE columns the partial sum is
// added to a second register tile, which reduces the error to about u sqrt(PROMOTE/6 + k/PROMOTE/6). float64 also keeps
// the rounding errors of these additions, which reduces the error to u sqrt(PROMOTE/6): with few features or many rows,
// cuBLAS errs less than a plain sum.
//
// Bytes moved: each x tile is read once for each column of tiles and each w tile once for each row of tiles: m n k
// (1/BLOCK_M + 1/BLOCK_N) elements; the minimum is (m + n) k. Tiles run down the columns, so that a wave shares its w
// tiles in L2.
#include "common/common.cuh"

#ifndef X_TYPE
#define X_TYPE float
#define G_TYPE float
#define BLOCK_M 128
#define BLOCK_N 128
#define THREAD_M 8
#define THREAD_N 8
#endif
#ifndef C_TYPE  // in the forward
#define C_TYPE G_TYPE
#define X_MN_MAJOR false
#define W_MN_MAJOR false
#endif
using T = X_TYPE;
using G = G_TYPE;
using C = C_TYPE;

struct GemmTiledProblem {
    long long m, n, k;        // rows of x, rows of w, terms of the sum
    long long ldx, ldw, ldg;  // row pitches in elements
    long long flags;          // FLAG_VECTOR_X, FLAG_VECTOR_W
};

constexpr int BLOCK_K = 16;
constexpr bool COMPENSATED = sizeof(G) == 8;
constexpr int PROMOTE = BLOCK_N < 32 ? 8 : BLOCK_K;
constexpr int THREADS_N = BLOCK_N / THREAD_N;
constexpr int THREADS = (BLOCK_M / THREAD_M) * THREADS_N;

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int LOAD = 16 / sizeof(T);                            // elements in one 16-byte load
constexpr int FRAG_M = smaller(THREAD_M, 16 / int(sizeof(G)));  // adjacent rows in one shared-memory read
constexpr int FRAG_N = smaller(THREAD_N, 16 / int(sizeof(G)));
constexpr int PAD = 16 / sizeof(G);  // keeps rows on 16 bytes and spreads the transposing stores over the banks

// One operand's ROWS x BLOCK_K block on its way from device memory to shared memory.
template <int ROWS, bool MN_MAJOR>
struct Stage {
    static constexpr int LOADS = ROWS * BLOCK_K / LOAD;
    static constexpr int RUN = (MN_MAJOR ? ROWS : BLOCK_K) / LOAD;  // loads that are adjacent in memory
    static constexpr int PER_THREAD = (LOADS + THREADS - 1) / THREADS;
    Vector<T, LOAD> held[PER_THREAD];

    __device__ void fetch(const T* p, long long rows, long long k, long long ld, long long k0, bool aligned) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int at = threadIdx.x + i * THREADS;
            const long long outer = at / RUN + (MN_MAJOR ? k0 : 0);
            const long long inner = at % RUN * LOAD + (MN_MAJOR ? 0 : k0), limit = MN_MAJOR ? rows : k;
            const bool inside = at < LOADS && outer < (MN_MAJOR ? k : rows);
            const T* from = p + outer * ld + inner;
            if (inside && aligned && inner + LOAD <= limit) {
                held[i] = *reinterpret_cast<const Vector<T, LOAD>*>(from);
            } else {
#pragma unroll
                for (int j = 0; j < LOAD; ++j) held[i].at[j] = inside && inner + j < limit ? from[j] : T(0.0f);
            }
        }
    }

    __device__ void store(G (*shared)[ROWS + PAD]) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (LOADS % THREADS != 0 && at >= LOADS) continue;
            const int outer = at / RUN, inner = at % RUN * LOAD;
#pragma unroll
            for (int j = 0; j < LOAD; ++j)
                shared[MN_MAJOR ? outer : inner + j][MN_MAJOR ? inner + j : outer] = to_float(held[i].at[j]);
        }
    }
};

constexpr int CTAS = sizeof(G) == 8 ? 2 : 1;  // CTAs on an SM; 16-bit and float32 tiles fit twice without this

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    gemm_tiled(const __grid_constant__ GemmTiledProblem p, const T* x, const T* w, C* g) {
    await_kernel_ahead();
    __shared__ alignas(16) G xs[2][BLOCK_K][BLOCK_M + PAD];
    __shared__ alignas(16) G ws[2][BLOCK_K][BLOCK_N + PAD];

    const long long tiles_m = (p.m + BLOCK_M - 1) / BLOCK_M, tiles_n = (p.n + BLOCK_N - 1) / BLOCK_N;
    for_each_item(tiles_m * tiles_n, [&](long long tile) {
        const long long m0 = tile % tiles_m * BLOCK_M, n0 = tile / tiles_m * BLOCK_N;
        const int tm = threadIdx.x / THREADS_N, tn = threadIdx.x % THREADS_N;

        const T* x_tile = x + m0 * (X_MN_MAJOR ? 1 : p.ldx);
        const T* w_tile = w + n0 * (W_MN_MAJOR ? 1 : p.ldw);
        const long long x_rows = p.m - m0, w_rows = p.n - n0;
        const bool x_aligned = p.flags & FLAG_VECTOR_X, w_aligned = p.flags & FLAG_VECTOR_W;

        Stage<BLOCK_M, X_MN_MAJOR> x_stage;
        Stage<BLOCK_N, W_MN_MAJOR> w_stage;
        G sum[THREAD_M][THREAD_N] = {};
        G low[THREAD_M][THREAD_N] = {};  // if COMPENSATED, what `sum` rounded off

        x_stage.fetch(x_tile, x_rows, p.k, p.ldx, 0, x_aligned);
        w_stage.fetch(w_tile, w_rows, p.k, p.ldw, 0, w_aligned);
        x_stage.store(xs[0]);
        w_stage.store(ws[0]);
        __syncthreads();

        int buffer = 0;
        for (long long k0 = 0; k0 < p.k; k0 += BLOCK_K, buffer ^= 1) {
            const bool more = k0 + BLOCK_K < p.k;
            if (more) {
                x_stage.fetch(x_tile, x_rows, p.k, p.ldx, k0 + BLOCK_K, x_aligned);
                w_stage.fetch(w_tile, w_rows, p.k, p.ldw, k0 + BLOCK_K, w_aligned);
            }
#pragma unroll
            for (int first = 0; first < BLOCK_K; first += PROMOTE) {
                G part[THREAD_M][THREAD_N] = {};
#pragma unroll
                for (int kk = first; kk < first + PROMOTE; ++kk) {
                    Vector<G, FRAG_M> xf[THREAD_M / FRAG_M];
                    Vector<G, FRAG_N> wf[THREAD_N / FRAG_N];
                    // A thread's fragments lie BLOCK / fragments apart, so that neighbouring threads read adjacent
                    // words without bank conflicts.
#pragma unroll
                    for (int f = 0; f < THREAD_M / FRAG_M; ++f)
                        xf[f] = *reinterpret_cast<const Vector<G, FRAG_M>*>(
                            &xs[buffer][kk][f * (BLOCK_M * FRAG_M / THREAD_M) + tm * FRAG_M]);
#pragma unroll
                    for (int f = 0; f < THREAD_N / FRAG_N; ++f)
                        wf[f] = *reinterpret_cast<const Vector<G, FRAG_N>*>(
                            &ws[buffer][kk][f * (BLOCK_N * FRAG_N / THREAD_N) + tn * FRAG_N]);
#pragma unroll
                    for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                        for (int j = 0; j < THREAD_N; ++j)
                            part[i][j] += xf[i / FRAG_M].at[i % FRAG_M] * wf[j / FRAG_N].at[j % FRAG_N];
                }
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                    for (int j = 0; j < THREAD_N; ++j) {
                        const G all = sum[i][j] + part[i][j];
                        if constexpr (COMPENSATED) low[i][j] += rest_of_sum(sum[i][j], part[i][j], all);
                        sum[i][j] = all;
                    }
            }
            if (more) {
                x_stage.store(xs[buffer ^ 1]);
                w_stage.store(ws[buffer ^ 1]);
                __syncthreads();
            }
        }

#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
            const long long row = m0 + i / FRAG_M * (BLOCK_M * FRAG_M / THREAD_M) + tm * FRAG_M + i % FRAG_M;
            if (row >= p.m) break;
#pragma unroll
            for (int f = 0; f < THREAD_N / FRAG_N; ++f) {
                const long long col = n0 + f * (BLOCK_N * FRAG_N / THREAD_N) + tn * FRAG_N;
                C* to = g + row * p.ldg + col;
                Vector<C, FRAG_N> out;
#pragma unroll
                for (int j = 0; j < FRAG_N; ++j) {
                    const G high = sum[i][f * FRAG_N + j];
                    from_float(COMPENSATED && isfinite(high) ? high + low[i][f * FRAG_N + j] : high, out.at[j]);
                }
                if (col + FRAG_N <= p.n && p.ldg % FRAG_N == 0) {
                    *reinterpret_cast<Vector<C, FRAG_N>*>(to) = out;
                } else {
#pragma unroll
                    for (int j = 0; j < FRAG_N; ++j)
                        if (col + j < p.n) to[j] = out.at[j];
                }
            }
        }
    });
}
