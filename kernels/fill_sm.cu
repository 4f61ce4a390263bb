// fill_sm: does nothing, and is never launched. It exists to ask the driver how many CTAs, alone and in clusters of 2,
// 4, 8 and 16, a context holds at once if each takes all shared memory of an SM. The grids of forward_sm90 rely on this
// number. It depends on the SMs that the context may use and, for clusters, on how these lie in the GPU's clusters of
// SMs (GPCs).
#include "common/common.cuh"

extern "C" __global__ void fill_sm() { await_kernel_ahead(); }
