"""Every family of data on every path: no error exceeds 1.1 times PyTorch's error plus half a unit."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import pytest

from gsbn import reference
from gsbn._plan import Limits
from tests.support.families import FAMILIES, spoil
from tests.support.forwards import recompute_on_few_sms
from tests.support.harness import forward, kind_of
from tests.support.strategies import Case
from tests.support.tolerance import assert_outcome_within, assert_within, bounds, norm_error, summed

pytest.importorskip("torch")
from tests.support import beside_torch
from tests.support.beside_torch import HEADER, fails, line, measure

SIXTEEN = ("float16", "bfloat16")
FAST = ("float32", "tf32", *SIXTEEN)
ALL = (*FAST, "float64")
CASE = Case((4096, 1, 8), "float32", True)


class Path(NamedTuple):
    """A way to compute a product, and shapes for it."""

    shapes: tuple[tuple[int, int, int], ...]
    kinds: tuple[str, ...] = FAST
    gemm: str = "auto"
    limits: Limits = Limits()
    hopper: bool = False
    groups: int = 1


PATHS = {
    "auto": Path(((300, 300, 300), (8, 64, 64)), ALL),
    "few features": Path(((3, 4096, 1), (3, 8192, 1), (128, 512, 2), (4096, 256, 3)), ALL),
    "short k": Path(((20000, 5, 40), (9000, 1, 8))),
    "tiled": Path(((300, 130, 70), (8, 64, 64)), ALL, "tiled"),
    "cublas": Path(((300, 130, 70), (8, 64, 64)), ALL, "cublas"),
    "sm90": Path(((1000, 264, 136),), FAST, "sm90", hopper=True),
    "sm90, few rows": Path(((8, 64, 64), (16, 1032, 200)), FAST, "sm90", hopper=True),
    "sm90, k shared": Path(
        ((129, 4104, 264),), FAST, "sm90", Limits(sm90=(32, 1, 2), split=True, cluster_batch=False), hopper=True
    ),
    "sm90, a cluster has all rows": Path(
        ((500, 512, 256),), FAST, "sm90", Limits(sm90=(64, 8), cluster_batch=True), hopper=True
    ),
    "sm90, the weight's limbs in registers": Path(
        ((100, 2048, 512),), ("float32",), "sm90", Limits(sm90=(32, 1, 1), limbs_rs=True), hopper=True
    ),
    "skinny": Path(((100000, 32, 32), (30000, 64, 48)), FAST, limits=Limits(skinny=True), hopper=True),
    "skinny, limbs of few inputs": Path(
        ((9000, 32, 72), (20001, 33, 48), (9000, 56, 200)), ("float32",), limits=Limits(skinny=True), hopper=True
    ),
    "skinny, long rows": Path(((9000, 128, 200),), ("float32", "tf32"), limits=Limits(skinny=True), hopper=True),
    "tall": Path(((20000, 96, 136),), ("float32",), limits=Limits(tall=True), hopper=True),
    "ghosts": Path(((1200, 300, 136), (64, 100, 61)), ALL, groups=4),
    "ghosts, two passes": Path(((1200, 300, 136),), ALL, limits=Limits(fused=False), groups=4),
    "ghosts, one after the other": Path(((2048, 264, 136),), FAST, limits=Limits(by_runs=True), hopper=True, groups=4),
    "dual": Path(((24, 1032, 264), (100, 1032, 520)), ("float16", "bfloat16"), limits=Limits(dual=True), hopper=True),
}


def assert_beside_torch(shape: tuple[int, int, int], kind: str, family: str, **how: Any) -> None:
    rows = measure(shape, (kind,), (family,), **how)
    assert rows, "nothing was computed"
    wrong = [line(row) for row in rows if fails(row)]
    assert not wrong, "\n".join(["", HEADER, *wrong])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [(name, shape, kind) for name, path in PATHS.items() for shape in path.shapes for kind in path.kinds],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_on_a_gpu(name: str, shape: tuple[int, int, int], kind: str, family: str, request: Any) -> None:
    path = PATHS[name]
    if path.hopper:
        request.getfixturevalue("hopper")
    how = {"device": "cuda", "libraries": ("torch-cuda",), "gemms": (path.gemm,), "limits": path.limits}
    how |= {"groups": path.groups}
    assert_beside_torch(shape, kind, family, **how)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", FAST)
def test_recompute(kind: str, family: str) -> None:
    """Each CTA has several tiles, whose statistics it merges one after the other."""
    limits = recompute_on_few_sms(*beside_torch.KINDS[kind], 2)
    how = {"device": "cuda", "libraries": ("torch-cuda",), "gemms": ("sm90",), "limits": limits}
    assert_beside_torch((4000, 264, 200), kind, family, **how)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["float32", *SIXTEEN])
def test_on_a_cpu(kind: str, family: str) -> None:
    for shape, groups in (((300, 100, 64), 1), ((8, 64, 64), 1), ((300, 100, 64), 3)):
        assert_beside_torch(shape, kind, family, device="cpu", libraries=("numpy",), groups=groups)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(16, 512, 512), (5, 400, 3), (24, 400, 40), (100, 65, 3), (300, 64, 8)], ids=str)
def test_small_products_on_a_cpu(shape: tuple[int, int, int], family: str) -> None:
    assert_beside_torch(shape, "float32", family, device="cpu", libraries=("numpy",))


# ---- the families, and tests of the rule itself


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same_in_every_library_and_fits_the_dtype(family: str, dtype: str) -> None:
    import torch

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((200, 24)), rng.standard_normal((10, 24)) / 24**0.5, rng.uniform(0.5, 2, 10)]
    tensors = [torch.from_numpy(a.copy()) for a in arrays]
    before = [a.copy() for a in arrays]
    spoil(family, *arrays, dtype, seed=3)
    spoil(family, *tensors, dtype, seed=3)
    for a, t in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(a, t.numpy(), rtol=1e-12, atol=1e-12)
    changed = [(a != b).any() for a, b in zip(arrays, before, strict=True)]
    assert any(changed) == (family != "normal")
    x, weight, scale = (torch.from_numpy(a).to(getattr(torch, dtype)) for a in arrays)
    z = (x.double() @ weight.double().T) * scale.double()
    assert z.abs().max() < 65504 or dtype != "float16", "PyTorch's scaled feature overflows"
    assert (x[1:] != x[:-1]).any() or family == "equal rows", "nothing is left of the family in this dtype"


@pytest.mark.parametrize("family", ["", "row 0 x 1e5", "last row x 1e5", "mean 1e4, row 0 zero"])
def test_no_feature_is_orthogonal_to_what_spreads_the_rows(family: str) -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((64, 32)), rng.standard_normal((5000, 32)) / 32**0.5
    spoil(family or "normal", x, weight, np.ones(5000), "float32")
    g = x @ weight.T
    share = g.var(0) / ((weight**2).sum(1) * x.var(0).mean())
    assert share.min() > 0.2


def about_the_first_row(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The variance of x wᵀ by float32 sums of d and d² about the first row, 16 rows at a time: what skinny.cu did."""
    g = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    d = g - g[0]
    groups = d.reshape(-1, 16, g.shape[1])
    first = groups.sum(1, dtype=np.float32).sum(0, dtype=np.float64)
    second = (groups * groups).sum(1, dtype=np.float32).sum(0, dtype=np.float64)
    return second / len(g) - (first / len(g)) ** 2


