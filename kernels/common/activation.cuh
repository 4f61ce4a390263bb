// Activations: y = f(u) with u = a (g - mean) + beta, and their derivatives in the backward.
//
// An activation is a struct here and a name in gsbn/_plan/activations.py; a kernel is compiled for one of them
// (ACTIVATION) and for its slope or alpha (ACTIVATION_PARAMETER).
//   of(u)            f(u), before it is rounded to T; NaN stays NaN
//   gradient(dy, u)  the gradient with respect to u, from the gradient dy with respect to y
//   JUMPS            whether the derivative jumps where side(u) changes
//   side(u)          whether u, rounded to T, is above zero; whatever f is, this must change at one u only. If f keeps
//                    signs, it is whether y is above zero.
//
// The backward does not have u. It computes u = slope d + offset from the deviation d that the forward saved. This d is
// g - mean, rounded mostly to 16 bits, so the u from it may lie on the other side of a jump than the u from which y was
// computed. The forward checks this; if it is so, it saves the neighbour of d on y's side (settle). So the gradient
// agrees with y in every element, and nothing but d is saved or read.
#pragma once
#include "common/common.cuh"

#ifndef ACTIVATION
#define ACTIVATION Identity
#endif
#ifndef ACTIVATION_PARAMETER
#define ACTIVATION_PARAMETER 0.0  // a double within float32's range
#endif
template <typename W>
constexpr W PARAMETER = W(ACTIVATION_PARAMETER);

// The largest u that becomes zero in T: half of T's least number, which rounds to even.
template <typename T>
constexpr float VANISHES = 0.0f;
template <>
constexpr float VANISHES<__half> = 0x1p-25f;

// e^v. The GPU's own exponential errs by 2 + 1.173 |v| units of float32. For v below -20, y is zero in float16; so the
// error is at most 2^-18.3 of e^v, a 150th of float16's unit. For bfloat16 the limit is v = -88, and the error is at
// most 2^-16.2 of e^v, a 300th of its unit.
template <typename T>
__device__ __forceinline__ float exponential(float v) {
    if constexpr (sizeof(T) == 2) return __expf(v);
    return expf(v);
}
template <typename T>
__device__ __forceinline__ double exponential(double v) {
    return exp(v);
}

// v sigmoid(z). For 16-bit types, the quotient errs by two units of float32. Where `rest` exceeds 2^126 the quotient is
// zero; |y| is then at most 2^-119.
template <typename T>
__device__ __forceinline__ float times_sigmoid(float v, float z) {
    const float rest = 1.0f + exponential<T>(-z);
    if constexpr (sizeof(T) == 2) return __fdividef(v, rest);
    return v / rest;
}
template <typename T>
__device__ __forceinline__ double times_sigmoid(double v, double z) {
    return v / (1.0 + exp(-z));
}

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

// Functions that are u above zero and another function below. Unless the parameter is 1, the slope jumps at zero.
template <typename T>
struct Bent {
    static constexpr bool JUMPS = ACTIVATION_PARAMETER != 1.0;
    // This asks u and not y: if the parameter is below zero, y is above zero on both sides.
    template <typename W>
    static __device__ __forceinline__ bool side(W u) {
        return u > W(VANISHES<T>);
    }
};

template <typename T>
struct LeakyRelu : Bent<T> {
    template <typename W>
    static __device__ __forceinline__ W of(W u) {
        return u > W(0) ? u : PARAMETER<W> * u;
    }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W u) {
        return Bent<T>::side(u) ? dy : PARAMETER<W> * dy;
    }
};

