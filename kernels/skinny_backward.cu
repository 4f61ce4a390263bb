// skinny_backward: computes dg, dx = dg w and dw = dgᵀ x for many short rows. It reads dy, d and x once and never
// writes dg. It replaces backward_dg and two products. Each CTA makes a part of dw; reduce_split_k adds the parts.
//
//   dy, d (m, n) and x (m, k) of T, through tensor maps: rows on 16 bytes      dx (m, k), contiguous, or null
//   weight (n, k), row pitch ldw, n <= FEATURES CLUSTER, k <= INPUTS
//   partials (CTAs or clusters, features, INPUTS), float32: each CTA's or cluster's part of dw (n, k)
//
// dg is computed as backward_dg computes it, from the sums in the workspace, and rounded to T. The first CTA, or
// cluster, writes the gradients of size O.
//
// Threads. A CTA has skinny_rows rows and TEAMS teams of threads (skinny/products.cuh). The teams take turns with tiles
// of ROWS rows, and each team has its own pipeline, which one of its threads fills by TMA. A thread computes dg from
// pieces of dy and d, and stores dg where dy was. The team then multiplies dg by the weight, for dx, and by the rows of
// x, for dw. The sums of dw stay in registers until the end. The CTAs of a cluster divide the features: each has
// skinny_features. They work on the same rows at the same time and exchange their parts of dx.
//
// With REMAT the forward stored no deviations, and there is no d. A team multiplies a tile of x by the weight, which
// gives g in registers, and computes dg from g - mean in float32 (skinny/remat.cuh). skinny_sums then runs ahead of this
// kernel, in place of backward_sums. With MAKERS a second team, the makers, computes dg of a tile while the first one
// multiplies the tile before.
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

struct Barriers {
    unsigned long long full[TEAMS][TILES];        // a tile has arrived
    unsigned long long made[MAKERS ? TILES : 1];  // the makers have computed its dg
    ClusterBarriers cluster[TEAMS];

    __device__ __forceinline__ void init() {
        for (int i = 0; i < TEAMS * TILES; ++i) mbar_init(&full[0][0] + i, 1);
        for (int i = 0; MAKERS && i < TILES; ++i) mbar_init(&made[i], TEAM / LANES);
        for (int i = 0; CLUSTER > 1 && i < TEAMS; ++i) {
            mbar_init(&cluster[i].ready, CLUSTER);
            mbar_init(&cluster[i].sent, 1);
        }
        mbar_init_fence();
    }
};

