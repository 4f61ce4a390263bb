"""``gsbn.forward`` and ``gsbn.fold`` on the CPU: within their bounds, as accurate as torch, with little memory."""

from __future__ import annotations

import copy
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import gsbn
from gsbn import reference
from gsbn._cpu.passes import BLOCK
from tests.support.accuracy import FAMILIES, assert_as_accurate_as_torch
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    Kind,
    Producer,
    assert_same_bits,
    forward,
    kind_of,
    place,
    without_out,
)
from tests.support.strategies import ACTIVATIONS, RENORMS, SCALES, Case, cases
from tests.support.tolerance import assert_outcome_within, bounds

CASE = Case((9, 5, 4), "float32", training=True)


def assert_right(kind: Kind, case: Case) -> None:
    """Every result is within its bound, and the same call gives the same bits."""
    arrays = case.arrays()
    wide = np.longdouble if case.dtype == "float64" else np.float64
    truth = reference.forward(**without_out(arrays), **case.options, dtype=wide)
    got, again = (forward(kind, arrays, dict(case.layouts), **case.options) for _ in range(2))
    narrow = DTYPES[case.dtype].itemsize == 2
    if case.shape[0]:
        assert_outcome_within(got, truth, bounds(without_out(arrays), truth, **case.options, deferred=narrow))
    for one, other in zip(got, again, strict=True):
        if one is not None:
            assert_same_bits(one, other)


@given(cases(limit=64, scales=tuple(SCALES), activations=ACTIVATIONS, renorms=RENORMS))
def test_numpy_is_within_its_bounds(case: Case) -> None:
    assert_right(kind_of("numpy"), case)


@given(cases(limit=64, scales=tuple(SCALES), activations=ACTIVATIONS, renorms=RENORMS))
def test_torch_is_within_its_bounds(case: Case) -> None:
    assert_right(kind_of("torch-cpu"), case)


