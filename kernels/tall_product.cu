// tall_product: computes c = aᵀ b for float32 matrices of many rows, through limbs that the kernel itself makes. It
// serves the backward's dw = dgᵀ x. Each CTA computes the partial product of its rows; reduce_split_k adds them up.
//
//   a (m, n), row pitch lda      b (m, k), row pitch ldb; adjacent columns
//   partials (CTAs of a block of c, n, k), with n and k rounded up to 128
//
// Threads. A CTA has a block of 128 by 128 of c, and `rows` rows of a and b, which it takes 32 at a time (a k-tile).
// Half of its threads are producers, one for each column of a and b. They copy rows to shared memory, 16 bytes at a
// time if rows start on 16 bytes. Then each producer reads 32 elements of its column, scales them by a power of two
// with which float16 can hold all elements of the column so far, and writes their limbs K-major, as wgmma reads them.
// Two warpgroups of consumers each multiply 64 columns of a by all columns of b. They add three of the four products of
// limbs, the small ones first, from zero. The sum of a k-tile is added to c in float32 (docs/design/limbs.md), in units
// of the scales. If a producer had to lower its scale, the consumers first rescale their sums.
//
// Bytes moved. a is read once for each 128 columns of b, and b once for each 128 columns of a (through L2 if there are
// several); each CTA writes 64 KB. At (802816, 128, 128) that is 831 MB. split_tiles and forward_sm90 would move 3.3
// GB.
#include "common/async_copy.cuh"
#include "common/common.cuh"
#include "common/limbs.cuh"
#include "common/warp_roles.cuh"
#include "sm90/wgmma.cuh"

struct TallProductProblem {
    long long m, n, k;
    long long lda, ldb;
    long long rows;   // rows of a CTA
    long long flags;  // FLAG_VECTOR_X: rows of a and b start on 16 bytes
};

constexpr int SIDE = 128;          // how many columns of a, and of b, a CTA has
constexpr int COLUMNS = 2 * SIDE;  // one for each producer
constexpr int BLOCK_K = 32;        // rows that a CTA takes at a time
constexpr int LANES = 32;
constexpr int CONSUMERS = 256;  // threads
constexpr int THREADS = CONSUMERS + COLUMNS;
constexpr int WORDS = 8;          // of 16 bytes in a column of a k-tile: first limbs, then second limbs
constexpr int STAGES = 3;         // k-tiles of limbs
constexpr int COPY_STAGES = 3;    // k-tiles that are being copied or read
constexpr float MOST = 65504.0f;  // the largest float16
constexpr int PRODUCER_REGISTERS = 88, CONSUMER_REGISTERS = 168;

struct Shared {
    uint4 limbs[STAGES][COLUMNS * WORDS];
    float rows[COPY_STAGES][BLOCK_K][COLUMNS];
    float lower[STAGES][COLUMNS];                      // each column's scale, divided by that of the k-tile before
    alignas(8) bool lowered[STAGES][COLUMNS / LANES];  // whether any column of a warp has a new scale
    float back[COLUMNS];                               // the factors that undo the scales at the end
    unsigned long long full[STAGES], empty[STAGES];
};

constexpr int SHARED_BYTES = 198 * 1024;  // gsbn/_plan/variants.py reads this, SIDE and THREADS
static_assert(sizeof(Shared) <= SHARED_BYTES, "a launch gives less than is used");

// Arrives once for a warp, after all of its lanes have written or read.
__device__ __forceinline__ void arrive(unsigned long long* barrier) {
    __syncwarp();
    if (threadIdx.x % LANES == 0) mbar_arrive(barrier);
}

// The rows of a CTA, in its columns of a and b, and how they are copied.
struct RowCopies {
    const float *a, *b;
    long long lda, ldb;
    int of_a, of_b;  // columns that exist
    int rows, k_tiles;

