"""KernelBench's evaluation accepts the two files of examples/."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.project.test_examples import EXAMPLES, devices, need_torch_cuda, run

# KernelBench's evaluator, level 2, executes the text of the problem and then the text of the candidate in one
# namespace without __file__ or __name__, and draws weights and inputs from equal seeds.

ORIGINAL = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super(Model, self).__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)
"""
PROBLEMS = {33: (1024, 8192, 8192), 39: (16384, 4096, 4096)}
REDUCED = {33: (128, 1024, 1024), 39: (1024, 256, 256)}


def models(number: int, device: str, dtype: Any, shape: tuple[int, int, int] | None = None) -> tuple[Any, Any, Any]:
    """(original, candidate, get_inputs), as the evaluator makes them; `shape` overrides the file's own sizes."""
    import torch

    context: dict[str, Any] = {}
    exec(ORIGINAL, context)
    with pytest.MonkeyPatch.context() as patch:  # only what the evaluator has loaded itself is on its path
        patch.setitem(sys.modules, "kernelbench", ModuleType("kernelbench"))
        patch.setattr(sys, "path", [folder for folder in sys.path if Path(folder).resolve() != EXAMPLES])
        exec((EXAMPLES / f"kernelbench_{number}.py").read_text(), context)
    assert tuple(context[name] for name in ("batch_size", "in_features", "out_features")) == PROBLEMS[number]
    if shape is not None:
        B, I, O = shape
        context.update(batch_size=B, in_features=I, out_features=O, scale_shape=(O,))
    made = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        with torch.no_grad():
            made.append(context[name](*context["get_init_inputs"]()).to(device=device, dtype=dtype))
    return *made, context["get_inputs"]


def agrees(number: int, device: str, shape: tuple[int, int, int] | None = None) -> None:
    """The evaluator's check in float32: five seeds at 1e-4, absolute and relative."""
    import torch

    original, candidate, get_inputs = models(number, device, torch.float32, shape)
    for seed in range(5):
        torch.manual_seed(seed)
        x = get_inputs()[0].to(device)
        before = x.clone()
        with torch.no_grad():
            expected, y = original(x), candidate(x)
        assert torch.allclose(expected, y, atol=1e-4, rtol=1e-4), f"seed {seed}"
        assert (y.shape, y.dtype, y.device) == (expected.shape, expected.dtype, expected.device)
        assert torch.equal(x, before)
    original(x)
    assert candidate(x).grad_fn is None, "the evaluator's timing loop leaves grad mode on"
    ours, theirs = candidate.state_dict(), original.state_dict()
    assert ours["bn.num_batches_tracked"] == theirs["bn.num_batches_tracked"] == 6
    for name in ("bn.running_mean", "bn.running_var"):
        assert torch.allclose(ours[name], theirs[name], atol=1e-4, rtol=1e-4), name


def no_worse_than_the_original(number: int, device: str, dtype: str, shape: tuple[int, int, int] | None = None) -> None:
    """In 16 bits the original rounds z and may exceed the evaluator's own 1e-2, so both are compared with float64."""
    import torch

    original, candidate, get_inputs = models(number, device, getattr(torch, dtype), shape)
    truth = copy.deepcopy(original).double()
    for seed in range(5):
        torch.manual_seed(seed)
        x = get_inputs()[0].to(device=device, dtype=getattr(torch, dtype))
        with torch.no_grad():
            exact = truth(x.double())
            theirs, ours = ((model(x).double() - exact).norm().item() for model in (original, candidate))
        assert ours <= theirs, f"seed {seed}"


@pytest.mark.parametrize("number", PROBLEMS)
def test_kernelbench_equal_seeds_give_equal_state(number: int) -> None:
    torch = pytest.importorskip("torch")
    original, candidate, _ = models(number, "cpu", torch.float32, (8, 96, 64))
    ours, theirs = candidate.state_dict(), original.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("number", PROBLEMS)
