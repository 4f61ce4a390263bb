"""`gsbn.prepare`: a prepared weight gives the same bits, owns its memory, and supports training."""

from __future__ import annotations

import numpy as np
import pytest

import gsbn
from gsbn._cuda import kernels as _kernels
from gsbn._forward import forward_within
from gsbn._plan import Limits
from tests.support.harness import (
    CPU_KINDS,
    DTYPES,
    GPU_KINDS,
    Producer,
    assert_same_bits,
    forward,
    kind_of,
    place,
    without_out,
)
from tests.support.strategies import Case

KINDS = [*CPU_KINDS, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_KINDS)]


def path_of(name: str) -> dict[str, str]:
    """One path for float32, since "auto" may choose another path for a prepared weight."""
    return {"gemm": "sm90"} if name in GPU_KINDS and _kernels.gpu(0).capability == (9, 0) else {}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_a_prepared_weight_changes_no_bit(name: str, dtype: str, training: bool) -> None:
    kind = kind_of(name)
    arrays = Case((70, 96, 40), dtype, training).arrays()
    path = path_of(name) if dtype == "float32" else {}
    plain = forward(kind, arrays, limits=Limits(limbs_rs=False), training=training, **path)
    got = forward(kind, arrays, prepared=True, training=training, **path)
    for a, b in zip(got, plain, strict=True):
        assert_same_bits(np.atleast_1d(a), np.atleast_1d(b))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KINDS)
def test_a_prepared_weight_owns_its_memory(name: str) -> None:
    kind = kind_of(name)
    host = Case((70, 96, 40), "float32", False).arrays()
    arrays = {n: kind.put(a) for n, a in without_out(host).items() if n != "weight"}
    weight = place(kind, host["weight"], "strided").view
    prepared = gsbn.prepare(weight)
    assert (prepared.shape, prepared.dtype, prepared.precision) == ((40, 96), weight.dtype, "highest")
    before = kind.get(gsbn.forward(**arrays, weight=prepared))
    weight[...] = 0
    assert_same_bits(kind.get(gsbn.forward(**arrays, weight=prepared)), before)
    assert_same_bits(
        kind.get(gsbn.forward(**arrays, weight=weight)), kind.get(gsbn.forward(**arrays, weight=0 * weight))
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_prepared_weight_is_trained_with(name: str) -> None:
    """Saved then has the copy made by prepare, which nothing changes; the gradients are those of the weight."""
    kind = kind_of(name)
    arrays = {n: kind.put(a) for n, a in without_out(Case((70, 96, 40), "float32", True).arrays()).items()}
    dy = kind.put(np.random.default_rng(0).standard_normal((70, 40)).astype(np.float32))
    weight = arrays.pop("weight")
    gradients = []
    for operand in (weight, gsbn.prepare(weight)):
        fresh = {n: kind.put(kind.get(a)) for n, a in arrays.items()}
        within, options = Limits(limbs_rs=False), {"training": True, "return_saved": True, **path_of(name)}
        _, saved = forward_within(within, **fresh, weight=operand, **options)
        gradients.append(gsbn.backward(dy, saved))
    for plain, prepared in zip(*gradients, strict=True):
        assert_same_bits(kind.get(prepared), kind.get(plain))


@pytest.mark.parametrize("name", KINDS)
def test_errors_of_prepare(name: str) -> None:
    kind = kind_of(name)
    arrays = {n: kind.put(a) for n, a in Case((4, 8, 8), "float32", False).arrays().items()}
    weight = arrays.pop("weight")
    prepared = gsbn.prepare(weight)
    with pytest.raises(ValueError, match=r"^weight: .*precision='high'"):
        gsbn.forward(**arrays, weight=prepared, precision="high")
    with pytest.raises(ValueError, match=r"^weight: .*fold"):
        gsbn.fold(prepared, arrays["scale"], arrays["running_mean"], arrays["running_var"])
    with pytest.raises(TypeError, match=r"^weight: .*prepared already"):
        gsbn.prepare(prepared)
    with pytest.raises(ValueError, match=r"^precision: "):
        gsbn.prepare(weight, "medium")
    with pytest.raises(TypeError, match=r"^precision: "):
        gsbn.prepare(weight, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^weight: expected 2 dimensions"):
        gsbn.prepare(weight[0])
    with pytest.raises(ValueError, match=r"^weight: expected at least one"):
        gsbn.prepare(weight[:0])
    with pytest.raises(ValueError, match=r"^weight: expected shape"):
        gsbn.forward(**{**arrays, "x": arrays["x"][:, :4]}, weight=prepared)
    with pytest.raises(TypeError, match=r"^weight: expected an array, got None"):
        gsbn.prepare(None)
    with pytest.raises(TypeError, match=r"^x: "):
        gsbn.forward(**{**arrays, "x": prepared}, weight=prepared)


def test_prepare_names_an_array_of_another_kind() -> None:
    torch = pytest.importorskip("torch")
    arrays = Case((4, 8, 8), "float32", False, layouts=()).arrays()
    prepared = gsbn.prepare(torch.from_numpy(arrays.pop("weight")))
    with pytest.raises(TypeError, match=r"^weight: expected a NumPy array"):
        gsbn.forward(**arrays, weight=prepared)
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    with pytest.raises(RuntimeError, match=r"^weight: requires grad"):
        gsbn.prepare(parameter)
    with torch.no_grad():
        assert not gsbn.prepare(parameter).weight.requires_grad


def test_prepare_takes_a_dlpack_producer() -> None:
    arrays = Case((4, 8, 8), "float32", False, layouts=()).arrays()
    prepared = gsbn.prepare(Producer(arrays["weight"]))
    foreign = {n: Producer(a) for n, a in without_out(arrays).items() if n != "weight"}
    want = gsbn.forward(**without_out(arrays))
    assert_same_bits(gsbn.forward(**foreign, weight=prepared), want)
