"""Contiguous (N, C, L) and (N, C, H, W) in 16 bits on Hopper: forward, backward and inference by the kernels for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gsbn._backward import How, run_channels_first  # noqa: E402
from gsbn._forward.channels_first import FORWARD_CHANNELS_FIRST  # noqa: E402
from gsbn._forward.operation import WHOLE_BATCH  # noqa: E402
from gsbn._host.run import ANY, call  # noqa: E402
from gsbn._plan import Limits  # noqa: E402
from gsbn._plan.sm90_variants import CHANNELS_FIRST_TILES  # noqa: E402
from gsbn.torch import ConvBatchNorm1d, ConvBatchNorm2d, LinearBatchNorm1d, convert  # noqa: E402
from gsbn.torch._autograd import kind_of_tensor  # noqa: E402
from tests.support.beside_torch import (  # noqa: E402
    EPS,
    FACTOR,
    base_operands,
    most_accurate,
    of_rounded_dg,
    operands,
    squares,
    truth_of,
)
from tests.support.families import FAMILIES  # noqa: E402
from tests.torch.layers import way_taken  # noqa: E402

DTYPES = ("bfloat16", "float16")
Tensors = dict[str, Any]
# (N, L), inputs, features: whole tiles and short ones, one tile in all, one sample, features and inputs that fill no
# block, a weight whose rows are not on 16 bytes, several blocks of features, more tiles than SMs
SHAPES = [
    ((4, 512), 64, 264), ((3, 784), 72, 264), ((1, 64), 64, 264), ((40, 72), 3, 136), ((5, 264), 136, 600),
    ((2, 40000), 64, 64), ((700, 64), 40, 264),
]  # fmt: skip


def problem(samples: tuple[int, int], inputs: int, features: int, family: str, dtype: str, seed: int) -> Tensors:
    """The operands of a family as rows, without a scale and a bias."""
    base = base_operands((samples[0] * samples[1], inputs, features), torch.float32, "cuda", seed)
    o = operands(base, family, dtype, seed)
    return o | {"scale": torch.ones_like(o["scale"]), "bias": torch.zeros_like(o["bias"])}


def first(rows: Any, samples: tuple[int, int]) -> Any:
    """Rows as (N, C, L)."""
    return rows.view(*samples, -1).transpose(1, 2).contiguous()


def last(x: Any) -> Any:
    """(N, C, L) as rows."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def ours(o: Tensors, samples: tuple[int, int], training: bool, relu: bool, state: Any, limits: Limits) -> Tensors:
    x, dy = first(o["x"], samples), first(o["dy"], samples)
    of_rows = x.view(len(o["x"]), -1)  # the same memory
    mean, var = (a.clone() for a in state)
    count = torch.zeros((), dtype=torch.int64, device="cuda") if training else None
    arrays = of_rows, o["weight"], None, None, o["gamma"], o["beta"], mean, var, count, None, None, None
    activation = "relu" if relu else None
    options = training, 1.0, EPS, "highest", "auto", training, None, activation, *WHOLE_BATCH, 1.0, samples[1]
    with torch.no_grad():
        made = call(FORWARD_CHANNELS_FIRST, arrays, options, limits=limits)
    if not training:
        return {"y": last(made.view(*dy.shape))}
    y, saved = made
    assert count == 1
    how = How.of(saved, ("x", "weight", "bias", "gamma", "beta"))._replace(
        dtypes=("float32", None, "float32", "float32")
    )
    given = dy.view(y.shape), of_rows, o["weight"], saved.deviations, saved.vectors, None
    dx, dweight, dbias, _, dgamma, dbeta, _ = run_channels_first(kind_of_tensor(y), given, how, samples[1], limits)
    assert not dbias.any()
    found = {"y": last(y.view(*dy.shape)), "dx": last(dx.view(*x.shape)), "dweight": dweight, "dgamma": dgamma}
    return found | {"dbeta": dbeta, "running_mean": mean, "running_var": var}


def theirs(o: Tensors, samples: tuple[int, int], training: bool, relu: bool, state: Any) -> Tensors:
    x, w, gamma, beta = leaves = [o[name].detach().requires_grad_() for name in ("x", "weight", "gamma", "beta")]
    mean, var = (a.clone() for a in state)
    z = functional.conv1d(x.view(*samples, -1).transpose(1, 2).contiguous(), w[:, :, None])
    y = functional.batch_norm(z, mean, var, gamma, beta, training, 1.0, EPS)
    y = last(y.relu() if relu else y)
    if not training:
        return {"y": y.detach()}
    found = dict(zip(("dx", "dweight", "dgamma", "dbeta"), torch.autograd.grad(y, leaves, o["dy"]), strict=True))
    return {"y": y.detach(), **found, "running_mean": mean, "running_var": var}


