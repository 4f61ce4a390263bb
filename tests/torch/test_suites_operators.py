"""PyTorch's samples of batch_norm and linear in `op_db`, and its check of operators, `opcheck`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.torch.suites import NO_BATCH, batch_norm, judge, linear, seed, torch  # skips without PyTorch

# isort: split
from torch.nn import functional
from torch.testing import make_tensor
from torch.testing._internal import optests
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import gradcheck, gradgradcheck

from gsbn._plan.problem import VECTOR_PARAMETERS
from gsbn.torch import _operators as operators
from tests.support.harness import STATISTICS

FOUND = {op.name: op for op in op_db if not op.variant_test_name}  # variants without cuDNN have the same samples
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LINEAR, NORM = "nn.functional.linear", "nn.functional.batch_norm"
OURS: dict[str, Callable[..., Any]] = {LINEAR: linear, NORM: batch_norm}
LEFT = {NORM: {"[[]0[]]*": NO_BATCH}, LINEAR: {"[[]?[]]*": NO_BATCH}}
RUNS = {NORM: 10, LINEAR: 14}


def samples(name: str, device: str, dtype: Any, gradients: bool = True) -> Iterator[tuple[str, Any]]:
    """The samples, and the same in memory with gaps."""
    seed()
    for sample in FOUND[name].sample_inputs(device, dtype, requires_grad=gradients):
        for given, how in ((sample, ""), (sample.noncontiguous(), " with gaps")):
            yield f"{list(given.input.shape)} {given.kwargs}{how}", given


def leaves(sample: Any, dtype: Any) -> tuple[list[Any], dict[str, Any]]:
    """The operands in a dtype, as leaves that require grad like those of the sample."""
    operands = (sample.input, *sample.args)
    made = [None if a is None else a.detach().to(dtype, copy=True) for a in operands]
    for leaf, a in zip(made, operands, strict=True):
        if a is not None and a.requires_grad:
            leaf.requires_grad_()
            if dtype is a.dtype and not a.is_contiguous():
                leaf.data = a.detach()
    return made, sample.kwargs


def results(run: Callable[..., Any], sample: Any, dtype: Any) -> list[Any]:
    """y, the operands that were written, and the gradients."""
    operands, options = leaves(sample, dtype)
    y = run(*operands, **options)
    dy = torch.arange(y.numel(), device=y.device, dtype=torch.float64).reshape(y.shape).cos()
    wanted = [a for a in operands if a is not None and a.requires_grad]
    found = torch.autograd.grad(y, wanted, dy.to(sample.input.dtype).to(dtype))
    return [y.detach(), *(a for a in operands if a is not None and not a.requires_grad), *found]


def size(name: str, sample: Any) -> list[Any]:
    """For each of the `results`, which are sums, the sum of the absolute values of its terms."""
    operands, options = leaves(sample, torch.float64)
    x, *rest = (None if a is None else a.detach() for a in operands)
    if name == LINEAR:
        weight, bias = rest[0], rest[1] if len(rest) > 1 else None
        rows, dy = x.flatten(0, -2).abs(), torch.ones(*x.shape[:-1], len(weight), device=x.device).double()
        dy = dy.flatten(0, -2)
        y = functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
        return [y, (dy @ weight.abs()).reshape(x.shape), dy.T @ rows, *([dy.sum(0)] if bias is not None else [])]
    mean, var, weight, bias = rest
    features, training, eps = x.shape[1], options.get("training", False), options.get("eps", 1e-5)
    rows = x.transpose(0, 1).reshape(features, -1)
    batch_mean, batch_var = rows.mean(1), rows.var(1, unbiased=False)
    about, spread = (batch_mean, batch_var) if training else (mean, var)
    shape = [1, features] + [1] * (x.dim() - 2)
    gamma = torch.ones(features, device=x.device).double() if weight is None else weight.abs()
    r = (gamma / (spread + eps).sqrt()).reshape(shape)
    normal = (x.abs() + about.abs().reshape(shape)) / (spread + eps).sqrt().reshape(shape)
    y = normal * gamma.reshape(shape) + (0 if bias is None else bias.abs().reshape(shape))
    momentum, n = abs(options.get("momentum", 0.1)), rows.shape[1]
    others = [d for d in range(x.dim()) if d != 1]
    through = r * (1 + (1 + normal * normal.mean(others, keepdim=True) if training else 0))
    sizes = [y]
    if mean is not None:
        wide = rows.square().sum(1) / max(1, n - 1)
        sizes += [(1 + momentum) * mean.abs() + momentum * rows.abs().mean(1), (1 + momentum) * var + momentum * wide]
    sizes += [through.expand_as(x)]
    return sizes + ([normal.sum(others), torch.full_like(gamma, n)] if weight is not None else [])


def is_right(name: str, sample: Any, dtype: Any) -> None:
    """Each result is within a few roundings of PyTorch's in float64.

    It is a sum of at most n products, in float32 or wider. The factors and the sum are each rounded to the dtype once:
    the error is at most (4 eps of the dtype + n eps of the sum) times the sum of the absolute values. The truth in
    float64 has the same error: twice that.
    """
    truth = results(FOUND[name].op, sample, torch.float64)
    found = results(OURS[name], sample, dtype)
    n = max(a.numel() for a in truth)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    roundings = 2 * (4 * torch.finfo(dtype).eps + n * torch.finfo(wide).eps)
    for a, b, most in zip(found, truth, size(name, sample), strict=True):
        assert a.shape == b.shape == most.shape and a.dtype is dtype
        assert ((a.double() - b).abs() <= roundings * most).all(), (a, b)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_samples(device: str, name: str, dtype: Any) -> None:
    assert dtype in FOUND[name].supported_dtypes(device)
    cases = ((which, lambda s=s: is_right(name, s, dtype)) for which, s in samples(name, device, dtype))
    judge(cases, LEFT[name], 2 * RUNS[name])


@pytest.mark.parametrize("name", OURS)
def test_derivatives(device: str, name: str) -> None:
    """First and second derivatives, also in batches, against finite differences."""

    def case(sample: Any) -> None:
        operands, options = leaves(sample, torch.float64)
        wanted = [i for i, a in enumerate(operands) if a is not None and a.requires_grad]

        def run(*given: Any) -> Any:
            full = [None if a is None else a.clone() for a in operands]  # every call starts with the same statistics
            for i, a in zip(wanted, given, strict=True):
                full[i] = a
            return OURS[name](*full, **options)

        given = [operands[i] for i in wanted]
        if all(a.numel() for a in given):
            assert gradcheck(run, given, check_batched_grad=True)
            assert gradgradcheck(run, given, check_batched_grad=True, nondet_tol=1e-12)
        else:
            run(*given).sum().backward()

    cases = ((which, lambda s=s: case(s)) for which, s in samples(name, device, torch.float64))
    judge(cases, LEFT[name], 2 * RUNS[name])


@pytest.mark.parametrize("name", OURS)
def test_recorded(device: str, name: str) -> None:
    """A recorded call and its gradients, with symbolic shapes, give the same results as the call."""

    def case(sample: Any) -> None:
        operands, options = leaves(sample, torch.float32)

        def run(*given: Any) -> Any:
            return OURS[name](*(a if a is None or a.requires_grad else a.clone() for a in given), **options)

        optests.aot_autograd_check(run, tuple(operands), {}, dynamic=True)

    cases = (
        (which, lambda s=s: case(s)) for which, s in samples(name, device, torch.float32) if not which.endswith("gaps")
    )
    judge(cases, LEFT[name], RUNS[name])


def test_other_dtypes_are_refused(device: str) -> None:
    """gsbn supports the floating dtypes of linear, and all of batch_norm."""
    assert set(FOUND[NORM].supported_dtypes(device)) == set(FLOATS)
    others = set(FOUND[LINEAR].supported_dtypes(device)) - set(FLOATS)
    assert {torch.complex64, torch.complex128} <= others
    for dtype in others:
        for sample in FOUND[LINEAR].sample_inputs(device, dtype):
            if sample.input.dim() > 1:
                with pytest.raises(TypeError, match=r"^x: expected dtype float32, .*, got"):
                    linear(sample.input, *sample.args)


def test_there_are_no_error_inputs() -> None:
    """op_db has none for these two functions; if it gets some, run them."""
    assert [name for name in OURS if FOUND[name].error_inputs_func] == []


# ---- opcheck


def operands(device: str, dtype: Any, vectors: bool) -> dict[str, Any]:
    seed()
    draw = lambda *shape, **more: make_tensor(shape, device=device, dtype=dtype, **more)  # noqa: E731
    made = {"x": draw(12, 6), "weight": draw(5, 6)}
    made |= dict.fromkeys(VECTOR_PARAMETERS) | {"running_mean": draw(5), "running_var": draw(5, low=0.5, high=2)}
    made["num_batches_tracked"] = torch.tensor(3, device=device)
    return made | ({name: draw(5, low=0.5, high=2) for name in VECTOR_PARAMETERS} if vectors else {})


def arguments(given: dict[str, Any], activation: str | None, momentum: float | None = 0.1) -> tuple[Any, ...]:
    """The arguments in the order of the schema: bias, scale, gamma, beta."""
    tensors = (given[n] for n in ("x", "weight", "bias", "scale", "gamma", "beta", *STATISTICS))
    return *tensors, 1.0, momentum, 1e-5, "highest", "auto", activation


def calls(device: str, dtype: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    full = dtype is torch.float32  # the others differ only in dtypes
    for vectors, activation in itertools.product((False, True), (None, "relu")) if full else [(True, "relu")]:
        given = operands(device, dtype, vectors)
        for operator in (operators.TRAIN, operators.INFER_SAVED, operators.INFER):
            momentum = None if vectors and operator is operators.TRAIN else 0.1
            yield f"{vectors} {activation} {operator.name()}", operator, arguments(given, activation, momentum)
        for training in (True, False):
            run = operators.TRAIN if training else operators.INFER_SAVED
            y, deviations, of_features = run(*arguments(given, activation))
            dtypes = " ".join("None" if given[n] is None else str(given[n].dtype)[6:] for n in VECTOR_PARAMETERS)
            for needs in ("x weight", "x weight bias scale gamma beta" if vectors else "weight"):
                dy = torch.ones_like(y)
                saved = dy, given["x"], given["weight"], deviations, of_features
                rest = training, "highest", "auto", activation, dtypes, None, needs
                yield f"{vectors} {activation} backward {training} {needs}", operators.BACKWARD, (*saved, *rest)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(device: str, dtype: Any) -> None:
    """Schemas declare what is written, fake tensors match the results, and recorded programs give the same results as
    the call, also with symbolic shapes."""
    ran = 0
    for name, operator, given in calls(device, dtype):
        try:
            optests.opcheck(operator, given, test_utils="ALL")
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        ran += 1
    assert ran == (4 if dtype is torch.float32 else 1) * (3 + 2 * 2)
