"""DLPack producers that fail, and JAX tracers: refused with an error that names the argument."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.support.interpreter import BLOCKER
from tests.support.refusals import B, I, O, about


class Producer:
    def __init__(self, device: Any = (1, 0), capsule: Any = None) -> None:
        self._device, self._capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        if isinstance(self._device, Exception):
            raise self._device
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        if isinstance(self._capsule, Exception):
            raise self._capsule
        return self._capsule


@pytest.mark.parametrize(
    "producer",
    [
        Producer(RuntimeError("deleted\nin two lines")),
        Producer(None),
        Producer(("cpu", 0)),
        Producer(capsule=BufferError("deleted")),
        Producer(capsule=OSError("deleted")),
        Producer(capsule=5),
        Producer((2, 0), capsule=5),
    ],
)
def test_a_producer_that_fails(producer: Any) -> None:
    if producer._device == (2, 0):
        pytest.importorskip("cupy")
    message = r"^x: expected .+, got tests\.api\.test_dlpack\.Producer: [A-Za-z]+: .+"
    with pytest.raises(TypeError, match=message) as caught:
        gsbn.forward(producer, np.ones((O, I)), np.ones(O), training=True)
    assert "\n" not in str(caught.value)


def test_an_array_on_a_gpu_without_cupy() -> None:
    script = """
import numpy as np
import gsbn
from gsbn._cuda import device as _device

class Producer:
    def __dlpack__(self, **options): raise AssertionError("nobody could take it")
    def __dlpack_device__(self): return 2, 0

for call in (lambda: gsbn.forward(Producer(), np.ones((4, 3)), np.ones(4)), _device.cuda):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", BLOCKER + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, name in zip(done.stdout.splitlines(), ("x", "gsbn"), strict=True):
        assert re.match(rf"{name}: expected CuPy for .+, got .+: pip install 'cupy-cuda12x", line), line


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "eval_shape"])
def test_jax_traces(transform: str) -> None:
    jax = pytest.importorskip("jax")
    jnp, kwargs = jax.numpy, {"training": True}
    call = getattr(jax, transform)
    weight, scale, x = jnp.ones((O, I)), jnp.ones(O), jnp.ones((1, B, I))
    arguments = (lambda x: gsbn.forward(x, weight, scale, **kwargs).sum(),)
    with pytest.raises(TypeError, match=rf"{about('x')}Tracer: .*examples/jax_handoff\.py"):
        call(*arguments, x) if transform == "eval_shape" else call(*arguments)(x if transform == "vmap" else x[0])
    x = jnp.ones((B, I))
    x.delete()
    with pytest.raises(TypeError, match=about("x")):
        gsbn.forward(x, weight, scale, **kwargs)
