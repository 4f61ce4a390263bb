"""A residual: y = f(u + residual) and its gradient beside the reference, for every activation, layout and option."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsbn
from gsbn import Gradients, reference
from gsbn._cuda import kernels
from gsbn._forward import forward_within
from gsbn._gradients import NEEDS
from gsbn._host.run import _found
from gsbn._plan import Limits
from gsbn._plan.sources import Kernel
from gsbn.bench.activations import before, of_before
from tests.support.gradients import draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    LAYOUTS,
    Kind,
    Producer,
    assert_same_bits,
    forward,
    kind_of,
    place,
    poisoned_allocations,
    without_out,
)
from tests.support.strategies import EVERY, OPTIONAL, RENORMS, SCALES, Case, cases
from tests.support.streams import call_and_replay
from tests.support.tolerance import TF32, Bounds, arithmetic, assert_outcome_within, assert_within, bounds, roundoff

KINDS = [*CPU_KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)]
GIVEN = (*OPTIONAL, "residual")
LIMBS = 2.0**-22 + 48 * 2.0**-23  # the rounding of an operand of a float32 product on tensor cores
ALL = NEEDS


def keeps_y(activation: Any) -> bool:
    return activation in ("relu", "leaky_relu")


def check(
    kind: Kind, case: Case, layouts: dict[str, str], needs: tuple[str, ...] = ALL, operand: float = LIMBS,
    **options: Any,
) -> None:  # fmt: skip
    """A forward and a step within their bounds; guards and inputs are unchanged, and equal calls have equal bits."""
    arrays, of_call = case.arrays(), {**case.options, **options}
    wide = np.longdouble if case.dtype == "float64" else np.float64
    truth = reference.forward(**without_out(arrays), **case.options, dtype=wide)
    on_tensor_cores = case.dtype == "float32" and not kind.is_cpu
    operand = operand if on_tensor_cores else 0.0
    form: dict[str, Any] = {"operand": operand, "deferred": arrays["x"].dtype.itemsize == 2}
    alone = forward(kind, arrays, layouts, **of_call)
    limit = bounds(without_out(arrays), truth, **case.options, **form)
    if on_tensor_cores:
        of_limbs = bounds(without_out(arrays), truth, **case.options, limbs=True)
        pairs = zip(limit, of_limbs, strict=True)
        limit = Bounds(*(None if one is None else np.maximum(one, other) for one, other in pairs))
    assert_outcome_within(alone, truth, limit)
    dy = draw_dy(arrays)
    y, found = step(kind, arrays, dy, layouts, needs, **of_call)
    again, found_again = step(kind, arrays, dy, layouts, needs, **of_call)
    assert_same_bits(y, again)
    for one, other in zip(found.values(), found_again.values(), strict=True):
        assert (one is None and other is None) or assert_same_bits(one, other) is None

    # The sum, or y, that was kept tells the gradient, which is rounded once.
    _, saved = gsbn.forward(**{name: kind.put(a) for name, a in arrays.items() if name != "out"}, **of_call,
                            return_saved=True)  # fmt: skip
    kept = None if saved.kept is None else kind.get(saved.kept)
    dv = kind.get(gsbn.backward(kind.put(dy), saved, needs=("residual",)).residual)
    if "residual" in needs and layouts.get("out", "C") == "C":
        assert_same_bits(found["residual"], dv)
    assert_before(dv, dy, kept, case.activation)
    given = {name: a for name, a in arrays.items() if name not in ("out", "residual")}
    of_backward = {"training": case.training, "eps": case.eps, "renorm": case.renorm, "groups": case.groups}
    if layouts.get("out", "C") != "C" or len(dy) < 2:
        return  # another place of y may be another path, whose sum is another one
    want = truth_of(given, dv, **of_backward)
    limits = gradient_bounds(given, dv, want, operand=operand, deferred=True, **of_backward)
    for name in Gradients._fields:
        if (gradient := found[name]) is not None:
            assert_within(gradient, np.asarray(getattr(want, name)), limits[name], name)


def assert_before(dv: np.ndarray, dy: np.ndarray, kept: np.ndarray | None, activation: Any) -> None:
    """dv = dy f′(kept) within the roundings of f′, and one to its own dtype."""
    if kept is None:
        assert_same_bits(dv, dy)
        return
    wide, v = (np.asarray(a, np.float64) for a in (dy, kept))
    want = before(np, wide, v, v > 0, activation)
    error = of_before(np, wide, np.zeros_like(v), activation, arithmetic(dv.dtype))
    tiny = {2: 2.0**-25, 4: 2.0**-126, 8: 2.0**-1022}[dv.dtype.itemsize]  # also what -ftz drops
    assert_within(dv, want, error + roundoff(dv.dtype) * (np.abs(want) + error) + tiny, "residual")


@pytest.mark.parametrize("name", KINDS)
@given(
    case=cases(limit=40, scales=tuple(SCALES), activations=EVERY, renorms=RENORMS),
    layout=st.sampled_from(LAYOUTS),
    of_dy=st.sampled_from(LAYOUTS),
    needs=st.sets(st.sampled_from(ALL)),
)
def test_any_call(name: str, case: Case, layout: str, of_dy: str, needs: set[str]) -> None:
    case = replace(case, given=(*case.given, "residual"))
    layouts = {**dict(case.layouts), "residual": layout, "dy": of_dy}
    check(kind_of(name), case, layouts, tuple(field for field in ALL if field in needs))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", EVERY, ids=str)
@pytest.mark.parametrize("options", [{"groups": 4}, {"renorm": (1.25, 0.5)}, {"training": False}], ids=str)
def test_options(options: dict[str, Any], activation: Any, dtype: str, name: str) -> None:
    case = Case(
        (48, 24, 40), dtype, activation=activation, given=GIVEN[:-2] + GIVEN[-1:], **{"training": True} | options
    )
    check(kind_of(name), case, {"residual": "padded"})


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled", "sm90"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 136, 72), (1100, 264, 136), (1100, 259, 131), (5000, 64, 48)])
def test_each_path_on_a_gpu(shape: Any, dtype: str, training: bool, activation: Any, gemm: str) -> None:
    if gemm == "sm90" and (dtype == "float64" or shape[1] % 8):
        pytest.skip("forward_sm90 does not serve it")
    if dtype == "float64":
        shape = (300, 72, 136)
    case = Case(shape, dtype, training, activation=activation, given=GIVEN)
    for layouts in ({}, {"residual": "F", "out": "padded"}, {"residual": "unaligned", "dy": "F", "out": "unaligned"}):
        try:
            check(kind_of("cupy"), case, layouts, gemm=gemm)
        except ValueError as error:
            if gemm != "sm90" or not str(error).startswith("gemm:"):
                raise
            pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 20])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_few_sms_and_tf32(precision: str, sms: int) -> None:
    case = Case((1100, 264, 136), "float32", True, activation="gelu", given=GIVEN)
    check(kind_of("cupy"), case, {}, operand=TF32 if precision == "high" else LIMBS, precision=precision, sms=sms)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_added_to_what_the_call_without_it_returns(layout: str, dtype: str, name: str) -> None:
    """Bit by bit: u is rounded, the sum is rounded, and f comes last, as in PyTorch."""
    kind = kind_of(name)
    arrays = without_out(Case((300, 64, 72), dtype, True, given=GIVEN).arrays())
    residual, options = arrays.pop("residual"), {"training": True, "eps": 1e-3}
    native = {n: kind.put(a) for n, a in arrays.items()}
    u = kind.get(gsbn.forward(**native, **options, return_saved=True)[0])  # saving may take another path
    wide = np.float64 if dtype == "float64" else np.float32
    v = reference.round_to(np.float64(u.astype(wide) + residual.astype(wide)), u.dtype)
    placed = place(kind, residual, layout)
    for activation, want in ((None, v), ("relu", np.where(v.astype(wide) > 0, v, v.dtype.type(0)))):
        native = {n: kind.put(a) for n, a in arrays.items()}
        with poisoned_allocations(kind):
            y, saved = gsbn.forward(**native, residual=placed.view, activation=activation, **options, return_saved=True)
        assert_same_bits(kind.get(y) + 0, want + 0)
        assert saved.residual and saved.kept is (None if activation is None else y)
        assert not placed.disturbed(kind)
    _, saved = gsbn.forward(
        **{n: kind.put(a) for n, a in arrays.items()}, residual=placed.view, activation="silu", **options,
        return_saved=True,
    )  # fmt: skip
    assert_same_bits(kind.get(saved.kept), v)


def test_what_is_kept(kind: Kind) -> None:
    arrays = {
        name: kind.put(a) for name, a in without_out(Case((40, 8, 16), "float32", True, given=GIVEN).arrays()).items()
    }
    for activation in EVERY:
        y, saved = gsbn.forward(**arrays, training=True, activation=activation, return_saved=True)
        assert saved.activation == activation and saved.residual
        assert (saved.kept is y) == keeps_y(activation) and (saved.kept is None) == (activation is None)
        gradients = gsbn.backward(y, saved)
        assert gradients.residual is not y and len(gradients) == len(Gradients._fields) == 6
        assert "residual=" in repr(gradients) and "residual=" not in repr(Gradients(*gradients))
        again = pickle.loads(pickle.dumps(gradients))
        assert_same_bits(kind.get(again.residual), kind.get(gradients.residual))
        assert gsbn.backward(y, saved, needs=("weight",)).residual is None
    del arrays["residual"]
    _, saved = gsbn.forward(**arrays, training=True, activation="silu", return_saved=True)
    assert not saved.residual and saved.kept is None and gsbn.backward(y, saved).residual is None


def test_one_array_may_be_input_and_residual(kind: Kind) -> None:
    """The block x + layer(x); nothing but `out` must lie apart."""
    x = kind.put(np.random.default_rng(0).standard_normal((64, 24)).astype("f4"))
    weight = kind.put(np.random.default_rng(1).standard_normal((24, 24)).astype("f4"))
    y = gsbn.forward(x, weight, training=True, activation="relu", residual=x)
    truth = reference.forward(kind.get(x), kind.get(weight), training=True, activation="relu", residual=kind.get(x))
    np.testing.assert_allclose(kind.get(y), truth.y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_no_rows(kind: Kind, groups: int) -> None:
    x, weight, residual = (kind.put(np.zeros(shape, "f4")) for shape in ((0, 8), (4, 8), (0, 4)))
    y, saved = gsbn.forward(x, weight, training=True, activation="silu", residual=residual, return_saved=True)
    gradients = gsbn.backward(y, saved)
    assert tuple(y.shape) == tuple(gradients.residual.shape) == (0, 4) and not kind.get(gradients.weight).any()


def test_saved_can_be_copied_and_pickled(cpu_kind: Kind) -> None:
    arrays = without_out(Case((20, 8, 4), "float32", True, given=GIVEN).arrays())
    dy = cpu_kind.put(draw_dy(arrays))
    options: dict[str, Any] = {"training": True, "activation": "gelu", "return_saved": True}
    _, saved = gsbn.forward(**{name: cpu_kind.put(a) for name, a in arrays.items()}, **options)
    want = gsbn.backward(dy, saved)
    for other in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        for a, b in zip(gsbn.backward(dy, other), want, strict=True):
            assert np.array_equal(cpu_kind.get(a), cpu_kind.get(b))


def test_other_libraries_arrays() -> None:
    arrays = {name: a for name, a in Case((20, 8, 4), "float32", True, given=GIVEN).arrays().items() if name != "out"}
    options: dict[str, Any] = {"training": True, "activation": "elu", "return_saved": True}
    want, kept = gsbn.forward(**copy.deepcopy(arrays), **options)
    y, saved = gsbn.forward(**{name: Producer(a) for name, a in arrays.items()}, **options)
    assert_same_bits(y, want)
    dy = draw_dy(arrays)
    for a, b in zip(gsbn.backward(Producer(dy), saved), gsbn.backward(dy, kept), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("name", GPU_KINDS)
def test_a_replay_is_a_step(name: str, activation: Any) -> None:
    kind = kind_of(name)
    case = Case((1100, 136, 264), "bfloat16", True, activation=activation, given=GIVEN)
    arrays = without_out(case.arrays())
    native, dy = {n: kind.put(a) for n, a in arrays.items()}, kind.put(draw_dy(arrays))

    def call() -> tuple[Any, Any]:
        y, saved = gsbn.forward(**native, **case.options, return_saved=True)
        return y, gsbn.backward(dy, saved)

    with call_and_replay(kind, call) as ((want_y, want), (y, gradients)):
        assert_same_bits(kind.get(y), kind.get(want_y))
        for field in ("x", "residual"):
            assert_same_bits(kind.get(getattr(gradients, field)), kind.get(getattr(want, field)))


ONE_LAUNCH: dict[str, tuple[tuple[int, int, int], Limits]] = {  # B, I, O; of training, if the name does not say more
    "recompute": ((70001, 64, 264), Limits(recompute=True, remat=False)),
    "remat": ((70001, 64, 264), Limits(remat=True)),
    "deferred tiles": ((9000, 128, 520), Limits(sm90=(128, 2), recompute=False, cluster_batch=False)),
    "large deferred tiles": ((20001, 128, 520), Limits(sm90=(256, 1), recompute=False, cluster_batch=False)),
    "small deferred tiles": ((2000, 128, 4096), Limits(sm90=(32, 2), recompute=False, cluster_batch=False)),
    "one tile a CTA": ((500, 256, 264), Limits(recompute=False, cluster_batch=False)),
    "cluster_batch": ((1001, 512, 264), Limits(cluster_batch=True)),
    "two CTAs an SM": ((32, 512, 4096), Limits(sm90=(32, 1), cluster_batch=True)),
    "inference": ((5001, 128, 72), Limits(skinny=False)),
    "inference, small tiles": ((5001, 128, 72), Limits(sm90=(32, 1))),
}


@contextlib.contextmanager
def prepared() -> Iterator[list[Kernel]]:
    """The kernels of all calls meanwhile, none of which finds its plan in the cache."""
    found, launcher = [], kernels.launcher

    def noted(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
        if kernel.name != "fill_sm":  # which the process's first call of a GPU launches
            found.append(kernel)
        return launcher(kernel, *arguments, **options)

    with mock.patch.object(kernels, "launcher", noted), mock.patch.dict(_found, clear=True):
        yield found


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", ("leaky_relu", 0.1)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ONE_LAUNCH)
def test_one_launch_gives_the_bits_of_two(way: str, dtype: str, activation: Any) -> None:
    """The one launch takes residuals whose rows start on 16 bytes; for others a second launch adds."""
    torch = pytest.importorskip("torch")
    (B, I, O), limits = ONE_LAUNCH[way]
    training, of_dtype = not way.startswith("inference"), getattr(torch, dtype)
    random = torch.Generator("cuda").manual_seed(B)

    def drawn(*shape: int, dtype: Any = of_dtype) -> Any:
        return torch.randn(*shape, generator=random, device="cuda").to(dtype)

    x, weight, residual = drawn(B, I), drawn(O, I) / I**0.5, drawn(B, O)
    residual[3 % B, 2:5] = torch.tensor([float("nan"), float("inf"), -0.0])
    vectors = {name: drawn(O, dtype=torch.float32) for name in ("gamma", "beta", "running_mean")}
    options = {"training": training, "activation": activation, "return_saved": training, "gemm": "sm90"}

    def call(pitch: int, start: int) -> list[Any]:
        at = drawn(B * pitch + start).as_strided((B, O), (pitch, 1), start)
        at.copy_(residual)
        state = {name: vector.clone() for name, vector in vectors.items()}
        state["running_var"] = torch.full((O,), 1.5, device="cuda")
        with poisoned_allocations(kind_of("torch-cuda")):
            made = forward_within(limits, x, weight, **options, **state, residual=at)
        y, saved = made if training else (made, None)
        assert saved is None or (saved.residual and saved.kept is (None if activation is None else y))
        kept = [] if saved is None else [saved.deviations, saved.vectors]
        return [y, *kept, state["running_mean"], state["running_var"]]

    with prepared() as launches:
        one = call(O + 8, 0)
    assert [(of.name, ("RESIDUAL", "1") in of.defines) for of in launches] == [("forward_sm90", True)]
    with prepared() as launches:
        two = call(O + 8, 1)
    assert [of.name for of in launches] == ["forward_sm90", "activate"]
    for a, b in zip(one, two, strict=True):
        a, b = (c.cpu().view(torch.int16 if c.dtype.itemsize == 2 else torch.int32) for c in (a, b))
        assert a.equal(b)


COPIES = ("copy_matrix", "copy_rows")  # of operands of the products


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu", ("leaky_relu", -0.5)])
@pytest.mark.parametrize("shape", [(20001, 64, 264), (9000, 128, 4096)])  # a cluster shares the rows, and none does
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_launch_of_the_sums_makes_its_gradient(dtype: str, shape: tuple[int, int, int], activation: Any) -> None:
    """It takes a dy whose rows start on 16 bytes; for others a launch before it makes the gradient. The bits agree."""
    torch = pytest.importorskip("torch")
    (B, I, O), of_dtype = shape, getattr(torch, dtype)
    random = torch.Generator("cuda").manual_seed(B)
    x, weight, residual, memory = (
        torch.randn(*of, generator=random, device="cuda").to(of_dtype) for of in ((B, I), (O, I), (B, O), (B * O + 8,))
    )
    options = {"training": True, "activation": activation, "return_saved": True}
    _, saved = gsbn.forward(x, weight, gamma=x[0, :1].expand(O), **options, residual=residual)

    def call(start: int) -> list[Any]:
        dy = memory[start : start + B * O].copy_(memory[: B * O].clone()).view(B, O)
        with poisoned_allocations(kind_of("torch-cuda")):
            gradients = gsbn.backward(dy, saved)
            return [*gradients, gradients.residual]

    first = memory.clone()
    with prepared() as launches:
        one = call(0)
    passes = [(of.name, ("RESIDUAL", "1") in of.defines) for of in launches if of.name not in COPIES]
    assert passes[:2] == [("backward_sums", True), ("backward_dg", False)]
    memory.copy_(first)
    with prepared() as launches:
        two = call(1)
    names = [of.name for of in launches if of.name not in COPIES]
    assert names[:3] == ["activate_backward", "backward_sums", "backward_dg"]
    for a, b in zip(one, two, strict=True):
        assert (a is b is None) or torch.equal(a, b)  # no NaN is equal to itself


@pytest.mark.gpu
def test_describe_shows_the_launch() -> None:
    cupy = pytest.importorskip("cupy")
    x, weight, residual = (cupy.ones(shape, "f4") for shape in ((64, 32), (48, 32), (64, 48)))
    plain = gsbn.describe(x, weight, training=True)
    assert gsbn.describe(x, weight, training=True, residual=residual).kernels == (*plain.kernels, "activate")


# ---- errors

X, W, H = np.ones((4, 3), "f4"), np.ones((2, 3), "f4"), np.ones((4, 2), "f4")


@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (H[:3], ValueError, r"^residual: expected shape \(4, 2\), got \(3, 2\)"),
        (H[:, :1], ValueError, r"^residual: expected shape \(4, 2\), got \(4, 1\)"),
        (H[0], ValueError, r"^residual: expected shape \(4, 2\), got \(2,\)"),
        (H.astype("f8"), TypeError, r"^residual: expected x's dtype float32, got float64"),
        (1.0, TypeError, r"^residual: expected a NumPy array"),
        (H.tolist(), TypeError, r"^residual: expected a NumPy array"),
    ],
)
def test_errors(residual: Any, error: type[Exception], message: str) -> None:
    mean, var = np.zeros(2, "f4"), np.ones(2, "f4")
    for _ in range(2):
        with pytest.raises(error, match=message):
            gsbn.forward(X, W, running_mean=mean, running_var=var, training=True, residual=residual)
    assert not mean.any() and (var == 1).all()


def test_out_and_statistics_lie_apart_from_it(kind: Kind) -> None:
    x, weight, residual = (kind.put(a) for a in (X, W, H))
    for _ in range(2):
        gsbn.forward(x, weight, training=True, residual=residual, out=kind.put(H))
        with pytest.raises(ValueError, match=r"^out: expected memory of its own, got memory that residual overlaps"):
            gsbn.forward(x, weight, training=True, residual=residual, out=residual)
        with pytest.raises(ValueError, match=r"^running_mean: expected memory of its own, .* that residual overlaps"):
            gsbn.forward(
                x, weight, running_mean=residual[1], running_var=kind.put(H[0]), training=True, residual=residual
            )
    np.testing.assert_array_equal(kind.get(residual), H)


def test_errors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x, weight, residual = map(torch.from_numpy, (X, W, H))
    with pytest.raises(TypeError, match=r"^residual: expected "):
        gsbn.forward(x, weight, training=True, residual=H)
    with pytest.raises(RuntimeError, match=r"^residual: requires grad"):
        gsbn.forward(x, weight, training=True, residual=residual.clone().requires_grad_())
    _, saved = gsbn.forward(x, weight, training=True, residual=residual, return_saved=True)
    weight += 1
    with pytest.raises(RuntimeError, match=r"^weight: modified by an inplace operation since the forward"):
        gsbn.backward(residual, saved)


def test_a_wrong_dy() -> None:
    for activation in (None, "relu", "silu"):
        _, saved = gsbn.forward(X, W, training=True, activation=activation, residual=H, return_saved=True)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^dy: expected shape \(4, 2\)"):
                gsbn.backward(X, saved)
            with pytest.raises(TypeError, match=r"^dy: expected x's dtype"):
                gsbn.backward(H.astype("f8"), saved)
        with pytest.raises(ValueError, match=r"^needs: expected names among .*'residual'"):
            gsbn.backward(H, saved, needs=("h",))


# ---- the reference


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"renorm": (1.0, 0.0)}, {"training": False}], ids=str)
@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_finite_differences_of_the_reference(activation: Any, options: dict[str, Any]) -> None:
    """The reference's gradients are the slopes of the loss Σ dy y, by central differences."""
    rng = np.random.default_rng(0)
    shapes = {"x": (8, 3), "weight": (4, 3), "residual": (8, 4), "gamma": (4,), "beta": (4,)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    state = {"running_mean": rng.standard_normal(4), "running_var": rng.uniform(0.5, 2, 4)}
    form = {"training": True, "activation": activation, **options, **state}
    dy = rng.standard_normal((8, 4))
    found = reference.backward(dy, **arrays, **form)
    for name, a in arrays.items():
        slope, h = np.empty(a.shape), 1e-6
        for at in np.ndindex(a.shape):
            ends = []
            for sign in (1, -1):
                moved = a.copy()
                moved[at] += sign * h
                ends.append((dy * reference.forward(**{**arrays, name: moved}, **form).y).sum())
            slope[at] = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose(getattr(found, name), slope, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_reference_without_one() -> None:
    """The gradient of an absent residual is that of zeros."""
    rng = np.random.default_rng(0)
    x, weight, dy = (rng.standard_normal(shape) for shape in ((6, 3), (2, 3), (6, 2)))
    for activation in (None, "silu"):
        form: dict[str, Any] = {"training": True, "activation": activation}
        got = reference.backward(dy, x, weight, **form)
        want = reference.backward(dy, x, weight, residual=np.zeros((6, 2)), **form)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    assert got.residual is not dy
    with pytest.raises(ValueError, match=r"^residual: expected shape \(rows, 2\)|^residual: expected shape \(6, 2\)"):
        reference.forward(x, weight, training=True, residual=dy[:5])
