// Activations: y = f(u) with u = a (g - mean) + beta, and their derivatives in the backward.
//
// An activation is a struct here and a name in gsbn/_typing.py; a kernel is compiled for one of them (ACTIVATION).
//   of(u)            f(u), before it is rounded to T; NaN stays NaN
//   gradient(dy, u)  the gradient with respect to u, dy being that with respect to y
//   JUMPS            whether the derivative jumps, where side(u) changes; f must not decrease
//
// The backward has no u. It computes one, u = slope d + offset, from the deviation d that the forward saved. This d is
// g - mean rounded, mostly to 16 bits, and may lie on the other side of a jump than the y that was written. The forward
// checks this, and then saves the neighbour of d on y's side (settle). So the gradient belongs to y in every element,
// and nothing but d is saved or read.
#pragma once
#include "common/common.cuh"

#ifndef ACTIVATION
#define ACTIVATION Identity
#endif

// The largest u that becomes zero in T: half of T's least number, which rounds to even.
template <typename T>
constexpr float VANISHES = 0.0f;
template <>
constexpr float VANISHES<__half> = 0x1p-25f;

template <typename T>
struct Identity {
    static constexpr bool JUMPS = false;
    template <typename W>
    static __device__ __forceinline__ W of(W u) {
        return u;
    }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W) {
        return dy;
    }
    template <typename W>
    static __device__ __forceinline__ bool side(W) {
        return true;
    }
};

template <typename T>
struct Relu {
    static constexpr bool JUMPS = true;
    static __device__ __forceinline__ float of(float u) {
#if __CUDA_ARCH__ >= 800
        float y;
        asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(u));
        return y;
#else
        return u <= 0.0f ? 0.0f : u;
#endif
    }
    static __device__ __forceinline__ double of(double u) { return u <= 0.0 ? 0.0 : u; }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W u) {
        return side(u) ? dy : W(0);
    }
    // Whether y is above zero, or NaN.
    template <typename W>
    static __device__ __forceinline__ bool side(W u) {
        return !(u <= W(VANISHES<T>));
    }
};

template <typename T>
using Activation = ACTIVATION<T>;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

// Rounds v to D; to the neighbour on v's other side if rounding would carry slope v + offset over the jump.
template <typename T, typename D, typename G>
__device__ __forceinline__ D settle(G v, G slope, G offset) {
    D d;
    from_float(v, d);
    if constexpr (Activation<T>::JUMPS && sizeof(D) == 2) {
        const float back = to_float(d);
        if (Activation<T>::side(fmaf(slope, back, offset)) != Activation<T>::side(fmaf(slope, v, offset))) {
            short bits = *reinterpret_cast<short*>(&d);  // sign and magnitude: neighbours differ by 1
            bits += fabsf(back) < fabsf(v) ? 1 : -1;
            d = *reinterpret_cast<D*>(&bits);
        }
    }
    return d;
}

// Whether deviations of this type are saved in units of each feature's own (SAVED_UNIT).
template <typename A>
constexpr bool in_units = false;
template <>
constexpr bool in_units<__half> = true;

// The deviation that is saved: d, g - mean in G and in units, rounded to K. If K is wider than G it is g - mean almost
// exactly, since the mean comes in two parts; u then becomes what the backward will compute.
template <typename T, typename K, typename G>
__device__ __forceinline__ K deviation(G g, G mean, G mean_low, G d, G slope, G offset, G& u) {
    if constexpr (sizeof(K) > sizeof(G)) {
        const K exact = (static_cast<K>(g) - mean) - mean_low;
        if (Activation<T>::JUMPS) u = fma(static_cast<K>(slope), exact, static_cast<K>(offset));
        return exact;
    } else {
        return settle<T, K>(d, slope, offset);
    }
}
