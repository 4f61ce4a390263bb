// dual_gemm: computes both products of a backward of few rows, dx = dg w and dw = dgᵀ x, in 16 bits. It reads w once
// for dx, and writes dw meanwhile.
//
//   dg (m, n), x (m, k), w (n, k), dw (n, k): rows start on 16 bytes; m <= ROWS      dx (m, k), contiguous
//
// A CTA has INPUTS input features, and the CTAs of a cluster divide the features: each has `steps` steps of STEP
// features. The CTA's columns of x stay in shared memory. One thread loads w and dg with TMA, step by step, through a
// pipeline of STAGES stages. Two warpgroups of consumers have 64 input features each. In a step they compute
//   dxᵀ (64, ROWS) += wᵀ dg    (MN-major, K-major)     it stays in registers
//   dw (STEP, 64) = dgᵀ x      (both MN-major)         it leaves through shared memory by TMA
// An operand lies in rows of 128 bytes, swizzled (sm90/wgmma.cuh), so one dg serves both products. Beyond a matrix, TMA
// reads zeros, which add nothing, and writes nothing. At the end the CTAs of a cluster exchange their parts of dx
// through distributed shared memory. Each CTA adds the parts of some rows, in the order of the CTAs, and stores these
// rows.
//
// The kernel ahead makes only dg: w and x are loaded before that kernel has ended.
//
// Bytes moved: w is read once and dw is written once, the minimum. dg is small; it is read from L2 once for each INPUTS
// input features. At (8, 4096, 11008) that is 180 MB.
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/tma.cuh"
#include "sm90/wgmma.cuh"

#ifndef ROWS  // the planner passes both, and CLUSTER if it is not 1
#define ELEMENT ELEMENT_BFLOAT16
#define ROWS 128  // 32, 64, 128: m, rounded up
#endif

struct DualGemmProblem {
    long long m, n, k;
    long long steps;  // steps of a CTA
};

constexpr int STEP = 64;     // features in a step
constexpr int INPUTS = 128;  // input features of a CTA
constexpr int WARPGROUPS = INPUTS / 64, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int STAGES = ROWS == 128 ? 5 : ROWS == 64 ? 6 : 8;
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 24;
constexpr int PAIRS = ROWS / 4 / CLUSTER;  // pairs of neighbouring rows of dx that a thread adds up
#if ELEMENT == ELEMENT_FLOAT16
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif

struct Stage {
    char w[WARPGROUPS][STEP * 128];
    char dg[ROWS * 128];
};
struct Shared {
    char x[WARPGROUPS][ROWS * 128];
    union {
        Stage stage[STAGES];
        float2 parts[CLUSTER][PAIRS][CONSUMERS];  // parts of dx, from each CTA
    };
    char dw[2][WARPGROUPS][STEP * 128];  // dw of two steps: TMA stores one while the next is made
    unsigned long long x_full, full[STAGES], empty[STAGES];
    unsigned long long drained, summed;  // all CTAs have read their stages; all parts of dx are here
};
// Read by gsbn/_plan/variants.py. The sum of x, the pipeline, dw, the barriers, and the padding that aligns all of them
// to 1024 bytes.
constexpr int SHARED_BYTES =
    128 * (ROWS * WARPGROUPS + STAGES * (STEP * WARPGROUPS + ROWS) + 2 * STEP * WARPGROUPS) + 1280;
static_assert(sizeof(Shared) + 1023 <= SHARED_BYTES, "a launch gives less than is used");

// A thread of a warpgroup; the warpgroup has the input features from `input` on.
struct Consumer {
    const DualGemmProblem& p;
    Shared& sh;
    const int group, thread, input;
    float dx[ROWS / 2] = {};

    __device__ __forceinline__ void group_sync() const {
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    }

    // Computes a step, whose operands have arrived: the features from `feature` on.
    __device__ __forceinline__ void multiply(const Stage& stage, unsigned long long* empty, int step,
                                             const TensorMap& dw_map, int feature) {
        constexpr int NEXT = 16 * 128 / 16;  // 16 of k add this to a descriptor if MN-major; 2 if K-major
        const auto of_w = operand_descriptor(smem(stage.w[group]), STEP * 128);
        const auto dg_k_major = operand_descriptor(smem(stage.dg), 16);
        const auto dg_mn_major = operand_descriptor(smem(stage.dg), ROWS * 128);
        const auto of_x = operand_descriptor(smem(sh.x[group]), ROWS * 128);
        float dw[32];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) wgmma<ELEMENT, true, true>(dw, dg_mn_major + NEXT * i, of_x + NEXT * i, i);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < STEP / 16; ++i)
            wgmma<ELEMENT, true, false>(dx, of_w + NEXT * i, dg_k_major + 2 * i, i > 0 || step > 0);
        wgmma_commit();
        char* const staging = sh.dw[step % 2][group];
        if (thread == 0) tma_store_wait_read<1>();  // dw of the step before the last one has left
        wgmma_wait<1>();
        group_sync();
        store_dw(dw, staging);
        fence_async();
        group_sync();
        if (thread == 0) {
            tma_store(&dw_map, staging, input, feature);
            tma_store_commit();
        }
        wgmma_wait<0>();
        __syncwarp();
        if (thread % 32 == 0) mbar_arrive(empty);
    }

    // Writes dw of a step to shared memory; the swizzle spreads the lanes over all banks.
    __device__ __forceinline__ void store_dw(const float (&dw)[32], char* staging) const {
        const int lane = thread % 32, row0 = thread / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const int row = row0 + 8 * Accumulator::row_half(i), piece = Accumulator::eight(i) / 8;
            Vector<Element, 2> two;
            from_float(dw[i], two.at[0]);
            from_float(dw[i + 1], two.at[1]);
            char* to = staging + row * 128 + ((piece ^ row) & 7) * 16;
            *reinterpret_cast<Vector<Element, 2>*>(to + Accumulator::first_column(lane) * 2) = two;
        }
    }

    // Adds dx over the cluster. CTA i receives, from all CTAs, PAIRS pairs of every thread: those from pair i PAIRS on.
    __device__ __forceinline__ void add_up(float2 (&sums)[PAIRS]) const {
        const int rank = rank_in_cluster(), own = group * 128 + thread;
        if constexpr (CLUSTER == 1) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) sums[i] = make_float2(dx[2 * i], dx[2 * i + 1]);
            return;
        }
        __syncwarp();
        if (thread % 32 < CLUSTER) mbar_arrive_at(&sh.drained, thread % 32);
        mbar_wait_sent(&sh.drained, 0);
