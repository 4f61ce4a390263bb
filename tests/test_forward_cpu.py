"""``gsbn.forward`` and ``gsbn.fold`` on the CPU: the reference's arithmetic, rounded once, in x's own kind of array."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from accuracy import FAMILIES, assert_as_accurate_as_torch
from harness import CPU_KINDS, DTYPES, Kind, Producer, assert_same_bits, forward, kind_of, place, without_out
from hypothesis import given
from strategies import Case, cases
from tolerance import roundoff

import gsbn
from gsbn import reference

CASE = Case((9, 5, 4), "float32", training=True)


def assert_is_the_reference(kind: Kind, case: Case) -> None:
    """The reference, rounded once: every bit of every result."""
    arrays = case.arrays()
    truth = reference.forward(**without_out(arrays), **case.options)
    got = forward(kind, arrays, dict(case.layouts), **case.options)
    assert_same_bits(got.y, reference.round_to(truth.y, arrays["x"].dtype))
    if truth.running_mean is not None:
        dtype = arrays["running_mean"].dtype
        assert_same_bits(got.running_mean, reference.round_to(truth.running_mean, dtype))
        assert_same_bits(got.running_var, reference.round_to(truth.running_var, dtype))
    if truth.num_batches_tracked is not None:
        assert got.num_batches_tracked == truth.num_batches_tracked


@given(cases(limit=64))
def test_numpy_is_the_reference_rounded_once(case: Case) -> None:
    assert_is_the_reference(kind_of("numpy"), case)


@given(cases(limit=64))
def test_torch_is_the_reference_rounded_once(case: Case) -> None:
    assert_is_the_reference(kind_of("torch-cpu"), case)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_larger_problem(cpu_kind: Kind, dtype: str, training: bool) -> None:
    assert_is_the_reference(cpu_kind, Case((700, 300, 257), dtype, training))


# ---- other producers


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("training", [True, False])
def test_another_producer_gets_numpy_back(dtype: str, training: bool) -> None:
    arrays = without_out(replace(CASE, dtype=dtype, training=training).arrays())
    want = reference.forward(**arrays, training=training)
    y = gsbn.forward(**{name: Producer(a) for name, a in arrays.items()}, training=training)
    assert type(y) is np.ndarray
    assert_same_bits(y, reference.round_to(want.y, arrays["x"].dtype))
    # written in place, through the producer
    for name in ("running_mean", "running_var"):
        assert_same_bits(arrays[name], reference.round_to(getattr(want, name), arrays[name].dtype))
    assert arrays["num_batches_tracked"] == want.num_batches_tracked


# ---- what PyTorch does


@pytest.mark.parametrize("momentum", [0.1, None])
def test_takes_the_place_of_torch_modules(momentum: float | None) -> None:
    """Parameters and state of torch's own modules go in as they are, and follow torch's over several batches."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    scale = torch.nn.Parameter(torch.randn(4))
    linear, norm = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4, momentum=momentum, eps=1e-3)
    truth = copy.deepcopy(torch.nn.ModuleList([linear, norm])).double()

    for training in (True, True, False, True, False):
        x = torch.randn(9, 5)
        truth[1].load_state_dict(norm.state_dict())  # so that one call's rounding is compared at a time
        with torch.no_grad():
            want = truth[1].train(training)(truth[0](x.double()) * scale.double())
            got = gsbn.forward(
                x,
                linear.weight,
                scale,
                bias=linear.bias,
                gamma=norm.weight,
                beta=norm.bias,
                running_mean=norm.running_mean,
                running_var=norm.running_var,
                num_batches_tracked=norm.num_batches_tracked,
                training=training,
                momentum=momentum,
                eps=1e-3,
            )
        for ours, theirs in (
            (got, want),
            (norm.running_mean, truth[1].running_mean),
            (norm.running_var, truth[1].running_var),
        ):
            # one rounding to float32; torch's own error in float64 is far below 1e-13 on nine rows of five
            assert ((ours.double() - theirs).abs() <= roundoff(np.float32) * theirs.abs() + 1e-13).all()
        assert norm.num_batches_tracked == truth[1].num_batches_tracked
        assert not got.requires_grad


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_as_accurate_as_torch(dtype: str, name: str) -> None:
    assert_as_accurate_as_torch(kind_of("torch-cpu"), name, (64, 96, 48), dtype)


# ---- what floating point does


def test_half_inputs_whose_gemm_overflows_half(cpu_kind: Kind) -> None:
    x = np.resize(np.array([200, -200, 100, 60], np.float16)[:, None], (4, 512))
    arrays = {"x": x, "weight": np.full((3, 512), 100, np.float16), "scale": np.ones(3, np.float16)}
    got = forward(cpu_kind, arrays, training=True)  # g reaches 1e7; y is ordinary
    assert_same_bits(got.y, reference.round_to(reference.forward(**arrays, training=True).y, np.float16))
    assert np.isfinite(got.y).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("training", [True, False])
def test_nan_and_infinity_stay_in_their_feature(cpu_kind: Kind, bad: float, training: bool) -> None:
    arrays = CASE.arrays()
    clean = forward(cpu_kind, arrays, training=training)
    arrays["weight"][1, 2] = bad
    got = forward(cpu_kind, arrays, training=training)
    assert not np.isfinite(got.y[:, 1]).any()
    for ours, theirs in zip(got[:3], clean[:3], strict=True):
        assert_same_bits(np.delete(ours, 1, axis=-1), np.delete(theirs, 1, axis=-1))


# ---- fold


@given(case=cases(limit=48, training=False))
def test_fold_is_the_reference_rounded_once(case: Case) -> None:
    arrays = {name: a for name, a in without_out(case.arrays()).items() if name not in ("x", "num_batches_tracked")}
    want = reference.fold(**arrays, eps=case.eps)
    for kind in map(kind_of, CPU_KINDS):
        placed = {name: place(kind, a, dict(case.layouts).get(name, "C")) for name, a in arrays.items()}
        got = gsbn.fold(**{name: p.view for name, p in placed.items()}, eps=case.eps)
        for ours, truth in zip(got, want, strict=True):
            assert type(ours) is type(placed["weight"].view)
            assert_same_bits(kind.get(ours), reference.round_to(truth, arrays["weight"].dtype))
        assert not any(p.disturbed(kind) for p in placed.values())