    // Starts the copies of a k-tile; each producer issues some of them. Absent rows become zeros. Absent columns are
    // not copied, because results that come from them are not read.
    template <bool WHOLE_WORDS>
    __device__ __forceinline__ void issue_copies(Shared& sh, int k_tile) const {
        constexpr int WIDTH = WHOLE_WORDS ? 4 : 1, ROW_THREADS = COLUMNS / WIDTH, STEP = COLUMNS / ROW_THREADS;
        const int producer = threadIdx.x - CONSUMERS, column = producer % ROW_THREADS * WIDTH,
                  row = producer / ROW_THREADS;
        const bool from_a = column < SIDE;
        const int bytes = 4 * min(from_a ? of_a - column : of_b - (column - SIDE), WIDTH);
        if (k_tile < k_tiles && bytes > 0) {
            const long long pitch = from_a ? lda : ldb;
            const float* from = (from_a ? a + column : b + (column - SIDE)) + (k_tile * BLOCK_K + row) * pitch;
            const int left = rows - k_tile * BLOCK_K;
            float* to = &sh.rows[k_tile % COPY_STAGES][row][column];
            const auto copy = [&](int i, const float* at, int inside) {
                if constexpr (WHOLE_WORDS)
                    copy_async(reinterpret_cast<uint4*>(to + i * COLUMNS), at, inside);
                else
                    copy_async(to + i * COLUMNS, at, inside);
            };
            if (left >= BLOCK_K) {
#pragma unroll
                for (int i = 0; i < BLOCK_K; i += STEP, from += STEP * pitch) copy(i, from, bytes);
            } else {
#pragma unroll 1
                for (int i = 0; i < BLOCK_K; i += STEP, from += STEP * pitch)
                    copy(i, row + i < left ? from : a, row + i < left ? bytes : 0);
            }
        }
        commit_copies();
    }
};

__device__ __forceinline__ void producers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(COLUMNS) : "memory"); }

template <bool WHOLE_WORDS>
__device__ __forceinline__ void make_limbs(Shared& sh, const RowCopies& rows) {
    const int column = threadIdx.x - CONSUMERS;
    const bool of_a = column < SIDE;
    // whether at least one column of the warp exists
    const bool there = column / LANES * LANES % SIDE < (of_a ? rows.of_a : rows.of_b);
    for (int i = 0; i < COPY_STAGES - 1; ++i) rows.issue_copies<WHOLE_WORDS>(sh, i);
    LimbScale scale(0.0f);
    int stage = 0, phase = 1;
#pragma unroll 1
    for (int k_tile = 0; k_tile < rows.k_tiles; ++k_tile) {
        await_copies<COPY_STAGES - 2>();
        producers_sync();  // the k-tile has arrived, and all producers have read the k-tile before
        rows.issue_copies<WHOLE_WORDS>(sh, k_tile + COPY_STAGES - 1);
        const float* from = &sh.rows[k_tile % COPY_STAGES][0][column];
        float v[BLOCK_K], top = 0.0f;
        if (there) {
#pragma unroll
            for (int i = 0; i < BLOCK_K; ++i) v[i] = from[i * COLUMNS];
#pragma unroll
            for (int i = 0; i < BLOCK_K; ++i) top = fmaxf(top, fabsf(v[i]));
        }
        mbar_wait(&sh.empty[stage], phase);
        bool lowered = false;
        if (there) {
            const bool lowers = k_tile == 0 || top * scale.there >= MOST;
            const float before = scale.there;
            if (lowers) scale = LimbScale(top);
            sh.lower[stage][column] = lowers ? scale.there / before : 1.0f;
            uint4* limbs = sh.limbs[stage] + column * WORDS;
#pragma unroll
            for (int word = 0; word < WORDS / 2; ++word) {
                unsigned high[4], low[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    split(v[8 * word + 2 * i] * scale.there, v[8 * word + 2 * i + 1] * scale.there, high[i], low[i]);
                limbs[word ^ column % 8] = make_uint4(high[0], high[1], high[2], high[3]);
                limbs[(word + WORDS / 2) ^ column % 8] = make_uint4(low[0], low[1], low[2], low[3]);
            }
            fence_async();
            if (k_tile + 1 == rows.k_tiles) sh.back[column] = of_a ? scale.back : scale.back * 0x1p28f;
            lowered = __any_sync(~0u, lowers);
        }
        if (column % LANES == 0) sh.lowered[stage][column / LANES] = lowered;
        arrive(&sh.full[stage]);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    await_copies<0>();
}

// Multiplies a lane's elements of c by a factor for the row and one for the column.
template <int N>
__device__ __forceinline__ void rescale(const float* factors, float (&c)[SIDE / 2]) {
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES * 16 + lane / 4;
    const float of_row[2] = {factors[row], factors[row + 8]};
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const float2 of_column =
            *reinterpret_cast<const float2*>(factors + SIDE + 8 * j + Accumulator::first_column(lane));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float &first = c[Accumulator::at(j, h, 0)], &second = c[Accumulator::at(j, h, 1)];
            first = first * of_row[h] * of_column.x;
            second = second * of_row[h] * of_column.y;
        }
    }
}

