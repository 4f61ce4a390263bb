// What normalize and normalize_fused are compiled for: a y of Y_TYPE and, with D_TYPE, what is kept of g beside it. No kernels.
#pragma once
#include "activation.cuh"
#include "features.cuh"

#ifndef Y_TYPE
#define Y_TYPE float
#endif
using Y = Y_TYPE;
#ifdef D_TYPE
constexpr bool KEEPS = true;
#else
constexpr bool KEEPS = false;
#define D_TYPE float
#endif
using D = D_TYPE;
