"""Tensors without plain memory, and tracers in place of arrays: refused with an error that names the argument.

Nothing is written, and the errors are gsbn's, not internal ones of the other library.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gsbn
from gsbn._arrays import dynamo as _dynamo
from gsbn._arrays.kinds import kind_of
from tests.support.interpreter import BLOCKER
from tests.support.refusals import B, I, O, about

torch = pytest.importorskip("torch")
WRITTEN = ("running_mean", "running_var", "num_batches_tracked", "out")


def arguments(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    call = {name: torch.randn(shape, generator=generator) for name, shape in (("x", (B, I)), ("weight", (O, I)))}
    call |= {name: torch.ones(O) for name in ("scale", "bias", "gamma", "beta", "running_mean", "running_var")}
    call |= {"num_batches_tracked": torch.zeros((), dtype=torch.int64), "out": torch.zeros(B, O)}
    return {name: a.to(device) for name, a in call.items()} | {"training": True} | changes


class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
    """A subclass that wraps another tensor and exposes its memory."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class Plain(torch.Tensor):  # type: ignore[misc, name-defined]
    """A subclass with its own memory."""


def fake(a: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(a)


def masked(a: Any) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(a, a == a)


def freed(a: Any) -> Any:
    """Free the storage, as FSDP does for a parameter that is not in use."""
    a = a.clone()
    a.untyped_storage().resize_(0)
    return a


def negated(a: Any) -> Any:
    return torch.complex(a, a).conj().imag


def nested(layout: str) -> Callable[[Any], Any]:
    return lambda a: torch.nested.nested_tensor([a, a], layout=getattr(torch, layout))


# A bad tensor from a good one, the error, and what its message must have
STRANGE: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "nested, strided": (nested("strided"), TypeError, r"torch\.cat\(.+\.unbind\(\)\)"),
    "nested, jagged": (nested("jagged"), TypeError, r"torch\.cat\(.+\.unbind\(\)\)"),
    "FakeTensor": (fake, TypeError, r"through gsbn\.torch"),
    "MaskedTensor": (masked, TypeError, r"\.get_data\(\)"),
    "wrapper subclass": (Wrapper, TypeError, "Wrapper: pass the tensor that it wraps"),
    "sparse": (lambda a: a.to_sparse(), TypeError, r"torch\.sparse_coo: pass .+\.to_dense\(\)"),
    "negated": (negated, ValueError, r"\.resolve_neg\(\)"),
    "freed": (freed, ValueError, "empty storage"),
    "zero tensor": (lambda a: torch._efficientzerotensor(a.shape, device=a.device), ValueError, "storage"),
    "uninitialised": (
        lambda a: torch.nn.UninitializedParameter(requires_grad=False, device=a.device),
        ValueError,
        "UninitializedParameter: run the lazy module once",
    ),
    "quantized": (lambda a: torch.quantize_per_tensor(a.cpu(), 0.1, 0, torch.qint8).to(a.device), TypeError, "qint8"),
    "conjugated": (lambda a: torch.complex(a, a).conj(), TypeError, "complex64"),
}


def refuses(call: dict[str, Any], name: str, error: type[Exception], message: str) -> None:
    before = {n: call[n].clone() for n in WRITTEN if n != name}
    with pytest.raises(error, match=message) as caught:
        gsbn.forward(**call)
    assert "\n" not in str(caught.value)
    for name, was in before.items():
        assert call[name].equal(was), name


@pytest.mark.filterwarnings("ignore:.*(nested tensors|MaskedTensors|quantiz|data pointer of FakeTensor|jit.script).*")
@pytest.mark.parametrize("name", ["x", "weight", "running_var", "out"])
@pytest.mark.parametrize("what", STRANGE)
def test_a_tensor_that_is_no_plain_memory(device: str, what: str, name: str) -> None:
    make, error, advice = STRANGE[what]
    call = arguments(device)
    gsbn.forward(**arguments(device))  # the plan of a good call must not serve this one
    refuses({**call, name: make(call[name])}, name, error, f"{about(name)}.*{advice}" if advice else about(name))


