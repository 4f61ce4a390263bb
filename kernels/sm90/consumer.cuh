// The consumers: two warpgroups. Each multiplies 64 features of a tile, computes their statistics and stores their y.
//
// Element (j, h, e) of a thread's accumulator (accumulator.cuh) is feature 64 half + 16 warp + feature_of(lane) + 8 h
// of the tile and row 8 j + 2 (lane % 4) + e: a thread has two features, h = 0 and 1. Four lanes have the same two
// features. Where only one thread for each feature acts, lane % 4 = 0 acts for h = 0, and lane % 4 = 1 for h = 1.
#pragma once
#include "sm90/deferred_epilogue.cuh"
#include "sm90/limbs_rs.cuh"
#include "sm90/split_k.cuh"
#include "sm90/operand.cuh"
#include "sm90/epilogue_store.cuh"

struct Consumer : EpilogueStore {
    int phase = 0, s = 0, nth = 0;            // phase of the next stage; the next stage; number of the tile
    int to_release = stages_used() - STAGES;  // stages that are still to be released
    int within = 0;                           // the first of the thread's two features, in the tile
    Run run_of_tile = {};                     // in inference

    // Releases a stage. The last STAGES stages are not released: nothing more is loaded into them, and other CTAs of
    // the cluster may have ended.
    __device__ __forceinline__ void release(int stage) {
        if (--to_release < 0) return;
        int cta = lane * ROWS_OF_CLUSTER + rank % ROWS_OF_CLUSTER;  // of those that share x, and this CTA
        if (CLUSTER_M > 1 && lane >= CLUSTER) {                     // of the others that share w
            const int own = rank % CLUSTER_M, other = lane - CLUSTER;
            cta = rank - own + other + (other >= own);
        }
        if (lane < SHARERS) mbar_arrive_at(&sh.empty[stage], cta);
    }

    __device__ __forceinline__ void next_stage(int step) {
        if constexpr (DEFERS)
            // the store of the tile before arrived long ago: this wait costs nothing here
            if (step == min(4, steps - 1) && storer && nth > 0) {
                tma_store_wait();
                count_up(&sh.stored[half]);
            }
        advance();
    }
    __device__ __forceinline__ void advance() {
        if (++s == STAGES) s = 0, phase ^= 1;
    }

    // Stores y or, without the residual, deviations that wait in y's memory. The residual lies in the next stages.
    __device__ __forceinline__ void store_y(const float (&d)[ACC], int row, int block, bool adds) {
#if RESIDUAL
        if (adds) {
            const int own = s + (RESIDUAL_STAGES > 1 ? half : 0), wraps = own >= STAGES;
            mbar_wait(&sh.full[own - wraps * STAGES], phase ^ wraps);
            residual_at = smem(sh.stage[own - wraps * STAGES]) + (RESIDUAL_STAGES > 1 ? 0 : half * RESIDUAL_BYTES);
        }
#endif
        store(y_map, d, row, block, [](int, float low, float high) { return pack(low, high); }, adds);
        if (adds) release_residual();
    }
    // Waits for a stage before it releases it, even if the warpgroup reads only the other: a warp that released a stage
    // twice before another warp did so once would end that warp's wait.
    __device__ __forceinline__ void release_residual() {
        for (int stage = 0; stage < RESIDUAL_STAGES; ++stage) {
            mbar_wait(&sh.full[s], phase);
            release(s);
            advance();
        }
    }

