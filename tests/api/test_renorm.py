"""Batch renormalisation: its formulas spelled out in PyTorch, its limits, and what it must not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from gsbn._forward import forward_within
from gsbn._plan import Limits
from tests.support.families import FAMILIES
from tests.support.gradients import NAMES, before_relu, draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import ANY, DTYPES, Kind, assert_same_bits, forward, place, without_out
from tests.support.strategies import RENORMS, Case
from tests.support.tolerance import assert_outcome_within, assert_within, bounds

CASE = Case((40, 8, 24), "float64", True)


def spelled_out(arrays: dict[str, Any], dy: Any, r_max: float, d_max: float, eps: float) -> list[np.ndarray]:
    """y and the gradients of all six arguments by the lines of the paper, in float64, by autograd."""
    torch = pytest.importorskip("torch")
    names = ("x", "weight", "bias", "scale", "gamma", "beta")
    x, weight, bias, scale, gamma, beta = leaves = [torch.tensor(arrays[name]).requires_grad_() for name in names]
    running_mean, running_var = (torch.tensor(arrays[name]) for name in ("running_mean", "running_var"))
    z = (x @ weight.T + bias) * scale
    mean, sigma = z.mean(0), torch.sqrt(z.var(0, unbiased=False) + eps)
    running_sigma = torch.sqrt(running_var + eps)
    r = torch.clip(sigma.detach() / running_sigma, 1 / r_max, r_max)
    d = torch.clip((mean.detach() - running_mean) / running_sigma, -d_max, d_max)
    y = gamma * ((z - mean) / sigma * r + d) + beta
    return [y.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(y, leaves, torch.tensor(dy)))]


@pytest.mark.parametrize("renorm", [renorm for renorm in RENORMS if renorm], ids=str)
@pytest.mark.parametrize("family", ["normal", "tiny and zero scale"])
def test_the_reference_is_the_paper(renorm: tuple[float, ...], family: str) -> None:
    arrays = without_out(replace(CASE, family=family).arrays())
    arrays["running_mean"][::3] += 100  # beyond d_max on either side, and within it
    arrays["running_mean"][1::3] -= 100
    arrays["running_var"][::2] *= 100  # beyond r_max, below 1 / r_max
    arrays["running_var"][1::4] /= 100
    for count in (49, 50):
        arrays["num_batches_tracked"][...] = count
        limits = (1.0, 0.0) if len(renorm) == 3 and count < renorm[2] else renorm[:2]
        dy = draw_dy(arrays)
        truth = reference.forward(**arrays, training=True, renorm=renorm)
        found = reference.backward(dy, **arrays, training=True, renorm=renorm)
        y, *gradients = spelled_out(arrays, dy, *limits, 1e-5)
        np.testing.assert_allclose(truth.y, y, rtol=1e-9, atol=1e-9)
        for name, theirs in zip(("x", "weight", "bias", "scale", "gamma", "beta"), gradients, strict=True):
            ours = getattr(found, name)
            # autograd's sums for the bias and the scale cancel
            loose = 1e-9 * np.abs(dy).sum() * max(1.0, float(np.abs(arrays["gamma"]).max()) / 1e-5**0.5)
            close = loose if name in ("bias", "scale") else 1e-9
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=close * (1 + np.abs(theirs).max()), err_msg=name)


@pytest.mark.parametrize("renorm", RENORMS[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 5, 4), (300, 72, 136), (1500, 40, 264)])
def test_is_within_its_bounds(kind: Kind, shape: tuple[int, int, int], dtype: str, renorm: tuple[float, ...]) -> None:
    assert_right(kind, Case(shape, dtype, True, offset=1.0, renorm=renorm))
    assert_right(kind, Case(shape, dtype, True, renorm=renorm, activation="relu", scale="(1,)"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families(kind: Kind, dtype: str, family: str) -> None:
    assert_right(kind, Case((300, 72, 136), dtype, True, family=family, renorm=(1.5, 0.5)))


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["passes", "fused"])
@pytest.mark.parametrize("gemm", ["cublas", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 16, 200, 1024])
def test_each_way_on_a_gpu(gpu_kind: Kind, rows: int, dtype: str, gemm: str, fused: bool) -> None:
    case = Case((rows, 72, 136), dtype, True, offset=1.0, renorm=(1.5, 0.5))
    assert_right(gpu_kind, case, Limits(fused=fused), gemm=gemm)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("renorm", [(1.5, 0.5), (1.5, 0.5, 50)], ids=str)
def test_many_short_rows(gpu_kind: Kind, dtype: str, renorm: tuple[float, ...]) -> None:
    """Neither g nor dg is written."""
    assert_right(gpu_kind, Case((20000, 32, 40), dtype, True, offset=1.0, renorm=renorm), Limits(skinny=True))


def assert_right(kind: Kind, case: Case, limits: Limits = ANY, **options: Any) -> None:
    """All results, and the gradients, are within their bounds."""
    arrays = case.arrays()
    arrays["running_mean"][::3] += 3
    arrays["running_var"][::2] *= 9
    options |= case.options
    got = forward(kind, arrays, limits=limits, **options)
    wide = np.longdouble if case.dtype == "float64" else np.float64
    given = without_out(arrays)
    truth = reference.forward(**given, **case.options, dtype=wide)
    deferred = DTYPES[case.dtype].itemsize == 2
    limbs = case.dtype == "float32" and not kind.is_cpu
    assert_outcome_within(got, truth, bounds(given, truth, **case.options, deferred=deferred, limbs=limbs))
    dy = draw_dy(arrays)
    y, gradients = step(kind, arrays, dy, limits=limits, forward_limits=limits, **options)
    dy = dy if case.activation is None else before_relu(dy, y)
    form = {"training": True, "eps": case.eps, "renorm": case.renorm}
    want = truth_of(given, dy, **form)
    allowed = gradient_bounds(given, dy, want, **form, deferred=deferred, activation=case.activation)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert_within(gradient, np.asarray(getattr(want, name)), allowed[name], name)


# ---- the limits, and the statistics


def natives(kind: Kind, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: kind.put(a) for name, a in without_out(arrays).items()}


def results(kind: Kind, arrays: dict[str, np.ndarray], limits: Limits = ANY, **options: Any) -> list[np.ndarray]:
    """y, the statistics and all gradients."""
    call = natives(kind, arrays)
    y, saved = forward_within(limits, **call, training=True, return_saved=True, **options)
    gradients = gsbn.backward(kind.put(draw_dy(arrays)), saved)
    return [kind.get(a) for a in (y, call["running_mean"], call["running_var"], *gradients)]


@pytest.mark.parametrize("limits", ["float32", "float64"])
def test_limits_in_an_array_are_numbers(kind: Kind, limits: str) -> None:
    """An array is read at each call: its values may change. It may have any layout, and is not written."""
    arrays = replace(CASE, dtype="float32").arrays()
    for numbers in ((1.5, 0.25), (3.0, 5.0)):
        for layout in ("C", "strided", "negative"):
            placed = place(kind, np.array(numbers, limits), layout)
            for ours, theirs in zip(
                results(kind, arrays, renorm=placed.view), results(kind, arrays, renorm=numbers), strict=True
            ):
                assert_same_bits(ours, theirs)
            assert not placed.disturbed(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_of_1_and_0_are_batch_normalisation(kind: Kind, dtype: str) -> None:
    arrays = Case((40, 8, 24), dtype, True).arrays()
    how: dict[str, Any] = {} if kind.is_cpu else {"gemm": "tiled", "limits": Limits(fused=False)}
    for renorm in (gsbn.Renorm(1, 0), gsbn.Renorm(3, 5, warmup=100)):  # a Case has counted fewer batches
        for ours, plain in zip(results(kind, arrays, renorm=renorm, **how), results(kind, arrays, **how), strict=True):
            np.testing.assert_array_equal(ours, plain)


def test_a_warm_up_ends_with_its_last_batch(kind: Kind) -> None:
    arrays = without_out(replace(CASE, dtype="float32").arrays())
    call = natives(kind, arrays)
    for batch in range(4):
        call["num_batches_tracked"][...] = batch
        before = {name: kind.get(call[name]) for name in ("running_mean", "running_var")}
        y = kind.get(gsbn.forward(**call, training=True, renorm=(1.25, 0.5, 2)))
        assert kind.get(call["num_batches_tracked"]) == batch + 1
        again = {**call, **{name: kind.put(a) for name, a in before.items()}}
        limits = (1.0, 0.0) if batch < 2 else (1.25, 0.5)
        want = kind.get(gsbn.forward(**again, training=True, renorm=limits))
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("momentum", [1.0, 0.0])
def test_the_statistics_are_those_before_this_batch(kind: Kind, momentum: float) -> None:
    """At a momentum of 1 the call replaces them, and y still depends on what they were."""
    arrays = replace(CASE, dtype="float32").arrays()
    call = natives(kind, arrays)
    y = kind.get(gsbn.forward(**call, training=True, momentum=momentum, renorm=(100.0, 100.0)))
    inference = gsbn.forward(**natives(kind, {n: a for n, a in arrays.items() if n != "num_batches_tracked"}))
    where = ~np.isclose(arrays["scale"], 0, atol=1e-3)  # there limits do not matter: y is that of inference
    np.testing.assert_allclose(y[:, where], kind.get(inference)[:, where], rtol=1e-4, atol=1e-4)


def test_inference_ignores_it(kind: Kind) -> None:
    call = natives(kind, replace(CASE, dtype="float32").arrays())
    plain = kind.get(gsbn.forward(**call))
    for renorm in ((3.0, 5.0, 7), kind.put(np.array([3.0, 5.0]))):
        assert_same_bits(kind.get(gsbn.forward(**call, renorm=renorm)), plain)


def test_an_empty_batch(kind: Kind) -> None:
    call = natives(kind, Case((0, 5, 4), "float32", True).arrays())
    y, saved = gsbn.forward(**call, training=True, renorm=(3.0, 5.0), return_saved=True)
    assert tuple(y.shape) == (0, 4)
    for name, gradient in zip(NAMES, gsbn.backward(y, saved), strict=True):
        assert not kind.get(gradient).any(), name


@pytest.mark.gpu
def test_a_replay_reads_the_limits_and_the_count(gpu_kind: Kind) -> None:
    from tests.support.streams import capture, new_stream

    arrays = without_out(replace(CASE, dtype="float32").arrays())
    for warmup in (None, 3):
        call = natives(gpu_kind, arrays)
        limits = gpu_kind.put(np.array([1.0, 0.0]))
        renorm = limits if warmup is None else (1.25, 0.5, warmup)
        with new_stream(gpu_kind) as stream:
            gsbn.forward(**call, training=True, renorm=renorm)
            replay, y = capture(gpu_kind, stream, lambda: gsbn.forward(**call, training=True, renorm=renorm))  # noqa: B023
            for count in range(5):
                now = (1.0, 0.0) if count < 3 else (1.25, 0.5)
                for name in ("running_mean", "running_var"):
                    call[name][...] = gpu_kind.put(arrays[name])
                call["num_batches_tracked"][...] = count
                limits[...] = gpu_kind.put(np.array(now))
                replay()
                stream.synchronize()
                truth = reference.forward(**arrays, training=True, renorm=now)
                limit = bounds(arrays, truth, training=True, renorm=now)
                assert_within(gpu_kind.get(y), truth.y, limit.y, "y")
