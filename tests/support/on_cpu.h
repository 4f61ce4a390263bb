// CUDA C for a CPU, as far as the portable kernels need it: tests/support/on_cpu.py compiles them with this header. The
// threads of a CTA are fibers of one thread; CTAs run one after the other.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <bit>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __constant__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- numbers of 16 bits

struct __half {
    _Float16 v;
    __half() = default;
    explicit __half(float v) : v(_Float16(v)) {}
};
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float v) {
        const unsigned word = std::bit_cast<unsigned>(v);
        bits = isnan(v) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
// v as float32, rounded so that rounding it once more to 16 bits is as good as rounding v.
inline float rounded_to_odd(double v) {
    const float near = float(v), toward_zero = fabs(double(near)) > fabs(v) ? nextafterf(near, 0.0f) : near;
    return double(near) == v || !isfinite(v) || !isfinite(near)
               ? near
               : std::bit_cast<float>(std::bit_cast<unsigned>(toward_zero) | 1);
}
inline float __half2float(__half v) { return float(v.v); }
inline float __bfloat162float(__nv_bfloat16 v) { return std::bit_cast<float>(unsigned(v.bits) << 16); }
inline __half __float2half_rn(float v) { return __half(v); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
inline __half __double2half(double v) { return __half(rounded_to_odd(v)); }
inline __nv_bfloat16 __double2bfloat16(double v) { return __nv_bfloat16(rounded_to_odd(v)); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __half __ushort_as_half(unsigned short v) { return std::bit_cast<__half>(v); }
inline __half __float2half_ru(float v) {  // the least number from v on
    const __half near(v);
    const short bits = std::bit_cast<short>(near);
    if (!(near.v < v)) return near;
    return std::bit_cast<__half>(short(near.v == 0 ? 1 : bits < 0 ? bits - 1 : bits + 1));
}
inline __half __float2half_rd(float v) {
    const __half up = __float2half_ru(-v);
    return __half(-float(up.v));
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return std::bit_cast<__nv_bfloat16>(v); }

// ---- arithmetic

inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline double __longlong_as_double(long long v) { return std::bit_cast<double>(v); }
inline long long __double_as_longlong(double v) { return std::bit_cast<long long>(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(v); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((1ULL * high << 32) | low) >> shift % 32);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((1ULL * high << 32) | low) << shift % 32 >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    unsigned out = 0;
    for (int i = 0; i < 32; i += 8) out |= unsigned(((1ULL * b << 32) | a) >> (which >> i / 2 & 7) * 8 & 255) << i;
    return out;
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline unsigned long long __cvta_generic_to_shared(const void* at) { return std::bit_cast<unsigned long long>(at); }
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}
template <typename T>
T atomicAdd(T* at, T v) {
    const T before = *at;
    *at += v;
    return before;
}
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void stop(const char* why) {
    fprintf(stderr, "on_cpu.h: %s\n", why);
    abort();
}
[[noreturn]] inline void not_portable() { stop("a kernel came to PTX that the CPU does not have"); }

// ---- threads

struct Three {
    unsigned x, y, z;
};
inline Three threadIdx, blockIdx, gridDim;

enum class Waits { NOT, FOR_WARP, FOR_CTA, ENDED };
struct Fiber {
    ucontext_t context;
    Waits waits;
    unsigned lanes;  // those of its warp that it waits for
    int vote;
    unsigned long long exchanged[2];
    std::vector<char> stack;
};
inline std::vector<Fiber> fibers(1024);
inline ucontext_t scheduler;
inline int voted;
inline void (*body)();
alignas(1024) inline char dynamic_memory[256 * 1024];

inline void wait(Waits what) {
    Fiber& own = fibers[threadIdx.x];
    own.waits = what;
    swapcontext(&own.context, &scheduler);
}
inline void __syncthreads() { wait(Waits::FOR_CTA); }
inline void __syncwarp(unsigned lanes = ~0u) {
    fibers[threadIdx.x].lanes = lanes;
    wait(Waits::FOR_WARP);
}
inline int __syncthreads_or(int vote) {
    fibers[threadIdx.x].vote = vote;
    __syncthreads();
    return voted;
}
template <typename T>
T __shfl_sync(unsigned lanes, T v, int from) {
    memcpy(fibers[threadIdx.x].exchanged, &v, sizeof(T));
    __syncwarp(lanes);
    memcpy(&v, fibers[threadIdx.x / 32 * 32 + unsigned(from) % 32].exchanged, sizeof(T));
    __syncwarp(lanes);
    return v;
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T v, int mask) {
    return __shfl_sync(lanes, v, threadIdx.x ^ mask);
}
inline unsigned __ballot_sync(unsigned lanes, bool vote) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= unsigned(__shfl_sync(lanes, vote, i) && lanes >> i & 1) << i;
    return votes;
}

// Lets the fibers of a CTA go on if all that have not ended wait for the CTA.
inline void release_cta(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i)
        if (fibers[i].waits != Waits::FOR_CTA && fibers[i].waits != Waits::ENDED) return;
    voted = 0;
    for (unsigned i = 0; i < threads; ++i) voted |= fibers[i].vote;
    for (unsigned i = 0; i < threads; ++i) {
        fibers[i].vote = 0;
        if (fibers[i].waits == Waits::FOR_CTA) fibers[i].waits = Waits::NOT;
    }
}

// Lets each fiber of a warp go on if all lanes that it waits for, and that have not ended, wait for the same lanes.
inline void release_warp(unsigned first) {
    unsigned waiting = 0;
    for (int i = 0; i < 32; ++i) waiting |= unsigned(fibers[first + i].waits == Waits::FOR_WARP) << i;
    const auto goes_on = [&](int lane) {
        const unsigned lanes = fibers[first + lane].lanes;
        for (int i = 0; i < 32; ++i) {
            const Fiber& other = fibers[first + i];
            const bool same = waiting >> i & 1 && other.lanes == lanes;
            if (lanes >> i & 1 && !same && other.waits != Waits::ENDED) return false;
        }
        return true;
    };
    unsigned released = 0;
    for (int i = 0; i < 32; ++i) released |= unsigned(waiting >> i & 1 && goes_on(i)) << i;
    for (int i = 0; i < 32; ++i)
        if (released >> i & 1) fibers[first + i].waits = Waits::NOT;
}

inline void run_cta(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.stack.resize(128 * 1024);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        fiber.waits = Waits::NOT;
        fiber.vote = 0;
        makecontext(&fiber.context, +[] { body(), wait(Waits::ENDED); }, 0);
    }
    for (unsigned running = threads; running > 0;) {
        bool moved = false;
        for (unsigned i = 0; i < threads; ++i) {
            if (fibers[i].waits != Waits::NOT) continue;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            running -= fibers[i].waits == Waits::ENDED;
            moved = true;
        }
        if (!moved) stop("threads of a warp wait for different barriers");
        for (unsigned i = 0; i < threads; i += 32) release_warp(i);
        release_cta(threads);
    }
}

// ---- a launch

// Calls a kernel with its struct and the 64-bit words after it.
template <typename Problem, typename... Words>
void launch(void (*kernel)(Problem, Words...), unsigned grid, unsigned threads, const void* record,
            const unsigned long long* words) {
    static void (*of)(Problem, Words...);
    static std::remove_const_t<Problem> problem;
    static const unsigned long long* passed;
    of = kernel, passed = words;
    memcpy(&problem, record, sizeof(problem));
    body = +[] {
        [&]<size_t... I>(std::index_sequence<I...>) {
            of(problem, std::bit_cast<Words>(passed[I])...);
        }(std::index_sequence_for<Words...>());
    };
    gridDim = {grid, 1, 1};
    for (unsigned cta = 0; cta < grid; ++cta) {
        blockIdx = {cta, 0, 0};
        run_cta(threads);
    }
}
