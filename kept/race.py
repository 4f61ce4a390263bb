# race.py WORD: what racecheck says of a __syncthreads after other barriers
import sys, cupy as cp
SRC = r"""
extern "C" __global__ void hand_over(float* out) {
    extern __shared__ __align__(1024) float words[];
    const int team = threadIdx.x / 128, at = threadIdx.x % 128;
#ifdef NAMED
    for (int i = 0; i < 3; ++i) asm volatile("bar.sync %0, 128;" ::"r"(team + 1) : "memory");
#endif
#ifdef NAMEDWARP
    for (int i = 0; i < 3; ++i) __syncwarp();
#endif
    __syncthreads();
#ifdef WIDE
    *reinterpret_cast<float2*>(words + team * 256 + at * 2) = make_float2(at, team);
#else
    words[team * 256 + at * 2] = at; words[team * 256 + at * 2 + 1] = team;
#endif
    __syncthreads();
    float sum = 0;
    if (threadIdx.x < 64)
        for (int j = 0; j < 4; ++j) {
#ifdef WIDE
            const float4 v = *reinterpret_cast<const float4*>(words + j * 256 + threadIdx.x * 4);
            sum += v.x + v.y + v.z + v.w;
#else
            for (int i = 0; i < 4; ++i) sum += words[j * 256 + threadIdx.x * 4 + i];
#endif
        }
    out[threadIdx.x] = sum;
}
"""
words = sys.argv[1:]
k = cp.RawKernel(SRC, "hand_over", options=tuple("-D" + w for w in words if w.isupper()))
k.max_dynamic_shared_size_bytes = 200 * 1024
out = cp.zeros(512, "f4")
k((2,), (512,), (out,), shared_mem=200 * 1024 if "BIG" in words else 8192)
cp.cuda.runtime.deviceSynchronize(); print(words, float(out.sum()))