@pytest.mark.parametrize("family", ["row 0 x 2e3"])  # in the others PyTorch's own variance on a CPU is as wrong
def test_a_variance_about_the_first_row_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison with PyTorch. With normal data such a variance is as good as any, so they do not show it."""
    honest = beside_torch.ours

    def about_a_row(library: str, o: dict[str, Any], *rest: Any) -> Any:
        results, path = honest(library, o, *rest)
        if "running_var" in results:
            x, weight, scale = (o[name].numpy() for name in ("x", "weight", "scale"))
            var = about_the_first_row(x, weight) * scale.astype(np.float64) ** 2 * (len(x) / (len(x) - 1))
            results["running_var"] = var.astype(np.float32)
        return results, path

    monkeypatch.setattr(beside_torch, "ours", about_a_row)
    shape, how = (8192, 32, 32), {"device": "cpu", "libraries": ("numpy",)}
    wrong = {row["quantity"] for row in measure(shape, ("float32",), (family,), **how) if fails(row)}
    assert "running_var" in wrong
    usual = measure(shape, ("float32",), ("normal",), **how)
    assert not any(fails(row) for row in usual if row["quantity"] == "running_var")


def test_the_bound_of_a_statistic_grows_as_the_root_of_the_rows() -> None:
    assert [summed(n) for n in (1, 10, 32)] == [1, 10, 32]
    assert summed(1_000_000) < 1.2 * 1000
    np.testing.assert_allclose(summed(64_000_000) / summed(16_000_000), 2, rtol=0.01)


@pytest.mark.parametrize(("got", "right"), [([1.0, np.nan], True), ([1.0, 2.0], False), ([np.nan, np.nan], False)])
def test_nan_is_right_where_it_is_the_truth_alone(got: list[float], right: bool) -> None:
    with contextlib.nullcontext() if right else pytest.raises(AssertionError, match="NaN"):
        assert_within(np.array(got), np.array([1.0, np.nan]), np.array([1e-9, np.nan]))


@pytest.mark.parametrize("error", [5e-5, -5e-5])
def test_a_variance_that_is_off_in_the_fifth_digit_is_out_of_bound(error: float) -> None:
    """At 4096 rows, where a bound proportional to the number of rows would allow ten times as much."""
    arrays = {name: a for name, a in CASE.arrays().items() if name != "out"}
    arrays["x"][:] = np.abs(arrays["x"])
    arrays["weight"][:] = np.abs(arrays["weight"])
    truth = reference.forward(**arrays, training=True, momentum=1.0)
    limit = bounds(arrays, truth, training=True, momentum=1.0)
    got = forward(kind_of("numpy"), arrays, training=True, momentum=1.0)
    assert_outcome_within(got, truth, limit)
    assert got.running_var is not None and truth.running_var is not None
    assert norm_error(got.running_var, truth.running_var) < 1e-6
    got.running_var[:] = truth.running_var * (1 + error)
    with pytest.raises(AssertionError, match="running_var"):
        assert_outcome_within(got, truth, limit)
