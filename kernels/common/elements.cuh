// How operands are multiplied: what the macro ELEMENT may be in forward_sm90 and in the skinny kernels. No kernels.
//
// Macros and not an enum, so that #if can compare them by name. gsbn/_plan/sm90_variants.py reads them.
#pragma once

#define ELEMENT_BFLOAT16 0
#define ELEMENT_FLOAT16 1
#define ELEMENT_TF32 2      // float32, rounded to TF32 by the tensor core
#define ELEMENT_LIMBS 3     // float32, each operand as two float16 limbs (docs/design/limbs.md)
#define ELEMENT_LIMBS_RS 4  // limbs of x, and w as it is: its limbs are made in registers, which wgmma reads (RS)
#define ELEMENT_FLOAT32 5   // float32, by fused multiply-adds; in the skinny kernels alone
