"""What ``gsbn.bench`` runs side by side: gsbn itself, and every peer that is installed, on the same operands.

All of them see the same memory for ``x`` and ``weight``, have running statistics of their own, allocate their result
as a user's call does, and run without autograd. Names, as ``gsbn bench --only`` takes them, are the keys of ``NAMES``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gsbn

from .. import _forward, _kernels, _plan, _sm90
from .._interop import kind_of
from . import gradients
from .bounds import EPS, MOMENTUM, Operands, as_dtype
from .machine import has_gpu, path

if TYPE_CHECKING:
    from .measure import Case

NAMES = {
    "gsbn": "gsbn",
    "gsbn-prepared": "gsbn, prepared",
    "gsbn-cublas": "gsbn, cublas",
    "gsbn-tiled": "gsbn, tiled",
    "gsbn-sm90": "gsbn, sm90",
    "gsbn-torch": "gsbn on tensors",
    "gsbn-gemm": "gsbn, GEMM alone",
    "gemm-torch": "GEMM, torch.mm",
    "gemm-lt": "GEMM, cuBLASLt",
    "gemm-cupy": "GEMM, cupy",
    "gemm-numpy": "GEMM, numpy",
    "addmm": "addmm, folded",
    "pytorch": "PyTorch eager",
    "compile": "torch.compile",
    "autotune": "max-autotune",
    "jax": "JAX",
}
GPU_ONLY = {
    "gsbn-prepared",
    "gsbn-cublas",
    "gsbn-tiled",
    "gsbn-sm90",
    "gsbn-gemm",
    "gemm-lt",
    "gemm-cupy",
    "compile",
    "autotune",
}


class Unavailable(Exception):
    """The candidate cannot run this case here; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case.

    ``call`` runs it once and returns its result. ``outputs`` runs it once from fresh running statistics and returns
    ``(y, running_mean, running_var)`` as arrays of the clock's own kind, or ``(g, None, None)`` for a bare GEMM; of a
    backward or a step, the gradients.
    ``capturable`` says that a CUDA graph of it would run the same kernels; ``wait`` blocks until a result is there.
    """

    name: str
    library: str  # cupy, numpy, torch or jax: whose streams and allocator it uses
    call: Callable[[], Any]
    outputs: Callable[[], tuple[Any, ...]]
    capturable: bool = True
    path: str = ""  # the GEMM that gsbn takes
    wait: Callable[[Any], None] = lambda result: None

    @property
    def is_gemm(self) -> bool:
        return is_gemm(self.name)


def is_gemm(name: str) -> bool:
    """Whether a candidate computes g alone: the peers' GEMMs, and forward_sm90 without its forward."""
    return name.startswith("gemm-") or name == "gsbn-gemm"


def names(gpu: bool) -> list[str]:
    """The candidates that make sense on this kind of machine, installed or not."""
    return [name for name in NAMES if (name not in GPU_ONLY if not gpu else name != "gemm-numpy")]


def load(names: list[str]) -> dict[str, Any]:
    """Import what the named candidates need: module, or None where it is not installed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of the GPU
    needed = {"jax" if name == "jax" else "torch" for name in names if name not in ("gsbn", "gemm-cupy", "gemm-numpy")}
    found: dict[str, Any] = {}
    for library in sorted(needed):
        try:
            found[library] = importlib.import_module(library)
        except ImportError:
            found[library] = None
    return found


def make(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    """The candidate called ``name`` on these operands; raises ``Unavailable``."""
    if case.direction != "forward":
        return gradients.make(name, case, operands, xp)
    if name == "gsbn-gemm":
        return _own_gemm(case, operands, xp)
    if name == "addmm":
        return _addmm(case, operands, xp)
    if name.startswith("gsbn"):
        return _gsbn(name, case, operands, xp)
    if name.startswith("gemm"):
        return _gemm(name, case, operands, xp)
    return _jax(case, operands, xp) if name == "jax" else _module(name, case, operands, xp)


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """PyTorch's and CuPy's global float32 matmul precision, restored on the way out."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy") if has_gpu() else None
    if torch is not None:
        torch_before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    if cupy is not None:
        from cupy._core import _routines_linalg as core

        cupy_before = core.get_compute_type("f")
        core.set_compute_type("f", core.COMPUTE_TYPE_TF32 if precision == "high" else core.COMPUTE_TYPE_FP32)
    try:
        yield
    finally:
        if torch is not None:
            torch.set_float32_matmul_precision(torch_before)
        if cupy is not None:
            core.set_compute_type("f", cupy_before)