    // The mainloop: d = the product over the CTA's steps. The wgmmas of one stage stay in flight while those of the
    // next stage are issued. Behind them this looks whether the stage after that is full, and where it lies.
    __device__ __forceinline__ void multiply(float (&d)[PRODUCT_ACC]) {
        constexpr int NEXT_STAGE = STAGE_BYTES / 16;  // added to a descriptor
        const u64 first_a = W::descriptor(sh.stage[0] + half * (64 * 128)),
                  first_b = X::descriptor(sh.stage[0] + W_BYTES);
        u64 offset = s * NEXT_STAGE;
        bool full = mbar_test(&sh.full[s], phase);
        int before = 0;  // the stage before s
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            if (!full) mbar_wait(&sh.full[s], phase);
            const u64 a = first_a + offset, b = first_b + offset;
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < BLOCK_K / MMA_K; ++j) multiply_add(d, a + W::NEXT * j, b + X::NEXT * j, step | j);
            wgmma_commit();
            const int stage = s;
            next_stage(step);
            offset = s == 0 ? 0 : offset + NEXT_STAGE;
            full = mbar_test(&sh.full[s], phase);
            if (step > 0) {
                wgmma_wait<1>();
                release(before);
            }
            before = stage;
        }
        wgmma_wait<0>();
        release(before);
    }

    // The mainloop with limbs: `sum` = the product. The tensor core adds in d and truncates towards zero. So d starts
    // from zero for each part of a stage, takes the small products first, and is added to `sum`, with rounding.
    // Meanwhile the wgmmas of the other warpgroup run.
    __device__ __forceinline__ void multiply_limbs(float (&d)[PRODUCT_ACC], float (&sum)[PRODUCT_ACC]) {
        constexpr int PARTS = 2;  // parts of a stage
#pragma unroll
        for (int i = 0; i < PRODUCT_ACC; ++i) sum[i] = 0.0f;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            mbar_wait(&sh.full[s], phase);
            const u64 a = W::descriptor(sh.stage[s] + half * (64 * 128)), b = X::descriptor(sh.stage[s] + W_BYTES);
            constexpr u64 A_LOW = BLOCK_N * 128 / 16, B_LOW = PRODUCT_M * 128 / 16;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                constexpr int STEPS = BLOCK_K / MMA_K / PARTS;
                const u64 a_part = a + W::NEXT * STEPS * part, b_part = b + X::NEXT * STEPS * part;
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < STEPS; ++j) multiply_add(d, a_part + A_LOW + W::NEXT * j, b_part + X::NEXT * j, j);
#pragma unroll
                for (int j = 0; j < STEPS; ++j) multiply_add(d, a_part + W::NEXT * j, b_part + B_LOW + X::NEXT * j, 1);
#pragma unroll
                for (int j = 0; j < STEPS; ++j) multiply_add(d, a_part + W::NEXT * j, b_part + X::NEXT * j, 1);
                wgmma_commit();
                wgmma_wait<0>();
                if (part == PARTS - 1) release(s);
#pragma unroll
                for (int i = 0; i < PRODUCT_ACC; ++i) sum[i] += d[i];
            }
            next_stage(step);
        }
    }

    // Issues the wgmmas of one part of a stage, with w's limbs in registers: the small products first, from zero.
    __device__ __forceinline__ void begin_part(float (&d)[PRODUCT_ACC], const LimbsOfW& w, int stage, int part) const {
        constexpr int STEPS = BLOCK_K / MMA_K / 2;
        constexpr u64 LOW = PRODUCT_M * 128 / 16;
        const u64 b = X::descriptor(sh.stage[stage] + W_BYTES) + X::NEXT * STEPS * part;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEPS; ++j) wgmma_rs(d, w.low[j], b + X::NEXT * j, j);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) wgmma_rs(d, w.high[j], b + LOW + X::NEXT * j, 1);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) wgmma_rs(d, w.high[j], b + X::NEXT * j, 1);
        wgmma_commit();
    }

    // The mainloop of ELEMENT_LIMBS_RS: this thread makes the limbs of w in registers, while the tensor core multiplies
    // the part before or works for the other warpgroup. `of_w` becomes w's exponents, for unscale.
    __device__ __forceinline__ void multiply_limbs_rs(float (&d)[PRODUCT_ACC], float (&sum)[PRODUCT_ACC],
                                                      int (&of_w)[2]) {
        constexpr bool AHEAD = PRODUCT_M < 128;  // otherwise there are no registers for the limbs of two parts
        UnitsOfW units;
        const auto limbs_of = [&](int part) {
            return LimbsOfW(sh.stage[s] + part * ((W_MN_MAJOR ? 32 : BLOCK_N) * 128),
                            64 * half + 16 * warp + feature_of(lane), lane);
        };
        const auto end_part = [&](const int (&field)[2]) {
            float factor[2];
            units.follow(field, sum, factor);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < PRODUCT_ACC; ++i) sum[i] = fmaf(d[i], factor[Accumulator::row_half(i)], sum[i]);
        };