def test_kernelbench_reduced(number: int) -> None:
    pytest.importorskip("torch")
    agrees(number, "cpu", REDUCED[number])


@pytest.mark.parametrize("number", PROBLEMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernelbench_reduced_in_16_bits(number: int, dtype: str) -> None:
    pytest.importorskip("torch")
    no_worse_than_the_original(number, "cpu", dtype, REDUCED[number])


@pytest.mark.gpu
@pytest.mark.parametrize("number", PROBLEMS)
def test_kernelbench_full_size(number: int) -> None:
    need_torch_cuda()
    agrees(number, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("number", PROBLEMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernelbench_full_size_in_16_bits(number: int, dtype: str) -> None:
    need_torch_cuda()
    no_worse_than_the_original(number, "cuda", dtype)


@pytest.mark.parametrize("gpu", devices())
@pytest.mark.parametrize("number", PROBLEMS)
def test_kernelbench_adversarial_checks(number: int, gpu: bool) -> None:
    """KernelBench looks for kernels that change their input or reuse an earlier result."""
    torch = pytest.importorskip("torch")
    if gpu:
        need_torch_cuda()
    original, candidate, get_inputs = models(number, "cuda" if gpu else "cpu", torch.float32, REDUCED[number])
    x = get_inputs()[0].to("cuda" if gpu else "cpu")
    with torch.no_grad():
        before, parameters = x.clone(), [p.clone() for p in candidate.parameters()]
        first = candidate(x)
        kept = first.clone()
        again = candidate(-x)
        want, want_again = original(x), original(-x)
    assert torch.equal(x, before)
    assert all(map(torch.equal, candidate.parameters(), parameters))
    assert len({a.untyped_storage().data_ptr() for a in (x, first, again, *candidate.parameters())}) == 3 + len(
        parameters
    )
    assert torch.equal(first, kept)
    assert torch.allclose(first, want, atol=1e-4, rtol=1e-4)
    assert torch.allclose(again, want_again, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["the default stream", "one of its own"])
@pytest.mark.parametrize("number", PROBLEMS)
def test_kernelbench_no_work_on_another_stream(number: int, own: bool) -> None:
    """x is valid only between a long kernel and the next fill, both on the caller's stream: work on any other stream
    reads NaN, before or after."""
    need_torch_cuda()
    import torch

    original, candidate, get_inputs = models(number, "cuda", torch.float32, (1024, 1024, 1024))
    x = get_inputs()[0].cuda()
    with torch.no_grad():
        want = original(x)
        late = torch.full_like(x, torch.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            candidate(late)  # compiles, and allocates memory
            torch.cuda._sleep(100_000_000)
            late.copy_(x)
            y = candidate(late)
            late.fill_(torch.nan)
            done = stream.record_event()
        assert not done.query(), "the host waited for the long kernel"
        stream.synchronize()  # this stream alone
        assert torch.allclose(y, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gpu", devices())
def test_kernelbench_time(gpu: bool) -> None:
    if gpu:
        need_torch_cuda()
    pytest.importorskip("torch")
    told = run(EXAMPLES / "kernelbench_time.py", *(["--trials", "3"] if gpu else []), gpu=gpu)
    assert "33: correctness True (5 / 5)" in told
    assert "39: correctness True (5 / 5)" in told
    assert ("speed-up" in told) == gpu


@pytest.mark.parametrize("number", PROBLEMS)
def test_kernelbench_static_checks(number: int) -> None:
    """The candidate has nothing that the evaluator's static checker forbids, and no computing layers of PyTorch."""
    text = (EXAMPLES / f"kernelbench_{number}.py").read_text()
    assert set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)) == {"torch", "gsbn"}
    forbidden = r"\btry\s*:|\bexcept\b|\bpass\b|\bthreading\b|nn\.functional|\bF\.|torch\.(mm|matmul|batch_norm)\b"
    assert re.findall(forbidden, text) == []
    assert "from __future__" not in text, "the evaluator may put a line before the first"
