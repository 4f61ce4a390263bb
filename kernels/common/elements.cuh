// How operands are multiplied: the values of the macro ELEMENT in forward_sm90 and in the skinny kernels. No kernels.
//
// These are macros and not an enum, so that #if can compare them by name. gsbn/_plan/sm90_variants.py reads them.
#pragma once

#define ELEMENT_BFLOAT16 0
#define ELEMENT_FLOAT16 1
#define ELEMENT_TF32 2      // float32, rounded to TF32 by the tensor core
#define ELEMENT_LIMBS 3     // float32, each operand as two float16 limbs (docs/design/limbs.md)
#define ELEMENT_LIMBS_RS 4  // x comes as limbs; the limbs of w are made in registers, which wgmma reads (RS)
#define ELEMENT_FLOAT32 5   // float32, by fused multiply-adds; in the skinny kernels alone
