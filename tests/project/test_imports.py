"""gsbn without CuPy and torch: it imports fast and computes on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.interpreter import BLOCKER, python


def test_works_with_numpy_alone() -> None:
    python(
        BLOCKER
        + """
import numpy as np
import gsbn

x, weight = np.arange(12, dtype=np.float32).reshape(4, 3), np.eye(2, 3, dtype=np.float32)
mean, var, count = np.zeros(2, np.float32), np.ones(2, np.float32), np.array(0)
y = gsbn.forward(x, weight, np.ones(2, np.float32), running_mean=mean, running_var=var, num_batches_tracked=count,
                 training=True, momentum=None)
np.testing.assert_allclose(y.mean(0), 0, atol=1e-6)
np.testing.assert_array_equal(mean, x.mean(0)[:2])
assert count == 1
w, b = gsbn.fold(weight, np.ones(2, np.float32), mean, var)
y = gsbn.forward(x, weight, np.ones(2, np.float32), running_mean=mean, running_var=var)
np.testing.assert_allclose(x @ w.T + b, y, atol=1e-5)
for wrong in ([[1.0]], None, 3):
    try:
        gsbn.forward(wrong, weight, np.ones(2, np.float32))
    except TypeError as error:
        assert str(error).startswith("x: ")
    else:
        raise AssertionError(wrong)
"""
    )


def test_never_asks_for_torch() -> None:
    """Not even inside a try: gsbn looks torch up in sys.modules."""
    asked = python(
        BLOCKER
        + """
import numpy as np
import gsbn

class Producer:
    def __init__(self, a): self.a = a
    def __dlpack__(self, **options): return self.a.__dlpack__(**options)
    def __dlpack_device__(self): return self.a.__dlpack_device__()

for wrap in (lambda a: a, Producer):
    gsbn.forward(wrap(np.ones((2, 3))), wrap(np.ones((4, 3))), wrap(np.ones(4)), training=True)
print(*(name for name in Blocker.asked if name.partition(".")[0] == "torch"))
"""
    )
    assert not asked.strip()


def test_importing_brings_in_nothing_large() -> None:
    script = """
import sys
before = set(sys.modules)
import gsbn
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    assert python(script).split() == ["gsbn", "numpy"]


def test_importing_brings_in_no_instrument() -> None:
    """gsbn imports neither the bench nor modules that only the bench and the compiler need, unless NumPy does."""
    script = """
import sys
import numpy
before = set(sys.modules)
import gsbn
print(*sorted(set(sys.modules) - before))
"""
    brought = python(script).split()
    for name in ("gsbn.bench", "gsbn.torch", "subprocess", "shutil", "platform", "concurrent.futures"):
        assert [module for module in brought if f"{module}.".startswith(f"{name}.")] == []


def test_the_bench_is_there_after_a_bare_import() -> None:
    script = (
        BLOCKER
        + """
import gsbn

print(gsbn.bench.Case(4, 5, 6).title)
from gsbn import bench
from gsbn.bench import Case
assert bench is gsbn.bench is sys.modules["gsbn.bench"] and bench.Case is Case
print(*bench.__all__)
try:
    gsbn.benchmark
except AttributeError as error:
    print(error)
"""
    )
    title, names, error = python(script).splitlines()
    assert title == "(4, 5, 6) float32 training"
    assert {"PRESETS", "Case", "Rates", "Report", "Result", "Settings", "cases", "median_interval", "run"} <= {
        *names.split()
    }
    assert error == "module 'gsbn' has no attribute 'benchmark'"


def test_the_bridge_is_there_after_a_bare_import() -> None:
    """Inside gsbn.torch the name torch is PyTorch."""
    pytest.importorskip("torch")
    script = """
import sys
import gsbn
import torch

print("gsbn.torch" in sys.modules)
print(torch.nn.Module in gsbn.torch.LinearBatchNorm1d.__mro__, gsbn.torch is sys.modules["gsbn.torch"])
from gsbn import torch as bridge
print(bridge is gsbn.torch, *bridge.__all__)
"""
    first, second, third = python(script).splitlines()
    assert (first, second) == ("False", "True True")
    assert {"LinearBatchNorm1d", "convert", "linear_batch_norm", "revert"} <= {*third.split()}


def test_the_bridge_says_what_it_lacks() -> None:
    script = BLOCKER + "import gsbn\ntry:\n    gsbn.torch\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert "torch" in python(script)


def test_warming_up_needs_no_bench() -> None:
    script = """
import sys
import gsbn

try:
    gsbn.warm_up()
except RuntimeError as error:
    assert "no GPU to compile kernels for" in str(error)
print(*(name for name in sys.modules if name.startswith("gsbn.bench")))
"""
    assert not python(BLOCKER + script).strip()


def test_importing_takes_little_time(tmp_path: Path) -> None:
    """Less CPU time than NumPy takes, on any machine; CuPy or torch would take several times that.

    The first run writes gsbn's byte code, whatever the environment says; NumPy's is part of its installation.
    """
    script = """
import time
start = time.process_time()
import numpy
middle = time.process_time()
import gsbn
print((time.process_time() - middle) / (middle - start))
"""
    written = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(python(script, **written)) for _ in range(4)) < 1


def test_the_public_names() -> None:
    import gsbn

    assert {"forward", "fold", "__version__"} <= set(dir(gsbn))
    assert gsbn.__version__.count(".") == 2
    with pytest.raises(TypeError, match="unexpected keyword"):
        gsbn.forward(None, None, None, affine=None)
    assert {"torch", "bench"} <= {*dir(gsbn)} or not find_spec("torch")
    assert "TYPE_CHECKING" not in dir(gsbn) and {*gsbn.__all__} <= {*dir(gsbn)}


def test_help_works_without_torch() -> None:
    script = """
import pydoc
import gsbn

assert "torch" not in dir(gsbn) and "bench" in dir(gsbn)
text = pydoc.plain(pydoc.render_doc(gsbn))
assert "gsbn - Linear, per-feature scale, BatchNorm1d and activation in one call" in text
print(text[text.index("    forward(") :].partition(")")[0])
"""
    signature = python(BLOCKER + script)
    assert "x: 'Array[Any] | AnyArray', weight: 'AnyArray | Prepared'" in signature and ": 'Any'" not in signature