// Computes the warpgroup's 64 rows of c, in the first N columns of the block.
template <int N>
__device__ __forceinline__ void multiply(Shared& sh, int k_tiles, float (&c)[SIDE / 2]) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;  // a warp has 16 rows of c
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        mbar_wait(&sh.full[stage], phase);
        const uint4* a = sh.limbs[stage] + (warp * 16 + lane % 16) * WORDS;
        unsigned of_a[2][2][4];  // [first or second limbs][16 of k]
#pragma unroll
        for (int i = 0; i < 4; ++i) load_matrices(of_a[i / 2][i % 2], a + ((2 * i + lane / 16) ^ lane % 8));
        const unsigned long long b = operand_descriptor(smem(sh.limbs[stage] + SIDE * WORDS), 0);
        float sums[N / 2];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 6; ++i)  // second by first limbs, first by second, first by first
            wgmma_rs(sums, of_a[i < 2][i % 2], b + 2 * (i % 2) + (i / 2 == 1 ? WORDS / 2 : 0), i);
        wgmma_commit();
        if (k_tile > 0 && *reinterpret_cast<const unsigned long long*>(sh.lowered[stage]) != 0)
            rescale<N>(sh.lower[stage], c);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < N / 2; ++i) c[i] += sums[i];
        arrive(&sh.empty[stage]);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    rescale<N>(sh.back, c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tall_product(const __grid_constant__ TallProductProblem p, const float* a, const float* b, float* partials) {
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbar_init(&sh.full[i], COLUMNS / LANES);
            mbar_init(&sh.empty[i], CONSUMERS / LANES);
        }
    }
    __syncthreads();
    await_kernel_ahead();

    const unsigned wide = unsigned((p.k + SIDE - 1) / SIDE);  // blocks in a row of blocks of c
    const unsigned blocks = unsigned((p.n + SIDE - 1) / SIDE) * wide;
    const long long n0 = blockIdx.x % blocks / wide * SIDE, k0 = blockIdx.x % blocks % wide * SIDE;
    const long long part = blockIdx.x / blocks, first = part * p.rows;
    const int of_b = int(min(p.k - k0, 1LL * SIDE));
    const int rows = int(min(p.rows, p.m - first)), k_tiles = (rows + BLOCK_K - 1) / BLOCK_K;
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        const RowCopies all = {a + first * p.lda + n0,
                               b + first * p.ldb + k0,
                               p.lda,
                               p.ldb,
                               int(min(p.n - n0, 1LL * SIDE)),
                               of_b,
                               rows,
                               k_tiles};
        if (p.flags & FLAG_VECTOR_X)
            make_limbs<true>(sh, all);
        else
            make_limbs<false>(sh, all);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    float c[SIDE / 2] = {};
    if (of_b > SIDE / 2)
        multiply<SIDE>(sh, k_tiles, c);
    else
        multiply<SIDE / 2>(sh, k_tiles, c);
    const long long pitch = wide * SIDE;
    float* to = partials + part * blocks * SIDE * SIDE + (n0 + warp * 16 + lane / 4) * pitch + k0 +
                Accumulator::first_column(lane);
#pragma unroll
    for (int j = 0; j < SIDE / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(to + 8 * h * pitch + 8 * j) =
                make_float2(c[Accumulator::at(j, h, 0)], c[Accumulator::at(j, h, 1)]);
}