def assert_as_accurate(shape: Any, family: str, dtype: str, limits: Limits = ANY, seeds: int = 2) -> None:
    """As tests.support.beside_torch has it: at most 1.1 times the error of PyTorch's convolution, or of exact
    arithmetic on a gradient of g in 16 bits, and half a unit; over all seeds together."""
    samples = shape[0]
    sums: dict[tuple[str, str], list[float]] = {}
    with most_accurate():
        for seed in range(seeds):
            o = problem(*shape, family, dtype, seed)
            fresh = torch.zeros_like(o["beta"]), torch.ones_like(o["beta"])
            truth = truth_of(o, {}, True)
            of_truth = tuple(truth[name].to(o["beta"]) for name in ("running_mean", "running_var"))
            frozen = truth_of(o, dict(zip(("running_mean", "running_var"), of_truth, strict=True)), False)
            truth |= {"y, frozen": frozen["y"]}
            results = {"ours": ours(o, samples, True, False, fresh, limits)}
            results |= {"theirs": theirs(o, samples, True, False, fresh), "rounded": of_rounded_dg(o)}
            results["ours"]["y, frozen"] = ours(o, samples, False, False, of_truth, limits)["y"]
            results["theirs"]["y, frozen"] = theirs(o, samples, False, False, of_truth)["y"]
            for of, found in results.items():
                for name, got in found.items():
                    if name in truth:
                        wrong, size = map(float, squares(got, truth[name]))
                        before = sums.get((of, name), [0.0, 0.0])
                        sums[of, name] = [before[0] + wrong, before[1] + size]
    error = {key: (wrong / (size or 1.0)) ** 0.5 for key, (wrong, size) in sums.items()}
    for of, name in error:
        if of == "ours":
            wide = name in ("dgamma", "dbeta", "running_mean", "running_var")
            roundoff = torch.finfo(torch.float32 if wide else getattr(torch, dtype)).eps / 2
            limit = FACTOR * max(error["theirs", name], error.get(("rounded", name), 0.0)) + roundoff
            assert not error[of, name] > limit, (name, error[of, name], error["theirs", name], limit)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Any, dtype: str) -> None:
    assert_as_accurate(shape, "normal", dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tile", CHANNELS_FIRST_TILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles(tile: tuple[int, int], dtype: str) -> None:
    assert_as_accurate(((3, 784), 72, 264), "mean 1e2", dtype, Limits(sm90=tile))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, dtype: str) -> None:
    assert_as_accurate(((9, 328), 64, 264), family, dtype, seeds=8)  # 2112 features: a ratio varies by 2 %


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_bit_by_bit(shape: Any, dtype: str) -> None:
    """In inference with a mean of 0, a variance of 1 and eps 0 y is g, of integers the same in any order."""
    samples, inputs, features = shape
    draw = torch.Generator("cuda").manual_seed(0)
    size = (samples[0], inputs, samples[1])
    x, w = (
        torch.randint(-1, 2, s, generator=draw, device="cuda").to(getattr(torch, dtype))
        for s in (size, (features, inputs))
    )
    state = torch.zeros(features, device="cuda"), torch.ones(features, device="cuda")
    arrays = x.view(-1, inputs), w, None, None, None, None, *state, None, None, None, None
    guard = torch.full((x.numel() + 64,), torch.nan, device="cuda", dtype=x.dtype)  # what lies behind x is not read
    guard[: x.numel()] = x.flatten()
    for of_x in (arrays[0], guard[: x.numel()].view(-1, inputs)):
        options = False, 0.1, 0.0, "highest", "auto", False, None, None, *WHOLE_BATCH, 1.0, samples[1]
        with torch.no_grad():
            y = call(FORWARD_CHANNELS_FIRST, (of_x, *arrays[1:]), options)
        assert torch.equal(y.view(samples[0], features, samples[1]).double(), torch.matmul(w.double(), x.double()))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_and_its_gradient_agree(dtype: str) -> None:
    """Where y is 0 no gradient passes: dbeta is the sum of dy over the other elements, of integers exactly."""
    samples, features = (3, 784), 136
    o = problem(samples, 64, features, "normal", dtype, 0)
    o["dy"] = torch.randint(-3, 4, o["dy"].shape, device="cuda").to(o["dy"])
    state = torch.zeros_like(o["beta"]), torch.ones_like(o["beta"])
    found, wanted = ours(o, samples, True, True, state, ANY), theirs(o, samples, True, True, state)
    assert torch.equal(found["dbeta"], (o["dy"] * (found["y"] > 0)).float().sum(0))
    for name in ("y", "dx", "dweight"):  # elements on the other side of 0 in PyTorch are few
        assert float((found[name].double() - wanted[name].double()).norm() / wanted[name].double().norm()) < 0.05


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_in_every_run_and_in_a_graph(dtype: str) -> None:
    layer = ConvBatchNorm1d(64, 200, activation="relu", device="cuda", dtype=getattr(torch, dtype))
    x = torch.randn(5, 64, 784, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)

    def a_step() -> list[Any]:
        y = layer(x)
        assert way_taken(y) == "in place"
        # detached: a graph of autograd's that lived on would tie a capture to this stream
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], y.detach().cos())]

    wanted = a_step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a_step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = a_step()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(a_step(), wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("what", ["layer", "converted", "linear"])
def test_who_takes_them(what: str, autocast: bool) -> None:
    """The layers, a converted model and LinearBatchNorm1d; y is contiguous, gradients have their arguments' dtypes."""
    dtype = torch.float32 if autocast else torch.bfloat16
    made: Any = {
        "layer": lambda: ConvBatchNorm2d(64, 136, activation="relu"),
        "converted": lambda: nn.Sequential(nn.Conv2d(64, 136, 1, bias=False), nn.BatchNorm2d(136), nn.ReLU()),
        "linear": lambda: LinearBatchNorm1d(64, 136, activation="relu"),
    }[what]().to("cuda", dtype)
    plain = copy.deepcopy(made)
    if what == "converted":
        assert convert(made).replaced == (("0", "1", "2"),)
    shape = (4, 64, 784) if what == "linear" else (4, 64, 28, 28)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    results = []
    for model in (made, plain):
        leaf = x.clone().requires_grad_()
        if model is plain and what != "converted":
            first_, norm = (plain.linear, plain.norm) if what == "linear" else (plain.conv, plain.norm)

            def model(x: Any, first_: Any = first_, norm: Any = norm) -> Any:
                z = first_(x.transpose(1, 2)).transpose(1, 2).contiguous() if what == "linear" else first_(x)
                return norm(z).relu()

        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = model(leaf)
        y.backward(torch.ones_like(y).cos())
        of = made if len(results) == 0 else plain
        results.append([y, leaf.grad, *(p.grad for p in of.parameters()), *of.buffers()])
        if len(results) == 1:
            assert way_taken(y) == "in place" and y.is_contiguous() and leaf.grad.is_contiguous()
    for found, wanted in zip(*results, strict=True):
        assert found.dtype is wanted.dtype and found.shape == wanted.shape
        if wanted.is_floating_point():
            assert float((found.double() - wanted.double()).norm()) < 0.05 * float(wanted.double().norm())
        else:
            assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(4, 64, 14, 14), (4, 64, 7, 8), (0, 64, 28, 28)])