#pragma unroll
        for (int cta = 0; cta < CLUSTER; ++cta)
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float* pair = dx + 2 * (cta * PAIRS + i);
                send(&sh.parts[rank][i][own], pair[0], pair[1], &sh.summed, cta);
            }
        mbar_wait_sent(&sh.summed, 0);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            sums[i] = sh.parts[0][i][own];
#pragma unroll
            for (int cta = 1; cta < CLUSTER; ++cta) {
                const float2 part = sh.parts[cta][i][own];
                sums[i].x += part.x;
                sums[i].y += part.y;
            }
        }
    }

    __device__ __forceinline__ void store_dx(Element* to) const {
        float2 sums[PAIRS];
        add_up(sums);
        const int lane = thread % 32, first = rank_in_cluster() * PAIRS;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int at = 2 * (first + i), row = Accumulator::eight(at) + Accumulator::first_column(lane);
            const long long column = input + thread / 32 * 16 + lane / 4 + 8 * Accumulator::row_half(at);
            if (column >= p.k) continue;
            if (row < p.m) from_float(sums[i].x, to[row * p.k + column]);
            if (row + 1 < p.m) from_float(sums[i].y, to[(row + 1) * p.k + column]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) IN_CLUSTERS
    dual_gemm(const __grid_constant__ DualGemmProblem p,
              const __grid_constant__ TensorMap dg_map,  // boxes of ROWS rows x 128 bytes; all boxes are swizzled
              const __grid_constant__ TensorMap x_map,   // boxes of ROWS rows
              const __grid_constant__ TensorMap w_map,   // of STEP rows
              const __grid_constant__ TensorMap dw_map,  // of STEP rows
              Element* dx) {
    extern __shared__ char dynamic[];
    Shared& sh = *reinterpret_cast<Shared*>(dynamic + (-smem(dynamic) & 1023));
    const int input = blockIdx.x / CLUSTER * INPUTS, steps = int(p.steps);
    const int first = rank_in_cluster() * steps;
    const int count = max(min(steps, int((p.n + STEP - 1) / STEP) - first), 0);
    if (threadIdx.x == 0) {
        mbar_init(&sh.x_full, 1);
        for (int s = 0; s < STAGES; ++s) {
            mbar_init(&sh.full[s], 1);
            mbar_init(&sh.empty[s], CONSUMERS / 32);
        }
        mbar_init(&sh.drained, CLUSTER * CONSUMERS / 32);
        mbar_init(&sh.summed, 1);
        mbar_init_fence();
        mbar_expect(&sh.summed, sizeof(sh.parts));
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive();
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) {
            mbar_expect(&sh.x_full, sizeof(sh.x));
            for (int group = 0; group < WARPGROUPS; ++group)
                tma_load(sh.x[group], &x_map, &sh.x_full, input + group * 64, 0);
            const auto load_w = [&](int step) {
                const int s = step % STAGES;
                mbar_expect(&sh.full[s], sizeof(Stage));
                for (int group = 0; group < WARPGROUPS; ++group)
                    tma_load(sh.stage[s].w[group], &w_map, &sh.full[s], input + group * 64, (first + step) * STEP);
            };
            const auto load_dg = [&](int step) {
                const int s = step % STAGES;
                tma_load(sh.stage[s].dg, &dg_map, &sh.full[s], (first + step) * STEP, 0);
            };
            const int ahead = min(count, STAGES);
            for (int step = 0; step < ahead; ++step) load_w(step);
            // Wait only now: the kernel ahead belongs to the same call, and has itself waited for the kernels that
            // wrote w and x. Consumers write nothing before they have dg.
            await_kernel_ahead();
            for (int step = 0; step < ahead; ++step) load_dg(step);
            for (int step = ahead; step < count; ++step) {
                mbar_wait(&sh.empty[step % STAGES], (step / STAGES - 1) & 1);
                load_w(step);
                load_dg(step);
            }
        }
        __syncwarp();
        if constexpr (CLUSTER > 1) cluster_wait();
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    if constexpr (CLUSTER > 1) cluster_wait();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    Consumer consumer = {p, sh, group, int(threadIdx.x % 128), input + group * 64};
    mbar_wait(&sh.x_full, 0);
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        const int s = step % STAGES;
        mbar_wait(&sh.full[s], step / STAGES & 1);
        consumer.multiply(sh.stage[s], &sh.empty[s], step, dw_map, (first + step) * STEP);
    }
    consumer.store_dx(dx);
    if (consumer.thread == 0) tma_store_wait();
}
