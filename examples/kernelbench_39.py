"""KernelBench level 2, problem 39 (Gemm_Scale_BatchNorm), with gsbn.forward in place of the three operators.

KernelBench's evaluator executes this text in a namespace that already holds the original `Model`, with torch seeded.
So ModelNew creates the same parameters in the same order, and its running statistics stay in the module's state.
As a script, the file makes the evaluator's check against the three operators, and prints the largest difference.
"""

import copy
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit("kernelbench_39: needs PyTorch: pip install torch")
import torch
import torch.nn as nn

import gsbn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        # These modules own the parameters, named and initialised as in the original. They are never called.
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    # True keeps the weight's limbs from call to call. Off: PyTorch's version counter does not see every write.
    keep_limbs = False

    def weight(self):
        if not self.keep_limbs:
            return self.gemm.weight
        version = self.gemm.weight._version
        if getattr(self, "_kept", (None,))[0] != version:
            self._kept = version, gsbn.prepare(self.gemm.weight)
        return self._kept[1]

    @torch.no_grad()  # the evaluator's timing loop leaves grad mode on
    def forward(self, x):
        gemm, bn = self.gemm, self.bn
        return gsbn.forward(
            x,
            self.weight(),
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


batch_size = 16384
in_features = 4096
out_features = 4096
scale_shape = (out_features,)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, scale_shape]


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and importlib.util.find_spec("cupy") is None:
        sys.exit("kernelbench_39: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    if device == "cpu":
        batch_size = 64  # of whole rows: a CPU takes too long over 16384
    torch.manual_seed(42)
    model = ModelNew(*get_init_inputs()).to(device)
    original = copy.deepcopy(model)
    for seed in range(5):
        torch.manual_seed(seed)
        x = get_inputs()[0].to(device)
        y, expected = model(x), original.bn(original.gemm(x) * original.scale)
        difference = (y - expected).abs().max().item()
        print(f"{tuple(x.shape)} on {device}, seed {seed}: max |y - PyTorch's| = {difference:.1e}")
        assert torch.allclose(expected, y, atol=1e-4, rtol=1e-4), "out of KernelBench's tolerance"
