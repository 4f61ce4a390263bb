// How a consumer warpgroup stores y and the deviations: staged in shared memory, and with the residual added on the way.
#pragma once
#include "sm90/cta.cuh"

struct EpilogueStore : Cta {
    const int half, warp, lane, rank;            // half: which consumer warpgroup this is
    const bool storer = warp == 0 && lane == 0;  // the thread that issues the warpgroup's TMA stores
#if RESIDUAL
    u32 residual_at;  // the address in shared memory of the tile's residual, of the warpgroup's features
#endif

    // Which of 8 features a lane has. With ELEMENT_LIMBS_RS the features that are read at once lie two rows apart,
    // because neighbouring rows would conflict in a bank.
    static __device__ __forceinline__ int feature_of(int lane) {
        return ELEMENT == ELEMENT_LIMBS_RS ? lane / 4 % 4 * 2 + lane / 16 : lane / 4;
    }

    // Stores staged rows of y, from row0 on, if rows may start anywhere. A warp stores every fourth row; these are all
    // aligned alike. A lane has 4 bytes of a row. If they straddle two words of y, the lane stores the word that begins
    // in its neighbour's bytes; two bytes remain at either end of the row.
    __device__ __forceinline__ void store_pieces(const char* staging, int row0, int column, int lane) const {
        const int rows = min(int(m) - row0, PASS_M);
#pragma unroll 1
        for (int box = 0; box < BOXES; ++box) {
            const int col0 = column + box * (64 / BOXES);
            // bytes of a row of y, from the lane's first one on
            const int left = min(int(n) - col0, 64) * Y_BYTES - 4 * lane;
            char* to = y + (row0 + warp) * y_pitch + size_t(col0) * Y_BYTES + 4 * lane;
            const bool straddles = !FLOAT32 && size_t(to) & 2, begins_before = straddles && lane > 0;
            const bool word = begins_before ? left >= 2 : !straddles && left >= 4;
            const bool half_word = begins_before ? left == 0 : !FLOAT32 && (straddles ? left >= 2 : left == 2);
            const bool last_half = straddles && lane == 31 && left >= 4;
            const u32 bytes = begins_before ? 0x5432 : 0x7654;  // which bytes of the lane's and its neighbour's words
            if (begins_before) to -= 2;
            int from = box * (PASS_M * 128) + warp * 128 + (((lane / 4) ^ warp) << 4) + (lane & 3) * 4;
#pragma unroll 4
            for (int r = warp; r < rows; r += 4) {
                const u32 own = *reinterpret_cast<const u32*>(staging + from);
                const u32 piece = FLOAT32 ? own : __byte_perm(__shfl_up_sync(~0u, own, 1), own, bytes);
                if (word) *reinterpret_cast<u32*>(to) = piece;
                if (half_word) *reinterpret_cast<unsigned short*>(to) = piece;
                if (last_half) *reinterpret_cast<unsigned short*>(to + 4) = own >> 16;
                from = (from ^ 64) + 4 * 128;  // piece c of row r lies at c ^ (r & 7)
                to += 4 * y_pitch;
            }
        }
    }

