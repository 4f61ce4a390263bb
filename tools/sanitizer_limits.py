"""What compute-sanitizer does not support on Hopper, shown on kernels of ten lines that are evidently correct.

compute-sanitizer --tool racecheck python tools/sanitizer_limits.py counter     reports a hazard
compute-sanitizer --tool racecheck python tools/sanitizer_limits.py barrier     reports none
compute-sanitizer --tool racecheck python tools/sanitizer_limits.py elected     reports a hazard
compute-sanitizer --tool racecheck python tools/sanitizer_limits.py arrivals    reports none
compute-sanitizer --tool initcheck python tools/sanitizer_limits.py copy        reports uninitialised memory
compute-sanitizer --tool initcheck python tools/sanitizer_limits.py store       reports none

counter: warp 0 writes 32 words. After __syncwarp, which orders the writes of its lanes, lane 0 increments a counter
with release semantics. Warp 1 reads the counter with acquire semantics until it sees the increment, then reads the
words. By the memory model of PTX the increment synchronises with that read, so the writes happen before the reads.
These are count_up and look of forward_sm90. With `barrier` the warps use __syncthreads instead.

elected: the same with an mbarrier that expects one arrival, by lane 0 after __syncwarp, as in tall_product. With
`arrivals` it expects 32, one from each lane.

copy: TMA stores a tile of 8 rows of 128 bytes to memory, through a tensor map, as forward_sm90 stores y;
the host reads it. With `store` the threads store the tile. (Needs a Hopper GPU.)
"""

import ctypes
import sys
from pathlib import Path

import cupy as cp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gsbn._cuda import tensor_maps as _tma
from gsbn._plan.tensor_maps import L2_NONE

HAND_OVER = r"""
extern "C" __global__ void hand_over(int* out) {
    __shared__ int words[32], ready;
    const int lane = threadIdx.x % 32;
    const unsigned at = (unsigned)__cvta_generic_to_shared(&ready);
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        words[lane] = lane * lane;
        __syncwarp();
#ifndef OTHER
        if (lane == 0) asm volatile("red.release.cta.shared::cta.add.s32 [%0], 1;" ::"r"(at) : "memory");
    } else {
        int seen;
        do asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(seen) : "r"(at) : "memory");
        while (seen < 1);
#else
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
#endif
        out[lane] = words[31 - lane];
    }
}
"""

ARRIVE = r"""
extern "C" __global__ void arrive(int* out) {
    __shared__ int words[32];
    __shared__ unsigned long long barrier;
    const int lane = threadIdx.x % 32;
    const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
#ifndef OTHER
    const int arrivals = 1;
#else
    const int arrivals = 32;
#endif
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals));
    __syncthreads();
    if (threadIdx.x < 32) {
        words[lane] = lane * lane;
        __syncwarp();
        if (lane < arrivals) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    } else {
        asm volatile("{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
                     "@!done bra WAIT;\n}" ::"r"(at) : "memory");
        out[lane] = words[31 - lane];
    }
}
"""

STORE = r"""
struct alignas(64) TensorMap { char bytes[128]; };
extern "C" __global__ void store(const __grid_constant__ TensorMap map, float* out) {
    __shared__ alignas(1024) float tile[256];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = 7;
#ifndef OTHER
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %2}], [%1];" ::"l"(&map),
                     "r"((unsigned)__cvta_generic_to_shared(tile)), "r"(0) : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
#else
    for (int i = threadIdx.x; i < 256; i += 32) out[i] = tile[i];
#endif
}
"""


def main(what):
    cp.cuda.set_allocator(None)
    options = ("-DOTHER",) if what in ("barrier", "arrivals", "store") else ()
    if what not in ("copy", "store"):
        out = cp.zeros(32, cp.int32)
        code, name = (HAND_OVER, "hand_over") if what in ("counter", "barrier") else (ARRIVE, "arrive")
        cp.RawKernel(code, name, options)((1,), (64,), (out,))
        wrong = (out.get()[::-1] != np.arange(32) ** 2).sum()
    else:
        out = cp.empty((8, 32), cp.float32)
        owner, at = _tma.tensor_map(out.data.ptr, 8, 32, 128, "float32", 8, 32, L2_NONE)
        encoded = np.frombuffer(ctypes.string_at(at, 128), "V128")[0]
        del owner
        cp.RawKernel(STORE, "store", (*options, "-std=c++17"))((1,), (32,), (encoded, out))
        wrong = (out.get() != 7).sum()
    print(f"{what}: {wrong} words are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if sys.argv[1:] else __doc__)
