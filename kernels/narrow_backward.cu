// narrow_backward: of many rows that are short, dg, dx = dg w and dw = dgᵀ x from one reading of dy, d and x; dg is never
// written. It takes the place of backward_dg and of two products. add_parts adds up what its CTAs made of dw.
//
//   dy (m, n) of T, row pitch dy_row      d (m, n) of T, row pitch ldd      x (m, k), row pitch ldx: rows on 16 bytes
//   weight (n, k), row pitch ldw, n <= FEATURES, k <= INPUTS      dx (m, k), contiguous, or null      dw (n, k), contiguous
//
// dg is made as backward_dg makes it, from the sums in the workspace, and rounded to T; the first CTA writes the gradients of
// size O. A CTA has narrow_rows rows, of which its TEAMS (narrow_products.cuh) take tiles of ROWS in turn, each through a ring
// of its own: a thread copies there the pieces of dy and d that it will make dg of, and puts dg in dy's place; its team then
// multiplies it, by the weight for dx, and by the rows of x for dw, whose sums stay in registers to the end.
//
// Moves dy, d and x once, dx once, and FEATURES INPUTS floats a CTA: at (1000000, 32, 32) in bfloat16 256 MB. backward_dg and
// two products move 448 MB.
#include "narrow_products.cuh"

constexpr int THREADS_HERE = TEAM * TEAMS;
constexpr int OF_DY = FEATURES / VEC, OF_X = INPUTS / VEC;                     // pieces of 16 bytes in a row
constexpr int DY = (OF_DY + 7) / 8 * 8 * ROWS, X = (OF_X + 7) / 8 * 8 * ROWS;  // pieces of a tile, in whole blocks
constexpr int TILE = 2 * DY + X;                                               // dy, then dg; d; x
constexpr int RINGS = 192 * 1024 / 16;
constexpr int TILES = RINGS / TEAMS / TILE;  // on their way or at hand
static_assert(TILES >= 2, "a tile on its way while another is multiplied");

