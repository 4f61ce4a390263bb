"""A user's script as type checkers see it: what comes back for each kind of array. `make lint` checks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import gsbn
from gsbn import bench, reference

if TYPE_CHECKING:
    from tensors import JaxArray, Parameter, Producer, Tensor
    from typing_extensions import assert_type
else:

    def assert_type(value: object, _: object) -> object:
        return value


Float32 = NDArray[np.float32]


def numpy_arrays() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((8, 4)).astype(np.float32), rng.standard_normal((3, 4)).astype(np.float32)
    scale, mean, var, count = np.ones(3, np.float32), np.zeros(3, np.float32), np.ones(3, np.float32), np.array(0)

    y = gsbn.forward(
        x, weight, scale, bias=mean.copy(), gamma=scale, beta=None, running_mean=mean, running_var=var,
        num_batches_tracked=count, training=True, momentum=None, eps=1e-3, precision="high", gemm="auto", sms=64,
        out=np.empty((8, 3), np.float32), return_saved=False,
    )  # fmt: skip
    assert_type(y, Float32)
    y, saved = gsbn.forward(x, weight, scale, training=True, return_saved=True)
    assert_type(y, Float32)
    assert_type(saved, gsbn.Saved)

    assert_type(gsbn.forward(x, weight, training=True), Float32)
    renormed = gsbn.forward(x, weight, running_mean=mean, running_var=var, training=True, renorm=gsbn.Renorm(r_max=2.0))
    assert_type(renormed, Float32)
    assert_type(gsbn.forward(x, weight, training=True, groups=2), Float32)
    for limits in ((3.0, 5.0), np.array([3.0, 5.0])):
        y, saved = gsbn.forward(
            x, weight, running_mean=mean, running_var=var, training=True, renorm=limits, return_saved=True
        )
    assert_type(gsbn.forward(x, weight, 0.5, training=True, activation="relu"), Float32)
    y, saved = gsbn.forward(x, weight, None, training=True, activation=None, return_saved=True)
    assert_type(y, Float32)

    gradients = gsbn.backward(np.ones_like(y), saved, needs=["x", "weight"], sms=None)
    assert_type(gradients, gsbn.Gradients[Float32])
    assert_type(gradients.weight, Float32 | Any)
    weight -= 0.1 * gradients.weight
    computed = {name for name in gsbn.Gradients._fields if name != "x"}
    for gradient in gsbn.backward(y, saved, needs=computed):
        assert_type(gradient, Float32 | Any)

    ones = np.ones((3, 4), np.float32)
    w, b = gsbn.fold(ones, scale, mean, var, beta=scale, eps=1e-3)
    assert_type(w, Float32)
    assert_type(b, Float32)  # not of two axes, as `ones` is by its type

    assert_type(gsbn.fold(ones, None, mean, var), tuple[Float32, Float32])
    assert_type(gsbn.fold(ones, 2, mean, var)[0], Float32)

    assert_type(gsbn.linear(x, weight, None, "relu"), Float32)
    assert_type(gsbn.linear(x, weight, return_saved=True), tuple[Float32, gsbn.Saved])
    assert_type(gsbn.matmul(x, weight.T), Float32)

    prepared = gsbn.prepare(weight, precision="high")
    assert_type(prepared, gsbn.Prepared)
    assert_type(prepared.shape, tuple[int, int])
    assert_type(gsbn.forward(x, prepared, scale, training=True, precision="high"), Float32)

    truth = reference.forward(x, weight, scale, training=True)
    assert_type(truth.y, NDArray[Any])
    assert_type(reference.backward(y, x, weight, scale, training=True), gsbn.Gradients[NDArray[Any]])
    reference.forward(x, weight, training=True, activation="relu")
    gsbn.linear(x, weight, None, ("leaky_relu", 0.2))
    gsbn.forward(x, weight, training=True, activation=("elu", 2))
    reference.backward(y, x, weight, 0.5, beta=mean, training=True, activation="relu")
    cases = bench.cases([(8, 4, 3)], ["float32"], directions=["step"])
    assert_type(cases, list[bench.Case])


def tensors(x: Tensor, weight: Parameter, scale: Parameter, count: Tensor | None, keep: bool) -> None:
    y = gsbn.forward(x, weight, scale, num_batches_tracked=count, training=True, gemm="sm90")
    assert_type(y, Tensor)
    y, saved = gsbn.forward(x, weight, scale, training=True, out=y, return_saved=True)
    assert_type(y, Tensor)
    assert_type(gsbn.forward(x, weight, training=True, activation="relu"), Tensor)
    assert_type(gsbn.fold(weight, 0.5, x, x), tuple[Tensor, Tensor])
    assert_type(gsbn.backward(y, saved), gsbn.Gradients[Tensor])
    assert_type(gsbn.backward(y, saved).gamma, Tensor | Any)
    assert_type(gsbn.fold(weight, scale, x, x), tuple[Tensor, Tensor])  # no Parameters
    assert_type(gsbn.forward(x, gsbn.prepare(weight), scale), Tensor)
    assert_type(gsbn.forward(x, weight, scale, return_saved=keep), Any)  # y, or y and saved


def other_arrays(jax: JaxArray, producer: Producer, cupy: Any, saved: gsbn.Saved) -> None:
    assert_type(gsbn.forward(jax, jax, jax, training=True), Any)  # CuPy's or NumPy's
    assert_type(gsbn.backward(jax, saved), gsbn.Gradients[Any])
    assert_type(gsbn.fold(producer, producer, producer, producer), tuple[Any, Any])
    assert_type(gsbn.forward(cupy, cupy, cupy, training=True, gemm="tiled"), Any)
    y, saved = gsbn.forward(cupy, cupy, cupy, training=True, return_saved=True)
    assert_type(gsbn.backward(y, saved), gsbn.Gradients[Any])


def compile_ahead() -> int:
    return gsbn.warm_up(lambda done, total, name: print(done, total, name))