def test_functions_beside_forward(device: str) -> None:
    """The other functions make the same check."""
    call = {n: a for n, a in arguments(device).items() if n != "out"}
    _, saved = gsbn.forward(**call, return_saved=True)
    dy, weight = freed(torch.ones(B, O, device=device)), freed(call["weight"])
    with pytest.raises(ValueError, match=about("dy")):
        gsbn.backward(dy, saved)
    with pytest.raises(ValueError, match=about("weight")):
        gsbn.prepare(weight)
    with pytest.raises(ValueError, match=about("weight")):
        gsbn.fold(weight, call["scale"], call["running_mean"], call["running_var"])
    gsbn.backward(torch.ones(B, O, device=device), saved)
    with pytest.raises(ValueError, match=about("weight")):  # freed between the forward and the backward
        gsbn.backward(torch.ones(B, O, device=device), saved._replace(weight=weight))


def test_a_distributed_tensor(device: str, tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        call = arguments(device)
        weight = distribute_tensor(call["weight"], init_device_mesh(device, (1,)), [Replicate()])
        refuses({**call, "weight": weight}, "weight", TypeError, rf"{about('weight')}.*DTensor: .*weight\.to_local\(\)")
        gsbn.forward(**{**call, "weight": weight.to_local()})
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (lambda f, a: torch.func.vmap(f)(torch.stack([a, a])), "torch.func.vmap"),
        (lambda f, a: torch.func.jvp(f, (a,), (a,)), "torch.func.grad or jvp"),
        (lambda f, a: torch.func.functionalize(f)(a), "torch.func.functionalize"),
        (lambda f, a: torch.func.grad(lambda t: f(t).sum())(a), "no_grad"),
        (lambda f, a: torch.func.grad(lambda t: torch.no_grad()(f)(t).sum())(a), "torch.func.grad or jvp"),
    ],
    ids=["vmap", "jvp", "functionalize", "grad", "grad without grad"],
)
@pytest.mark.parametrize("name", ["x", "scale", "out"])
def test_transforms_of_torch_func(device: str, name: str, transform: Any, told: str) -> None:
    call = arguments(device)
    gsbn.forward(**arguments(device))
    error = RuntimeError if told == "no_grad" else TypeError
    with pytest.raises(error, match=f"^{name}: .*{told}"):
        transform(lambda a: gsbn.forward(**{**call, name: a}), call[name])


def test_a_tangent_is_not_lost_without_a_word(device: str) -> None:
    from torch.autograd import forward_ad

    call = arguments(device)
    with torch.no_grad():
        gsbn.forward(**arguments(device))
        with forward_ad.dual_level():
            gsbn.forward(**arguments(device))  # x has no tangent
            refuses({**call, "x": forward_ad.make_dual(call["x"], call["x"])}, "x", RuntimeError, "^x: has a tangent")


def test_tensors_that_are_fine(device: str) -> None:
    expected = gsbn.forward(**arguments(device))
    call = arguments(device)
    with torch.no_grad():
        weight = torch.nn.Parameter(call["weight"])
        assert gsbn.forward(**{**call, "weight": weight}).equal(expected)
        assert gsbn.forward(**{**arguments(device), "x": call["x"].as_subclass(Plain)}).equal(expected)
        buffer = torch.nn.Buffer(arguments(device)["running_mean"])
        assert gsbn.forward(**{**arguments(device), "running_mean": buffer}).equal(expected)
    empty = arguments(device, x=torch.empty(0, I, device=device), out=torch.empty(0, O, device=device))
    assert gsbn.forward(**empty).shape == (0, O)


