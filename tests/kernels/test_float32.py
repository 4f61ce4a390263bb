"""float32 at "highest" on Hopper: two float16 limbs, compared with float64 and SGEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import reference
from gsbn._backward import backward_within
from gsbn._cuda import kernels as _kernels
from gsbn._forward import forward_within
from gsbn._plan import Limits
from gsbn._plan.sm90_variants import LIMBS_RS_TILES
from tests.support.gradients import assert_made_of_limbs, dx_of
from tests.support.harness import assert_same_bits, forward, kind_of, place, without_out
from tests.support.strategies import Case
from tests.support.tolerance import assert_outcome_within, bounds, norm_error

U = 2.0**-24


# ---- limbs


@pytest.fixture
def hopper() -> Any:
    cupy = pytest.importorskip("cupy")
    device = _kernels.gpu(cupy.cuda.Device().id)
    if device.capability != (9, 0) or not device.sm90a:
        pytest.skip("needs a GPU of compute capability 9.0 and NVRTC 12.9")
    return cupy


@pytest.fixture(params=["limbs", "limbs_rs", "mn_major"])
def g_of(request: pytest.FixtureRequest, hopper: Any) -> Callable[..., Any]:
    """g = x weightᵀ, by an inference whose affine map changes nothing.

    "limbs": limbs of both are made beforehand. "limbs_rs": the launch makes the weight's. "mn_major": so, with an
    MN-major weight, as in the backward's dx = dg weight.
    """
    within = Limits(limbs_rs=request.param != "limbs")

    def make(x: Any, weight: Any, gemm: str = "sm90") -> Any:
        if request.param == "mn_major":
            return dx_of(hopper, x, hopper.ascontiguousarray(weight.T), within, gemm)
        one, zero = hopper.ones(len(weight), "f4"), hopper.zeros(len(weight), "f4")
        return forward_within(within, x, weight, one, running_mean=zero, running_var=one, eps=0.0, gemm=gemm)

    return make


def error_of(cupy: Any, g: Any, x: Any, w: Any) -> float:
    truth = x.astype("f8") @ w.astype("f8").T
    return float(cupy.linalg.norm(g - truth) / cupy.linalg.norm(truth))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("k", [1, 2, 7, 8, 33, 64, 100, 200, 257, 512, 1024, 4096, 8192, 65536])
def test_g_is_no_further_off_than_ieee_float32(hopper: Any, g_of: Callable[..., Any], k: int, offset: float) -> None:
    """Norm-wise: from K = 512 on at most SGEMM's error, for smaller K at most the larger of that and 4 u."""
    cupy = hopper
    ours, ieee = [], []
    for seed in range(5):
        rng = cupy.random.default_rng(seed)
        x = (rng.standard_normal((300, k)) + offset).astype("f4")
        w = rng.standard_normal((260, k)).astype("f4")
        ours.append(error_of(cupy, g_of(x, w), x, w))
        ieee.append(error_of(cupy, g_of(x, w, "cublas"), x, w))
    limit = max(ieee) if k >= 512 else max(*ieee, 4 * U)
    assert max(ours) <= limit, (ours, ieee)