    // Stores d to y or, if TO_Y is false, to the deviations. d is transposed through shared memory, which has rows of
    // 128 bytes, with piece c (16 bytes) of row r at c ^ (r & 7). pack_of(h, ...) packs two rows of feature h. With
    // `adds` the residual is added on the way.
    template <bool TO_Y = true, typename Pack>
    __device__ __forceinline__ void store(const TensorMap& map, const float (&d)[ACC], int row, int block,
                                          const Pack& pack_of, bool adds = false) const {
        const int lane = lane_id();  // read again, as in run
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            char* staging = sh.staging[half][pass % STAGINGS];
            const float* e = d + pass * (ACC / PASSES);
            if (storer) tma_store_wait_read<STAGINGS - 1>();  // the last store from this buffer
            warpgroup_sync(half);
            if constexpr (FLOAT32) {
#pragma unroll
                for (int i = 0; i < ACC / PASSES; ++i) {
                    const int r = i / 4 * 8 + Accumulator::first_column(lane) + Accumulator::odd(i);  // its column
                    const int of_eight = feature_of(lane);
                    const int c = (warp & 1) * 4 + Accumulator::row_half(i) * 2 + of_eight / 4;
                    *reinterpret_cast<float*>(staging + warp / 2 * (PASS_M * 128) + r * 128 + ((c ^ (r & 7)) << 4) +
                                              (of_eight & 3) * 4) = e[i];
                }
            } else {
                const auto packed = [&](int j, int h) {
                    return pack_of(h, e[Accumulator::at(j, h, 0)], e[Accumulator::at(j, h, 1)]);
                };
                if constexpr (CHANNELS_FIRST) {  // no transposition: 64 features, each with 64 rows (128 bytes)
                    const u32 start =
                        smem(staging) + (16 * warp + (lane & 15)) * 128 + (((lane / 16) ^ (lane & 7)) << 4);
#pragma unroll
                    for (int j = 0; j < PASS_M / 8; j += 2)
                        stmatrix(start ^ (j << 4), packed(j, 0), packed(j, 1), packed(j + 1, 0), packed(j + 1, 1));
                } else {
                    const u32 start = smem(staging) + (lane / 16 * 8 + (lane & 7)) * 128 +
                                      (((2 * warp + (lane / 8 & 1)) ^ (lane & 7)) << 4);
#pragma unroll
                    for (int j = 0; j < PASS_M / 8; j += 2) {
                        const int at = j * (8 * 128);
                        u32 words[4] = {packed(j, 0), packed(j, 1), packed(j + 1, 0), packed(j + 1, 1)};
#if RESIDUAL
                        if (adds) {
                            u32 residual[4];
                            load_matrices_trans(residual,
                                                residual_at + pass * (PASS_M * 128) + (start - smem(staging)) + at);
#pragma unroll
                            for (int i = 0; i < 4; ++i) words[i] = add_residual(words[i], residual[i]);
                        }
#endif
                        stmatrix_trans(start + at, words[0], words[1], words[2], words[3]);
                    }
                }
            }
            fence_async();
            warpgroup_sync(half);
            if (TO_Y && !(p.flags & FLAG_VECTOR_Y)) {
                store_pieces(staging, row * BLOCK_M + pass * PASS_M, block * BLOCK_N + 64 * half, lane);
            } else if (CHANNELS_FIRST) {
                if (storer && block < blocks) {
                    const Samples::Place at = samples().place(row);
                    tma_store(&map, staging, at.first + pass * PASS_M, block * BLOCK_N + 64 * half, at.sample);
                }
            } else if (K_IN_SAMPLES) {
                const OfSplit at = of_split(row);
                if (storer && block < blocks)
                    for (int box = 0; box < BOXES; ++box)
                        tma_store(&map, staging + box * (PASS_M * 128),
                                  block * BLOCK_N + 64 * half + box * (64 / BOXES), at.row * BLOCK_M + pass * PASS_M,
                                  at.split);
            } else if (storer && block < blocks) {
                for (int box = 0; box < BOXES; ++box)
                    tma_store(&map, staging + box * (PASS_M * 128), block * BLOCK_N + 64 * half + box * (64 / BOXES),
                              row * BLOCK_M + pass * PASS_M);
            }
            if (storer) tma_store_commit();  // even if the group is empty: the wait above counts passes
        }
        if (PASSES % STAGINGS) {  // an odd number would change which buffer comes first
            if (storer) tma_store_wait_read<0>();
            warpgroup_sync(half);
        }
    }

    // Stores the deviations in d. A thread has the jumps of its two features, if deviations are settled.
    __device__ __forceinline__ void store_deviations(const float (&d)[ACC], const JumpOfU (&jump)[2], int row,
                                                     int block) const {
        store<false>(*for_backward.map, d, row, block,
                     [&](int h, float low, float high) { return pack_deviations(low, high, jump[h], jump[h]); });
    }
};
