"""gsbn inside PyTorch's autograd: a drop-in for ``nn.Sequential(nn.Linear, Scale, nn.BatchNorm1d)``.

`LinearScaleBatchNorm` owns the three modules, with their names, initialisation and state_dict, and hands their tensors
to `gsbn.forward` and `gsbn.backward`. Both are registered as custom operators, so that torch.compile keeps them in its
graph whole; an autograd.Function connects the two. Under torch.autocast x and weight are cast as nn.Linear casts them.

As a script it trains a classifier of handwritten digits twice, with the plain modules and with gsbn, from the same
weights, and compares the loss curves; then once more under autocast, compiled, and replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    sys.exit("torch_autograd: needs PyTorch: pip install torch")

import gsbn


@torch.library.custom_op("gsbn::forward", mutates_args=("running_mean", "running_var", "num_batches_tracked"))
def forward_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    num_batches_tracked: torch.Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        y, saved = gsbn.forward(
            x,
            weight,
            scale,
            bias=bias,
            gamma=gamma,
            beta=beta,
            running_mean=running_mean,
            running_var=running_var,
            num_batches_tracked=num_batches_tracked,
            training=training,
            momentum=momentum,
            eps=eps,
            precision=precision,
            return_saved=True,
        )
    return y, saved.deviations, saved.vectors


@forward_op.register_fake
def _(x, weight, scale, bias, gamma, beta, mean, var, count, training, momentum, eps, precision):  # type: ignore[no-untyped-def]
    """The shapes that `gsbn.Saved` documents."""
    (rows, _), features = x.shape, weight.shape[0]
    kept, pitch = x.dtype, features
    if x.device.type == "cpu":
        kept = torch.float64 if rows <= 16 or kept == torch.float64 else torch.float32
    else:
        pad = 16 // x.dtype.itemsize
        pitch = (features + pad - 1) // pad * pad
        if x.dtype.itemsize == 2:
            kept = torch.float32 if not training else x.dtype if rows > 16 else torch.float64
    y, deviations = x.new_empty(rows, features), x.new_empty(rows, pitch, dtype=kept)
    return y, deviations, x.new_empty(7, features, dtype=torch.float64)


@torch.library.custom_op("gsbn::backward", mutates_args=())
def backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    deviations: torch.Tensor,
    vectors: torch.Tensor,
    training: bool,
    precision: str,
    dtypes: str,
    needs: str,
) -> list[torch.Tensor]:
    """The gradients named in `needs`, in the order of `gsbn.Gradients`; an operator cannot return None."""
    absent = tuple(None if name == "None" else name for name in dtypes.split())
    saved = gsbn.Saved(x, weight, deviations, vectors, training, precision, "auto", absent)  # type: ignore[arg-type]
    with torch.no_grad():
        return [gradient for gradient in gsbn.backward(dy, saved, needs=needs.split()) if gradient is not None]


@backward_op.register_fake
def _(dy, x, weight, deviations, vectors, training, precision, dtypes, needs):  # type: ignore[no-untyped-def]
    of = {"x": x, "weight": weight}
    for name, dtype in zip(gsbn.Gradients._fields[2:], dtypes.split(), strict=True):
        of[name] = None if dtype == "None" else dy.new_empty(weight.shape[0], dtype=getattr(torch, dtype))
    return [torch.empty_like(of[name], memory_format=torch.contiguous_format) for name in needs.split()]


class _Function(torch.autograd.Function):
    """Hands over, and knows nothing."""

    @staticmethod
    def forward(ctx, x, weight, bias, scale, gamma, beta, mean, var, count, training, momentum, eps, precision):  # type: ignore[no-untyped-def]
        y, deviations, vectors = forward_op(
            x, weight, scale, bias, gamma, beta, mean, var, count, training, momentum, eps, precision
        )
        ctx.save_for_backward(x, weight, deviations, vectors)
        ctx.training, ctx.precision = training, precision
        dtypes = (None if a is None else a.dtype for a in (bias, scale, gamma, beta))
        ctx.dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        names, wanted = gsbn.Gradients._fields, ctx.needs_input_grad
        needs = " ".join(name for name, need in zip(names, wanted[:6], strict=True) if need)
        found = backward_op(dy, *ctx.saved_tensors, ctx.training, ctx.precision, ctx.dtypes, needs)
        of = dict(zip(needs.split(), found, strict=True))
        return *(of.get(name) for name in names), None, None, None, None, None, None, None


class Scale(nn.Module):
    """``x * scale``, feature by feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class LinearScaleBatchNorm(nn.Sequential):
    """``BatchNorm1d(Linear(x) * scale)`` by gsbn: the three modules stay, with their state, and are never called.

    >>> layer = LinearScaleBatchNorm(nn.Linear(64, 32), Scale(32), nn.BatchNorm1d(32))
    """

    def __init__(self, linear: nn.Linear, scale: Scale, norm: nn.BatchNorm1d, precision: str = "highest") -> None:
        super().__init__(linear, scale, norm)
        self.precision = precision

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, scale, norm = self
        weight = linear.weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        batch = norm.training or norm.running_mean is None  # as BatchNorm1d chooses its statistics
        state = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        if not norm.track_running_stats and batch:
            state = (None, None, None)
        return _Function.apply(
            x, weight, linear.bias, scale.scale, norm.weight, norm.bias, *state, batch, norm.momentum, norm.eps,
            self.precision,
        )  # fmt: skip


