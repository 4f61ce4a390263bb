// fill_sm: does nothing, and is never launched. It exists so that the driver can be asked how many CTAs a context holds
// at once, alone and in clusters of 2, 4, 8 and 16, if each CTA takes all shared memory of an SM. The grids of
// forward_sm90 rely on this number. It depends on the SMs that the context may use and, for clusters, on how these SMs
// are distributed over the GPU's clusters of SMs (GPCs).
#include "common/common.cuh"

extern "C" __global__ void fill_sm() { await_kernel_ahead(); }