// Registers of a thread where there are makers. With 128 input features dw takes 128 and dx 32.
constexpr int MAKER_REGISTERS = INPUTS > 64 ? 64 : 128, MULTIPLIER_REGISTERS = 256 - MAKER_REGISTERS;

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1) IN_CLUSTERS
    skinny_backward(const __grid_constant__ BackwardProblem p, const __grid_constant__ TensorMap dy_map,
                    const __grid_constant__ TensorMap d_map,  // with REMAT any map
                    const __grid_constant__ TensorMap x_map, const T* w, const double* saved, const char* workspace,
                    float* partials, T* dx, void* to_bias, void* to_scale, void* to_gamma, void* to_beta) {
    __shared__ alignas(16) G coefficients[IN_REGISTERS ? 1 : DG_ROWS * FEATURES];
    __shared__ Barriers barriers;
    T* weight = reinterpret_cast<T*>(skinny_shared + PIPELINE_WORDS);
    // the makers have the pipeline of the team that multiplies
    const int role = uniform(threadIdx.x / TEAM), team = MAKERS ? 0 : role, member = threadIdx.x % TEAM;
    uint4* pipeline = skinny_shared + team * TILES * TILE;
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive();

    const int width = CLUSTER == 1 ? FEATURES : int(p.skinny_features);
    const long long col0 = 1LL * rank_in_cluster() * width;
    const int features = int(max(min(p.n - col0, 1LL * width), 0LL));  // this CTA's features
    const long long begin = blockIdx.x / CLUSTER * p.skinny_rows, end = min(begin + p.skinny_rows, p.m);
    constexpr int PITCH = TEAM / OF_DY;  // a thread has a piece of every PITCH-th row, from `first` on
    const int of_dy = member % OF_DY, first = member / OF_DY, inside = max(min(features - of_dy * VEC, VEC), 0);
    const long long last = begin + ((end - begin - 1) / ROWS - team) * ROWS;  // where the team's first tile begins
    long long next_row = last;
    const auto load_next = [&](int stage) {  // by one thread of the team
        if (next_row >= begin)
            load_tile(&dy_map, &d_map, &x_map, pipeline + stage * TILE, &barriers.full[team][stage], int(col0),
                      next_row);
        next_row -= TEAMS * ROWS;
    };
    const bool loads = MAKERS ? threadIdx.x == 0 : member == 0;
#pragma unroll 1
    for (int i = 0; loads && i < TILES - 1; ++i) load_next(i);

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
    // Absent columns have dg = 0, because the products read them. Those of the cluster's next CTA have its dy: an infinite
    // one makes all of dx NaN anyway.
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
    fence_async();
    __syncthreads();
#if !REMAT
    const BeforeY before(p, saved, col0 + of_dy * VEC, inside);
    Coefficients of(before, stored, FEATURES, of_dy * VEC);
    if constexpr (IN_REGISTERS) __syncthreads();
#endif
    if (loads) load_next(TILES - 1);
    if constexpr (CLUSTER > 1) cluster_wait();

    int stage = 0, phase = 0;
#if REMAT
    OfFeature of_feature[RematTile::BLOCKS][2];
    RematTile::load(saved, p.n, col0, features, of_feature);
#endif
    // Computes dg of a tile that has `left` rows; it takes the place of dy.
    const auto make_dg = [&](uint4* dg, int left) {
#if REMAT
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
            team_sync(role);
            for (int i = first; i < ROWS; i += PITCH)
                if (i >= left) dg[place(i, of_dy)] = uint4{};
        }
#else
        constexpr int AT_ONCE = ROWS / PITCH < 4 ? ROWS / PITCH : 4;  // rows that a thread reads before it computes dg
        if constexpr (!IN_REGISTERS) of = Coefficients(before, stored, FEATURES, of_dy * VEC);
#pragma unroll
        for (int i = first; i < ROWS; i += AT_ONCE * PITCH) {
            Row row[AT_ONCE];  // read as whole words: the compiler would read each element by itself
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const uint4* at = dg + place(i + j * PITCH, of_dy);
                *reinterpret_cast<uint4*>(&row[j].dy) = *at;
                *reinterpret_cast<uint4*>(&row[j].d) = at[DY];
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const Vector<T, VEC> out = of.dg(row[j]);
                dg[place(i + j * PITCH, of_dy)] =  // absent rows: dy = 0 would not give dg = 0
                    i + j * PITCH < left ? *reinterpret_cast<const uint4*>(&out) : uint4{};
            }
        }
#endif
        fence_async();
    };
    if constexpr (MAKERS) {
        if (role == TEAMS) {
            if constexpr (MAKER_REGISTERS < 128) give_registers<MAKER_REGISTERS>();
#pragma unroll 1
            for (long long row0 = last; row0 >= begin; row0 -= ROWS) {
                mbar_wait(&barriers.full[0][stage], phase);
                make_dg(pipeline + stage * TILE, int(min(end - row0, 1LL * ROWS)));
                __syncwarp();
                if (member % LANES == 0) mbar_arrive(&barriers.made[stage]);
                if (++stage == TILES) stage = 0, phase ^= 1;
            }
            return;
        }
        if constexpr (MULTIPLIER_REGISTERS > 128) take_registers<MULTIPLIER_REGISTERS>();
    }

    Products products;
    int cluster_phase = 0;
#pragma unroll 1
    for (long long row0 = last; row0 >= begin; row0 -= TEAMS * ROWS) {
        const int left = int(min(end - row0, 1LL * ROWS));
        uint4* dg = pipeline + stage * TILE;
        mbar_wait(&barriers.full[team][stage], phase);
        if constexpr (MAKERS) {
            mbar_wait(&barriers.made[stage], phase);
        } else {
            make_dg(dg, left);
            team_sync(team);
        }
        products.take(dg, dg + ROOM_AT, dg + X_AT, weight, dx == nullptr ? dx : dx + row0 * p.k, left, int(p.k),
                      barriers.cluster[team], cluster_phase);
        cluster_phase ^= 1;
        team_sync(team);  // all threads of the team have read
        if (loads) load_next(stage);
        if (++stage == TILES) stage = 0, phase ^= 1;
    }
    const auto teams_sync = [&] {  // of all teams that multiply
        if constexpr (MAKERS)
            team_sync(team);
        else
            __syncthreads();
    };
    teams_sync();  // all pipelines are free

    float* of_teams = reinterpret_cast<float*>(skinny_shared);  // [TEAMS][FEATURES][DW_ROW]
    products.leave(of_teams + team * FEATURES * DW_ROW);
    teams_sync();
    float4* to = reinterpret_cast<float4*>(partials) + blockIdx.x * (width * (INPUTS / 4));
#pragma unroll 2
    for (int i = threadIdx.x; i < width * (INPUTS / 4); i += TEAM * TEAMS) {
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