#pragma unroll
        for (int i = 0; i < PRODUCT_ACC; ++i) sum[i] = 0.0f;
        LimbsOfW first;
        const auto begin_step = [&] {
            mbar_wait(&sh.full[s], phase);
            first = limbs_of(0);
        };
        if (AHEAD) begin_step();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            if (!AHEAD) begin_step();
            begin_part(d, first, s, 0);
            if (!AHEAD) end_part(first.field);
            const LimbsOfW second = limbs_of(1);
            if (AHEAD) end_part(first.field);
            begin_part(d, second, s, 1);
            if (!AHEAD) end_part(second.field);
            const int before = s;
            next_stage(step);
            if (AHEAD) {
                if (step + 1 < steps) begin_step();
                end_part(second.field);
            }
            release(before);
        }
        of_w[0] = units.exponent(0), of_w[1] = units.exponent(1);
        if constexpr (SPLIT_K > 1) {  // all CTAs need one unit: their sums will be added; x is below 2^15
            constexpr int COMMON = 10;
#pragma unroll
            for (int i = 0; i < PRODUCT_ACC; ++i)
                sum[i] = times_power_of_two(sum[i], of_w[Accumulator::row_half(i)] - COMMON);
            of_w[0] = of_w[1] = COMMON;
        }
    }

    // Computes d = g of the tile or, with limbs, `sum` and `of_w`, from which unscale makes g. It is a template, so
    // that only one branch is compiled.
    template <int SIZE>
    __device__ __forceinline__ void make(float (&d)[SIZE], float (&sum)[SIZE], int (&of_w)[2]) {
        if constexpr (SIZE < PRODUCT_ACC) {
            float d_of_all[PRODUCT_ACC], sum_of_all[PRODUCT_ACC];
            if constexpr (ELEMENT == ELEMENT_LIMBS_RS) {
                multiply_limbs_rs(d_of_all, sum_of_all, of_w);
                reduce_scatter(sh, rank, sum_of_all, sum);
            } else if constexpr (ELEMENT == ELEMENT_LIMBS) {
                multiply_limbs(d_of_all, sum_of_all);
                reduce_scatter(sh, rank, sum_of_all, sum);
            } else {
                multiply(d_of_all);
                reduce_scatter(sh, rank, d_of_all, d);
            }
        } else if constexpr (ELEMENT == ELEMENT_LIMBS_RS) {
            multiply_limbs_rs(d, sum, of_w);
        } else if constexpr (ELEMENT == ELEMENT_LIMBS) {
            multiply_limbs(d, sum);
        } else {
            multiply(d);
        }
    }

    // MODE_INFERENCE: turns g into y for the thread's two features.
    __device__ __forceinline__ void apply_constants(float (&d)[ACC], int block) {
        run_of_tile.ends_before(block);
        const int slot = run_of_tile.number % 2;
        wait_count(&sh.constants_ready[slot], (run_of_tile.number / 2 + 1) * CONSTANT_WARPS, SHORT_BACKOFF);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 ac = sh.constants[slot][within + 8 * h];
            const float low = WITH_LOWS ? __bfloat162float(sh.lows[slot][within + 8 * h]) : 0.0f;
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& v = d[Accumulator::at(j, h, e)];
                    v = OfU::of(WITH_LOWS ? line(ac, v) + low : line(ac, v));
                }
        }
    }

    // MODE_TRAINING: turns g into deviations from the tile's centres, which wait in y's memory for the epilogue. In the
    // CTA's last tile it turns g into y at once.
    __device__ __forceinline__ void normalize(float (&d)[ACC], int row, int block, int lane) const {
        const int rows = min(int(m) - row * BLOCK_M, BLOCK_M);
        float mean[2], m2[2];
        centre(d, rows, lane, mean, m2);
        mbar_wait(&sh.agreed, 0);
        const u64 launch = sh.launch;
        const int h = lane & 1;
        const float own = h ? mean[1] : mean[0];
        if ((lane & 2) == 0)
            publish(partial + (size_t(block) * scheduler.rows + row) * BLOCK_N + within + 8 * h, own, h ? m2[1] : m2[0],
                    launch);
        if (lane == 0) hint(&sh.ready);
        if (!DEFERS || cluster_id() + (nth + 1) * clusters >= scheduler.count()) {
            epilogue_of_last_tile(d, row, block, h, own, launch);
        } else if (!FLOAT32) {
            float shift[2], in_units[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                shift[i] = mean[i] - centre_of(mean[i], m2[i], float(rows));
                in_units[i] = 1.0f / deviation_unit(m2[i], rows);
            }
#pragma unroll
            for (int i = 0; i < ACC; ++i) {
                d[i] += shift[Accumulator::row_half(i)];
                if (IN_UNITS) d[i] *= in_units[Accumulator::row_half(i)];
            }
        }
    }

