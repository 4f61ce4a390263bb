// skinny_backward: computes dg, dx = dg w and dw = dgᵀ x for many short rows. It reads dy, d and x once and never
// writes dg. It replaces backward_dg and two products. Each CTA makes a part of dw; reduce_split_k adds the parts.
//
//   dy (m, n) of T, row pitch dy_row      d (m, n) of T, row pitch ldd      x (m, k), row pitch ldx: rows on 16 bytes
//   weight (n, k), row pitch ldw, n <= FEATURES CLUSTER, k <= INPUTS      dx (m, k), contiguous, or null
//   partials (CTAs or clusters, features, INPUTS), float32: each CTA's or cluster's part of dw (n, k)
//
// dg is computed as backward_dg computes it, from the sums in the workspace, and rounded to T. The first CTA, or
// cluster, writes the gradients of size O.
//
// Threads. A CTA has skinny_rows rows and TEAMS teams of threads (skinny/products.cuh). The teams take turns with tiles
// of ROWS rows, and each team has its own pipeline. A thread copies pieces of dy and d, computes dg from them, and
// stores dg where dy was. The team then multiplies dg by the weight, for dx, and by the rows of x, for dw. The sums of
// dw stay in registers until the end. The CTAs of a cluster divide the features: each has skinny_features. They work on
// the same rows at the same time and exchange their parts of dx.
//
// With REMAT the forward stored no deviations, and d is null. A team multiplies a tile of x by the weight, which gives
// g in registers, and computes dg from g - mean in float32 (skinny/remat.cuh). skinny_sums then runs ahead of this
// kernel, in place of backward_sums.
//
// The kernel takes the last rows first: backward_sums took the first rows first, so L2 still holds the end. While
// backward_sums still runs, this kernel may load everything except the sums.
//
// Bytes moved. It reads dy, d and x once (a cluster reads x once from memory; its other CTAs read x from L2). It writes
// dx once, and FEATURES INPUTS floats for each CTA. At (1000000, 32, 32) in bfloat16 that is 256 MB. backward_dg and
// two products move 448 MB. With REMAT it does not read d.
#include "skinny/pipeline.cuh"
#if REMAT
#include "skinny/remat.cuh"
#endif

// parts of dx from other CTAs lie where d and x were or, without d, where dg was
constexpr int ROOM_AT = REMAT ? 0 : DY;
static_assert(CLUSTER == 1 || (TILE - ROOM_AT) * 16 >= ROWS * INPUTS * 4, "there is room for them");

// With two warpgroups the coefficients have no shared memory of their own: each thread keeps those of its columns.
constexpr bool IN_REGISTERS = WARPGROUPS > 1 && !REMAT;

extern __shared__ __align__(1024) uint4 skinny_shared[];

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1) IN_CLUSTERS
    skinny_backward(const __grid_constant__ BackwardProblem p, const T* dy, const T* d, const T* x, const T* w,
                    const double* saved, const char* workspace, float* partials, T* dx, void* to_bias, void* to_scale,
                    void* to_gamma, void* to_beta) {
    __shared__ alignas(16) G coefficients[IN_REGISTERS ? 1 : DG_ROWS * FEATURES];
    __shared__ ClusterBarriers barriers[TEAMS];
    T* weight = reinterpret_cast<T*>(skinny_shared + PIPELINE_WORDS);
    const int team = uniform(threadIdx.x / TEAM), member = threadIdx.x % TEAM;
    uint4* pipeline = skinny_shared + team * TILES * TILE;
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x < TEAMS) {
            mbar_init(&barriers[threadIdx.x].ready, CLUSTER);
            mbar_init(&barriers[threadIdx.x].sent, 1);
            mbar_init_fence();
        }
        __syncthreads();
        cluster_arrive();
    }

    const int width = CLUSTER == 1 ? FEATURES : int(p.skinny_features);
    const long long col0 = 1LL * rank_in_cluster() * width;
    const int features = int(max(min(p.n - col0, 1LL * width), 0LL));  // this CTA's features
    dy += col0, d += col0;
    const long long begin = blockIdx.x / CLUSTER * p.skinny_rows, end = min(begin + p.skinny_rows, p.m);
    const Pieces own(p, member, features);
    const int of_dy = own.of_dy, first = own.first;
    constexpr int STEP = Pieces::STEP;
    constexpr int AT_ONCE = ROWS / STEP < 4 ? ROWS / STEP : 4;  // rows that a thread reads before it computes dg of any
    const auto issue_copies = [&](int stage, long long row0) {
        const int left = row0 < begin ? 0 : int(min(end - row0, 1LL * ROWS));
        copy_tile(p, dy, d, x, pipeline + stage * TILE, own, row0, left);
    };
    const long long last = begin + ((end - begin - 1) / ROWS - team) * ROWS;  // where the team's first tile begins
    long long next_row = last;
