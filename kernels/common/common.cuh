// What every kernel shares: element types, the per-feature vectors, how work is handed out. No kernels.
//
// Compiled by NVRTC: there is no <stdint.h> and no <type_traits>. A kernel takes the constants of its launch in a struct
// of its own by value, 8 bytes each, and then 64-bit words, mostly addresses: nothing needs a cast on the way from Python.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Bits of the field `flags`. gsbn/_declared.py reads them, the KIND_ below and the kernels' structs from the sources.
enum : long long {
    FLAG_VECTOR_X = 1,    // rows of x start on 16 bytes
    FLAG_VECTOR_W = 2,    // rows of weight start on 16 bytes
    FLAG_VECTOR_Y = 4,    // rows of y start on 16 bytes, its columns being adjacent; and end there, for forward_sm90
    FLAG_CUMULATIVE = 8,  // momentum=None: the factor is 1 / num_batches_tracked
    FLAG_UNITS = 16,      // deviations are kept in units of a power of two near their spread: float16's range is short
    FLAG_ALONE = 32,      // a feature's rows lie in one tile: no CTA of forward_sm90 waits for another
    FLAG_RUNNING = 64,    // inference: what y is made with comes from the running statistics
    FLAG_LIMBS = 256,     // the tensor core made g of limbs: see M2_OF_LIMBS
    FLAG_INDEPENDENT = 128,  // reads nothing that the launch ahead writes, which has waited before it lets others begin
};

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline double to_float(double v) { return v; }

__device__ inline void from_float(float v, float& out) { out = v; }
__device__ inline void from_float(float v, __half& out) { out = __float2half_rn(v); }
__device__ inline void from_float(float v, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }
__device__ inline void from_float(double v, double& out) { out = v; }

// Without .ftz, which CuPy compiles with: subnormal numbers have digits, too.
__device__ __forceinline__ float multiply_no_ftz(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ void widen(float v, float& out) { out = v; }
__device__ __forceinline__ void widen(float v, double& out) { asm("cvt.f64.f32 %0, %1;" : "=d"(out) : "f"(v)); }

// N adjacent elements that move as one access of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
    T at[N];
};

// The first `inside` of N adjacent elements that start on an access of N, zeros for the rest.
template <typename T, int N>
__device__ inline Vector<T, N> load(const T* from, int inside) {
    if (inside == N) return *reinterpret_cast<const Vector<T, N>*>(from);
    Vector<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.at[j] = j < inside ? from[j] : T(0.0f);
    return out;
}

// How the THREADS of a CTA lie over a matrix of which each takes VEC columns: `along` threads a row, a power of two and a warp
// at most, and as many rows at once as they are enough for: narrow rows, too, fill a warp.
template <int THREADS, int VEC>
struct Places {
    int columns, rows;  // of a CTA at once
    int column, row;    // of this thread among them

    __device__ explicit Places(long long row_threads_) {  // without divisions, which are some twenty instructions each
        const int row_threads = static_cast<int>(row_threads_), thread = static_cast<int>(threadIdx.x),
                  shift = 31 - __clz(row_threads);
        columns = row_threads * VEC;
        rows = THREADS >> shift;
        column = (thread & (row_threads - 1)) * VEC;
        row = thread >> shift;
    }
    // How many blocks of columns a row of n has, without a division of 64 bits, which is some hundred instructions.
    __device__ unsigned blocks(long long n) const {
        return static_cast<unsigned>((n + columns - 1) >> (31 - __clz(columns)));
    }
};

// How the THREADS of a CTA share `columns` columns, a power of two: each has one of them, as one of `parts` threads.
template <int THREADS>
struct Sharers {
    int column, part, parts;

    __device__ explicit Sharers(int columns) {
        const int thread = static_cast<int>(threadIdx.x), shift = 31 - __clz(columns);
        column = thread & (columns - 1);
        part = thread >> shift;
        parts = THREADS >> shift;
    }
};

// A per-feature vector is a pointer and a code, stride * 8 + kind, so that each may be absent, strided and of its own
// dtype without a kernel for every combination; they are O(O) beside O(B O) work.
enum : int { KIND_ABSENT = 0, KIND_FLOAT32 = 1, KIND_FLOAT64 = 2, KIND_FLOAT16 = 3, KIND_BFLOAT16 = 4 };

#ifndef CONCURRENT_WITH_MMA
#define CONCURRENT_WITH_MMA 0
#endif

// Fetching and reading are apart so that several fetches are in flight at once: a switch that converts would wait in turn.
// Both take the fewest instructions in a kernel that defines CONCURRENT_WITH_MMA: these wait for every instruction beside them.
// Elsewhere they do without branches, with which a CTA of normalize took 1 us longer for six arguments.
struct Fetched {
    int kind;
    unsigned long long bits;

    template <typename R>  // float or double
    __device__ R or_else(R absent) const {
        R wide;
#if CONCURRENT_WITH_MMA
        switch (kind) {
            case KIND_FLOAT32: widen(__uint_as_float(static_cast<unsigned>(bits)), wide); return wide;
            case KIND_FLOAT64: return static_cast<R>(__longlong_as_double(bits));
            case KIND_FLOAT16: return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
            case KIND_BFLOAT16: return __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(bits)));
            default: return absent;
        }
#else
        const unsigned short half = static_cast<unsigned short>(bits);
        float v = __uint_as_float(static_cast<unsigned>(bits));
        v = kind == KIND_FLOAT16 ? __half2float(__ushort_as_half(half)) : v;
        v = kind == KIND_BFLOAT16 ? __bfloat162float(__ushort_as_bfloat16(half)) : v;
        widen(v, wide);
        wide = kind == KIND_FLOAT64 ? static_cast<R>(__longlong_as_double(bits)) : wide;
        return kind == KIND_ABSENT ? absent : wide;