@pytest.mark.gpu
@pytest.mark.parametrize("span", [0, 4, 8, 16])
@pytest.mark.parametrize("k", [3, 64, 1000, 8192])
def test_elementwise_in_rows_of_similar_magnitudes(hopper: Any, g_of: Callable[..., Any], k: int, span: int) -> None:
    """|dg| <= (2**-21 + 3 min(K, 32) 2**-23 + ceil(K / 32) 2**-24) |x||w|ᵀ and a row's share: docs/design/limbs.md"""
    cupy = hopper
    rng = cupy.random.default_rng(span)

    def matrix(rows: int) -> Any:
        return cupy.ldexp(rng.uniform(-2, 2, (rows, k)), rng.integers(-span, 1, (rows, k)).astype("i4")).astype("f4")

    x, w = matrix(300), matrix(260)
    truth = x.astype("f8") @ w.astype("f8").T
    arrays = {"x": x.get(), "weight": w.get(), "scale": np.ones(260, np.float32)}
    frozen = {"running_mean": np.zeros(260, np.float32), "running_var": np.ones(260, np.float32)}
    want = reference.forward(**arrays, **frozen, eps=0.0)
    limit = bounds({**arrays, **frozen}, want, training=False, eps=0.0, limbs=True).y
    error = np.abs(g_of(x, w).get() - truth.get())
    assert (error <= limit).all()
    sizes = np.abs(arrays["x"]).astype(np.float64) @ np.abs(arrays["weight"]).astype(np.float64).T
    assert (error / sizes).max() <= 16 * U  # errors are far smaller in practice: those of terms are random


@pytest.mark.gpu
def test_powers_of_two_change_no_digit(hopper: Any, g_of: Callable[..., Any]) -> None:
    """Rows of x and of the weight that differ by 2**±60, and products near both ends of float32's range."""
    cupy = hopper
    rng = cupy.random.default_rng(0)
    x, w = (rng.standard_normal((rows, 320)).astype("f4") for rows in (260, 132))
    plain = g_of(x, w)
    for low, high in ((-60, 60), (-90, 0), (0, 90), (-3, 3)):
        p, q = rng.integers(low, high + 1, 260), rng.integers(-high, -low + 1, 132)
        g = g_of(cupy.ldexp(x, p[:, None].astype("i4")), cupy.ldexp(w, q[:, None].astype("i4")))
        want = cupy.ldexp(plain.astype("f8"), (p[:, None] + q[None, :]).astype("i4"))
        normal = (cupy.abs(want) >= 2.0**-126) & (cupy.abs(want) < 2.0**127)
        assert int(normal.sum()) > 1000
        assert bool((g == want)[normal].all())
        assert bool((cupy.abs(g) <= 2.0**-126)[cupy.abs(want) < 2.0**-126].all())


@pytest.mark.gpu
def test_large_numbers_overflow_only_where_float32_does(hopper: Any, g_of: Callable[..., Any]) -> None:
    cupy = hopper
    rng = cupy.random.default_rng(0)
    x = cupy.ldexp(rng.uniform(1, 2, (260, 256)), 126).astype("f4")  # up to the largest float32
    w = cupy.ldexp(rng.uniform(1, 2, (132, 256)), -30).astype("f4")
    g = g_of(x, w)
    assert bool(cupy.isfinite(g).all())
    assert error_of(cupy, g, x, w) <= 4 * U
    assert bool(cupy.isinf(g_of(x, cupy.ldexp(w, 30).astype("f4"))).all())


@pytest.mark.gpu
def test_subnormal_operands_have_digits(hopper: Any, g_of: Callable[..., Any]) -> None:
    cupy = hopper
    rng = np.random.default_rng(0)
    x = cupy.asarray((rng.integers(1, 2**20, (260, 128)) * 2.0**-149).astype(np.float32))
    w = cupy.asarray(np.ldexp(rng.uniform(1, 2, (132, 128)), 60).astype(np.float32))
    truth = x.get().astype(np.float64) @ w.get().astype(np.float64).T
    assert norm_error(g_of(x, w).get(), truth) <= 4 * U


