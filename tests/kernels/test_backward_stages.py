"""The two stages of a backward. Between them autograd frees what the second does not need."""

from __future__ import annotations

import pytest

import gsbn
from gsbn._arrays.kinds import kind_of as library_of
from gsbn._backward import How, run
from gsbn._gradients import NEEDS
from tests.support.harness import DTYPES, assert_same_bits
from tests.support.integers import assert_products_are_exact, integers

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


def whole(saved: gsbn.Saved) -> How:
    return How.of(saved, NEEDS)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",  # the last: limbs of x lie over those for dx
    [(64, 512, 256), (1000, 264, 520), (4096, 256, 128), (300, 100, 77), (16, 64, 64), (2048, 1024, 1280)],
)
def test_give_the_bits_of_the_whole_backward(
    shape: tuple[int, int, int], dtype: str, activation: str | None, training: bool
) -> None:
    rows, inputs, features = shape
    x, weight, dy = (
        integers((rows, inputs), dtype),
        integers((features, inputs), dtype),
        integers((rows, features), dtype),
    )
    vector = "float64" if dtype == "float64" else "float32"
    mean, var = cupy.zeros(features, vector), cupy.full(features, inputs, vector)
    gamma, scale = cupy.linspace(-1, 2, features, dtype=vector), cupy.full(1, 0.5, vector)
    _, saved = gsbn.forward(
        x, weight, scale, gamma=gamma, running_mean=mean, running_var=var, training=training, activation=activation,
        return_saved=True,
    )  # fmt: skip
    expected, kind = gsbn.backward(dy, saved), library_of(x)
    norm, made = run(kind, (dy, None, None, *saved[2:4], None), whole(saved)._replace(linear=False))
    dg = made[-1][:, :features]
    linear, _ = run(kind, (dg, x, weight, None, None, None), whole(saved)._replace(norm=False))
    found = {}
    for stage in (norm, linear):
        found |= {name: a for name, a in zip(NEEDS, stage, strict=True) if a is not None}
    assert found.keys() == {name for name, gradient in expected._asdict().items() if gradient is not None}
    for name, gradient in found.items():
        assert_same_bits(cupy.asnumpy(gradient), cupy.asnumpy(getattr(expected, name)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 512, 256), (1000, 264, 520), (4096, 256, 128), (300, 100, 77)])
def test_in_place_gives_the_same(shape: tuple[int, int, int], dtype: str) -> None:
    rows, inputs, features = shape
    x, weight = integers((rows, inputs), dtype), integers((features, inputs), dtype)
    dy = integers((rows, features), dtype)
    _, saved = gsbn.forward(x, weight, training=True, activation="relu", return_saved=True)
    expected = gsbn.backward(dy, saved)
    found, _ = run(library_of(x), (dy, *saved[:4], None), whole(saved)._replace(in_place=True))
    for name, gradient in zip(NEEDS, found, strict=True):
        wanted = getattr(expected, name)
        assert (gradient is None) == (wanted is None)
        if gradient is not None:
            assert_same_bits(cupy.asnumpy(gradient), cupy.asnumpy(wanted))


@pytest.mark.parametrize("gemm", ["auto", "cublas", "tiled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", [(64, 512, 256), (1000, 264, 520), (2048, 512, 1024), (4096, 256, 128), (1000, 100, 72)]
)
def test_products_of_small_integers_are_exact(shape: tuple[int, int, int], dtype: str, gemm: str) -> None:
    """In float32 also dweight of 16-bit operands (`wide`), which 16 bits cannot hold; and limbs in other memory."""
    assert_products_are_exact(shape, dtype, gemm, wide=dtype != "float32")
