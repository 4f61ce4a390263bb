// fill_sm: does nothing, and is never launched. The driver is asked how many CTAs, alone and in clusters of two, four,
// eight and sixteen, a context holds at once if each has all of an SM's shared memory: what forward_sm90's grids may
// count on. It depends on the SMs that the context may use, and for clusters on how these lie in the GPU's clusters of
// SMs (GPC).
#include "common/common.cuh"

extern "C" __global__ void fill_sm() { await_kernel_ahead(); }