@pytest.mark.gpu
def test_inf_and_nan_stay_where_ieee_puts_them(hopper: Any, g_of: Callable[..., Any]) -> None:
    cupy = hopper
    rng = cupy.random.default_rng(0)
    x, w = (rng.standard_normal((rows, 200)).astype("f4") for rows in (260, 132))
    x[3, 5], x[7, 1], x[9], w[11, 2], w[13, :] = cupy.inf, cupy.nan, 0, -cupy.inf, cupy.nan
    x[20, :], x[21, 3], x[21, 4] = cupy.inf, cupy.inf, -cupy.inf
    g, ieee = g_of(x, w), g_of(x, w, "cublas")
    assert bool((cupy.isfinite(g) == cupy.isfinite(ieee)).all())
    clean = g_of(cupy.nan_to_num(x, nan=0, posinf=0, neginf=0), w)
    fine = cupy.isfinite(g)
    assert bool((g == clean)[fine].all())  # the other elements of the row are unchanged
    one = cupy.ones(132, "f4")
    y = gsbn.forward(x, w[:11], one[:11], training=True)
    assert bool(cupy.isnan(y).all())  # a row with Inf affects every feature's mean
    y = gsbn.forward(x[30:], w, one, training=True)
    assert [int(j) for j in cupy.nonzero(~cupy.isfinite(y).all(axis=0))[0]] == [11, 13]


@pytest.mark.gpu
def test_a_long_span_loses_what_the_documentation_says(hopper: Any, g_of: Callable[..., Any]) -> None:
    """In a row with 10⁶ an element of 10⁻³ keeps about ten bits: g's error is small relative to the row's norm only."""
    cupy = hopper
    rng = cupy.random.default_rng(0)
    x, w = (rng.standard_normal((rows, 256)).astype("f4") for rows in (260, 132))
    x[:, 0] *= 1e6
    x[:, 1:] *= 1e-3
    w[:, 0] = 0  # hides the large element
    truth = x.astype("f8") @ w.astype("f8").T
    error = cupy.abs(g_of(x, w) - truth)
    norms = cupy.linalg.norm(x.astype("f8"), axis=1)[:, None] * cupy.linalg.norm(w.astype("f8"), axis=1)
    assert float((error / norms).max()) <= 4 * U
    assert 2.0**-13 < float(cupy.linalg.norm(error) / cupy.linalg.norm(truth)) < 2.0**-8
    assert error_of(cupy, g_of(x, w, "cublas"), x, w) <= 4 * U  # the documented alternative


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(300, 77, 132), (301, 30, 8), (77, 200, 64), (64, 1025, 8), (1000, 20000, 260), (300, 77, 131), (70, 64, 1)],
)
def test_rows_of_any_length_pitch_and_alignment(hopper: Any, shape: tuple[int, int, int], training: bool) -> None:
    layouts = {"x": "unaligned", "weight": "strided"}
    arrays = Case(shape, "float32", training).arrays()
    truth = reference.forward(**without_out(arrays), training=training)
    for of_x in (False, True):
        got = forward(kind_of("cupy"), arrays, layouts, limits=Limits(limbs_rs=of_x), gemm="sm90", training=training)
        assert_outcome_within(got, truth, bounds(arrays, truth, training=training, limbs=True))


