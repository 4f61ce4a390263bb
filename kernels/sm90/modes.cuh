// What a launch of forward_sm90 computes: the values of the macro MODE. gsbn/_plan/sm90_variants.py reads them.
#pragma once

#define MODE_GEMM 0           // y = x w^T
#define MODE_INFERENCE 1      // y from the running statistics
#define MODE_TRAINING 2       // y from the batch's statistics; tiles wait for them in y's memory, as deviations
#define MODE_RECOMPUTE 3      // the same; tiles are multiplied again once the statistics are known
#define MODE_CLUSTER_BATCH 4  // the same; the CTAs of one cluster have all rows of their features