template <typename T>
struct Elu : Bent<T> {
    // e^u - 1 would cancel near zero. There, 16-bit types use the series up to u^6 / 6!; its relative error is 2^-24.
    // For lower u, the error of the GPU's exponential is 2^-20 of the difference.
    static __device__ __forceinline__ float below(float u) {
        if constexpr (sizeof(T) != 2) return expm1f(u);
        const float series =
            u * fmaf(u, fmaf(u, fmaf(u, fmaf(u, fmaf(u, 1 / 720.0f, 1 / 120.0f), 1 / 24.0f), 1 / 6.0f), 0.5f), 1.0f);
        return u > -0.25f ? series : __expf(u) - 1.0f;
    }
    static __device__ __forceinline__ float of(float u) { return u > 0.0f ? u : PARAMETER<float> * below(u); }
    static __device__ __forceinline__ double of(double u) { return u > 0.0 ? u : PARAMETER<double> * expm1(u); }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W u) {
        return Bent<T>::side(u) ? dy : dy * (PARAMETER<W> * exponential<T>(u));
    }
};

template <typename T>
struct Smooth {
    static constexpr bool JUMPS = false;
    template <typename W>
    static __device__ __forceinline__ bool side(W) {
        return true;
    }
};

template <typename T>
struct Silu : Smooth<T> {
    template <typename W>
    static __device__ __forceinline__ W of(W u) {
        return times_sigmoid<T>(u, u);
    }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W u) {
        const W s = times_sigmoid<T>(W(1), u);
        return dy * (s * fma(u, W(1) - s, W(1)));
    }
};

// u Phi(u), with Phi(u) = erfc(-u / sqrt(2)) / 2: 1 + erf(u / sqrt(2)) would cancel for u far below zero.
template <typename T>
struct Gelu : Smooth<T> {
    static __device__ __forceinline__ double bell(double u) { return exp(-0.5 * u * u); }
    static __device__ __forceinline__ float bell(float u) { return exponential<T>(-0.5f * u * u); }
    static __device__ __forceinline__ double phi(double u, double) { return 0.5 * erfc(-0.70710678118654752 * u); }
    // 16-bit types use Phi(-|u|) = e^(-u^2 / 2) t Q(t) with t = 1 / (1 + 0.3 |u|). Q is a least-squares fit; its
    // weights are chosen so that the relative error is even: 2^-22.8 for |u| up to 13.5, where bfloat16 ends. With
    // erfcf, forwards took 1.5 to 2 times as long.
    static __device__ __forceinline__ float phi(float u, float bell_of_u) {
        if constexpr (sizeof(T) != 2) return 0.5f * erfcf(-0.707106781f * u);
        const float t = __fdividef(1.0f, fmaf(0.3f, fabsf(u), 1.0f));
        float q = 0.03593175f;
        q = fmaf(q, t, -0.15827604f);
        q = fmaf(q, t, 0.20820667f);
        q = fmaf(q, t, -0.0553939f);
        q = fmaf(q, t, 0.12946923f);
        q = fmaf(q, t, 0.09963749f);
        q = fmaf(q, t, 0.12079836f);
        q = fmaf(q, t, 0.11962639f);
        const float below = bell_of_u * (t * q);
        return u > 0.0f ? 1.0f - below : below;
    }
    template <typename W>
    static __device__ __forceinline__ W of(W u) {
        return u * phi(u, bell(u));
    }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W u) {
        const W e = bell(u);
        return dy * fma(u, W(0.39894228040143268) * e, phi(u, e));
    }
};

// (1 + tanh v) / 2 is sigmoid(2 v), which does not cancel.
template <typename T>
struct GeluTanh : Smooth<T> {
    static constexpr double SLOPE = 1.5957691216057308, CUBE = 0.044715;  // 2 sqrt(2 / pi)
    template <typename W>
    static __device__ __forceinline__ W twice_v(W u) {
        return W(SLOPE) * u * fma(W(CUBE) * u, u, W(1));
    }
    template <typename W>
    static __device__ __forceinline__ W of(W u) {
        return times_sigmoid<T>(u, twice_v(u));
    }
    template <typename W>
    static __device__ __forceinline__ W gradient(W dy, W u) {
        const W s = times_sigmoid<T>(W(1), twice_v(u)), rate = W(SLOPE) * fma(W(3 * CUBE) * u, u, W(1));
        return dy * fma(u * (s * (W(1) - s)), rate, s);
    }
};