@pytest.mark.gpu
def test_a_prepared_weight_in_a_graph(hopper: Any) -> None:
    """Limbs that a captured call uses live as long as the graph, and x is split again in each replay."""
    cupy = hopper
    rng = cupy.random.default_rng(0)
    x, w = (rng.standard_normal((rows, 512)).astype("f4") for rows in (512, 256))
    out, one = cupy.empty((512, 256), "f4"), cupy.ones(256, "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        prepared = gsbn.prepare(w)
        gsbn.forward(x, prepared, one, training=True, out=out, gemm="sm90")
        stream.begin_capture()
        gsbn.forward(x, prepared, one, training=True, out=out, gemm="sm90")
        graph = stream.end_capture()
        del prepared
        for seed in range(3):
            x[...] = cupy.random.default_rng(seed).standard_normal((512, 512))
            junk = cupy.full((1 << 22,), cupy.nan, "f4")
            graph.launch(stream)
            stream.synchronize()
            want = forward_within(Limits(limbs_rs=False), x, w, one, training=True, gemm="sm90")
            assert bool((out == want).all())
            del junk


def limbs_of(a: Any) -> tuple[Any, Any]:
    """The limbs of rows and their exponents, by the definition at the head of split_limbs.cu."""
    rows, k = a.shape
    top = np.where(np.isfinite(a), np.abs(a), 0).max(axis=1)
    exponents = np.where(top > 0, np.frexp(top)[1] - 15, 0)
    whole = np.zeros((rows, -(-k // 64) * 64), np.float32)
    whole[:, :k] = np.ldexp(a.astype(np.float64), -exponents[:, None])
    high = whole.astype(np.float16)
    low = np.where(np.isfinite(whole), whole - high, np.float32(0)).astype(np.float16)
    return np.stack([limb.reshape(rows, -1, 64) for limb in (high, low)], axis=2), exponents


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("k", [1, 7, 32, 64, 65, 100, 128, 129, 256, 257, 512, 513, 1024, 1025, 8192, 8193])
@pytest.mark.parametrize("rows", [1, 5, 127, 389])
def test_limbs_are_those_of_the_definition(hopper: Any, rows: int, k: int) -> None:
    """Bit for bit, however many rows share a warp: for zeros, Inf and NaN, and any magnitude."""
    rng = np.random.default_rng(rows + k)
    powers = rng.integers(-100, 100, (rows, 1)) + rng.integers(-20, 1, (rows, k))
    w = np.ldexp(rng.uniform(-2, 2, (rows, k)), powers).astype(np.float32)
    w[rows // 2], w[rows // 3, k // 2], w[rows // 4, k // 3] = 0, np.inf, np.nan
    made = gsbn.prepare(hopper.asarray(w)).limbs[0]
    limbs, exponents = (array.get() for array in made[1:])
    want, of_rows = limbs_of(w)
    np.testing.assert_array_equal(limbs.view(np.float16).reshape(want.shape), want)
    np.testing.assert_array_equal(exponents.view(np.int32), of_rows)


# ---- the backward's products

# In the last three, limbs of dg's rows overwrite dg, and in two of these x's limbs do later.
SHAPES = [(300, 76, 132), (1030, 520, 1100), (300, 132, 192), (192, 512, 1024), (64, 576, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("span", [0, 16])
@pytest.mark.parametrize("tile", LIMBS_RS_TILES)
@pytest.mark.parametrize(
    "shape",  # rows of dg, columns of dx, features (over which dx sums)
    [(1, 264, 4104), (5, 4, 300), (33, 132, 4100), (64, 1000, 8), (100, 260, 4999), (129, 2052, 1100), (256, 68, 4096)],
)
def test_dx_of_few_rows_by_every_tile(
    hopper: Any, shape: tuple[int, int, int], tile: tuple[int, int, int], span: int
) -> None:
    """limbs_rs is within the bound of docs/design/limbs.md, with full and partial tiles."""
    cupy, (rows, columns, features) = hopper, shape
    rng = cupy.random.default_rng(span)

    def matrix(*size: int) -> Any:
        return cupy.ldexp(rng.uniform(-2, 2, size), rng.integers(-span, 1, size).astype("i4")).astype("f4")

    dg, weight = matrix(rows, features), matrix(features, columns)
    within = Limits(sm90=tile[: 2 + (tile[2] > 1)], limbs_rs=True)
    got = dx_of(cupy, dg, weight, within)
    assert_same_bits(got.get(), dx_of(cupy, dg, weight, within).get())
    assert_made_of_limbs(cupy, got, dg, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["C", "F", "strided", "unaligned"])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 1028, 8), (5, 4, 300), (2000, 64, 24), (70, 77, 132)])
def test_gradients_through_limbs(hopper: Any, shape: tuple[int, int, int], layout: str) -> None:
    """dx and dw take MN-major operands, so limbs are of transposes. At most IEEE float32's error, in any layout."""
    kind = kind_of("cupy")
    arrays = without_out(Case(shape, "float32", True).arrays())
    B, _, O = shape
    dy = np.random.default_rng(1).standard_normal((B, O)).astype(np.float32)
    scale, bias, gamma = (arrays[name] for name in ("scale", "bias", "gamma"))
    truth = reference.backward(dy, arrays["x"], arrays["weight"], scale, bias=bias, gamma=gamma, training=True)
    errors: dict[tuple[str, bool], list[float]] = {}
    for gemm, of_x in (("sm90", False), ("sm90", True), ("cublas", False)):
        placed = {n: place(kind, a, layout if n in ("x", "weight") else "C").view for n, a in arrays.items()}
        _, saved = gsbn.forward(**placed, training=True, gemm=gemm, return_saved=True)
        got = backward_within(Limits(limbs_rs=of_x), hopper.asarray(dy), saved)
        again = backward_within(Limits(limbs_rs=of_x), hopper.asarray(dy), saved)
        for a, b in zip(got, again, strict=True):
            assert bool((a == b).all())
        errors[gemm, of_x] = [
            norm_error(kind.get(a), b)
            for a, b in ((got.x, truth.x), (got.weight, truth.weight), (got.gamma, truth.gamma))
        ]
    for both, of_dg, ieee in zip(*errors.values(), strict=True):
        assert max(both, of_dg) <= max(1.05 * ieee, 4 * U), errors


@pytest.mark.gpu
def test_dw_of_dg_itself_comes_before_limbs_take_its_place(hopper: Any) -> None:
    """Many rows: dx by limbs, dw by cuBLAS. Each is the same as alone, and has at most IEEE float32's error."""
    rng = hopper.random.default_rng(0)
    x, weight, dy = (rng.standard_normal(shape, dtype="f4") for shape in ((65536, 128), (1024, 128), (65536, 1024)))
    d = x.astype("f8") @ weight.astype("f8").T
    d -= d.mean(axis=0)
    r = 1 / hopper.sqrt((d * d).mean(axis=0) + 1e-5)
    dg = r * (dy - dy.mean(axis=0, dtype="f8") - d * r**2 * (dy * d).mean(axis=0))
    truth = dg @ weight.astype("f8"), dg.T @ x.astype("f8")
    _, saved = gsbn.forward(x, weight, training=True, return_saved=True)
    both = gsbn.backward(dy, saved, needs=("x", "weight"))
    assert bool((gsbn.backward(dy, saved, needs=("x",)).x == both.x).all())
    assert bool((gsbn.backward(dy, saved, needs=("weight",)).weight == both.weight).all())
    _, saved = gsbn.forward(x, weight, training=True, gemm="cublas", return_saved=True)
    ieee = gsbn.backward(dy, saved, needs=("x", "weight"))
    for ours, theirs, true in zip((both.x, both.weight), (ieee.x, ieee.weight), truth, strict=True):
        errors = [float(hopper.linalg.norm(a - true) / hopper.linalg.norm(true)) for a in (ours, theirs)]
        assert errors[0] <= max(1.05 * errors[1], 4 * U), errors


@pytest.mark.gpu
@pytest.mark.parametrize("of_x", [False, True])
@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_same_with_or_without_the_other(
    hopper: Any, shape: tuple[int, int, int], layout: str, of_x: bool
) -> None:
    """Without the other, limbs lie in other memory, and another kernel makes dg's for dx."""
    kind, (B, _, O) = kind_of("cupy"), shape
    arrays = without_out(Case(shape, "float32", True).arrays())
    placed = {n: place(kind, a, layout if n in ("x", "weight") else "C").view for n, a in arrays.items()}
    _, saved = gsbn.forward(**placed, training=True, gemm="sm90", return_saved=True)
    dy = hopper.random.default_rng(1).standard_normal((B, O)).astype("f4")
    within = Limits(limbs_rs=of_x)
    both = backward_within(within, dy, saved)
    assert bool((backward_within(within, dy, saved, needs=("x",)).x == both.x).all())
    assert bool((backward_within(within, dy, saved, needs=("weight",)).weight == both.weight).all())
