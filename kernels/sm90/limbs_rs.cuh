// ELEMENT_LIMBS_RS: the consumers make the limbs of w in registers. w comes to shared memory as float32. This saves a
// launch that reads all of w and writes as many bytes, which this launch would read again.
//
// Every 32 of k of a feature (a part) are scaled by themselves, as split_limbs scales a row (docs/design/limbs.md). The
// products of a part are added to a sum that has its own unit, a power of two that follows the largest part so far.
// Scales and units are kept as the exponent fields of float32.
#pragma once
#include "common/limbs.cuh"
#include "sm90/formats.cuh"
#include "sm90/operand.cuh"

// LEAST_FIELD: the least exponent field of a scale; even smaller parts keep all their digits with it. SLACK: by how
// much the field of a part may exceed the unit of the sum.
constexpr int LEAST_FIELD = 15, SLACK = 8;

// The limbs of a thread's two features h (Consumer) in one part, for two wgmma_rs of 16 of k each, and the exponent
// fields by which they were scaled.
struct LimbsOfW {
    u32 high[2][4], low[2][4];
    int field[2];

    LimbsOfW() = default;
    // `tile` has the part in swizzled rows of 128 bytes. If w is K-major, a row is a feature. If w is MN-major, a row
    // is 32 features of one k, and the next 32 features follow after BLOCK_K rows. `row` is the thread's first feature
    // in the tile.
    __device__ __forceinline__ LimbsOfW(const char* tile, int row, int lane) {
        const int quarter = lane & 3;
        float2 v[2][2][2];  // [feature h][16 of k][half of these]
        float top[2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if constexpr (W_MN_MAJOR) {
                        const int k = 16 * j + 8 * i + 2 * quarter, feature = row + 8 * h, of_box = feature % 32;
                        const char* box = tile + feature / 32 * (BLOCK_K * 128) + of_box % 4 * 4;
                        const auto at = [&](int k) {
                            return *reinterpret_cast<const float*>(box + k * 128 + ((of_box / 4 ^ k) & 7) * 16);
                        };
                        v[h][j][i] = make_float2(at(k), at(k + 1));
                    } else {
                        const int piece = (4 * j + 2 * i + quarter / 2) ^ (row & 7);
                        v[h][j][i] =
                            *reinterpret_cast<const float2*>(tile + (row + 8 * h) * 128 + piece * 16 + quarter % 2 * 8);
                    }
                    top[h] = fmaxf(top[h], fmaxf(fabsf(v[h][j][i].x), fabsf(v[h][j][i].y)));
                }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
            field[h] = max(__float_as_int(top[h]) >> 23, LEAST_FIELD);
            const float scale = power_of_two(127 + 14 - field[h]);  // brings the largest number into [2^14, 2^15)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    split(multiply_no_ftz(v[h][j][i].x, scale), multiply_no_ftz(v[h][j][i].y, scale),
                          high[j][2 * i + h], low[j][2 * i + h]);
        }
    }
};

// The units of the sums of a thread's two features.
struct UnitsOfW {
    int field[2] = {-1000, -1000};  // there is no part yet

    // Call this before a part is added. The part is to be multiplied by `factor`. A sum whose unit has become too small
    // is scaled to the unit of the part.
    template <int SIZE>
    __device__ __forceinline__ void follow(const int (&of_part)[2], float (&sum)[SIZE], float (&factor)[2]) {
        if (__any_sync(~0u, max(of_part[0] - field[0], of_part[1] - field[1]) > SLACK)) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (of_part[h] - field[h] > SLACK) {
                    const float down = power_of_two(max(field[h] - of_part[h], -127));  // 2^-127 becomes 0
                    field[h] = of_part[h];
#pragma unroll
                    for (int i = 0; i < SIZE; ++i)
                        if (Accumulator::row_half(i) == h) sum[i] *= down;
                }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) factor[h] = power_of_two(max(of_part[h] - field[h], -127));
    }
    // the exponent of feature h: an element is 2^exponent times its limbs
    __device__ __forceinline__ int exponent(int h) const { return max(field[h], LEAST_FIELD) - 127 - 14; }
};
