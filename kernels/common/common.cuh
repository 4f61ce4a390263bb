// The code that all kernels share: element types, per-feature vectors, the distribution of work, the wait for the
// kernel ahead. No kernels.
//
// NVRTC compiles the kernels: there is no <stdint.h> and no <type_traits>. A kernel takes the constants of its launch
// by value, in its own struct, whose fields have 8 bytes each. Then it takes 64-bit words, mostly addresses. So Python
// does not have to cast anything.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Bits of the field `flags`. gsbn/_plan/declared.py reads these constants, the KIND_ constants below, and the structs
// of the kernels.
enum : long long {
    FLAG_VECTOR_X = 1,    // rows of x start on 16 bytes
    FLAG_VECTOR_W = 2,    // rows of weight start on 16 bytes
    FLAG_VECTOR_Y = 4,    // rows of y start on 16 bytes, and columns are adjacent; for forward_sm90 rows end there, too
    FLAG_CUMULATIVE = 8,  // momentum=None: the factor is 1 / num_batches_tracked
    FLAG_UNITS = 16,      // deviations are saved in units of a power of two near their spread: float16's range is short
    FLAG_ALONE = 32,      // all rows of a feature lie in one tile: no CTA of forward_sm90 waits for another
    FLAG_RUNNING = 64,    // inference: the constants of y come from the running statistics
    FLAG_INDEPENDENT = 128,  // this launch reads nothing that the launch ahead writes: await_kernel_ahead
    FLAG_LIMBS = 256,        // the tensor core computed g from limbs: see M2_OF_LIMBS
    FLAG_ROUNDS = 512,       // deviations are saved in 16 bits: deviation_centre
};

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline double to_float(double v) { return v; }

__device__ inline void from_float(float v, float& out) { out = v; }
__device__ inline void from_float(float v, __half& out) { out = __float2half_rn(v); }
__device__ inline void from_float(float v, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }
__device__ inline void from_float(double v, double& out) { out = v; }
// Two elements, on 4 bytes.
__device__ inline void from_floats(float u, float v, __half* out) {
    *reinterpret_cast<__half2*>(out) = __floats2half2_rn(u, v);
}
__device__ inline void from_floats(float u, float v, __nv_bfloat16* out) {
    *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(u, v);
}

// a / d for 0 <= a < 2^31 and d < 2^31, computed from reciprocal = floor(2^62 / d) + 1. A division would take about
// thirty instructions. The reciprocal exceeds 2^62 / d by at most 1, so the quotient errs by less than 2^-31 before it
// is truncated.
__device__ __forceinline__ int quotient(unsigned a, unsigned long long reciprocal) {
    return int(__umul64hi(4ULL * a, reciprocal));
}

// A float64 number as G. Subnormal numbers are not flushed to zero here, which takes instructions: arithmetic does it.
template <typename G>
__device__ __forceinline__ G narrow(double v) {
    if constexpr (sizeof(G) == 8) return v;
    float out;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(out) : "d"(v));
    return out;
}

// A product that does not flush subnormal numbers to zero. Kernels are compiled with .ftz, which does.
__device__ __forceinline__ float multiply_no_ftz(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ void widen(float v, float& out) { out = v; }
__device__ __forceinline__ void widen(double v, double& out) { out = v; }
__device__ __forceinline__ void widen(float v, double& out) { asm("cvt.f64.f32 %0, %1;" : "=d"(out) : "f"(v)); }

// N adjacent elements that move as one access of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
    T at[N];
};

// Element j of a vector. Of two bfloat16 in a word, the compiler would take two instructions for the second.
template <typename T, int N>
__device__ __forceinline__ auto element(const Vector<T, N>& v, int j) {
    return to_float(v.at[j]);
}
template <int N>
__device__ __forceinline__ float element(const Vector<__nv_bfloat16, N>& v, int j) {
    const unsigned word = reinterpret_cast<const unsigned*>(&v)[j / 2];
    return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
}

// A vector rounded to T; two elements in one instruction.
template <typename T, typename G, int N>
__device__ __forceinline__ Vector<T, N> rounded(const Vector<G, N>& v) {
    Vector<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j)
        if constexpr (sizeof(T) > 2 || sizeof(G) > 4)
            from_float(v.at[j], out.at[j]);
        else if (j % 2 == 0)
            from_floats(v.at[j], v.at[j + 1], out.at + j);
    return out;
}

// Reads a number that another thread may change meanwhile.
template <typename T>
__device__ __forceinline__ T load_volatile(const T* from) {
    return *static_cast<const volatile T*>(from);
}

