// clear: writes zeros. It stands in for a memset, whose CTAs would not be limited by `sms`.
//
//   to: `bytes` of memory that starts on 16 bytes
//
// A thread writes 16 bytes at once; the last ones one by one. Bytes moved: `bytes`, the minimum.
#include "common/common.cuh"

struct ClearProblem {
    long long bytes;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) clear(const __grid_constant__ ClearProblem p, char* to) {
    await_kernel_ahead();
    for_each_item((p.bytes + 16 * THREADS - 1) / (16 * THREADS), [&](unsigned item) {
        long long at = (static_cast<long long>(item) * THREADS + threadIdx.x) * 16;
        if (at + 16 <= p.bytes) {
            *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
        } else {
            for (; at < p.bytes; ++at) to[at] = 0;
        }
    });
}