def test_what_is_not_served_runs_pytorchs_modules(shape: tuple[int, ...]) -> None:
    layer = ConvBatchNorm2d(64, 32, device="cuda", dtype=torch.bfloat16)
    y = layer(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    assert way_taken(y) is None and y.is_contiguous()
    assert way_taken(layer.eval()(torch.randn(4, 64, 8, 8, device="cuda").bfloat16())) is None


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_memory_that_starts_anywhere() -> None:
    """x off 16 bytes is PyTorch's; dy off 16 bytes is copied, and a weight in rows of 2 bytes more, too."""
    layer = ConvBatchNorm1d(65, 32, device="cuda", dtype=torch.bfloat16)
    memory = torch.randn(4 * 65 * 128 + 1, device="cuda", dtype=torch.bfloat16)
    x, off = memory[:-1].view(4, 65, 128), memory[1:].view(4, 65, 128)
    assert way_taken(layer(off)) is None
    leaf = x.clone().requires_grad_()
    dy = torch.randn(4 * 32 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(4, 32, 128)
    y = layer(leaf)
    assert way_taken(y) == "in place"
    found = torch.autograd.grad(y, [leaf, layer.conv.weight], dy)
    y = layer(leaf)
    wanted = torch.autograd.grad(y, [leaf, layer.conv.weight], dy.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_gradients_of_gradients() -> None:
    """By PyTorch's own operators: the gradient penalty is that of PyTorch's modules to the accuracy of bfloat16."""
    layer = ConvBatchNorm1d(64, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for model in (layer, nn.Sequential(layer.conv, layer.norm)):
        layer.zero_grad()
        # not the sum of squares, which the norm keeps: its gradient is rounding alone
        (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        assert gradient.shape == x.shape
        gradient.square().sum().backward()
        found.append(layer.conv.weight.grad.double().clone())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.1
