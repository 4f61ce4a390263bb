// The caller's per-feature arguments, and the statistics of a feature: over the rows of one tile, and merged over all
// rows.
#pragma once
#include "common/renorm.cuh"
#include "sm90/accumulator.cuh"
#include "sm90/samples.cuh"
#include "sm90/words.cuh"

struct Arguments {  // the arguments of one feature
    float scale, gamma, beta;

    // a of y = a (g - mean) + beta; also correct if scale is 0
    __device__ float slope(float var, float eps) const {
        return multiply_no_ftz(gamma, scale) / sqrtf(fmaf(scale * scale, var, eps));
    }
    __device__ double ratio() const { return 1.0; }
    __device__ double shift() const { return 0.0; }
};

// The constants of y = (a g + c) + low, from the running statistics. `low`, which only limbs use, corrects the rounding
// of a and c, at the g for which z is the running mean: there a g and c cancel, and their rounding errors are the same
// in all rows.
struct Frozen {
    float a, c, low;
};

#if RENORM
// The numbers that the correction of a feature (common/renorm.cuh) takes from its running statistics, before they are
// updated.
struct Running {
    float distance = 0.0f, sigma = 1.0f;  // s b - running_mean; sigma'

    Running() = default;
    __device__ Running(const Arguments& u, float b, float mean, float var, float eps)
        : distance(fmaf(u.scale, b, -mean)), sigma(sqrtf(var + eps)) {}
};

// A feature's arguments with the correction applied: beta is the offset of y, and slope() includes the ratio.
struct Corrected : Arguments {
    Correction<float> by;

    __device__ Corrected(const Arguments& u, const Running& of, const RenormLimits<float>& limits, float mean,
                         float var, float eps)
        : Arguments(u), by(limits, fmaf(scale * scale, var, eps), fmaf(scale, mean, of.distance), of.sigma) {
        beta = fmaf(gamma, by.shift, beta);
    }
    __device__ float slope(float var, float eps) const { return Arguments::slope(var, eps) * by.ratio; }
    __device__ double ratio() const { return by.ratio; }
    __device__ double shift() const { return by.shift; }
};
#endif

template <typename Void>
struct FeatureVector {  // see fetch
    Void* at;
    long long code;

    __device__ Fetched fetch(long long i) const { return ::fetch(at, code, i); }
    // The number of feature i, or `absent`. V is the vector's type, and its stride is 1 or 0 (Features::common_kind); or
    // V is void, and the code alone tells.
    template <typename V>
    __device__ float load(int i, float absent) const {
        if constexpr (is_same<V, void>)
            return fetch(i).or_else(absent);
        else
            return int(code) ? to_float(static_cast<const V*>(at)[int(code) & 8 ? i : 0]) : absent;
    }
};

// The numbers of one feature from which Frozen follows.
struct FrozenArguments {
    Arguments u;
    float b, mean, var;
};

struct Features {  // the caller's per-feature arguments
    FeatureVector<const void> bias, scale, gamma, beta;
    FeatureVector<void> running_mean, running_var;
    float eps, number;
#if RENORM
    const void* renorm;

    __device__ Running running(int i, const Arguments& u) const {
        const Fetched of_b = bias.fetch(i), of_rm = running_mean.fetch(i), of_rv = running_var.fetch(i);
        return {u, of_b.or_else(0.0f), of_rm.or_else(0.0f), of_rv.or_else(1.0f), eps};
    }
#endif

    __device__ Arguments arguments_of(int i) const {
        const Fetched s = scale.fetch(i), g = gamma.fetch(i), b = beta.fetch(i);
        return {s.or_else(number), g.or_else(1.0f), b.or_else(0.0f)};
    }

