"""What compute-sanitizer's racecheck makes of a counter in shared memory: forward_sm90's count_up and look, alone.

compute-sanitizer --tool racecheck python tools/racecheck_counter.py [barrier]

Warp 0 writes 32 words and counts up with release semantics, after __syncwarp has ordered its lanes' writes before lane
0's addition. Warp 1 looks at the counter with acquire semantics until it has seen that, and reads the words: by PTX's
memory model the addition synchronises with the look, and the writes happen before the reads. racecheck reports a hazard
all the same. With `barrier` the warps meet in __syncthreads instead, and it reports none.
"""

import sys

import cupy as cp

CODE = r"""
extern "C" __global__ void hand_over(int* out) {
    __shared__ int words[32], ready;
    const int lane = threadIdx.x % 32;
    const unsigned at = (unsigned)__cvta_generic_to_shared(&ready);
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        words[lane] = lane * lane;
        __syncwarp();
#ifndef BARRIER
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

options = ("-DBARRIER",) if "barrier" in sys.argv else ()
out = cp.zeros(32, cp.int32)
cp.RawKernel(CODE, "hand_over", options)((1,), (64,), (out,))
wrong = int((out.get()[::-1] != [n * n for n in range(32)]).sum())
print(f"{'barrier' if options else 'counter'}: {wrong} words of 32 are wrong")
sys.exit(wrong > 0)
