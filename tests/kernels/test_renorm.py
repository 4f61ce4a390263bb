"""Batch renormalisation by forward_sm90, in each of its modes and with each tile, and whatever else is one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import Gradients, reference
from gsbn._backward import backward_within
from gsbn._forward import forward_within
from gsbn._plan import Limits
from tests.kernels.test_forward_sm90 import CHOICES, ELEMENTS, SHAPES, name_of, skip_what_others_do
from tests.support.forwards import recompute_on_few_sms
from tests.support.gradients import before_relu, draw_dy, gradient_bounds, truth_of
from tests.support.harness import ANY, assert_same_bits, kind_of, without_out
from tests.support.strategies import RENORMS, Case
from tests.support.tolerance import TF32, assert_within, bounds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")
RENORM = (1.5, 0.5)  # limits that some features reach and others do not


def assert_right(case: Case, precision: str, limits: Limits = ANY, gemm: str = "sm90") -> None:
    """y, the statistics and the gradients are within their bounds, and repeat bit by bit."""
    arrays = without_out(case.arrays())
    arrays["running_mean"][::3] += 3
    arrays["running_var"][::2] *= 9
    dy = draw_dy(arrays)

    def results() -> list[np.ndarray]:
        call = {name: cupy.asarray(a) for name, a in arrays.items()}
        how: dict[str, Any] = {"gemm": gemm, "precision": precision, "return_saved": True, **case.options}
        y, saved = forward_within(limits, **call, **how)
        if gemm == "sm90":  # the products of the backward are tested elsewhere
            saved = saved._replace(gemm="auto")
        gradients = backward_within(ANY, cupy.asarray(dy), saved)
        written = (call[name] for name in ("running_mean", "running_var", "num_batches_tracked"))
        return [cupy.asnumpy(a) for a in (y, *written, *gradients)]

    found, again = results(), results()
    for one, other in zip(found, again, strict=True):
        assert_same_bits(np.atleast_1d(one), np.atleast_1d(other))
    y, mean, var, count, *gradients = found
    truth = reference.forward(**arrays, **case.options)
    limbs = case.dtype == "float32" and precision == "highest"
    operand = TF32 if case.dtype == "float32" else 0.0
    limit = bounds(arrays, truth, **case.options, operand=operand, deferred=case.dtype != "float32", limbs=limbs)
    assert_within(y, truth.y, limit.y, "y")
    assert_within(mean, truth.running_mean, limit.running_mean, "running_mean")
    assert_within(var, truth.running_var, limit.running_var, "running_var")
    assert count == truth.num_batches_tracked
    dy = dy if case.activation is None else before_relu(dy, y)
    form = {"training": True, "renorm": case.renorm}
    want = truth_of(arrays, dy, **form)
    allowed = gradient_bounds(arrays, dy, want, **form, operand=operand, deferred=True, activation=case.activation)
    for name, gradient in zip(Gradients._fields, gradients, strict=True):
        assert_within(gradient, np.asarray(getattr(want, name)), allowed[name], name)


@pytest.mark.parametrize("within", CHOICES, ids=name_of)
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile(shape: tuple[int, int, int], dtype: str, precision: str, within: Limits) -> None:
    skip_what_others_do(within, shape, precision)
    if dtype != "float32" and shape[0] <= 16:
        pytest.skip("so few rows in 16 bits are saved in float64")
    assert_right(Case(shape, dtype, True, offset=0.5, renorm=RENORM), precision, within)


@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("cluster", [1, 2])
def test_recompute(cluster: int, dtype: str, precision: str) -> None:
    limits = recompute_on_few_sms(dtype, precision, cluster)
    for activation in (None, "relu"):
        assert_right(Case((4000, 72, 200), dtype, True, renorm=RENORM, activation=activation), precision, limits)


@pytest.mark.parametrize("gemm", ["auto", "sm90"])
@pytest.mark.parametrize("renorm", RENORMS[1:], ids=str)
@pytest.mark.parametrize(("dtype", "precision"), ELEMENTS)
@pytest.mark.parametrize("shape", [(256, 376, 2048), (256, 2048, 2048), (9000, 264, 520)])
def test_limits_and_warm_ups(
    shape: tuple[int, int, int], dtype: str, precision: str, renorm: tuple[float, ...], gemm: str
) -> None:
    """A warm-up reads the count of batches, which one CTA raises: then CTAs wait for each other."""
    assert_right(Case(shape, dtype, True, renorm=renorm, activation="relu"), precision, gemm=gemm)


@pytest.mark.parametrize("limits", [ANY, Limits(cluster_batch=True), Limits(cluster_batch=False)], ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_limits_of_1_and_0_are_batch_normalisation(dtype: str, limits: Limits) -> None:
    """The same bits: nothing else differs between the variants."""
    arrays = without_out(replace(Case((512, 264, 520), dtype, True), activation=None).arrays())
    dy, results = cupy.asarray(draw_dy(arrays)), []
    for renorm in (None, (1.0, 0.0)):
        call = {name: cupy.asarray(a) for name, a in arrays.items()}
        y, saved = forward_within(limits, **call, training=True, gemm="sm90", return_saved=True, renorm=renorm)
        gradients = gsbn.backward(dy, saved._replace(gemm="auto"))
        results.append([cupy.asnumpy(a) for a in (y, call["running_mean"], call["running_var"], *gradients)])
    for ours, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_limits_change_between_replays() -> None:
    """One launch reads them from memory, in each mode."""
    from tests.support.streams import capture, new_stream

    kind = kind_of("cupy")
    arrays = without_out(Case((512, 264, 520), "float32", True).arrays())
    for limits in (Limits(cluster_batch=True), Limits(cluster_batch=False)):
        call, numbers = {name: kind.put(a) for name, a in arrays.items()}, kind.put(np.array([3.0, 5.0]))
        how: dict[str, Any] = {"training": True, "gemm": "sm90", "return_saved": True, "renorm": numbers}
        with new_stream(kind) as stream:
            forward_within(limits, **call, **how)
            replay, y = capture(kind, stream, lambda: forward_within(limits, **call, **how)[0])  # noqa: B023
            for now in ((1.0, 0.0), (1.25, 0.25), (3.0, 5.0)):
                for name in ("running_mean", "running_var"):
                    call[name][...] = kind.put(arrays[name])
                numbers[...] = kind.put(np.array(now))
                replay()
                stream.synchronize()
                truth = reference.forward(**arrays, training=True, renorm=now)
                limit = bounds(arrays, truth, training=True, renorm=now, limbs=True)
                assert_within(kind.get(y), truth.y, limit.y, "y")