# The second has several blocks of rows and a partial one; the third has narrow rows, which passes combine.
@pytest.mark.parametrize("shape", [(700, 300, 257), (1100, 37, 520), (9001, 5, 100)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_larger_problem(cpu_kind: Kind, dtype: str, training: bool, shape: tuple[int, int, int]) -> None:
    layouts = (("out", "strided"), ("x", "negative")) if shape[1] < 100 else ()
    for activation in ACTIVATIONS:
        assert_right(cpu_kind, Case(shape, dtype, training, offset=10.0, layouts=layouts, activation=activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
def test_memory_beyond_y_is_a_block(dtype: str, training: bool, activation: str | None) -> None:
    """A block each for d, a product, its parts and the passes; the weight and the vectors are small."""
    case = Case((60000, 8, 64), dtype, training, activation=activation)
    arrays = without_out(case.arrays()) | {"out": np.empty((60000, 64), DTYPES[dtype])}
    tracemalloc.start()
    try:
        gsbn.forward(**arrays, **case.options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 4 * BLOCK < 4 * arrays["out"].size


# ---- a scale of one element, and relu

MANY = (700, 37, 520)  # rows in several blocks


@pytest.mark.parametrize("shape", [(9, 5, 4), MANY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_one_number_is_a_vector_of_it(cpu_kind: Kind, training: bool, dtype: str, shape: tuple[int, int, int]) -> None:
    """y and the running statistics have the same bits."""
    arrays = without_out(Case(shape, dtype, training).arrays())
    _, wide = arrays.pop("scale"), arrays["running_var"].dtype

    def results(scale: object) -> list[np.ndarray]:
        call = {name: cpu_kind.put(a) for name, a in arrays.items()}
        y = gsbn.forward(
            **call, training=training, scale=cpu_kind.put(scale) if isinstance(scale, np.ndarray) else scale
        )
        return [cpu_kind.get(y), *(cpu_kind.get(call[name]) for name in ("running_mean", "running_var"))]

    for number, forms in ((1.0, (None, 1, np.float64(1))), (-1.5, (-1.5, np.float32(-1.5))), (3.0, (3, np.int64(3)))):
        want = results(np.full(shape[2], number, wide))
        for form in (*forms, *(np.full(one, number, wide) for one in ((), (1,), (1, 1)))):
            for ours, theirs in zip(results(form), want, strict=True):
                assert_same_bits(ours, theirs)


@pytest.mark.parametrize("shape", [(9, 5, 4), MANY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_relu_is_the_positive_part(cpu_kind: Kind, training: bool, dtype: str, shape: tuple[int, int, int]) -> None:
    """Exactly; NaN stays, and nothing else changes."""
    arrays = Case(shape, dtype, training).arrays()
    arrays["weight"][1, 2] = np.nan
    arrays["beta"][::3] = 0
    plain = forward(cpu_kind, arrays, training=training)
    got = forward(cpu_kind, arrays, training=training, activation="relu")
    assert (np.asarray(got.y, np.float64) == 0).any() and np.isnan(got.y[:, 1].astype(np.float64)).all()
    np.testing.assert_array_equal(got.y.astype(np.float64), np.maximum(plain.y.astype(np.float64), 0))
    for ours, want in zip(got[1:], plain[1:], strict=True):
        assert_same_bits(ours, want)


@pytest.mark.parametrize("training", [True, False])
def test_relu_agrees_with_torch(training: bool) -> None:
    """Within the error of PyTorch, which subtracts the means of z, while gsbn subtracts those of g.

    A sum of n terms errs by n u times the sum of their sizes at most, so z less its mean by d = (I + B) u max|z|, and y
    by |gamma| r d (1 + sqrt(B)), r = 1 / sqrt(v + eps): with v, r changes by r^3 sqrt(v) d, and z is within sqrt(B v).
    In inference the running mean takes the place of the batch's, and may be as large. Four more operations make y.
    """
    torch = pytest.importorskip("torch")
    kind, arrays = kind_of("torch-cpu"), without_out(Case(MANY, "float64", training).arrays())
    t = {name: kind.put(a) for name, a in arrays.items()}
    z = torch.nn.functional.linear(t["x"], t["weight"], t["bias"]) * t["scale"]
    statistics = t["running_mean"].clone(), t["running_var"].clone()
    want = torch.nn.functional.batch_norm(z, *statistics, t["gamma"], t["beta"], training).relu()
    got = forward(kind, arrays, training=training, activation="relu").y
    sizes = np.abs(arrays["x"]) @ np.abs(arrays["weight"]).T + np.abs(arrays["bias"])
    largest = (sizes * np.abs(arrays["scale"])).max(0) + (0 if training else np.abs(arrays["running_mean"]))
    d = (sum(arrays["x"].shape) + 4) * 2.0**-53 * largest
    var = z.var(0, correction=0).numpy() if training else arrays["running_var"]
    limit = np.abs(arrays["gamma"]) / np.sqrt(var + 1e-5) * d * (1 + len(got) ** 0.5)
    assert (np.abs(got - want.numpy()) <= limit + 4 * 2.0**-53 * np.abs(arrays["beta"])).all()


# ---- other producers


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("training", [True, False])
def test_another_producer_gets_numpy_back(dtype: str, training: bool) -> None:
    arrays = without_out(replace(CASE, dtype=dtype, training=training).arrays())
    want = forward(kind_of("numpy"), arrays, training=training)
    y = gsbn.forward(**{name: Producer(a) for name, a in arrays.items()}, training=training)
    assert type(y) is np.ndarray
    assert_same_bits(y, want.y)
    for name in ("running_mean", "running_var", "num_batches_tracked"):  # written in place through the producer
        assert_same_bits(arrays[name], getattr(want, name))


# ---- agreement with PyTorch


@pytest.mark.parametrize("momentum", [0.1, None])
def test_takes_the_place_of_torch_modules(momentum: float | None) -> None:
    """The parameters and the state of torch's modules are the arguments, and agree with torch over several batches."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    scale = torch.nn.Parameter(torch.randn(4))
    linear, norm = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4, momentum=momentum, eps=1e-3)
    truth = copy.deepcopy(torch.nn.ModuleList([linear, norm])).double()

    for training in (True, True, False, True, False):
        x = torch.randn(9, 5)
        truth[1].load_state_dict(norm.state_dict())  # so that each comparison has the rounding of one call
        with torch.no_grad():
            want = truth[1].train(training)(truth[0](x.double()) * scale.double())
            arrays = {"x": x, "weight": linear.weight, "scale": scale, "bias": linear.bias, "gamma": norm.weight}
            arrays |= {"beta": norm.bias, "running_mean": norm.running_mean, "running_var": norm.running_var}
            arrays = {name: a.numpy().copy() for name, a in arrays.items()}
            options = {"training": training, "momentum": momentum or 1.0, "eps": 1e-3}  # momentum is at most 1
            limits = bounds(arrays, reference.forward(**arrays, **options), **options)
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
        for ours, theirs, limit in (
            (got, want, limits.y),
            (norm.running_mean, truth[1].running_mean, limits.running_mean),
            (norm.running_var, truth[1].running_var, limits.running_var),
        ):
            # torch's own error in float64 is far below 1e-13 on nine rows of five
            assert limit is None or ((ours.double() - theirs).abs().numpy() <= limit + 1e-13).all()
        assert norm.num_batches_tracked == truth[1].num_batches_tracked
        assert not got.requires_grad


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_as_accurate_as_torch(dtype: str, name: str) -> None:
    for shape in ((64, 96, 48), (600, 512, 128)):  # one chain of products, and several
        assert_as_accurate_as_torch(kind_of("torch-cpu"), name, shape, dtype)


# ---- floating point


def test_half_inputs_whose_gemm_overflows_half(cpu_kind: Kind) -> None:
    x = np.resize(np.array([200, -200, 100, 60], np.float16)[:, None], (4, 512))
    arrays = {"x": x, "weight": np.full((3, 512), 100, np.float16), "scale": np.ones(3, np.float16)}
    got = forward(cpu_kind, arrays, training=True)  # g reaches 1e7; y is ordinary
    truth = reference.forward(**arrays, training=True)
    assert_outcome_within(got, truth, bounds(arrays, truth, training=True, deferred=True))
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


@given(case=cases(limit=48, training=False, scales=tuple(SCALES)))
def test_fold_is_the_reference_rounded_once(case: Case) -> None:
    arrays = {name: a for name, a in without_out(case.arrays()).items() if name not in ("x", "num_batches_tracked")}
    want = reference.fold(**{"scale": None, **arrays}, eps=case.eps)
    for kind in map(kind_of, CPU_KINDS):
        placed = {name: place(kind, a, dict(case.layouts).get(name, "C")) for name, a in arrays.items()}
        got = gsbn.fold(**{"scale": None} | {name: p.view for name, p in placed.items()}, eps=case.eps)
        for ours, truth in zip(got, want, strict=True):
            assert type(ours) is type(placed["weight"].view)
            assert_same_bits(kind.get(ours), reference.round_to(truth, arrays["weight"].dtype))
        assert not any(p.disturbed(kind) for p in placed.values())


@pytest.mark.parametrize("number", [2.5, 3, np.float32(-0.5)])
def test_fold_of_a_number(cpu_kind: Kind, number: float) -> None:
    names = ("weight", "running_mean", "running_var", "bias", "gamma", "beta")
    arrays = {name: cpu_kind.put(CASE.arrays()[name]) for name in names}
    want = gsbn.fold(scale=cpu_kind.put(np.full(4, number, np.float32)), **arrays)
    for ours, theirs in zip(gsbn.fold(scale=number, **arrays), want, strict=True):
        assert_same_bits(cpu_kind.get(ours), cpu_kind.get(theirs))
