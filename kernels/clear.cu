// clear: zeros in place of a memset, whose CTAs would be CUDA's to count and not `sms`'s.
//
//   to: `bytes` of memory that starts on 16 bytes
//
// A thread writes 16 of them; whoever has fewer, one by one.
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
