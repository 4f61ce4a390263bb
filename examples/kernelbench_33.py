"""KernelBench level 2, problem 33 (Gemm_Scale_BatchNorm), with gsbn.forward in place of the three operators.

KernelBench's evaluator executes this text, which needs PyTorch and gsbn alone, in a namespace that already holds the
original `Model`, with torch seeded. ModelNew creates the same parameters in the same order as Model, and its running
statistics stay in the module's state. `kernelbench_time.py` runs the evaluator's check, and times.
"""

import torch
import torch.nn as nn

import gsbn

batch_size = 1024
in_features = 8192
out_features = 8192
scale_shape = (out_features,)


class ModelNew(nn.Module):
    """BatchNorm1d(Linear(x) * scale) by gsbn.forward."""

    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        # These modules own the parameters, named and initialised as in the original. They are never called.
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    @torch.no_grad()  # the evaluator's timing loop leaves grad mode on
    def forward(self, x):
        gemm, bn = self.gemm, self.bn
        return gsbn.forward(
            x,
            gemm.weight,
            self.scale,
            bias=gemm.bias,
            gamma=bn.weight,
            beta=bn.bias,
            running_mean=bn.running_mean,
            running_var=bn.running_var,
            num_batches_tracked=bn.num_batches_tracked,
            training=self.training,
            momentum=bn.momentum,
            eps=bn.eps,
        )


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, scale_shape]