    // The KIND_ of the vectors that are given, if it is the same for all, and each is contiguous or one number;
    // otherwise KIND_ABSENT.
    __device__ int common_kind() const {
        long long any = 0, all = -1;
        for (long long code : {bias.code, scale.code, gamma.code, beta.code, running_mean.code, running_var.code})
            any |= code, all &= code ? code : -1;
        // a code is 8 strides + KIND_: from 8 on for a stride of 1
        return any <= 15 && any >= 0 && (any & 7) == (all & 7) ? int(any & 7) : KIND_ABSENT;
    }
    // What Frozen follows from. V is the type of all vectors (common_kind), or void: then it takes any vectors, and so
    // much code that fetching it takes longer than a short mainloop.
    template <typename V>
    __device__ FrozenArguments frozen_arguments(int i) const {
        return {{scale.template load<V>(i, number), gamma.template load<V>(i, 1.0f), beta.template load<V>(i, 0.0f)},
                bias.template load<V>(i, 0.0f),
                running_mean.template load<V>(i, 0.0f),
                running_var.template load<V>(i, 1.0f)};
    }
    __device__ Frozen frozen(const FrozenArguments& of) const {
        const auto& [u, b, rm, rv] = of;
        const float gr = u.gamma * __frsqrt_rn(rv + eps), a = multiply_no_ftz(gr, u.scale);
        if constexpr (!BY_LIMBS) {
            return {a, fmaf(gr, fmaf(u.scale, b, -rm), u.beta), 0.0f};
        } else {
            const float sb = __fmul_rn(u.scale, b), at = sb - rm, scaled = __fmul_rn(gr, at), c = scaled + u.beta;
            const float of_at = fmaf(u.scale, b, -sb) + rest_of_sum(sb, -rm, at);
            const float of_c = fmaf(gr, at, -scaled) + rest_of_sum(scaled, u.beta, c) + gr * of_at;
            const float low = of_c + fmaf(gr, u.scale, -a) * (rm / u.scale - b);
            return {a, c, isfinite(low) ? low : 0.0f};
        }
    }
};

// Mean and M2 of a feature over the tiles so far, merged tile by tile (Welford's algorithm, by Chan's formula).
struct Welford {
    // the mean is high + low: no digits are lost if the mean is large or the first tile is unlike the others
    float high, low, m2;

    __device__ __forceinline__ void merge(float mean, float of_tile, int rows_before, int rows) {
        const float before = float(rows_before), weight = float(rows) / (before + float(rows));
        if (rows_before == 0) high = mean, low = 0.0f, m2 = 0.0f;
        const float d = mean - high - low, shift = fmaf(d, weight, low), sum = high + shift;
        m2 += fmaf(d * d, before * weight, of_tile);
        low = rest_of_sum(high, shift, sum);
        high = sum;
    }
    __device__ __forceinline__ float mean() const { return high + low; }
};

// How the m rows of a feature are divided into parts; mean and M2 of each part are published. Part i has the tiles i, i
// + count, ... The CTA that publishes part i of a block of features merges the features [i share, (i + 1) share) of
// this block. `lanes` neighbouring lanes merge one feature; `lanes` is a power of two, and lanes * share <= 32.
struct RowParts {
    int count, m;
    int last;                  // the part with the last tile, the only one that may be short
    float before, at, beyond;  // rows of each part before `last`, of `last`, and of each after it
#if CHANNELS_FIRST
    Samples samples;  // here they determine the rows of a part
#endif

    __device__ __forceinline__ int share() const { return (BLOCK_N + count - 1) / count; }
    __device__ __forceinline__ int lanes() const {
        if constexpr (MODE == MODE_CLUSTER_BATCH) return 1;  // so that mergers and consumers get the same bits
        return max(1, 32 >> (32 - __clz(share() - 1)));
    }
    __device__ __forceinline__ float rows(int i) const {
#if CHANNELS_FIRST
        return float(samples.rows_between(samples.first(i), samples.first(i + 1)));
#else
        return i < last ? before : i == last ? at : beyond;
#endif
    }
};

// (mean, M2) of the parts of one feature, in the workspace; some may not be written yet.
struct Published {
    const Word* words;
    u64 launch;

    __device__ __forceinline__ bool here(int t, float2& part) const {
        const Word w = peek(words + size_t(t) * BLOCK_N);
        part = make_float2(w.x, w.y);
        return w.launch == launch;
    }
    __device__ __forceinline__ float2 again(int t) const {
        return __ldcg(reinterpret_cast<const float2*>(words + size_t(t) * BLOCK_N));
    }
};
// The same in shared memory.
struct Gathered {
    const float2* parts;

    __device__ __forceinline__ bool here(int t, float2& part) const {
        part = parts[t * BLOCK_N];
        return true;
    }
    __device__ __forceinline__ float2 again(int t) const { return parts[t * BLOCK_N]; }
};

