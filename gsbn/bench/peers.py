"""How each candidate computes a case: gsbn itself, and every peer that is installed, on the same operands.

All of them read the same memory of ``x`` and ``weight``, have running statistics of their own, and allocate their
result as a user's call does. A forward runs without autograd. Their names, which ``gsbn bench --only`` takes, are the
keys of ``gsbn.bench.candidate.NAMES``. ``gsbn.bench.ranks`` uses ``own`` and ``module`` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gsbn

from .. import _plan
from .._host.call import bare_gemm
from . import xla
from .bounds import EPS, GRADIENTS, Operands, draw_dy
from .candidate import COMPILED, OWN_GEMMS, WITHOUT_BACKWARD, Candidate, Unavailable, is_emulated
from .case import Case
from .libraries import Native, Torch
from .machine import matmul_of, path


def make(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    """The candidate called ``name`` on these operands; raises ``Unavailable``."""
    if name.startswith("gsbn") and name not in OWN_GEMMS:
        return own(name, case, operands, xp)
    if is_emulated(name) and case.kind != "float32":
        raise Unavailable("it is a way to float32 alone")
    if name == "pytorch" or name in COMPILED:
        return module(name, case, operands, xp)
    if case.direction != "forward":
        raise Unavailable("it has no backward here")
    if name.startswith("triton"):
        return module(name, case, operands, xp)
    if "jax" in name:
        return xla.make(name, case, operands, xp)
    if name.startswith("gemm"):
        return _gemm(name, case, operands, xp)
    return {"gsbn-gemm": _own_gemm, "gsbn-matmul": _matmul, "addmm": _addmm}[name](case, operands, xp)


def own(
    name: str,
    case: Case,
    operands: Operands,
    xp: Any,
    dy: Any = None,
    group: gsbn.Group | None = None,
    then: Callable[[], Any] | None = None,
) -> Candidate:
    """gsbn on arrays, or on tensors where the name is ``gsbn-torch``; with the ranks of a ``group``.

    ``dy`` is drawn if absent. ``then`` is called after every forward and after every backward.
    """
    if case.direction != "forward" and name in WITHOUT_BACKWARD:
        raise Unavailable("it has no backward here")
    library = Torch(xp) if name == "gsbn-torch" else Native(xp)
    gemm = name.partition("-")[2] if name in ("gsbn-cublas", "gsbn-tiled", "gsbn-sm90") else "auto"
    x, weight = map(library.take, (operands.x, operands.weight))
    scale = None if operands.scale is None else library.take(operands.scale)
    if name == "gsbn-prepared":
        weight = gsbn.prepare(weight, case.precision)
        if weight.limbs is None:
            raise Unavailable("there is nothing to prepare but for limbs")
    is_forward = case.direction == "forward"
    options: dict[str, Any] = {"training": case.training, "precision": case.precision, "gemm": gemm, "group": group}
    options |= {"activation": case.activation, "return_saved": not is_forward}
    options |= {key: library.take(a) for key, a in operands.affine.items()}
    try:
        chosen = path(case, gemm, xp)[0] if is_forward else "numpy" if xp.__name__ == "numpy" else gemm
    except ValueError as error:  # this GEMM cannot serve the case here
        raise Unavailable(str(error)) from None
    dy = None if is_forward else library.take(draw_dy(xp, operands) if dy is None else dy)

    def reset() -> None:
        options.update({key: library.take(a) for key, a in operands.fresh_statistics(xp).items()})

    def forward() -> Any:
        """y; where there is a backward, y and what that needs."""
        found = gsbn.forward(x, weight, scale, **options)
        if then:
            then()
        return found

    reset()
    kept = forward() if case.direction == "backward" else None

    def backward(of: Any = None) -> Any:
        gradients = gsbn.backward(dy, (of or kept or forward())[1])
        if then:
            then()
        return gradients

    def outputs() -> dict[str, Any]:
        if kept is None:
            reset()
        found = kept or forward()
        results = {"y": found} if is_forward else {**backward(found)._asdict(), "y": found[0]}
        results |= {key: options[key] for key in ("running_mean", "running_var")}
        return {key: None if a is None else library.give(a) for key, a in results.items()}

    return Candidate(name, library.name, forward if is_forward else backward, outputs, path=chosen)


def _gemm(name: str, case: Case, operands: Operands, xp: Any) -> Candidate:
    native = name in ("gemm-cupy", "gemm-numpy")
    if native and xp.__name__ == "numpy" and case.dtype not in ("float32", "float64"):
        raise Unavailable(f"numpy has no BLAS for {case.dtype}")
    library = Native(xp) if native else Torch(xp)
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
    return Candidate(name, library.name, run, lambda: {"g": library.give(run())}, capturable=not native)


def _own_gemm(case: Case, operands: Operands, xp: Any) -> Candidate:
    """forward_sm90's main loop and store alone, with the planner's tile: a fused forward adds its own work to this."""
    x, weight, g = operands.x, operands.weight, xp.empty((case.batch, case.out_features), operands.x.dtype)
    matmul = matmul_of(case, xp)
    try:
        _plan.gemm_for(matmul, precision=case.precision, gemm="sm90")
    except ValueError as error:
        raise Unavailable(str(error)) from None
    one = _plan.one_launch(matmul, "gemm", case.precision)
    if one.element == "limbs":
        raise Unavailable("the GEMM of limbs is not alone: they are made first")
    multiply = bare_gemm(matmul, one, xp.cuda.Device().id)

    def call() -> Any:
        multiply((x.data.ptr, weight.data.ptr, g.data.ptr), xp.cuda.get_current_stream().ptr)
        return g

    return Candidate("gsbn-gemm", xp.__name__, call, lambda: {"g": call()}, path="sm90")


def _matmul(case: Case, operands: Operands, xp: Any) -> Candidate:
    """gsbn.matmul, which takes cuBLAS where that is expected to be as fast."""
    a, b = operands.x, operands.weight.T

    def call() -> Any:
        return gsbn.matmul(a, b, precision=case.precision)

    return Candidate("gsbn-matmul", xp.__name__, call, lambda: {"g": call()})


def _addmm(case: Case, operands: Operands, xp: Any) -> Candidate:
    """The least that an inference forward can be: PyTorch's GEMM with a bias, on weights folded beforehand."""
    if case.training:
        raise Unavailable("folded weights serve inference alone")
    library = Torch(xp)
    affine = {key: operands.affine[key] for key in ("bias", "gamma", "beta")}
    w, b = gsbn.fold(operands.weight, operands.scale, operands.running_mean, operands.running_var, **affine, eps=EPS)
    x, weight_t, bias = library.take(operands.x), library.take(w).T, library.take(b)

    def call() -> Any:
        y = library.torch.addmm(bias, x, weight_t)
        return y.relu_() if case.activation == "relu" else _activated(y, case)

    return Candidate("addmm", "torch", call, lambda: {"y": library.give(call())})


