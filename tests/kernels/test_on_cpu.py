"""The portable kernels, compiled by g++ and run on the CPU: right on a machine without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from gsbn import reference
from gsbn._backward import How, backward_within, before_kept, run
from gsbn._forward import add_and_activate, forward_within
from gsbn._gradients import NEEDS
from gsbn._plan import Limits, declared
from gsbn._plan.copies import matrix_copy
from gsbn._plan.problem import Matrix, round_up
from gsbn._plan.split_k import split_k_reduction
from gsbn._plan.variants import THREADS
from tests.support import on_cpu
from tests.support.forwards import truth_and_bounds
from tests.support.gradients import before_relu, draw_dy, gradient_bounds, step, truth_of
from tests.support.harness import ANY, DTYPES, LAYOUTS, Kind, assert_same_bits, forward, place, without_out
from tests.support.strategies import Case
from tests.support.tolerance import assert_within, norm_error

pytestmark = pytest.mark.skipif(on_cpu.why_not() is not None, reason=str(on_cpu.why_not()))
KIND = Kind("on_cpu", on_cpu.put, lambda a: np.array(a, order="C", subok=False))
WAYS = {"fused": Limits(fused=True), "two passes": Limits(fused=False)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernels")
    on_cpu.write_sources(made)
    return made


@pytest.fixture
def gpu(folder: Path) -> Iterator[None]:
    with on_cpu.gpu(folder):
        yield


def assert_right(case: Case, limits: Limits = ANY) -> None:
    """A forward, one that saves, and the backward stay within their bounds."""
    arrays, layouts = case.arrays(), dict(case.layouts)
    got = forward(KIND, arrays, layouts, limits=limits, gemm="tiled", **case.options)
    truth, bounds = truth_and_bounds(without_out(arrays), **case.options)
    for name in ("y", "running_mean", "running_var") if case.training else ("y",):
        assert_within(getattr(got, name), getattr(truth, name), getattr(bounds, name), name)
    form: dict[str, Any] = {"training": case.training, "eps": case.eps, "renorm": case.renorm, "groups": case.groups}
    options = form | {"activation": case.activation, "gemm": "tiled", "limits": limits, "forward_limits": limits}
    dy = draw_dy(arrays)
    y, gradients = step(KIND, arrays, dy, layouts, **options)
    dy = dy if case.activation is None else before_relu(dy, y)
    wanted = truth_of(arrays, dy, **form)
    allowed = gradient_bounds(arrays, dy, wanted, activation=case.activation, **form)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert_within(gradient, getattr(wanted, name), allowed[name], name)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(300, 24, 37), (70, 40, 136), (8, 20, 24)], ids=str)
def test_stays_within_the_bounds(shape: tuple[int, int, int], dtype: str, training: bool, way: str) -> None:
    assert_right(Case(shape, dtype, training, activation="relu"), WAYS[way])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_ghost_batches_and_batch_renormalisation(dtype: str, way: str) -> None:
    assert_right(Case((96, 20, 24), dtype, True, groups=3), WAYS[way])
    assert_right(Case((96, 20, 24), dtype, True, renorm=(1.5, 0.5)), WAYS[way])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_layout(dtype: str, layout: str) -> None:
    names = ("x", "weight", "dy", "out", "gamma")
    assert_right(Case((70, 40, 131), dtype, True, layouts=tuple((name, layout) for name in names)))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [9, 70])
def test_rows_of_y_may_start_anywhere(features: int, dtype: str, way: str) -> None:
    """Words of memory then have elements of two threads. The bits are those of rows that start on 16 bytes."""
    for training, groups in ((True, 1), (False, 1), (True, 3)):
        case = Case((96, 16, features), dtype, training, activation="relu", groups=groups)
        arrays, options = case.arrays(), dict(case.options, gemm="tiled")
        wanted, *others = (
            forward(KIND, arrays, {"out": layout}, limits=WAYS[way], **options).y
            for layout in ("padded", "C", "unaligned")
        )
        for y in others:
            assert_same_bits(y, wanted)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", WAYS)
def test_a_dy_of_one_column(way: str) -> None:
    """Columns of stride 0 are read as one value; the bits are those of a whole matrix."""
    arrays = {name: KIND.put(a) for name, a in without_out(Case((90, 24, 40), "bfloat16", True).arrays()).items()}
    _, saved = forward_within(WAYS[way], **arrays, training=True, gemm="tiled", return_saved=True)
    column = KIND.put(draw_dy(arrays)[:, :1])
    one, whole = as_strided(column, (90, 40), (column.itemsize, 0), subok=True), KIND.put(np.repeat(column, 40, axis=1))
    for a, b in zip(*(backward_within(WAYS[way], dy, saved) for dy in (one, whole)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(KIND.get(a), KIND.get(b))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 1024), (33, 37), (9, 8)], ids=str)
def test_a_residual(shape: tuple[int, int], dtype: str, layout: str) -> None:
    """v = u + residual is rounded once; max(v, 0) and the gradient before it are exact."""
    rng = np.random.default_rng(0)
    u, residual, dy = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(3))
    v = (u.astype("f8") + residual.astype("f8")).astype(u.dtype)
    wanted = np.maximum(v, 0), np.where(v > 0, dy, 0).astype(u.dtype)
    for keeps in (False, True):
        of_u = KIND.put(u)
        y = add_and_activate(of_u, place(KIND, residual, layout).view, "relu", keeps=keeps)
        assert_same_bits(KIND.get(y), wanted[0])
        assert_same_bits(KIND.get(of_u), v if keeps else wanted[0])
        dv = before_kept(
            place(KIND, dy, layout).view, KIND.put(v) if keeps else place(KIND, wanted[0], layout).view, "relu"
        )
        assert_same_bits(KIND.get(dv), wanted[1])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [40, 37])
def test_a_step_with_a_residual(features: int, dtype: str, activation: str) -> None:
    """backward_sums makes its gradient if all rows start on 16 bytes. The bits are those of a launch of its own."""
    rng = np.random.default_rng(0)
    shapes = (300, 24), (features, 24), (300, features), (300, features)
    x, weight, residual, dy = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    options: dict[str, Any] = {"training": True, "activation": activation, "gemm": "tiled", "return_saved": True}
    _, saved = forward_within(ANY, *map(KIND.put, (x, weight)), **options, residual=KIND.put(residual))
    of_v = before_kept(KIND.put(dy), saved.kept, activation)
    plain = saved._replace(activation=None, residual=False, kept=None)
    for way, layout in itertools.product(WAYS.values(), LAYOUTS):
        found = backward_within(way, place(KIND, dy, layout).view, saved)
        assert_same_bits(KIND.get(found.residual), KIND.get(of_v))
        for a, b in zip(found, backward_within(way, of_v, plain), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(KIND.get(a), KIND.get(b))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_halves_of_a_backward(dtype: str) -> None:
    """autograd may run the norm's half and the product's half apart; small integers make both exact."""
    rng = np.random.default_rng(0)
    shapes = (70, 24), (40, 24), (70, 40)
    x, weight, dy = (KIND.put(rng.integers(-3, 4, shape).astype(DTYPES[dtype])) for shape in shapes)
    options: dict[str, Any] = {"training": True, "activation": "relu", "gemm": "tiled", "return_saved": True}
    _, saved = forward_within(ANY, x, weight, **options)
    how, kind = How.of(saved, NEEDS), on_cpu.Kind()
    of_norm, made = run(kind, (dy, None, None, *saved[2:4], None), how._replace(linear=False))
    of_product, _ = run(kind, (made[-1][:, :40], x, weight, None, None, None), how._replace(norm=False))
    wanted = backward_within(ANY, dy, saved)
    for name, *halves in zip(NEEDS, of_norm, of_product, strict=True):
        found = next((half for half in halves if half is not None), None)
        assert (found is None) == (getattr(wanted, name) is None)
        if found is not None:
            assert_same_bits(KIND.get(found), KIND.get(getattr(wanted, name)))


def launch(folder: Path, kernel: Any, grid: int, fields: dict[str, int], *arrays: Any) -> None:
    """Run a kernel that takes these fields and the addresses of these arrays."""
    record = declared.record(kernel, fields)
    words = (ctypes.c_uint64 * len(arrays))(*map(on_cpu.Kind().pointer, arrays))
    on_cpu.compiled(kernel, folder)(grid, THREADS, ctypes.c_void_p(record.ctypes.data), words)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 3, 30, 64, 65, 132, 200])
@pytest.mark.parametrize(("n", "k"), [(96, 200), (3, 5), (64, 1)])
def test_adds_partial_products(folder: Path, n: int, k: int, number: int, dtype: str) -> None:
    """Sums of small integers are exact in any order."""
    pitch = round_up(k, 4)
    plan = split_k_reduction(number, n, pitch, on_cpu.TURING)
    partials = np.full((number, n, pitch), np.nan, np.float32)
    partials[..., :k] = np.random.default_rng(0).integers(-9, 9, (number, n, k))
    c = on_cpu.Kind().empty((n, k), np.empty(0, DTYPES[dtype]))
    fields = {"n": n, "k": k, "pitch": pitch, "size": n * pitch, "number": number, "share": plan.share}
    fields["to_c"] = 8 + declared.kind_code(dtype)
    launch(folder, plan.kernel, plan.grid, fields, partials, c)
    assert_same_bits(np.asarray(c), partials[..., :k].sum(0, np.float64).astype(c.dtype))


COPIES = [*((dtype, dtype) for dtype in ("bfloat16", "float32", "float64")), ("float32", "float16")]
COPIES += [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]


def copied(folder: Path, source: Any, at: Matrix, to: Matrix, dtype: str, shape: tuple[int, int], matrices: int) -> Any:
    """What copy_matrix writes, elements in the order of their addresses; those that it leaves out are 1."""
    dtypes = source.dtype.name, dtype
    kernel, grid, fields = matrix_copy(shape, dtypes, at, to, on_cpu.TURING, matrices)
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, to.strides, strict=True))
    made = on_cpu.Kind().empty((matrices * size,), source, dtype)
    made[:] = 1
    launch(folder, kernel, grid, fields, source, made)
    return made


@pytest.mark.parametrize(("dtype", "to_dtype"), COPIES)
def test_copies_of_any_layout(folder: Path, dtype: str, to_dtype: str) -> None:
    size = DTYPES[dtype].itemsize
    for rows, cols in [(70, 131), (64, 128), (5, 200), (196, 24)]:
        by_rows, by_columns = [(cols, 1), (cols + 4, 1), (2 * cols, 2)], [(1, rows), (1, rows + 3), (2, 2 * rows + 8)]
        for strides, to_strides in itertools.product(by_rows + by_columns, repeat=2):
            if dtype != to_dtype and (strides in by_rows) == (to_strides in by_rows):
                continue  # only transposes cast
            source = on_cpu.Kind().empty((2 * (rows + 8) * (cols + 8),), np.empty(0, DTYPES[dtype]))
            source[:] = np.arange(source.size) % 251
            at, to = (Matrix(of, aligned=True) for of in (strides, to_strides))
            made = copied(folder, source, at, to, to_dtype, (rows, cols), 1)
            wanted = np.ones_like(made)
            view = as_strided(wanted, (rows, cols), [stride * wanted.itemsize for stride in to_strides])
            view[:] = as_strided(source, (rows, cols), [stride * size for stride in strides])
            assert_same_bits(np.asarray(made), np.asarray(wanted))


@pytest.mark.parametrize(("dtype", "to_dtype"), COPIES)
@pytest.mark.parametrize("shape", [(3, 49, 64), (2, 64, 49), (3, 196, 24), (2, 70, 3), (4, 128, 68)], ids=str)
def test_transposes(folder: Path, shape: tuple[int, int, int], dtype: str, to_dtype: str) -> None:
    matrices, rows, cols = shape
    source = on_cpu.Kind().empty(shape, np.empty(0, DTYPES[dtype]))
    source[:] = np.random.default_rng(0).standard_normal(shape)
    at, to = Matrix((cols, 1), aligned=True), Matrix((1, rows), aligned=True)
    made = copied(folder, source, at, to, to_dtype, (rows, cols), matrices)
    assert_same_bits(np.asarray(made), source.transpose(0, 2, 1).astype(made.dtype).reshape(-1))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(300, 40, 70), (1000, 24, 37), (40, 40, 5)], ids=str)
def test_an_outlying_row_costs_float64_no_digits_of_the_variance(shape: tuple[int, int, int]) -> None:
    """g and its deviations are integers, and exact. Of the squares, which are not, one is most of the sum: its rounding
    and those of two quotients and two products are some 0.41 u each, together 1e-16. Where no sum is compensated it is
    1.7e-16 to 2.3e-16."""
    (B, I, O), rng = shape, np.random.default_rng(0)
    x, weight = (rng.integers(-(2**10), 2**10, (n, I)).astype(np.float64) for n in (B, O))
    x[0] *= 2**11
    arrays = {"x": x, "weight": weight, "running_mean": np.zeros(O), "running_var": np.ones(O)}
    wanted = reference.forward(**arrays, training=True, momentum=1.0, dtype=np.longdouble).running_var
    got = forward(KIND, arrays, limits=WAYS["fused"], gemm="tiled", training=True, momentum=1.0).running_var
    assert got is not None
    assert norm_error(got / wanted, np.ones(O, np.longdouble)) < 1.5e-16