// Mean and M2 of one feature over all parts. `lanes` neighbouring lanes share a feature; lane `member` reads the parts
// member, member + lanes, ..., with BATCH words in flight. All lanes of a warp call it together. It adds in float32
// about a pivot, the mean of the first part. Deviations from the pivot are as small as the data allow, and a sum of a
// few hundred terms of similar size, which is mostly a tree, loses a bit or two of 24. (Measured: this is no worse than
// float64, where each instruction costs the tensor core tens of cycles.) If the first part is unlike the others, pivot
// and shift cancel: the second pass therefore adds the rest about pivot + shift.
template <typename Source>
__device__ __forceinline__ void merge_feature(const Source& source, const RowParts& parts, int member, int lanes,
                                              float& mean, float& m2) {
    constexpr int BATCH = 4;  // eight were slower
    const int count = parts.count;
    const float inverse = 1.0f / float(parts.m);  // divide before the wait: after it, others would wait for this
    float2 part[BATCH];
    float pivot, sum = 0.0f;
    m2 = 0.0f;
#pragma unroll 1
    for (int t0 = member; t0 < count; t0 += BATCH * lanes) {
        bool missing[BATCH], any;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) missing[i] = t0 + i * lanes < count;
        do {  // look again at the missing ones only
            any = false;
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (missing[i]) missing[i] = !source.here(t0 + i * lanes, part[i]), any |= missing[i];
        } while (any);
        if (t0 == member) pivot = __shfl_sync(~0u, part[0].x, lane_id() & -lanes);  // mean of part 0
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int t = t0 + i * lanes;
            if (t < count) sum = fmaf(parts.rows(t), part[i].x - pivot, sum);
        }
    }
#pragma unroll 1
    for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    const float shift = sum * inverse, near = pivot + shift;
    float rest = 0.0f;  // m times (the mean minus `near`)
#pragma unroll 1
    for (int t0 = member; t0 < count; t0 += BATCH * lanes) {
        if (count > BATCH * lanes) {  // otherwise part still holds them all
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (t0 + i * lanes < count) part[i] = source.again(t0 + i * lanes);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int t = t0 + i * lanes;
            if (t < count) {
                const float d = part[i].x - pivot - shift;
                m2 += fmaf(parts.rows(t) * d, d, part[i].y);
                rest = fmaf(parts.rows(t), part[i].x - near, rest);
            }
        }
    }
#pragma unroll 1
    for (int bit = 1; bit < lanes; bit *= 2) {
        m2 += __shfl_xor_sync(~0u, m2, bit);
        rest += __shfl_xor_sync(~0u, rest, bit);
    }
    mean = near + rest * inverse;
}

// Adds the thread's elements of feature h in COUNT blocks of eight rows, from block FIRST on, as a binary tree. If the
// number of terms is a power of two, equal numbers are added without rounding. So a constant feature gets its exact
// mean and variance 0, however large it is.
template <int FIRST, int COUNT>
__device__ __forceinline__ float sum_by_halves(const float (&d)[ACC], int h) {
    if constexpr (COUNT == 1)
        return d[Accumulator::at(FIRST, h, 0)] + d[Accumulator::at(FIRST, h, 1)];
    else
        return sum_by_halves<FIRST, COUNT / 2>(d, h) + sum_by_halves<FIRST + COUNT / 2, COUNT / 2>(d, h);
}

__device__ __forceinline__ float sum_of_rows(const float (&d)[ACC], int h) {
    float sum = sum_by_halves<0, ACC / 4>(d, h);
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Turns the first `rows` rows of a tile's accumulator d into deviations from their mean, and computes mean and M2, for
// the thread's two features.
__device__ __forceinline__ void centre(float (&d)[ACC], int rows, int lane, float (&mean)[2], float (&m2)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        mean[h] = sum_of_rows(d, h) / float(rows);  // rows past m are zero: TMA fills them in
#pragma unroll
        for (int j = 0; j < ACC / 4; ++j)
            d[Accumulator::at(j, h, 0)] -= mean[h], d[Accumulator::at(j, h, 1)] -= mean[h];
    }
    if (rows < BLOCK_M) {
        float rest[2] = {};
        // If the number of rows is not a power of two, the sum was rounded: also subtract the mean that is left.
#pragma unroll 1
        for (int again = 0; again < 2; ++again) {
#pragma unroll
            for (int j = 0; j < ACC / 4; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool there = 8 * j + Accumulator::first_column(lane) + e < rows;
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float& v = d[Accumulator::at(j, h, e)];
                        v = there ? v - rest[h] : 0.0f;
                    }
                }
            if (again) break;
#pragma unroll
            for (int h = 0; h < 2; ++h) rest[h] = sum_of_rows(d, h) / float(rows), mean[h] += rest[h];
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < ACC / 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float v = d[Accumulator::at(j, h, e)];
                sum[j % 2 * 2 + e] = fmaf(v, v, sum[j % 2 * 2 + e]);
            }
        }
        m2[h] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        m2[h] += __shfl_xor_sync(~0u, m2[h], 1);
        m2[h] += __shfl_xor_sync(~0u, m2[h], 2);
    }
}
