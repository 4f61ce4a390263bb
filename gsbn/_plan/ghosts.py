"""Plans a forward with ghost batches: by passes that know ghost batches, or by a call for each ghost batch."""

from __future__ import annotations

from typing import Any

from .forward import plan_forward
from .forward_path import gemm_for
from .problem import ITEMSIZE, SAVED_ROWS, Matmul, Matrix, ghost_pitch
from .program import Array, Gemm, Launch, Program, Step, place


def plan_ghosts(p: Matmul, *, groups: int, **options: Any) -> Program:
    """Plan a forward in training; `options` are those of `plan_forward`, with neither ranks nor renormalisation.

    One product and passes that know ghost batches take few launches. But they write g, and one launch of forward_sm90
    does not, so a few large ghost batches take less time one after the other.
    """
    run = _run_of(p, groups)
    by_runs = p.limits.by_runs
    if by_runs is not False and options["gemm"] == "auto" and _saves_alike(p, options):
        one = plan_forward(run, **options)
        if not any(array.scratch for array in one.arrays):  # else each run would copy the weight
            how = {"precision": options["precision"], "gemm": "auto", "saved": options["saves"]}
            how |= {"prepared": options["prepared"], "reads_count": options["momentum"] is None}
            *_, us = gemm_for(p, groups=groups, **how)
            *_, us_of_run = gemm_for(run, **how)
            if by_runs or 0 < groups * us_of_run < us:
                return _one_after_the_other(p, one, groups)
    return plan_forward(p, groups=groups, **options)


def _run_of(p: Matmul, groups: int) -> Matmul:
    """Return the call for one run of rows. Its operands are `aligned` only if every run starts on 16 bytes."""
    m, size = p.m // groups, ITEMSIZE[p.dtype]

    def rows(at: Matrix) -> Matrix:
        return at._replace(aligned=at.aligned and m * at.strides[0] * size % 16 == 0)

    limits = p.limits._replace(remat=False)  # their backward is one for all ghost batches
    return p._replace(m=m, x=rows(p.x), y=rows(p.y), limits=limits)


def _saves_alike(p: Matmul, options: dict[str, Any]) -> bool:
    """Return whether a call for each run saves what a backward that knows ghost batches reads."""
    return not options["saves"] or ghost_pitch(p.n, p.dtype) == p.n


def _one_after_the_other(p: Matmul, one: Program, groups: int) -> Program:
    """Return `one`, repeated for each ghost batch in the order of the rows. A run updates what the run before left."""
    m = p.m // groups
    made = {array.name: array for array in one.arrays}
    x, y = (m * at.strides[0] * ITEMSIZE[p.dtype] for at in (p.x, p.y))  # bytes of a run
    nbytes = {"x": x, "y": y, "u": y, "out": y, "vectors": 8 * SAVED_ROWS * p.n}
    if "deviations" in made:
        kept = made["deviations"]
        nbytes["deviations"] = m * kept.shape[1] * ITEMSIZE[kept.dtype]

    def of_run(i: int) -> list[Step]:
        def at(name: str) -> str:
            return place(i * nbytes[name], name) if i and name in nbytes else name

        steps: list[Step] = []
        for step in one.steps:
            if isinstance(step, Launch):
                passed = {parameter: at(name) for parameter, name in step.passed.items()}
                steps.append(step._replace(passed=passed, maps=tuple((at(name), what) for name, what in step.maps)))
            else:
                assert isinstance(step, Gemm)
                a, b, c = map(at, step.operands)
                steps.append(step._replace(operands=(a, b, c)))
        return steps

    def whole(array: Array) -> Array:
        shape = (groups, *array.shape) if array.name == "vectors" else (p.m, *array.shape[1:])
        return array._replace(shape=shape)

    steps = tuple(step for i in range(groups) for step in of_run(i))
    why = f"{groups} ghost batches, one after the other: {one.why}"
    return one._replace(why=why, arrays=tuple(map(whole, one.arrays)), steps=steps)