// Loads the first `inside` of N adjacent elements; the rest are zeros. The address is aligned for an access of N
// elements.
template <typename T, int N>
__device__ inline Vector<T, N> load(const T* from, int inside) {
    if (inside == N) return *reinterpret_cast<const Vector<T, N>*>(from);
    Vector<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.at[j] = j < inside ? from[j] : T(0.0f);
    return out;
}

// How the THREADS threads of a CTA are placed over a matrix. A thread has VEC columns; `row_threads` threads share a
// row (a power of two, at most a warp); the CTA has THREADS / row_threads rows at once. So short rows fill a warp, too.
template <int THREADS, int VEC>
struct Places {
    int columns, rows;  // how many the CTA has at once
    int column, row;    // this thread's first column and row among these

    __device__ explicit Places(long long row_threads_) {  // without divisions: each takes about twenty instructions
        const int row_threads = int(row_threads_), thread = int(threadIdx.x), shift = 31 - __clz(row_threads);
        columns = row_threads * VEC;
        rows = THREADS >> shift;
        column = (thread & (row_threads - 1)) * VEC;
        row = thread >> shift;
    }
    // How many blocks of columns n columns make. There is no 64-bit division, which would take about a hundred
    // instructions.
    __device__ unsigned blocks(long long n) const { return unsigned((n + columns - 1) >> (31 - __clz(columns))); }
};

// How the THREADS threads of a CTA share `columns` columns, a power of two. Each thread has one column; `parts` threads
// have the same column, and `part` is the thread's number among them.
template <int THREADS>
struct Sharers {
    int column, part, parts;

    __device__ explicit Sharers(int columns) {
        const int thread = int(threadIdx.x), shift = 31 - __clz(columns);
        column = thread & (columns - 1);
        part = thread >> shift;
        parts = THREADS >> shift;
    }
};

// A per-feature vector is a pointer and a code, stride * 8 + kind. So each vector may be absent or strided and may have
// its own dtype, without a kernel for every combination. The work on vectors is O, that on matrices B O.
enum : int { KIND_ABSENT = 0, KIND_FLOAT32 = 1, KIND_FLOAT64 = 2, KIND_FLOAT16 = 3, KIND_BFLOAT16 = 4 };

#ifndef CONCURRENT_WITH_MMA
#define CONCURRENT_WITH_MMA 0
#endif

// `fetch` loads and `or_else` converts, so that several loads can be in flight at once. With CONCURRENT_WITH_MMA both
// functions have as few instructions as possible, because every instruction delays the tensor core beside it. Otherwise
// they have no branches: with branches, a CTA of normalize took 1 us longer for six arguments.
struct Fetched {
    int kind;
    unsigned long long bits;

    template <typename R>  // float or double
    __device__ R or_else(R absent) const {
        R wide;
#if CONCURRENT_WITH_MMA
        switch (kind) {
            case KIND_FLOAT32: widen(__uint_as_float(unsigned(bits)), wide); return wide;
            case KIND_FLOAT64: return R(__longlong_as_double(bits));
            case KIND_FLOAT16: return __half2float(__ushort_as_half(bits));
            case KIND_BFLOAT16: return __bfloat162float(__ushort_as_bfloat16(bits));
            default: return absent;
        }
#else
        const unsigned short half = bits;
        float v = __uint_as_float(unsigned(bits));
        v = kind == KIND_FLOAT16 ? __half2float(__ushort_as_half(half)) : v;
        v = kind == KIND_BFLOAT16 ? __bfloat162float(__ushort_as_bfloat16(half)) : v;
        widen(v, wide);
        wide = kind == KIND_FLOAT64 ? R(__longlong_as_double(bits)) : wide;
        return kind == KIND_ABSENT ? absent : wide;
#endif
    }
};

__device__ inline Fetched fetch(const void* p, long long code, long long i) {
    const long long at = i * (code >> 3);  // arithmetic shift: strides may be negative
    Fetched f = {int(code & 7), 0};
#if CONCURRENT_WITH_MMA
    if (f.kind == KIND_FLOAT32) {
        f.bits = static_cast<const unsigned*>(p)[at];
    } else if (f.kind == KIND_FLOAT64) {
        f.bits = static_cast<const unsigned long long*>(p)[at];
    } else if (f.kind != KIND_ABSENT) {
        f.bits = static_cast<const unsigned short*>(p)[at];
    }
#else
    if (f.kind == KIND_FLOAT32) f.bits = static_cast<const unsigned*>(p)[at];
    if (f.kind == KIND_FLOAT64) f.bits = static_cast<const unsigned long long*>(p)[at];
    if (f.kind >= KIND_FLOAT16) f.bits = static_cast<const unsigned short*>(p)[at];
#endif
    return f;
}

