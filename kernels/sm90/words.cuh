// How CTAs communicate through the workspace, in words of two floats and the number of the launch that wrote them, and
// how all CTAs agree on this number.
#pragma once
#include "sm90/formats.cuh"
#include "sm90/ptx.cuh"

struct alignas(16) Word {
    float x, y;
    u64 launch;
};

__device__ __forceinline__ void publish(Word* word, float x, float y, u64 launch) {
    u64 value = u64(__float_as_uint(y)) << 32 | __float_as_uint(x);
    asm volatile("{\n.reg .b128 all;\nmov.b128 all, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(word),
                 "l"(value), "l"(launch)
                 : "memory");
}

__device__ __forceinline__ Word peek(const Word* word) {
    u64 value, launch;
    asm volatile("{\n.reg .b128 all;\nld.relaxed.gpu.global.b128 all, [%2];\nmov.b128 {%0, %1}, all;\n}"
                 : "=l"(value), "=l"(launch)
                 : "l"(word)
                 : "memory");
    return {__uint_as_float(u32(value)), __uint_as_float(u32(value >> 32)), launch};
}

__device__ __forceinline__ float2 await(const Word* word, u64 launch, int backoff = SHORT_BACKOFF) {
    Word w;
    while ((w = peek(word)).launch != launch) __nanosleep(backoff);
    return make_float2(w.x, w.y);
}

constexpr bool TWO_WORDS = SAVE_DEVIATIONS && (!FLOAT32 || RENORM);  // a feature has two words in `merged`

struct Merged {  // the results for one feature, over all rows: y = f(a (g - centre) + offset)
    float centre, a, unit, offset;
    __device__ float offset_or(float beta) const { return TWO_WORDS ? offset : beta; }
};

// The centre is the mean or, with SAVE_DEVIATIONS, the centre of the deviations in y's type (deviation_centre).
__device__ __forceinline__ Merged merged_of(float mean, float var, float a, float beta) {
    const float centre = SAVE_DEVIATIONS ? centre_of(mean, var, 1.0f) : mean;
    return {centre, a, deviation_unit(var, 1), centre == mean ? beta : fmaf(-a, mean - centre, beta)};
}

// `merged` is [TWO_WORDS ? 2 : 1][features]. The first row holds (centre, a). There is a second row, (unit, offset), if
// units may differ from 1 or the offset from beta.
__device__ __forceinline__ Merged await_merged(const Word* merged, size_t features, size_t feature, u64 launch) {
    if constexpr (!TWO_WORDS) {
        const float2 all = await(merged + feature, launch);
        return {all.x, all.y, 1.0f, 0.0f};
    }
    Word all, more;  // both in flight at once
    while (all = peek(merged + feature), more = peek(merged + features + feature),
           all.launch != launch || more.launch != launch)
        __nanosleep(SHORT_BACKOFF);
    return {all.x, all.y, more.x, more.y};
}

__device__ __forceinline__ void publish_merged(Word* merged, size_t features, size_t feature, const Merged& all,
                                               u64 launch) {
    publish(merged + feature, all.centre, all.a, launch);
    if (TWO_WORDS) publish(merged + features + feature, all.unit, all.offset, launch);
}

__device__ __forceinline__ u64 later_than(u64 time) {
    u64 t;
    do t = now();
    while (t <= time);
    return t;
}

// Agrees on a number for this launch: a time within the launch, which no earlier user of the workspace can have left
// there. `epoch` is [1 + CTAs]: the number, then a report from each CTA. One warp of every CTA calls this; lane 0
// returns the number.
//
// Each CTA reports the time, again and again, until it sees a number later than its own start. CTA 0 waits until every
// other CTA has reported a time later than CTA 0's own start: such a report belongs to this launch. Then CTA 0 takes as
// the number a time later than any report, and so later than the start of any CTA. Anything else in `epoch` is earlier
// than this launch, or in the future, and is ignored. Every comparison is strict: an old number that equals the start
// of a CTA does not pass, however coarse the timer is. Reports are releases: when CTA 0 returns, it sees everything
// that the CTAs did before the call.
__device__ __forceinline__ u64 agree_on_number(u64* epoch, int lane) {
    const u64 start = now();
    u64 number;
    if (blockIdx.x == 0) {
#pragma unroll 1
        for (int cta = 1 + lane; cta < gridDim.x; cta += 32) {
            u64 report;
            do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(report) : "l"(epoch + 1 + cta) : "memory");
            while (report <= start || report >= now());  // so now() is later than any report, even if clocks differ
        }
        __syncwarp();
        number = later_than(start);
        if (lane == 0) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(epoch), "l"(number) : "memory");
    } else if (lane == 0) {
        do {
            asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(epoch + 1 + blockIdx.x), "l"(now()) : "memory");
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(number) : "l"(epoch) : "memory");
        } while (number <= start || number > now());
    }
    return number;
}