# ---- the demonstration -----------------------------------------------------------------------------------------------


def classifier(hidden: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(i, hidden), Scale(hidden), nn.BatchNorm1d(hidden)) for i in (64, hidden)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(hidden, 10))


def with_gsbn(model: nn.Module) -> nn.Module:
    """A copy in which gsbn takes the place of every such triple."""
    model = copy.deepcopy(model)
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential) and [type(m) for m in child] == [nn.Linear, Scale, nn.BatchNorm1d]:
            setattr(model, name, LinearScaleBatchNorm(*child))
    return model


def train(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, steps: int, autocast: bool = False) -> list[float]:
    """The loss at every step of plain SGD over batches of 256."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        at = torch.arange(step * 256, (step + 1) * 256, device=x.device) % len(x)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x[at]).float(), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        sys.exit("torch_autograd: needs scikit-learn for the data: pip install scikit-learn")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and importlib.util.find_spec("cupy") is None:
        sys.exit("torch_autograd: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    if device == "cpu" and importlib.util.find_spec("ml_dtypes") is None:
        sys.exit("torch_autograd: needs ml_dtypes for bfloat16 on the CPU: pip install ml_dtypes")
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(data.target, device=device)
    plain = classifier().to(device)
    ours = with_gsbn(plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    compiled, cast, plain_cast = copy.deepcopy(ours), copy.deepcopy(ours), copy.deepcopy(plain)

    theirs = train(plain, x, labels, steps)
    losses = train(ours, x, labels, steps)
    print(
        f"{device}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; furthest from PyTorch's curve {gap(losses, theirs):.1e}"
    )
    assert gap(losses, theirs) < 1e-3  # float32 roundings, amplified from step to step
    assert losses[-1] < losses[0] / 4

    half, half_theirs = train(cast, x, labels, steps, autocast=True), train(plain_cast, x, labels, steps, autocast=True)
    print(f"autocast to bfloat16: loss {half[-1]:.4f}, PyTorch's {half_theirs[-1]:.4f}")
    assert gap(half, half_theirs) < 0.1

    fused = torch.compile(compiled, fullgraph=True, dynamic=False)  # fullgraph: a graph break would be an error
    again = train(fused, x, labels, steps)
    print(f"torch.compile: furthest from eager {gap(again, losses):.1e}")
    assert gap(again, losses) < 1e-3

    if device == "cuda":
        replayed(ours, x[:256], labels[:256])


def replayed(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> None:
    """A whole training step in a CUDA graph, the optimiser included."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before = step().item()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(20):
        graph.replay()
    print(f"CUDA graph: loss {before:.4f} -> {loss.item():.4f} in 20 replays")
    assert loss.item() < before


if __name__ == "__main__":
    main()
