"""torch tensors in, torch tensors out: gsbn takes over from a Linear, a scale and a BatchNorm1d that PyTorch owns.

Nothing is copied. gsbn reads the modules' own parameters, writes their running statistics in place, and on a GPU
launches on torch's current stream, so that no synchronisation stands between its kernels and torch's.
"""

import copy
import importlib.util
import sys

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    sys.exit("torch_handoff: needs PyTorch: pip install torch")

import gsbn

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda" and importlib.util.find_spec("cupy") is None:
    sys.exit("torch_handoff: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
torch.manual_seed(0)
linear = nn.Linear(512, 256, device=device)
scale = nn.Parameter(torch.randn(256, device=device))
norm = nn.BatchNorm1d(256, device=device)
norm_torch = copy.deepcopy(norm)  # PyTorch's turn, from the same state


def forward(x: torch.Tensor) -> torch.Tensor:
    return gsbn.forward(
        x,
        linear.weight,
        scale,
        bias=linear.bias,
        gamma=norm.weight,
        beta=norm.bias,
        running_mean=norm.running_mean,
        running_var=norm.running_var,
        num_batches_tracked=norm.num_batches_tracked,
        training=norm.training,
        momentum=norm.momentum,
        eps=norm.eps,
    )


def compare(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    print(f"{what:<28} max difference {(ours - theirs).abs().max().item():.1e}")


# gsbn stands outside autograd: it takes parameters that require grad only where no gradient is recorded.
with torch.no_grad():
    for step in range(3):
        x = torch.randn(128, 512, device=device)
        y = forward(x)
        assert isinstance(y, torch.Tensor)
        assert y.device == x.device
        compare(f"training step {step}: y", y, norm_torch(linear(x) * scale))
    compare("running_mean", norm.running_mean, norm_torch.running_mean)
    compare("running_var", norm.running_var, norm_torch.running_var)
    assert norm.num_batches_tracked == norm_torch.num_batches_tracked == 3

    norm.eval()
    norm_torch.eval()
    x = torch.randn(7, 512, device=device)
    compare("inference: y", forward(x), norm_torch(linear(x) * scale))

print(f"gsbn and torch.nn agree on {device}")
