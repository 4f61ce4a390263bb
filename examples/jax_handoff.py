"""JAX arrays in, JAX arrays out: gsbn for inference, for training, and for gradients inside jax.grad.

gsbn reads a JAX array's memory through DLPack, and JAX takes the result in the same way; on a GPU nothing is copied.
JAX arrays never change, so the running statistics go by value: they are copied first, and the new ones are returned.
gsbn launches its own kernels, which JAX cannot trace: call these functions as they are, and jax.jit the rest.
"""

import importlib.util
import sys

try:
    import jax
except ModuleNotFoundError:
    sys.exit("jax_handoff: needs JAX: pip install jax, on a GPU 'jax[cuda12]' or 'jax[cuda13]'")
import jax.numpy as jnp
import numpy as np

import gsbn

EPS, MOMENTUM = 1e-5, 0.1


def ours(array):
    """A JAX array's memory as a CuPy array, on the CPU as a NumPy array. Only to be read: JAX may share it."""
    if isinstance(array, jax.core.Tracer):
        raise TypeError("gsbn cannot be traced: call it outside jax.jit and jax.vmap")
    array = jnp.asarray(array)
    if array.device.platform == "cpu":
        return np.asarray(array)
    import cupy

    if array.dtype == jnp.bfloat16:  # which CuPy's DLPack does not know
        return cupy.from_dlpack(jax.lax.bitcast_convert_type(array, jnp.int16)).view(array.dtype)
    return cupy.from_dlpack(array)


def theirs(array):
    """The way back, once gsbn's kernels have run: JAX does not know that they read its memory, and might reuse it."""
    if isinstance(array, np.ndarray):
        return jnp.asarray(array)
    import cupy

    cupy.cuda.get_current_stream().synchronize()
    if array.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(array.view(np.int16)), jnp.bfloat16)
    return jax.dlpack.from_dlpack(array)


def inference(x, parameters, statistics):
    """y (B, O) of x (B, I); parameters and statistics are dicts with gsbn.forward's names."""
    given = {name: ours(array) for name, array in {**parameters, **statistics}.items()}
    return theirs(gsbn.forward(ours(x), **given, eps=EPS))


def _forward(x, parameters, statistics):
    given = {name: ours(array) for name, array in parameters.items()}
    new = {name: ours(array).copy() for name, array in statistics.items()}  # which gsbn updates in place
    options = {"training": True, "momentum": MOMENTUM, "eps": EPS, "return_saved": True}
    y, saved = gsbn.forward(ours(x), **given, **new, **options)
    return (theirs(y), {name: theirs(array) for name, array in new.items()}), _Kept(saved, tuple(parameters))


def _backward(kept, cotangents):
    dy, _ = cotangents
    found = gsbn.backward(ours(dy), kept.saved, needs=("x", *kept.names))
    return theirs(found.x), {name: theirs(getattr(found, name)) for name in kept.names}, None


@jax.tree_util.register_static
class _Kept:
    """What the backward needs. JAX passes it on without a look at the arrays inside, some of which are float64."""

    def __init__(self, saved, names):
        self.saved, self.names = saved, names


@jax.custom_vjp
def training(x, parameters, statistics):
    """(y, the new statistics); jax.grad and jax.vjp follow y to x and to the parameters."""
    return _forward(x, parameters, statistics)[0]


training.defvjp(_forward, _backward)


# ---- the demonstration: the same in jax.numpy alone, as the judge ----------------------------------------------------


def plain(x, parameters, statistics):
    weight, scale, bias, gamma, beta = (parameters[name] for name in ("weight", "scale", "bias", "gamma", "beta"))
    z = (jnp.matmul(x, weight.T, precision="highest") + bias) * scale
    mean, var = z.mean(0), z.var(0)
    y = gamma * (z - mean) / jnp.sqrt(var + EPS) + beta
    new = {"running_mean": mean, "running_var": var * len(x) / (len(x) - 1)}
    return y, {name: (1 - MOMENTUM) * old + MOMENTUM * new[name] for name, old in statistics.items()}


def step(layer, x, target, parameters, statistics, rate=0.1):
    """One step of gradient descent: the loss before it, the new parameters and statistics, the gradient of x."""

    def loss(x, parameters):
        y, new = layer(x, parameters, statistics)
        return jnp.mean((y - target) ** 2), new

    (value, new), (dx, gradients) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, parameters)
    return value, jax.tree.map(lambda p, g: p - rate * g, parameters, gradients), new, dx


def compare(what, found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    difference = max(float(jnp.abs(a - b).max()) for a, b in pairs)
    print(f"{what:<28} max difference {difference:.1e}")
    assert difference < 1e-4, what


def main():
    device = jax.devices()[0]
    if device.platform != "cpu" and importlib.util.find_spec("cupy") is None:
        sys.exit("jax_handoff: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    B, I, O = 256, 128, 64
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, dtype="f4"))  # noqa: E731
    x, target, vectors = draw(B, I), draw(B, O), {name: draw(O) for name in ("scale", "bias", "gamma", "beta")}
    parameters = {"weight": draw(O, I) / np.float32(I**0.5), **vectors}
    statistics = {"running_mean": jnp.zeros(O), "running_var": jnp.ones(O)}
    mine, judge = (parameters, statistics), (parameters, statistics)
    for number in range(3):
        value, *mine, dx = step(training, x, target, *mine)
        expected, *judge, expected_dx = step(plain, x, target, *judge)
        compare(f"step {number}: loss", value, expected)
        compare(f"step {number}: gradient of x", dx, expected_dx)
    compare("parameters", mine[0], judge[0])
    compare("running statistics", mine[1], judge[1])
    assert not np.asarray(statistics["running_mean"]).any(), "a JAX array has changed"

    y = inference(x, *mine)
    weight, scale, bias, gamma, beta = (mine[0][name] for name in ("weight", "scale", "bias", "gamma", "beta"))
    z = (jnp.matmul(x, weight.T, precision="highest") + bias) * scale
    r = 1 / jnp.sqrt(mine[1]["running_var"] + EPS)
    compare("inference: y", y, gamma * r * (z - mine[1]["running_mean"]) + beta)
    assert isinstance(y, jax.Array) and y.device == device
    print(f"gsbn and JAX agree on {device.platform}")


if __name__ == "__main__":
    main()