def _activated(y: Any, case: Case) -> Any:
    """A tensor with the case's activation applied by PyTorch."""
    from ..torch._activations import apply

    return y if case.activation is None else apply(y, case.activation)


def _triton_linear(precision: str) -> Callable[..., Any]:
    """A linear layer by this package's Triton kernel."""
    try:
        from .triton_gemm import linear
    except ImportError:
        raise Unavailable("triton is not installed") from None
    return partial(linear, precision=precision)


def _scale_batch_norm(library: Torch, case: Case, operands: Operands, norm: str, linear: Any) -> Any:
    """KernelBench's module, ``BatchNorm1d(Linear(x) * scale)``, over the memory of the operands; or without the scale,
    and with the activation after it. Where the vectors are of another dtype than x, the scale is rounded to x's.
    ``linear`` computes the product."""
    torch: Any = library.torch

    class GemmScaleBatchNorm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            bias, gamma, beta = (operands.affine.get(key) for key in ("bias", "gamma", "beta"))
            self.gemm = torch.nn.Linear(case.in_features, case.out_features, bias is not None, device="meta")
            self.scale = None if operands.scale is None else parameter(operands.scale.astype(operands.x.dtype))
            self.gemm.weight, self.gemm.bias = parameter(operands.weight), None if bias is None else parameter(bias)
            dtype = library.take(gamma).dtype
            self.bn = getattr(torch.nn, norm)(case.out_features, device=library.device, dtype=dtype)
            self.bn.weight, self.bn.bias = parameter(gamma), parameter(beta)

        def forward(self, x: Any) -> Any:
            z = linear(x, self.gemm.weight, self.gemm.bias)
            y = self.bn(z if self.scale is None else z * self.scale)
            return _activated(y, case)

    def parameter(a: Any) -> Any:
        return torch.nn.Parameter(library.take(a), requires_grad=False)

    return GemmScaleBatchNorm().train(case.training)


TORCH_MODES = {"compile": "default", "autotune": "max-autotune-no-cudagraphs", "max-autotune": "max-autotune"}


def module(name: str, case: Case, operands: Operands, xp: Any, dy: Any = None, norm: str = "BatchNorm1d") -> Candidate:
    """KernelBench's module with this class of ``torch.nn``; its gradients by autograd.

    It is eager, compiled in one of ``TORCH_MODES``, or eager with Triton's product. ``dy`` is drawn if absent.
    """
    if name in COMPILED and case.direction == "backward":
        raise Unavailable("a compiled backward is timed in its step")
    library = Torch(xp)
    torch, x = library.torch, library.take(operands.x)
    linear = _triton_linear(name[len("triton-") :]) if name.startswith("triton-") else torch.nn.functional.linear
    layer = _scale_batch_norm(library, case, operands, norm, linear)
    run = torch.compile(layer, dynamic=False, mode=TORCH_MODES[name]) if name in COMPILED else layer
    capturable = name != "max-autotune"  # it launches graphs of its own
    if not capturable:
        torch._dynamo.mark_static_address(x)  # or its graph would begin with a copy of x

    def reset() -> None:
        for key, a in operands.fresh_statistics(xp).items():
            buffer = getattr(layer.bn, key)
            buffer.copy_(library.take(a).reshape(buffer.shape))

    def outputs() -> dict[str, Any]:
        reset()
        results = {"y": run(x), "running_mean": layer.bn.running_mean, "running_var": layer.bn.running_var}
        return {key: library.give(a) for key, a in results.items()}

    if case.direction == "forward":
        return Candidate(name, "torch", lambda: run(x), outputs, capturable)
    reset()
    places = [x, layer.gemm.weight, layer.gemm.bias, layer.scale, layer.bn.weight, layer.bn.bias]
    leaves = {name: leaf for name, leaf in zip(GRADIENTS, places, strict=True) if leaf is not None}
    for leaf in leaves.values():
        leaf.requires_grad_()
    dy = library.take(draw_dy(xp, operands) if dy is None else dy)
    kept: list[Any] = []
    if case.direction == "backward":
        with torch.enable_grad():
            kept.append(run(x))

    def gradients_and_y() -> tuple[Any, Any]:
        with torch.enable_grad():
            y = kept[0] if kept else run(x)
            return torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=bool(kept)), y

    def outputs_of_backward() -> dict[str, Any]:
        gradients, y = gradients_and_y()
        results = {**dict(zip(leaves, gradients, strict=True)), "y": y.detach()}
        return {key: library.give(a) for key, a in results.items()}

    return Candidate(name, "torch", lambda: gradients_and_y()[0], outputs_of_backward, capturable)