#if FEW_ROWS
    // FEW_ROWS: turns g of all rows into y, and stores the deviations. Both are computed in float64, because in a
    // backward of two or three rows the terms of dx cancel almost wholly. It computes u from the same numbers.
    __device__ __forceinline__ void normalize_few_rows(float (&d)[ACC], int block, int lane) const {
        const int rows = int(m), first = Accumulator::first_column(lane);
        constexpr int OF_LANE = 4;  // rows of a lane, of at most 16
        const auto over_lanes = [](double sum) {
            sum += __shfl_xor_sync(~0u, sum, 1);
            return sum + __shfl_xor_sync(~0u, sum, 2);
        };
        mbar_wait(&sh.agreed, 0);
        mbar_wait(&sh.arguments_ready, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int mine = within + 8 * h, feature = block * BLOCK_N + mine;
            // deviations from the first row, then from the mean: those of equal rows are exactly 0
            const double pivot = __shfl_sync(~0u, d[Accumulator::at(0, h, 0)], lane & ~3);
            double of_row[OF_LANE], sum = 0.0, squares = 0.0;
            bool there[OF_LANE];
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i) {
                there[i] = i / 2 * 8 + first + i % 2 < rows;
                of_row[i] = there[i] ? d[Accumulator::at(i / 2, h, i % 2)] - pivot : 0.0;
                sum += of_row[i];
            }
            const double shift = over_lanes(sum) * sh.inverse_m;
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i) {
                of_row[i] = there[i] ? of_row[i] - shift : 0.0;
                squares = fma(of_row[i], of_row[i], squares);
            }
            const double var = over_lanes(squares) * sh.inverse_m;
            if (lane % 4 == h) {  // for the mergers
                sh.of_all_rows[mine] = make_double2(pivot + shift, var);
                mbar_arrive(&sh.here[half]);
            }
            const Arguments u = sh.arguments[mine];
            const float slope = u.slope(float(var), f.eps);
            double* const to = reinterpret_cast<double*>(for_backward.deviations) + first * p.ld_deviations + feature;
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i) {
                if (there[i] && feature < n) to[(i / 2 * 8 + i % 2) * p.ld_deviations] = of_row[i];
                d[Accumulator::at(i / 2, h, i % 2)] = OfU::of(float(fma(double(slope), of_row[i], double(u.beta))));
            }
        }
    }
#else
    // MODE_CLUSTER_BATCH: turns g of the CTA's only tile into y. The other CTAs of the cluster have the other rows.
    __device__ __forceinline__ void normalize_in_cluster(float (&d)[ACC], int row, int block, int lane) const {
        float mean[2], m2[2];
        centre(d, min(int(m) - row * BLOCK_M, BLOCK_M), lane, mean, m2);
        u64* here = &sh.here[half];
        const int h = lane & 1, mine = within + 8 * h;
#if RENORM
        // Wait here for the limits and the running statistics: CTAs that receive this CTA's statistics may update them.
        mbar_wait(&sh.agreed, 0);
        mbar_wait(&sh.arguments_ready, 0);
#endif
        const float own = h ? mean[1] : mean[0];
        float mean_of_all = own, m2_of_all = h ? m2[1] : m2[0];

        if constexpr (CLUSTER_CTAS == 1) {
            if ((lane & 2) == 0) {  // for the mergers
                sh.gathered[0][mine] = make_float2(own, m2_of_all);
                mbar_arrive(here);
            }
        } else {
            if (storer) mbar_expect(here, CLUSTER_CTAS * 64 * sizeof(float2));
            for (int cta = (lane & 2) / 2; cta < CLUSTER_CTAS; cta += 2)  // the two lanes take turns
                send(&sh.gathered[rank][mine], own, m2_of_all, here, cta);
            mbar_wait_sent(here, 0);
            merge_feature(Gathered{&sh.gathered[0][mine]}, parts(block), 0, 1, mean_of_all, m2_of_all);
        }
        const float var = m2_of_all / float(m);
        mbar_wait(&sh.arguments_ready, 0);
#if RENORM
        const Corrected u = {sh.arguments[mine], sh.running[mine], sh.limits, mean_of_all, var, f.eps};
#else
        const Arguments u = sh.arguments[mine];
#endif
        const Merged all = merged_of(mean_of_all, var, u.slope(var, f.eps), u.beta);
        epilogue_in_registers(d, row, block, h, epilogue_of(1.0f, own - all.centre, all.a, all.unit, all.offset));
    }