@pytest.mark.filterwarnings("ignore:.*(nested tensors|MaskedTensors|data pointer of FakeTensor).*")
def test_the_quick_way_to_read_gives_up_on_what_the_checks_refuse() -> None:
    """On a GPU a tensor is checked only if `read` raises, or returns a key that no good call had."""
    cuda = kind_of(torch.ones(1)).cuda  # type: ignore[union-attr]
    read = cuda.read  # it does not use the device
    good = torch.ones(B, I)
    key, (pointer, none) = read((good, None))
    assert (pointer, none) == (good.data_ptr(), 0)
    assert read((torch.empty(0, I), None))[1] == [0, 0]
    for what, (make, _, _) in STRANGE.items():
        if what in ("quantized", "conjugated"):
            continue
        assert cuda.device(make(good)) is None, what  # asked for before; the CPU has no number
        try:
            other, _ = read((make(good), None))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
        assert other != key, what
    for transform in (
        lambda f: torch.func.vmap(f)(torch.stack([good, good])),
        lambda f: torch.func.functionalize(f)(good),
    ):
        with pytest.raises(RuntimeError):
            transform(lambda a: read((a, None)))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError):
        read((good, None))


# ---- torch.compile and torch.export


@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_goes_around(device: str) -> None:
    """Each call breaks the graph once, and none of gsbn's frames is compiled."""
    from torch._dynamo.utils import counters

    call = {n: a for n, a in arguments(device).items() if n != "out"}
    dy = torch.ones(B, O, device=device)

    def step(x: Any) -> Any:
        y, saved = gsbn.forward(**{**call, "x": x + 1}, return_saved=True)
        return y * 2, gsbn.backward(dy, saved).weight * 2

    with torch.no_grad():
        expected = step(call["x"])
        counters.clear()
        found = torch.compile(step, backend="eager")(call["x"])
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert sum(counters["graph_break"].values()) == 2, counters["graph_break"]
    assert counters["frames"]["total"] == 3  # before, between and after the two calls


class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(arguments()["weight"]), torch.nn.Parameter(torch.ones(O))

    def forward(self, x: Any) -> Any:
        return gsbn.forward(x, self.weight, self.scale, training=True)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["compile", "export", "export, not strict"])
def test_one_graph_of_all_is_refused(how: str) -> None:
    x = arguments()["x"]
    make = {
        "compile": lambda: torch.compile(Module(), fullgraph=True, backend="eager")(x),
        "export": lambda: torch.export.export(Module(), (x,), strict=True),
        "export, not strict": lambda: torch.export.export(Module(), (x,), strict=False),
    }[how]
    with (
        torch.no_grad(),
        pytest.raises((TypeError, torch._dynamo.exc.Unsupported), match=r"gsbn\.torch"),
    ):
        make()


def test_a_torch_of_other_names() -> None:
    _dynamo.skip_frames(object())


# ---- a library that is missing


def test_bfloat16_on_the_cpu_without_ml_dtypes() -> None:
    script = """
import torch, gsbn
gsbn.forward(torch.ones(3, 2), torch.ones(2, 2), torch.ones(2), training=True)
x, weight, scale = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((3, 2), (2, 2), 2))
for call in (lambda: gsbn.forward(x, weight, scale, training=True), lambda: gsbn.prepare(weight)):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    blocker = BLOCKER.replace('"cupy", "cupy_backends", "torch", ', "")
    done = subprocess.run([sys.executable, "-c", blocker + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message = "{}: expected ml_dtypes for bfloat16 on the CPU, got an environment without it: pip install ml_dtypes\n"
    assert done.stdout == message.format("x") + message.format("weight")


# ---- numbers


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["large", "small"])
@pytest.mark.parametrize("name", ["eps", "momentum", "training", "precision", "gemm", "return_saved"])
def test_a_number_that_python_refuses_to_print(name: str, value: int) -> None:
    error = ValueError if name in ("eps", "momentum") else TypeError
    refuses(arguments(**{name: value}), name, error, rf"{about(name)}int that cannot be printed")