#endif
    }
};

__device__ inline Fetched fetch(const void* p, long long code, long long i) {
    const long long at = i * (code >> 3);  // arithmetic shift: strides may be negative
    Fetched f = {static_cast<int>(code & 7), 0};
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
    switch (static_cast<int>(code & 7)) {
        case KIND_FLOAT32: static_cast<float*>(p)[at] = static_cast<float>(v); break;
        case KIND_FLOAT64: static_cast<double*>(p)[at] = v; break;
        case KIND_FLOAT16: round_to(v, static_cast<__half*>(p)[at]); break;
        case KIND_BFLOAT16: round_to(v, static_cast<__nv_bfloat16*>(p)[at]); break;
        default: break;
    }
}

// What normalize applies to a feature: y = f(a ((g - m) - m_low) + beta), four arrays of n in G's type, pitch ldg.
// The mean is subtracted before anything is multiplied, and m_low carries what float32 drops of it: with |m| >> sigma
// the rounding of m alone would be the largest error in y.
enum : int { AFFINE_M = 0, AFFINE_M_LOW = 1, AFFINE_A = 2, AFFINE_BETA = 3, AFFINE_ROWS = 4 };

// What a forward keeps for its backward, O-vectors in float64; SAVED_RATE on are of one mode. See backward.cu.
enum : int {
    SAVED_A = 0,       // gamma s r
    SAVED_SCALE = 1,   // training: gamma eps r^3 unit; inference: gamma r
    SAVED_GAMMA = 2,   // training: s r unit; inference: r
    SAVED_RATE = 3,    // training: s^2 r^2 unit^2
    SAVED_UNIT = 4,    // training: what the deviations are in units of
    SAVED_CENTRE = 3,  // inference: what is subtracted from g
    SAVED_BIASED = 4,  // inference: centre + b
    SAVED_Z = 5,       // inference: s (centre + b) - running_mean
    SAVED_S = 6,       // inference: s
    SAVED_SLOPE = 7,   // training: a unit, as y was made with it: y = f(slope d + offset)
    SAVED_M = 7,       // inference: m of y = f(a (g - m) + offset)
    SAVED_OFFSET = 8,  // of either
};

// The SAVED_ rows of feature i in training, from its scale, gamma and variance, its deviations being in units of `unit`;
// y = a d + offset with this `a`, which may be a rounding.
__device__ inline void store_saved(double* saved, long long n, long long i, double s, double gamma, double var,
                                   double eps, double unit, double a, double offset) {
    const double r = 1.0 / sqrt(s * s * var + eps), in_units = s * r * unit;
    saved[SAVED_A * n + i] = gamma * s * r;
    saved[SAVED_SCALE * n + i] = gamma * eps * r * r * r * unit;
    saved[SAVED_GAMMA * n + i] = in_units;
    saved[SAVED_RATE * n + i] = in_units * in_units;
    saved[SAVED_UNIT * n + i] = unit;
    saved[SAVED_SLOPE * n + i] = a * unit;
    saved[SAVED_OFFSET * n + i] = offset;
}

// v in two parts of G; what is not finite has no second one.
template <typename G>
struct HighLow {
    G high, low;
    __device__ explicit HighLow(double v)
        : high(static_cast<G>(v)), low(static_cast<G>(isfinite(high) ? v - high : 0.0)) {}
};

template <typename G>
__device__ inline void store_affine(G* affine, long long pitch, long long i, double m, double a, double beta) {
    const HighLow<G> parts(m);
    affine[AFFINE_M * pitch + i] = parts.high;
    affine[AFFINE_M_LOW * pitch + i] = parts.low;
    affine[AFFINE_A * pitch + i] = static_cast<G>(a);
    affine[AFFINE_BETA * pitch + i] = static_cast<G>(beta);
}

// What M2 of a g that the tensor core made of limbs is to be multiplied by for an unbiased variance. The tensor core cuts off
// what float32 cannot hold of a sum, where an FMA rounds: g ends short of the truth by 2^-24 of itself on average (measured and
// simulated: 0.9 to 1.1 of it for 64 to 8192 terms and any shape), and M2 by twice that. y and the gradients do not see it,
// being made of the g and the M2 that there are.
constexpr double M2_OF_LIMBS = 1.0 + 0x1p-23, M2_AS_MADE = 1.0 - 0x1p-23;

// A launch may have fewer CTAs than there is work (`sms`): CTA b takes the items b, b + gridDim.x, ... of `count`. All of
// its threads come back from one item before any begins the next, so that shared memory is free again.
template <typename Work>
__device__ __forceinline__ void for_each_item(long long count, const Work& work) {
    for (unsigned item = blockIdx.x; item < count; item += gridDim.x) {  // a grid, and so count, is below 2^31
        if (item != blockIdx.x) __syncthreads();
        work(item);
    }
}

// What every kernel does first; or, where the kernel ahead is of the same call and has itself waited for whatever
// made a kernel's operands, as soon as the first of these are asked for. A launch may begin while the kernel ahead of
// it in the stream is still running (programmatic dependent launch, from Hopper on; Launcher in gsbn/_kernels.py):
// this waits until all of that one is done and seen, and only then lets the next launch begin in its turn, so that no
// more than two overlap. Launched otherwise, as all that a call with `sms` launches, it does not wait. Behind a kernel that `waits` for another GPU the next
// one begins when that has ended: its CTAs would hold the SMs that others need (common/ranks.cuh). A launch with FLAG_INDEPENDENT
// waits at its end in place of its beginning, so that it runs beside the kernel ahead, and has never ended before
// that one has: whoever waits for it, waits for both.
__device__ inline void await_kernel_ahead(bool waits = false) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (!waits) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
