"""Plans the elementwise launches: y = f(u) or f(u + residual) after a forward, the gradient before f, transposes."""

from __future__ import annotations

from typing import Any

from .copies import matrix_copy
from .problem import Matmul, Matrix, ceil_div
from .program import ABSENT, Builder, Program
from .sources import with_activation
from .variants import activate, activate_backward


def place_of_u(p: Matmul, *, out: bool, keeps: bool) -> tuple[Matmul, dict[str, Any]]:
    """Return the call and the options with which `plan_forward` plans a forward that makes u; a later launch makes y.

    u lies in y's memory if nothing keeps u and y is contiguous and starts on 16 bytes. Else u is an array of its own.
    """
    if not keeps and p.y.aligned and p.y.strides == (p.n, 1):
        return p, {"out": out}
    return p._replace(y=Matrix((p.n, 1), aligned=True)), {"out": False, "result": "u"}


def then_activate(
    program: Program, p: Matmul, activation: Any, *, out: bool, keeps: bool, residual: Matrix | None = None
) -> Program:
    """Add y = f(u), or y = f(v) with v = u + residual, to `program`, a forward that makes u where `place_of_u` says.

    `p` is the call, with the layout of y. If `keeps`, the array "u" is returned; with a residual it then holds v.
    """
    build = Builder(p.device)
    arrays = tuple(a._replace(scratch=not keeps) if a.name == "u" else a for a in program.arrays)
    own = program.made("u") is not None
    y = "out" if out else build.make("y", (p.m, p.n), p.dtype) if own else "y"
    if p.m:
        _add(build, p, activation, "u" if own else y, y, residual, keeps=keeps)
    made = build.program(program.path, program.why)
    return program._replace(arrays=(*made.arrays, *arrays), steps=(*program.steps, *made.steps))


def plan_residual(p: Matmul, activation: Any, residual: Matrix, *, keeps: bool) -> Program:
    """Plan y = f(v) with v = u + residual. The rows of u are contiguous. v overwrites u if `keeps`, else y does."""
    build = Builder(p.device)
    _add(build, p, activation, "u", build.make("y", (p.m, p.n), p.dtype) if keeps else "u", residual, keeps=keeps)
    return build.program("residual", "")


def plan_activate_backward(p: Matmul, activation: Any, v: Matrix | None) -> Program:
    """Plan dv = dy f'(v); dv is contiguous, and p.y is the layout of dy.

    `v` is the layout of v, or of y if y is enough. It is None without an activation; dv is then a copy of dy.
    """
    build = Builder(p.device)
    add_before(build, p, activation, v, build.make("dv", (p.m, p.n), p.dtype))
    return build.program("activate", "")


def add_before(build: Builder, p: Matmul, activation: Any, v: Matrix | None, dv: str) -> None:
    """Add the launch of `plan_activate_backward`, which writes to the memory `dv`."""
    kernel, item = activate_backward(p.dtype)
    at = p.y if v is None else v
    fields = {"m": p.m, "n": p.n, "dy_row": p.y.strides[0], "dy_col": p.y.strides[1]}
    fields |= {"v_row": at.strides[0], "v_col": at.strides[1]}
    passed = {"dy": "dy", "v": "dy" if v is None else "kept", "dv": dv}
    if p.m:
        grid = p.device.grid(ceil_div(p.m * p.n, item))
        build.launch(with_activation(kernel, activation), grid, fields, passed)


def plan_transpose(p: Matmul, matrices: int, dtype: str) -> Program:
    """Plan y (matrices * n, rows), the transposes of contiguous matrices x, which are (rows, n) each. m is all rows."""
    build, rows, cols = Builder(p.device), p.m // matrices, p.n
    y = build.make("y", (matrices * cols, rows), dtype)
    to = Matrix((1, rows), aligned=True)
    kernel, grid, fields = matrix_copy((rows, cols), (p.dtype, dtype), p.x, to, p.device, matrices)
    build.launch(kernel, grid, fields, {"from": "x", "to": y})
    return build.program("transpose", "")


def _add(build: Builder, p: Matmul, activation: Any, u: str, y: str, residual: Matrix | None, *, keeps: bool) -> None:
    """Add the launch of the kernel activate."""
    kernel, item = activate(p.dtype, residual=residual is not None)
    fields: dict[str, Any] = {"m": p.m, "n": p.n, "y_row": p.y.strides[0], "y_col": p.y.strides[1]}
    passed = {"u": u, "y": y}
    if residual is not None:
        fields |= {"residual_row": residual.strides[0], "residual_col": residual.strides[1]}
        passed |= {"residual": "residual", "v": u if keeps else ABSENT}
    build.launch(with_activation(kernel, activation), p.device.grid(ceil_div(p.m * p.n, item)), fields, passed)