template <typename T>
using Activation = ACTIVATION<T>;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

// Rounds v to D. If rounding would move slope v + offset across the jump, it takes the next number of D on the other
// side of v.
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

// The same for many v of one feature, in four instructions each. T is the 16-bit type, A the activation. `from` is the
// least v on the upper side of the jump of slope v + offset, `above` is T's least number on that side, and `below` is the
// number of T before it.
template <typename A, typename T>
struct Jump {
    float from, above, below;

    Jump() = default;
    __device__ __forceinline__ explicit Jump(float from) : from(from) { place(T()); }

    __device__ __forceinline__ float settle(float v) const {
        float up, down;  // fmaxf and fminf would lose NaN
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(up) : "f"(v), "f"(above));
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(down) : "f"(v), "f"(below));
        return v >= from ? up : down;
    }

    // `from` of a feature, or -inf if no v jumps. Division gives it but for a few units, and bisection finds it.
    static __device__ __forceinline__ float least(float slope, float offset) {
        const float guess = (VANISHES<T> - offset) / slope;
        if (!A::JUMPS || !(fabsf(guess) < MOST)) return -2.0f * MOST;
        const auto is_upper = [&](int i) { return A::side(fmaf(slope, in_order(i), offset)) != (slope < 0.0f); };
        int before = order_of(guess) - 4, here = before + 8;
        if (is_upper(before) || !is_upper(here)) before = order_of(-MOST), here = order_of(MOST);
        while (unsigned(here) - unsigned(before) != 1) {
            const int middle = before + int((unsigned(here) - unsigned(before)) / 2);
            (is_upper(middle) ? here : before) = middle;
        }
        return in_order(here);
    }

private:
    static constexpr float MOST = 0x1.fffffep127f;

    // Integers in the order of the floats. Subnormal floats are left out: kernels are compiled without them.
    static constexpr int SUBNORMAL = 0x7FFFFF;
    static __device__ __forceinline__ int order_of(float v) {
        const int magnitude = max((__float_as_int(v) & 0x7FFFFFFF) - SUBNORMAL, 0);
        return v < 0.0f ? -magnitude : magnitude;
    }
    static __device__ __forceinline__ float in_order(int i) {
        const float magnitude = __int_as_float(i ? abs(i) + SUBNORMAL : 0);
        return i < 0 ? -magnitude : magnitude;
    }

    __device__ __forceinline__ void place(__half) {
        above = __half2float(__float2half_ru(from));
        below = __half2float(__float2half_rd(in_order(order_of(from) - 1)));
    }
    // The upper half of a float is a bfloat16.
    __device__ __forceinline__ void place(__nv_bfloat16) {
        const int bits = __float_as_int(from), magnitude = bits & 0x7FFFFFFF;
        const int up = ((bits < 0 ? -magnitude : magnitude) + 0xFFFF) & ~0xFFFF, down = up - 0x10000;
        above = __int_as_float(up < 0 ? int(0x80000000) | -up : up);
        below = __int_as_float(down < 0 ? int(0x80000000) | -down : down);
    }
};

// Whether deviations of this type are saved in units, of which each feature has its own (SAVED_UNIT).
template <typename A>
constexpr bool in_units = false;
template <>
constexpr bool in_units<__half> = true;

// The deviation that is saved. It is d, which is g - mean in G and in units, rounded to K. If K is wider than G, it is
// g - mean almost exactly, since the mean comes in two parts; `u` then becomes the u that the backward will compute.
template <typename T, typename K, typename G>
__device__ __forceinline__ K deviation(G g, G mean, G mean_low, G d, G slope, G offset, G& u) {
    if constexpr (sizeof(K) > sizeof(G)) {
        const K exact = (K(g) - mean) - mean_low;
        if (Activation<T>::JUMPS) u = fma(K(slope), exact, K(offset));
        return exact;
    } else {
        return settle<T, K>(d, slope, offset);
    }
}