#endif

    // The epilogue of the CTA's last tile, once all tiles are merged. `own` is the tile's mean of feature h.
    __device__ __forceinline__ void epilogue_of_last_tile(float (&d)[ACC], int row, int block, int h, float own,
                                                          u64 launch) const {
        mbar_wait(&sh.arguments_ready, 0);
        if constexpr (SAVE_DEVIATIONS) {
            const Merged all = await_merged(merged, features, size_t(block) * BLOCK_N + within + 8 * h, launch);
            epilogue_in_registers(
                d, row, block, h,
                epilogue_of(1.0f, own - all.centre, all.a, all.unit, all.offset_or(sh.beta[within + 8 * h])));
        } else {
            const Arguments u = sh.arguments[within + 8 * h];
            Merged all = {};
            if (!RANKS && parts(block).lanes() == 1) {  // there are few parts: merging them here saves a round trip
                float m2;
                const Word* words = words_of(block) + within + 8 * h;
                merge_feature(Published{words, launch}, parts(block), 0, 1, all.centre, m2);
                all.a = u.slope(m2 / float(m), f.eps);
            } else {
                all = await_merged(merged, features, size_t(block) * BLOCK_N + within + 8 * h, launch);
            }
            epilogue_in_registers(d, row, block, h, epilogue_of(1.0f, own - all.centre, all.a, 1.0f, u.beta));
        }
    }

    // The epilogue of a tile in registers. This thread knows the coefficients of its feature h; the neighbouring lane
    // knows those of the other feature.
    __device__ __forceinline__ void epilogue_in_registers(float (&d)[ACC], int row, int block, int h,
                                                          const Epilogue& own) const {
        const auto of_both = [&](float2 xy, float2(&both)[2]) {  // for h = 0 and 1
            const float2 other = make_float2(__shfl_xor_sync(~0u, xy.x, 1), __shfl_xor_sync(~0u, xy.y, 1));
            both[0] = h ? other : xy, both[1] = h ? xy : other;
        };
        float2 to_y[2];
#if SAVE_DEVIATIONS
        float2 to_deviation[2];
        of_both(own.to_deviation, to_deviation);
#pragma unroll
        for (int i = 0; i < ACC; ++i) d[i] = line(to_deviation[Accumulator::row_half(i)], d[i]);
        JumpOfU jump[2];
        if constexpr (SETTLES) {
            const float other = __shfl_xor_sync(~0u, own.jump.from, 1);
            jump[0] = JumpOfU(h ? other : own.jump.from), jump[1] = JumpOfU(h ? own.jump.from : other);
        }
        store_deviations(d, jump, row, block);
#endif
        of_both(own.to_y, to_y);
#pragma unroll
        for (int i = 0; i < ACC; ++i) d[i] = OfU::of(line(to_y[Accumulator::row_half(i)], d[i]));
    }

    __device__ __forceinline__ void run() {
        float d[ACC];
        for (; has(nth); ++nth) {
            const auto [row, block] = tile(nth, rank);
            float sum[ACC];
            int of_w[2];
            make(d, sum, of_w);
            const int lane = lane_id();  // read again: values that depend on it must not take registers in the mainloop
            within = 64 * half + 16 * warp + feature_of(lane);
            const int feature = block * BLOCK_N + within;
            if (is_there(row, block)) {
                if constexpr (ELEMENT == ELEMENT_LIMBS) load_exponents(w_exponents, int(n), feature, of_w);
                if constexpr (BY_LIMBS)
                    unscale(sum, d, x_exponents, int(m), row * BLOCK_M + Accumulator::first_column(lane), of_w);
                if constexpr (MODE == MODE_INFERENCE) apply_constants(d, block);
                if constexpr (MODE == MODE_TRAINING) normalize(d, row, block, lane);
#if FEW_ROWS
                if (row == 0) normalize_few_rows(d, block, lane);  // other CTAs of the cluster have no rows
#else
                if constexpr (MODE == MODE_CLUSTER_BATCH) normalize_in_cluster(d, row, block, lane);
#endif
            }
            store_y(d, row, block, RESIDUAL && stores_y(nth));
            if (MODE == MODE_INFERENCE && storer) count_up(&sh.stored[half]);  // also says that the constants were read
            if constexpr (SPLIT_K > 1) break;                                  // a CTA has one tile
        }
        if constexpr (DEFERS) epilogue_of_deferred_tiles(SHORT_BACKOFF);
        if (storer) tma_store_wait_read<0>();  // shared memory must outlive the stores that read it
    }
};
