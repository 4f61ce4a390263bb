// clear: writes zeros. It replaces a memset, because `sms` would not limit the CTAs of a memset.
//
//   to: `bytes` of memory that starts on 16 bytes
//
// A thread writes 16 bytes at once; it writes the last bytes, if they are fewer than 16, one by one. Bytes moved:
// `bytes`, the minimum.
#include "common/common.cuh"

struct ClearProblem {
    long long bytes;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) clear(const __grid_constant__ ClearProblem p, char* to) {
    await_kernel_ahead();
    for_each_item((p.bytes + 16 * THREADS - 1) / (16 * THREADS), [&](unsigned item) {
        long long at = (1LL * item * THREADS + threadIdx.x) * 16;
        if (at + 16 <= p.bytes) {
            *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
        } else {
            for (; at < p.bytes; ++at) to[at] = 0;
        }
    });
}