#pragma unroll 1
    for (int i = 0; i < TILES - 1; ++i, next_row -= TEAMS * ROWS) issue_copies(i, next_row);

    Products::load_weight(p, w + col0 * p.ldw, features, weight);
    for (int i = threadIdx.x; i < features; i += THREADS_HERE) Factors{saved + col0 + i, p.n, col0 + i}.prefetch();
    // Wait only now: the kernel ahead belongs to the same call, and has itself waited for the kernels that wrote the
    // data read above.
    await_kernel_ahead();
    // the last stage of the last team
    double* scratch = reinterpret_cast<double*>(skinny_shared + PIPELINE_WORDS - TILE);
    G* const stored = IN_REGISTERS ? reinterpret_cast<G*>(scratch + SUMS * THREADS) : coefficients;
    static_assert(8 * SUMS * THREADS + (IN_REGISTERS ? DG_ROWS * FEATURES * sizeof(G) : 0) <= 16 * TILE,
                  "in one stage");
    // absent columns have dg = 0, because the products read them
    for (int i = threadIdx.x; i < DG_ROWS * FEATURES; i += THREADS_HERE)
        if (i % FEATURES >= features) stored[i] = G(0);
    // as many columns at once as in backward_dg, so that both kernels compute the same bits
    const int columns = int(p.row_threads) * VEC;
#pragma unroll 1
    for (int at = 0; at < features; at += columns) {
        if (at > 0) __syncthreads();
        merge_splits(p, workspace, columns, col0 + at, scratch, [&](long long c, int column, const ColumnSums& sums) {
            if (at + column < features)
                store_feature(p, Factors{saved + c, p.n, c}, sums, blockIdx.x < CLUSTER, to_bias, to_scale, to_gamma,
                              to_beta, stored, FEATURES, at + column);
        });
    }
    if constexpr (!BY_FMA) fence_async();
    __syncthreads();
#if REMAT
    OfFeature of_feature[RematTile::BLOCKS][2];
    RematTile::load(saved, p.n, col0, features, of_feature);
#else
    const BeforeY before(p, saved, col0 + of_dy * VEC, own.inside);
    Coefficients of(before, stored, FEATURES, of_dy * VEC);
    if constexpr (IN_REGISTERS) __syncthreads();
#endif
    issue_copies(TILES - 1, next_row);
    next_row -= TEAMS * ROWS;
    if constexpr (CLUSTER > 1) cluster_wait();

    Products products;
    int stage = 0, phase = 0;
#pragma unroll 1
    for (long long row0 = last; row0 >= begin; row0 -= TEAMS * ROWS, next_row -= TEAMS * ROWS) {
        await_copies<TILES - 1>();
        const int left = int(min(end - row0, 1LL * ROWS));
        uint4* dg = pipeline + stage * TILE;
#if REMAT
        fence_async();
        team_sync(team);
        RematTile::take<true>(dg, dg + X_AT, weight, [&](int block, int h, unsigned two, float g0, float g1) {
            const OfFeature& f = of_feature[block][h];
            const G* const by = stored + RematTile::feature(block, h);
            const float2 of_rows = unpack_as<OF_T>(two);
            const auto dg_of = [&](float of_row, float g) {
                const float d = f.deviation(g), u = f.before_y(of_row, d);
                const float mean = by[DG_MEAN * FEATURES], mean_low = by[DG_MEAN_LOW * FEATURES];
                return by[DG_A * FEATURES] * fmaf(-by[DG_RATE * FEATURES], d, (u - mean) - mean_low);
            };
            return pack_as<OF_T>(dg_of(of_rows.x, g0), dg_of(of_rows.y, g1));
        });
        if (left < ROWS) {  // absent rows have d = -mean: dg may be infinite, and their x of zero would make it NaN
            team_sync(team);
            for (int i = first; i < ROWS; i += STEP)
                if (i >= left) dg[place(i, of_dy)] = uint4{};
        }
#else
        if constexpr (!IN_REGISTERS) of = Coefficients(before, stored, FEATURES, of_dy * VEC);
#pragma unroll
        for (int i = first; i < ROWS; i += AT_ONCE * STEP) {
            Row row[AT_ONCE];  // read as whole words: the compiler would read each element by itself
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const uint4* at = dg + place(i + j * STEP, of_dy);
                *reinterpret_cast<uint4*>(&row[j].dy) = *at;
                *reinterpret_cast<uint4*>(&row[j].d) = at[DY];
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const Vector<T, VEC> out = of.dg(row[j]);
                dg[place(i + j * STEP, of_dy)] =  // absent rows: dy = 0 would not give dg = 0
                    i + j * STEP < left ? *reinterpret_cast<const uint4*>(&out) : uint4{};
            }
        }
#endif
        if constexpr (!BY_FMA) fence_async();
        team_sync(team);
        products.take(dg, dg + ROOM_AT, dg + X_AT, weight, dx == nullptr ? dx : dx + row0 * p.k, left, int(p.k),
                      barriers[team], phase);
        phase ^= 1;
        team_sync(team);  // all threads of the team have read
        issue_copies(stage, next_row);
        stage = stage + 1 == TILES ? 0 : stage + 1;
    }
    await_copies<0>();
    __syncthreads();  // all pipelines are free

    float* of_teams = reinterpret_cast<float*>(skinny_shared);  // [TEAMS][FEATURES][DW_ROW]
    products.leave(of_teams + team * FEATURES * DW_ROW);
    __syncthreads();
    float4* to = reinterpret_cast<float4*>(partials) + blockIdx.x * (width * (INPUTS / 4));
#pragma unroll 2
    for (int i = threadIdx.x; i < width * (INPUTS / 4); i += THREADS_HERE) {
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