__device__ inline void round_to(double v, __half& out) { out = __double2half(v); }
__device__ inline void round_to(double v, __nv_bfloat16& out) { out = __double2bfloat16(v); }
__device__ inline void round_to(float v, __half& out) { out = __float2half_rn(v); }
__device__ inline void round_to(float v, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }

template <typename R>
__device__ inline void store_vector(void* p, long long code, long long i, R v) {
    const long long at = i * (code >> 3);
    switch (int(code & 7)) {
        case KIND_FLOAT32: static_cast<float*>(p)[at] = float(v); break;
        case KIND_FLOAT64: static_cast<double*>(p)[at] = v; break;
        case KIND_FLOAT16: round_to(v, static_cast<__half*>(p)[at]); break;
        case KIND_BFLOAT16: round_to(v, static_cast<__nv_bfloat16*>(p)[at]); break;
        default: break;
    }
}

// The constants with which normalize computes y = f(a ((g - mean) - mean_low) + beta): four rows of n numbers of type
// G, pitch ldg. The mean is subtracted before anything is multiplied, and mean_low is the part of the mean that float32
// drops: if |mean| >> sigma, the rounding of the mean alone would be the largest error in y. With FLAG_ROUNDS, `mean`
// is the centre of the deviations, and `beta` is the u of that centre.
enum : int { AFFINE_MEAN = 0, AFFINE_MEAN_LOW = 1, AFFINE_A = 2, AFFINE_BETA = 3, AFFINE_ROWS = 4 };

// What a forward saves for its backward: rows of n float64 numbers (backward.cu has the formulas). From SAVED_RATE on,
// a row has one meaning in training and another in inference.
enum : int {
    SAVED_A = 0,        // gamma s r
    SAVED_SCALE = 1,    // training: gamma eps r^3 unit; inference: gamma r
    SAVED_GAMMA = 2,    // training: s r unit; inference: r
    SAVED_RATE = 3,     // training: s^2 r^2 unit^2
    SAVED_UNIT = 4,     // training: the unit of the deviations
    SAVED_REST = 5,     // training: eps r^2, which is 1 - s^2 r^2 var
    SAVED_CENTRE = 3,   // inference: the centre, which is subtracted from g
    SAVED_BIASED = 4,   // inference: centre + b
    SAVED_Z = 5,        // inference: s (centre + b) - running_mean
    SAVED_OF_MEAN = 6,  // training: the deviation of the mean, which is 0 or, if the centre is 0, the mean
    SAVED_S = 6,        // inference: s
    SAVED_SLOPE = 7,    // training: a unit, with the a of y: y = f(slope d + offset)
    SAVED_MEAN = 7,     // inference: mean of y = f(a (g - mean) + offset)
    SAVED_OFFSET = 8,   // both: offset in these formulas
    SAVED_ROWS = 9,     // number of rows without RENORM and REMAT
    SAVED_G_MEAN = 9,   // with REMAT: the mean that the backward subtracts from g
    SAVED_RATIO = 9,    // with RENORM: ratio, by which the rows A, SCALE, GAMMA and SLOPE have been multiplied
    SAVED_SHIFT = 10,   // with RENORM: shift, by which gamma / beta is in SAVED_OFFSET
};

// The centre from which deviations in 16 bits are taken: the mean, but 0 where that is small beside the spread. One row
// far from all others moves the mean to where the deviations of the other rows would lose their digits. The backward
// takes deviations about any centre (Projection in backward/columns.cuh).
template <typename R>
__device__ __forceinline__ R deviation_centre(R mean, R var) {
    return mean * mean < var ? R(0) : mean;
}

#ifndef RENORM
#define RENORM 0  // 1: a variant for batch renormalisation (common/renorm.cuh)
#endif

