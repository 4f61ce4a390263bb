// skinny_sums: computes the column sums of a backward of many short rows whose forward stored no deviations: S = sum dy
// f'(u) and E = sum dy f'(u) d, with d = g - mean and u = slope d + offset. It replaces backward_sums, and computes g
// again (skinny/remat.cuh).
//
//   dy (m, n) and x (m, k) of T, through tensor maps: rows on 16 bytes, k <= INPUTS
//   weight (n, k), row pitch ldw          saved: SAVED_ rows of n
//   workspace (splits, 2, n): S and E of each split, in float64
//
// Threads. A cluster has a split's rows, which its CTAs divide (sums_rows each), and skinny_features features;
// neighbouring clusters have the same rows, so that L2 serves x to all but the first. A CTA has TEAMS teams of threads,
// as in skinny_backward; they take turns with tiles of ROWS rows. A thread adds the 16 rows that it has of a feature
// and tile in float32, everything else in float64. At the end four lanes, all teams and the cluster's CTAs add their
// sums of a feature.
//
// Bytes moved. It reads dy and x once, the minimum: at (50000, 64, 1024) 109 MB, where dy and d are 205 MB.
#include "common/cluster_columns.cuh"
#include "skinny/remat.cuh"

extern __shared__ __align__(1024) uint4 skinny_shared[];

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1) IN_CLUSTERS
    skinny_sums(const __grid_constant__ BackwardProblem p, const __grid_constant__ TensorMap dy_map,
                const __grid_constant__ TensorMap x_map, const T* w, const double* saved, double* workspace) {
    __shared__ unsigned long long full[TEAMS][TILES];  // barriers: a tile has arrived
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS * TILES; ++i) mbar_init(&full[0][0] + i, 1);
        mbar_init_fence();
    }
    __syncthreads();
    await_kernel_ahead();
    T* weight = reinterpret_cast<T*>(skinny_shared + PIPELINE_WORDS);
    __shared__ ClusterTotals<FEATURES, false, SUMS / 2> of_cluster;
    const int rank = rank_in_cluster(), cluster = blockIdx.x / CLUSTER;
    of_cluster.begin(rank, FEATURES);
    const int team = uniform(threadIdx.x / TEAM), width = int(p.skinny_features);
    const int blocks = int((p.n + width - 1) / width), split = cluster / blocks;
    const long long col0 = 1LL * (cluster % blocks) * width;
    const int features = int(min(p.n - col0, 1LL * width));
    const long long begin = (1LL * split * CLUSTER + rank) * p.sums_rows, end = min(begin + p.sums_rows, p.m);
    uint4* pipeline = skinny_shared + team * TILES * TILE;
    long long next_row = begin + team * ROWS;
    const auto load_next = [&](int stage) {  // by one thread of the team
        if (next_row < end)
            load_tile(&dy_map, nullptr, &x_map, pipeline + stage * TILE, &full[team][stage], int(col0), next_row);
        next_row += TEAMS * ROWS;
    };
    const bool loads = threadIdx.x % TEAM == 0;
#pragma unroll 1
    for (int i = 0; loads && i < TILES; ++i) load_next(i);
    Products::load_weight(p, w + col0 * p.ldw, features, weight);
    OfFeature of[RematTile::BLOCKS][2];
    RematTile::load(saved, p.n, col0, features, of);
    fence_async();
    __syncthreads();

    double sums[RematTile::BLOCKS][2][SUMS] = {};
    int stage = 0, phase = 0;
#pragma unroll 1
    for (long long row0 = begin + team * ROWS; row0 < end; row0 += TEAMS * ROWS) {
        uint4* tile = pipeline + stage * TILE;
        mbar_wait(&full[team][stage], phase);
        float of_tile[RematTile::BLOCKS][2][SUMS] = {};
        RematTile::take<false>(tile, tile + X_AT, weight, [&](int block, int h, unsigned two, float g0, float g1) {
            const float2 of_rows = unpack_as<OF_T>(two);
            const auto add = [&](float of_row, float g) {
                const float d = of[block][h].deviation(g), u = of[block][h].before_y(of_row, d);
                of_tile[block][h][0] += u;
                of_tile[block][h][1] = fmaf(u, d, of_tile[block][h][1]);
            };
            add(of_rows.x, g0);
            add(of_rows.y, g1);
            return 0u;
        });
#pragma unroll
        for (int i = 0; i < RematTile::BLOCKS * 2 * SUMS; ++i) (&sums[0][0][0])[i] += (&of_tile[0][0][0])[i];
        team_sync(team);  // all threads of the team have read
        if (loads) load_next(stage);
        if (++stage == TILES) stage = 0, phase ^= 1;
    }
    __syncthreads();  // all pipelines are free

    double* of_teams = reinterpret_cast<double*>(skinny_shared);  // [TEAMS][SUMS][FEATURES]
#pragma unroll
    for (int block = 0; block < RematTile::BLOCKS; ++block)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) {
                double sum = sums[block][h][i];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (threadIdx.x % 4 == 0) of_teams[(team * SUMS + i) * FEATURES + RematTile::feature(block, h)] = sum;
            }
    __syncthreads();
    const int feature = int(threadIdx.x) % FEATURES;
    const bool speaks = threadIdx.x < FEATURES;
    ColumnSums all;
    if (speaks)
        for (int i = 0; i < SUMS; ++i)
            for (int j = 0; j < TEAMS; ++j) all.of[i] += of_teams[(j * SUMS + i) * FEATURES + feature];
    of_cluster.add(rank, feature, speaks, all.of);
    if (!speaks || feature >= features || feature % CLUSTER != rank) return;
    for (int i = 0; i < SUMS; ++i) workspace[(1LL * split * SUMS + i) * p.n + col0 + feature] = all.of[i];
}