def forget_compiled() -> None:
    """Drop what torch.compile holds: every case compiles anew, with static shapes, and no limit is ever met."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


def _gsbn(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    library = _Torch(xp) if name == "gsbn-torch" else _Native(xp)
    gemm = name.partition("-")[2] if name in ("gsbn-cublas", "gsbn-tiled", "gsbn-sm90") else "auto"
    x, weight, scale = map(library.take, (operands.x, operands.weight, operands.scale))
    if name == "gsbn-prepared":
        weight = gsbn.prepare(weight, case.precision)
        if weight.limbs is None:
            raise Unavailable("there is nothing to prepare but for limbs")
    affine = {key: library.take(a) for key, a in operands.affine.items()}
    state: dict[str, Any] = {}

    def reset() -> None:
        state.update({key: library.take(a) for key, a in operands.fresh_statistics(xp).items()})

    def call() -> Any:
        options: dict[str, Any] = {"training": case.training, "precision": case.precision, "gemm": gemm}
        return gsbn.forward(x, weight, scale, **affine, **state, **options)

    def outputs() -> tuple[Any, Any, Any]:
        reset()
        return library.give(call()), library.give(state["running_mean"]), library.give(state["running_var"])

    try:
        chosen = path(case, gemm, xp)[0]
    except ValueError as error:  # this GEMM cannot serve the case here
        raise Unavailable(str(error)) from None
    reset()
    return Candidate(name, library.name, call, outputs, chosen != "cublas", chosen)


def _gemm(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    native = name in ("gemm-cupy", "gemm-numpy")
    if native and xp.__name__ == "numpy" and case.dtype not in ("float32", "float64"):
        raise Unavailable(f"numpy has no BLAS for {case.dtype}")
    library = _Native(xp) if native else _Torch(xp)
    x, weight_t = library.take(operands.x), library.take(operands.weight).T
    g = library.take(xp.empty((case.batch, case.out_features), operands.x.dtype))
    matmul = xp.matmul if native else library.torch.mm

    def call() -> Any:
        return matmul(x, weight_t, out=g)

    def call_lt() -> Any:
        prefer = library.torch.backends.cuda.preferred_blas_library
        before = prefer()
        prefer("cublaslt")
        try:
            return call()
        finally:
            prefer(before)

    run = call_lt if name == "gemm-lt" else call
    return Candidate(name, library.name, run, lambda: (library.give(run()), None, None), capturable=not native)


def _own_gemm(case: Case, operands: Operands, xp: Any) -> Candidate:
    """forward_sm90's main loop and store, with the tile that the planner takes for it: what a fused forward adds to."""
    x, weight, g = operands.x, operands.weight, xp.empty((case.batch, case.out_features), operands.x.dtype)
    device, kind = xp.cuda.Device().id, kind_of(x)
    assert kind is not None
    at = [_forward.matrix_of(kind.view(a)) for a in (x, weight, g)]
    shape = (case.batch, case.out_features, case.in_features)
    p = _plan.Matmul(*shape, case.dtype, _kernels.gpu(device), *at)
    try:
        _plan.gemm_for(p, precision=case.precision, gemm="sm90", capturing=False)
    except ValueError as error:
        raise Unavailable(str(error)) from None
    one = _plan.one_launch(p, "gemm", case.precision)
    if one.limbs is not None:
        raise Unavailable("the GEMM of limbs is not alone: they are made first")
    multiply = _sm90.Sm90Gemm(p, one, device)

    def call() -> Any:
        multiply(x.data.ptr, weight.data.ptr, g.data.ptr, xp.cuda.get_current_stream().ptr)
        return g

    return Candidate("gsbn-gemm", xp.__name__, call, lambda: (call(), None, None), path="sm90")


def _addmm(case: Case, operands: Operands, xp: Any) -> Candidate:
    """The least that an inference forward can be: PyTorch's GEMM with a bias, on weights folded beforehand."""
    if case.training:
        raise Unavailable("folded weights serve inference alone")
    library = _Torch(xp)
    affine = {key: operands.affine[key] for key in ("bias", "gamma", "beta")}
    w, b = gsbn.fold(operands.weight, operands.scale, operands.running_mean, operands.running_var, **affine, eps=EPS)
    x, weight_t, bias = library.take(operands.x), library.take(w).T, library.take(b)

    def call() -> Any:
        return library.torch.addmm(bias, x, weight_t)

    return Candidate("addmm", "torch", call, lambda: (library.give(call()), None, None))


def _scale_batch_norm(library: _Torch, case: Case, operands: Operands) -> Any:
    """KernelBench's module, ``BatchNorm1d(Linear(x) * scale)``, over the memory of the operands."""
    torch: Any = library.torch

    class GemmScaleBatchNorm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gemm = torch.nn.Linear(case.in_features, case.out_features, device="meta")
            self.scale = parameter(operands.scale)
            self.bn = torch.nn.BatchNorm1d(case.out_features, device=library.device, dtype=self.scale.dtype)
            self.gemm.weight, self.gemm.bias = parameter(operands.weight), parameter(operands.affine["bias"])
            self.bn.weight, self.bn.bias = parameter(operands.affine["gamma"]), parameter(operands.affine["beta"])

        def forward(self, x: Any) -> Any:
            return self.bn(self.gemm(x) * self.scale)

    def parameter(a: Any) -> Any:
        return torch.nn.Parameter(library.take(a), requires_grad=False)

    return GemmScaleBatchNorm().train(case.training)