// Stores the SAVED_ rows of feature i in training. Its deviations are in units of `unit`, and the deviation of the mean
// is `of_mean`. y was computed with `a` and `offset`, which may be rounded. common/renorm.cuh defines `ratio` and
// `shift`.
__device__ inline void store_saved(double* saved, long long n, long long i, double s, double gamma, double var,
                                   double eps, double of_mean, double unit, double a, double offset, double ratio = 1.0,
                                   double shift = 0.0) {
    const double square = 1.0 / (s * s * var + eps), r = sqrt(square), to_units = s * unit;
    saved[SAVED_A * n + i] = gamma * s * r * ratio;
    saved[SAVED_SCALE * n + i] = gamma * eps * square * r * unit * ratio;
    saved[SAVED_GAMMA * n + i] = to_units * r * ratio;
    saved[SAVED_RATE * n + i] = to_units * to_units * square;  // few roundings: dg of an outlier cancels with it
    saved[SAVED_UNIT * n + i] = unit;
    saved[SAVED_REST * n + i] = eps * square;
    saved[SAVED_OF_MEAN * n + i] = of_mean;
    saved[SAVED_SLOPE * n + i] = a * unit;
    saved[SAVED_OFFSET * n + i] = offset;
    if constexpr (RENORM) {
        saved[SAVED_RATIO * n + i] = ratio;
        saved[SAVED_SHIFT * n + i] = shift;
    }
}

// The part of a + b that the rounded `sum` lost (Knuth's two-sum).
template <typename R>
__device__ __forceinline__ R rest_of_sum(R a, R b, R sum) {
    const R back = sum - a;
    return (a - (sum - back)) + (b - back);
}

// A sum. If COMPENSATED, the rounding errors are summed, too.
template <bool COMPENSATED, typename R = double>
struct LongSum {
    R high = 0, low = 0;
    __device__ __forceinline__ void add(R v) {
        if constexpr (COMPENSATED) {
            const R sum = high + v;
            low += rest_of_sum(high, v, sum);
            high = sum;
        } else {
            high += v;
        }
    }
    __device__ __forceinline__ R total() const { return COMPENSATED && isfinite(high) ? high + low : high; }
};

// v as a sum of two numbers of type G; if v is not finite, the second one is 0.
template <typename G>
struct HighLow {
    G high, low;
    __device__ explicit HighLow(double v) : high(G(v)), low(G(isfinite(high) ? v - high : 0.0)) {}
};

template <typename G>
__device__ inline void store_affine(G* affine, long long pitch, long long i, double mean, double a, double beta) {
    const HighLow<G> parts(mean);
    affine[AFFINE_MEAN * pitch + i] = parts.high;
    affine[AFFINE_MEAN_LOW * pitch + i] = parts.low;
    affine[AFFINE_A * pitch + i] = G(a);
    affine[AFFINE_BETA * pitch + i] = G(beta);
}

// If g was computed from limbs, its M2 is multiplied by M2_OF_LIMBS, so that the variance is unbiased. The tensor core
// truncates sums where an FMA rounds. So g is too small by 2^-24 of itself on average (measured and simulated: 0.9 to
// 1.1 times that, for 64 to 8192 terms and any shape), and M2 by twice that. y and the gradients are not affected: they
// use g and M2 as computed.
constexpr double M2_OF_LIMBS = 1.0 + 0x1p-23, M2_AS_MADE = 1.0 - 0x1p-23;

// Distributes `count` items of work; a launch may have fewer CTAs than items (`sms`). CTA b takes the items b, b +
// gridDim.x, ... All of its threads end one item before any of them begins the next, so that shared memory is free
// again.
template <typename Work>
__device__ __forceinline__ void for_each_item(long long count, const Work& work) {
    for (unsigned item = blockIdx.x; item < count; item += gridDim.x) {  // a grid, and so `count`, is below 2^31
        if (item != blockIdx.x) __syncthreads();
        work(item);
    }
}

__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Every kernel calls this function first, or before it reads what the kernel ahead writes. A launch may begin while the
// kernel ahead of it in the stream still runs (programmatic dependent launch, from Hopper on; Launcher in
// gsbn/_cuda/kernels.py). This function waits until all of that kernel is done and its writes are visible. Only then
// does it let the next launch begin, so that at most two launches overlap. A launch that does not overlap, such as any
// launch of a call with `sms`, does not wait.
//
// Code ahead of the call runs beside the kernel ahead. Code that runs once in a launch costs the time to fetch it from
// L2, so what needs no memory comes first.
//
// If the kernel ahead belongs to the same call, it has itself waited for the kernels that wrote the call's operands. A
// kernel may then read the operands first, and call this function later.
//
// `waits` is for a kernel that waits for another GPU: the next launch then begins only when this one has ended.
// Otherwise its CTAs would hold SMs that others need (common/ranks.cuh).
//
// A launch with FLAG_INDEPENDENT calls this function at its end instead: it runs beside the kernel ahead, but never
// ends before that kernel. So a launch that waits for it waits for both.
__device__ inline void await_kernel_ahead(bool waits = false) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (!waits) let_next_kernel_begin();
}
