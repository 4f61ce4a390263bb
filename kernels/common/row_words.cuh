// How lanes store rows of a matrix, in whole words even if the rows do not start on words. No kernels.
//
// Neighbouring lanes have neighbouring words of a row (Vector<T, N>, 8 or 16 bytes). If the row starts `shift` bytes
// after the start of a word of memory, each lane rotates its word by as many bytes, and gets the bytes with which the
// word of memory begins from the lane ahead, which has the columns before its own. Elements at the ends of the row, or
// of what the lanes have of it, are stored one by one. If all were, a word would take N stores, each to parts of
// sectors.
#pragma once
#include "common/ghost.cuh"

constexpr int LEAST_WORDS = 4;  // if lanes have fewer words of a row together, elements take no longer

// v, each byte `shift` bytes further on; the last `shift` bytes become the first ones.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> rotated(const Vector<T, N>& v, unsigned shift) {
    constexpr int WORDS = sizeof(T) * N / 4;
    static_assert(WORDS == 2 || WORDS == 4, "8 or 16 bytes");
    Vector<T, N> out = v;
    unsigned* const of = reinterpret_cast<unsigned*>(&out);
#pragma unroll
    for (int by = 1; by < WORDS; by *= 2) {
        unsigned from[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) from[i] = of[i];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) of[i] = shift & 4 * by ? from[(i + WORDS - by) % WORDS] : from[i];
    }
    if constexpr (sizeof(T) == 2) {
        const unsigned last = of[WORDS - 1], bits = shift % 4 * 8;
#pragma unroll
        for (int i = WORDS - 1; i >= 0; --i) of[i] = __funnelshift_l(i > 0 ? of[i - 1] : last, of[i], bits);
    }
    return out;
}

// The first `shift` bytes of `ahead`, and then those of `own`.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> joined(const Vector<T, N>& ahead, const Vector<T, N>& own, unsigned shift) {
    Vector<T, N> out;
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * N / 4; ++i) {
        const unsigned a = reinterpret_cast<const unsigned*>(&ahead)[i], b = reinterpret_cast<const unsigned*>(&own)[i];
        unsigned word = shift > 4 * i ? a : b;
        if (sizeof(T) == 2 && shift == 4 * i + 2) word = __byte_perm(a, b, 0x7610);
        reinterpret_cast<unsigned*>(&out)[i] = word;
    }
    return out;
}

// condition ? a : b, in registers: the operator would choose between addresses in local memory.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> chosen(bool condition, const Vector<T, N>& a, const Vector<T, N>& b) {
    Vector<T, N> out;
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * N / 4; ++i)
        reinterpret_cast<unsigned*>(&out)[i] =
            condition ? reinterpret_cast<const unsigned*>(&a)[i] : reinterpret_cast<const unsigned*>(&b)[i];
    return out;
}

// Stores joined(ahead, own, shift) to the word of memory that begins `shift` bytes before an address.
template <typename T, int N>
__device__ __forceinline__ void store_joined(T* at, const Vector<T, N>& ahead, const Vector<T, N>& own,
                                             unsigned shift) {
    *reinterpret_cast<Vector<T, N>*>(reinterpret_cast<char*>(at) - shift) = joined(ahead, own, shift);
}

// The vector that lane `from` passes. `lanes`: a mask of the lanes that call this.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> shuffled(unsigned lanes, const Vector<T, N>& v, int from) {
    Vector<T, N> out;
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * N / 4; ++i)
        reinterpret_cast<unsigned*>(&out)[i] = __shfl_sync(lanes, reinterpret_cast<const unsigned*>(&v)[i], from);
    return out;
}

// Stores the first `inside` of N elements, at once if `whole`, else one by one, `col` elements apart.
template <typename T, int N>
__device__ __forceinline__ void store_word(T* to, const Vector<T, N>& v, int inside, bool whole, long long col) {
    if (whole) {
        *reinterpret_cast<Vector<T, N>*>(to) = v;
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < inside) to[j * col] = v.at[j];
    }
}

// How a lane's N elements of a row are stored if they straddle two words of memory. With the default, no word of memory
// is stored, and all elements are stored one by one.
template <typename T, int N>
struct Straddle {
    int in_first = N;                                       // elements that lie in the first of the two words
    bool stores_first = false, next_stores_second = false;  // this lane, and the next one

    __device__ Straddle() {}
    // For an element that lies `shift` bytes after the start of a word of memory. `has_ahead`: whether the lane ahead
    // has the elements before it. `left`: how many there are from it on, as far as this lane and the next one have
    // them.
    __device__ Straddle(unsigned shift, bool has_ahead, int left)
        : in_first(N - int(shift / sizeof(T))),
          stores_first((has_ahead || shift == 0) && left >= in_first),
          next_stores_second(left >= N + in_first) {}

    // Stores the elements that no word of memory has. `to`: the address of the first element; columns lie `col`
    // elements apart.
    __device__ __forceinline__ void store_rest(T* to, const Vector<T, N>& v, int left, long long col) const {
        if (!stores_first || !next_stores_second)
#pragma unroll
            for (int j = 0; j < N; ++j)
                if (j < left && !(j < in_first ? stores_first : next_stores_second)) to[j * col] = v.at[j];
    }
};

// The lanes that have a row together, a word of VEC columns each (Places).
template <int VEC>
struct RowOfLanes {
    int inside;      // columns that this lane has
    int left;        // columns that it and the next lane have
    bool has_ahead;  // whether the lane ahead has the columns ahead
    unsigned lanes;  // a mask of those that have columns

    // All lanes of a warp call it.
    template <int THREADS>
    __device__ __forceinline__ RowOfLanes(const Places<THREADS, VEC>& at_once, const Column& place)
        : inside(place.inside<VEC>()),
          left(int(min(place.left, at_once.column + VEC < at_once.columns ? 2LL * VEC : 1LL * VEC))),
          has_ahead(at_once.column > 0 && place.feature > 0) {
        const int row_threads = at_once.columns / VEC, first = int(threadIdx.x) % 32 & -row_threads;
        lanes = __ballot_sync(~0u, inside > 0) & ~0u >> (32 - row_threads) << first;
    }
    // All lanes with columns call it, with the address of their own in the same row.
    template <typename T>
    __device__ __forceinline__ void store(T* to, const Vector<T, VEC>& v) const {
        const unsigned shift = unsigned(size_t(to) % sizeof(v));
        const auto own = rotated(v, shift), ahead = shuffled(lanes, own, int(threadIdx.x) % 32 - 1);
        const Straddle<T, VEC> straddle(shift, has_ahead, left);
        if (straddle.stores_first) store_joined(to, ahead, own, shift);
        straddle.store_rest(to, v, left, 1);
    }
};