def _module(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    """KernelBench's module, eager or compiled."""
    library = _Torch(xp)
    module, x = _scale_batch_norm(library, case, operands), library.take(operands.x)

    def outputs() -> tuple[Any, Any, Any]:
        for key, a in operands.fresh_statistics(xp).items():
            buffer = getattr(module.bn, key)
            buffer.copy_(library.take(a).reshape(buffer.shape))
        return library.give(run(x)), library.give(module.bn.running_mean), library.give(module.bn.running_var)

    run = module
    if name != "pytorch":
        run = library.torch.compile(
            module, dynamic=False, mode={"autotune": "max-autotune-no-cudagraphs"}.get(name, "default")
        )
    return Candidate(name, "torch", lambda: run(x), outputs)


def _jax(case: Case, operands: Operands, xp: Any) -> Candidate:
    jax = load(["jax"])["jax"]
    if jax is None:
        raise Unavailable("jax is not installed")
    if case.dtype == "float64":
        raise Unavailable("jax computes float64 only in its global x64 mode")
    if (jax.default_backend() == "gpu") != (xp.__name__ == "cupy"):
        raise Unavailable(f"jax runs on {jax.default_backend()} here")
    jnp = jax.numpy
    algorithm = {"highest": "F32_F32_F32", "high": "TF32_TF32_F32"}[case.precision]
    precision = algorithm if case.dtype == "float32" and xp.__name__ == "cupy" else None

    def to_jax(a: Any) -> Any:
        if a.dtype.name == "bfloat16":
            return jax.lax.bitcast_convert_type(jnp.from_dlpack(a.view("int16")), jnp.bfloat16)
        return jnp.from_dlpack(a)

    def from_jax(a: Any) -> Any:
        if a.dtype == jnp.bfloat16:
            return xp.from_dlpack(jax.lax.bitcast_convert_type(a, jnp.int16)).view(operands.x.dtype)
        return xp.from_dlpack(a)

    def formula(x: Any, w: Any, s: Any, b: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
        z = (jnp.matmul(x, w.T, precision=precision) + b) * s
        m, v = (mean, var)
        if case.training:
            m, v = z.mean(0, dtype=jnp.float32), z.var(0, dtype=jnp.float32)
            unbiased = case.batch / (case.batch - 1)
            mean = ((1 - MOMENTUM) * mean + MOMENTUM * m).astype(mean.dtype)
            var = ((1 - MOMENTUM) * var + MOMENTUM * unbiased * v).astype(var.dtype)
        y = (z - m) * (gamma * jax.lax.rsqrt(v.astype(jnp.float32) + EPS)) + beta
        return y.astype(x.dtype), mean, var

    forward = jax.jit(formula)
    if xp.__name__ == "cupy":
        xp.cuda.get_current_stream().synchronize()
    fresh = operands.fresh_statistics(xp)
    arrays = [operands.x, operands.weight, operands.scale, *operands.affine.values(), *list(fresh.values())[:2]]
    arguments = [to_jax(a) for a in arrays]
    jax.block_until_ready(arguments)

    def outputs() -> tuple[Any, Any, Any]:
        y, mean, var = jax.block_until_ready(forward(*arguments))
        return from_jax(y), from_jax(mean), from_jax(var)

    return Candidate("jax", "jax", lambda: forward(*arguments), outputs, wait=jax.block_until_ready)


class _Native:
    """NumPy or CuPy arrays as they are."""

    torch: Any = None

    def __init__(self, xp: Any) -> None:
        self.name = xp.__name__

    def take(self, a: Any) -> Any:
        return a

    def give(self, a: Any) -> Any:
        return a


class _Torch(_Native):
    """Tensors over the memory of NumPy or CuPy arrays, and back. DLPack between them has no bfloat16: int16 passes."""

    def __init__(self, xp: Any) -> None:
        self.name, self.xp, self.torch = "torch", xp, load(["pytorch"])["torch"]
        if self.torch is None:
            raise Unavailable("torch is not installed")
        self.device = "cuda" if xp.__name__ == "cupy" else "cpu"
        if self.device == "cuda" and not self.torch.cuda.is_available():
            raise Unavailable("this torch sees no GPU")

    def take(self, a: Any) -> Any:
        if a.dtype.name == "bfloat16":
            return self.torch.from_dlpack(a.view("int16")).view(self.torch.bfloat16)
        return self.torch.from_dlpack(a)

    def give(self, a: Any) -> Any:
        if a.dtype == self.torch.bfloat16:
            return self.xp.from_dlpack(a.view(self.torch.int16)).view(as_dtype("bfloat16"))
        return self.xp.from_dlpack(a)