extern __shared__ __align__(1024) uint4 narrow_shared[];

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1)
    narrow_backward(const __grid_constant__ Problem p, const T* dy, const T* d, const T* x, const T* w,
                    const double* saved, const char* workspace, float* partials, T* dx, void* to_bias, void* to_scale,
                    void* to_gamma, void* to_beta) {
    await_kernel_ahead();
    __shared__ alignas(16) G stored[DG_ROWS][FEATURES];
    T* weight = reinterpret_cast<T*>(narrow_shared + RINGS);
    const int team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    uint4* ring = narrow_shared + team * TILES * TILE;

    const long long begin = blockIdx.x * p.narrow_rows, end = min(begin + p.narrow_rows, p.m);
    const int of_dy = member % OF_DY, of_x = member % OF_X;  // a thread's columns, in pieces
    const int inside = static_cast<int>(max(min(p.n - of_dy * VEC, 1LL * VEC), 0LL));
    const int inside_x = static_cast<int>(max(min(p.k - of_x * VEC, 1LL * VEC), 0LL));
    constexpr int STEP = TEAM / OF_DY, STEP_X = TEAM / OF_X;
    const int first = member / OF_DY, first_x = member / OF_X;  // and rows, that far apart
    const auto ask = [&](int stage, long long row0) {
        uint4* to = ring + stage * TILE;
        const int left = static_cast<int>(max(min(end - row0, 1LL * ROWS), 0LL));
        const T* from_dy = dy + (row0 + first) * p.dy_row + of_dy * VEC;
        const T* from_d = d + (row0 + first) * p.ldd + of_dy * VEC;
        const T* from_x = x + (row0 + first_x) * p.ldx + of_x * VEC;
#pragma unroll
        for (int i = first; i < ROWS; i += STEP, from_dy += STEP * p.dy_row, from_d += STEP * p.ldd) {
            const int bytes = i < left ? inside * static_cast<int>(sizeof(T)) : 0;
            copy_async(to + place(i, of_dy), bytes > 0 ? from_dy : dy, bytes);
            copy_async(to + DY + place(i, of_dy), bytes > 0 ? from_d : d, bytes);
        }
#pragma unroll
        for (int i = first_x; i < ROWS; i += STEP_X, from_x += STEP_X * p.ldx) {
            const int bytes = i < left ? inside_x * static_cast<int>(sizeof(T)) : 0;
            copy_async(to + 2 * DY + place(i, of_x), bytes > 0 ? from_x : x, bytes);
        }
        commit_copies();
    };
    long long asked = begin + team * ROWS;
#pragma unroll 1
    for (int i = 0; i < TILES - 1; ++i, asked += TEAMS * ROWS) ask(i, asked);

    Products::lay_weight(p, w, weight);
    // dg of columns that there are not is zero: products take it
    for (int i = threadIdx.x; i < DG_ROWS * FEATURES; i += THREADS_HERE)
        if (i % FEATURES >= p.n) (&stored[0][0])[i] = G(0);
    // of as many columns as backward_dg has, so that what it makes where this kernel is not needed is the same
    double* scratch = reinterpret_cast<double*>(narrow_shared + RINGS - TILE);  // the last stage of the last team
    merge_splits(p, workspace, static_cast<int>(p.along) * VEC, 0, scratch, [&](long long c, int, double S, double E) {
        store_feature(p, Factors{saved, p.n, c}, S, E, blockIdx.x == 0, to_bias, to_scale, to_gamma, to_beta,
                      &stored[0][0], FEATURES, c);
    });
    if constexpr (!BY_FMA) fence_async();
    __syncthreads();
    ask(TILES - 1, asked);
    asked += TEAMS * ROWS;
    const BeforeY before(p, saved, of_dy * VEC, inside);

    Products products;
    int stage = 0;
#pragma unroll 1
    for (long long row0 = begin + team * ROWS; row0 < end; row0 += TEAMS * ROWS, asked += TEAMS * ROWS) {
        await_copies<TILES - 1>();
        const int left = static_cast<int>(min(end - row0, 1LL * ROWS));
        uint4* dg = ring + stage * TILE;
        const Coefficients of(before, &stored[0][0], FEATURES, of_dy * VEC);
#pragma unroll
        for (int i = first; i < ROWS; i += STEP) {
            uint4* at = dg + place(i, of_dy);
            Row row;  // by whole words: element by element the compiler reads them from the ring
            *reinterpret_cast<uint4*>(&row.dy) = *at;
            *reinterpret_cast<uint4*>(&row.d) = at[DY];
            const Vector<T, VEC> out = of.dg(row);
            *at = i < left ? *reinterpret_cast<const uint4*>(&out) : uint4{};  // zeros of dy are no zeros of dg
        }
        if constexpr (!BY_FMA) fence_async();
        team_sync(team);
        products.take(dg, dg + 2 * DY, weight, dx == nullptr ? dx : dx + row0 * p.k, left, static_cast<int>(p.k));
        team_sync(team);  // all have read
        ask(stage, asked);
        stage = stage + 1 == TILES ? 0 : stage + 1;
    }
    await_copies<0>();
    __syncthreads();  // all rings are free

    float* of_teams = reinterpret_cast<float*>(narrow_shared);  // [TEAMS][FEATURES][DW_ROW]
    products.leave(of_teams + team * FEATURES * DW_ROW);
    __syncthreads();
    float4* to = reinterpret_cast<float4*>(partials) + blockIdx.x * (FEATURES * INPUTS / 4);
#pragma unroll 2
    for (int i = threadIdx.x; i < FEATURES * INPUTS / 4; i += THREADS_HERE) {
        float4 sum = {};
#pragma unroll
        for (int j = 0; j < TEAMS; ++j) {
            const int row = j * FEATURES + i / (INPUTS / 4);
            const float4 part = *reinterpret_cast<const float4*>(of_teams + row * DW_ROW + i % (INPUTS / 4) * 4);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        to[i] = sum;
    }
}
