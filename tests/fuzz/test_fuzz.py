"""The first cases of the fuzzer; ``python -m tests.fuzz`` runs any number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gsbn
from tests.fuzz.bad import draw_bad, judge_bad
from tests.fuzz.good import draw_good, judge_good
from tests.fuzz.run import run
from tests.support.harness import CPU_KINDS, GPU_KINDS, available
from tests.support.strategies import Case

CHUNK = 50


def draw(kinds: tuple[str, ...], chunk: int, *, bad: bool) -> None:
    """Run a chunk of cases. A failure has the line that runs its case again."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    served = [run(seed, available(kinds), bad=bad) for seed in seeds]
    assert sum(served) > CHUNK / 2, "most cases were refused"


@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
def test_on_the_cpu(bad: bool, chunk: int) -> None:
    draw(CPU_KINDS, chunk, bad=bad)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(6))
def test_good_calls_on_the_gpu(chunk: int) -> None:
    draw(GPU_KINDS, chunk, bad=False)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(2))
def test_bad_calls_on_the_gpu(chunk: int) -> None:
    draw(GPU_KINDS, chunk, bad=True)


# ---- the fuzzer itself


@pytest.mark.parametrize("drawn", [draw_good, draw_bad])
def test_a_case_is_the_same_without_the_other_kinds(drawn: Any) -> None:
    for seed in range(100):
        case = drawn(seed, CPU_KINDS)
        assert drawn(seed, (case.kind,)) == case


@pytest.mark.parametrize(
    ("part", "message"),
    [("y", r"^y\[8, 3\]"), ("a guard of out", "^out: bytes"), ("gamma", "^gamma: bytes"), ("the count", None)],
)
def test_what_is_wrong_is_found(part: str, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Case((9, 5, 4), "float32", training=True)
    case = replace(draw_good(0, ("numpy",)), recipe=recipe, needs=None, prepared=False)
    assert judge_good(case)
    forward = gsbn.forward

    def wrong(**call: Any) -> Any:
        y = forward(**call)
        if part == "y":
            y[-1, -1] += 1
        elif part == "a guard of out":
            y.base[0] = 0
        elif part == "gamma":
            call["gamma"][...] *= 2
        else:
            call["num_batches_tracked"][...] -= 1
        return y

    monkeypatch.setattr(gsbn, "forward", wrong)
    with pytest.raises(AssertionError, match=message):
        judge_good(case)


def test_layers_without_a_norm_are_drawn_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in (draw_good(seed, ("numpy",)) for seed in range(100)) if case.linear]
    assert len(cases) > 5 and {case.needs is None for case in cases} == {False, True}
    case = next(case for case in cases if min(case.recipe.shape) > 1)
    assert judge_good(case)
    honest = gsbn.linear

    def wrong(**call: Any) -> Any:
        found = honest(**call)
        (found[0] if isinstance(found, tuple) else found)[-1, -1] += 1
        return found

    monkeypatch.setattr(gsbn, "linear", wrong)
    with pytest.raises(AssertionError, match=r"^y\["):
        judge_good(case)


def test_a_gradient_of_other_signs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one element of dy passes where y is zero, dbeta is wrong: for integers it must be exact."""
    recipe = Case((9, 5, 4), "bfloat16", training=True, activation="relu")
    case = replace(draw_good(0, ("numpy",)), recipe=recipe, needs=("beta",), integers=True, prepared=False)
    assert judge_good(case)
    honest = gsbn.backward

    def leaks(dy: Any, saved: Any, **options: Any) -> Any:
        found = honest(dy, saved, **options)
        if found.beta is not None:
            found.beta[2] += 1
        return found

    monkeypatch.setattr(gsbn, "backward", leaks)
    with pytest.raises(AssertionError, match="dbeta"):
        judge_good(case)


def test_an_error_that_comes_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(draw_bad(0, ("numpy",)), way="eps: 1j", primed=False)
    assert judge_bad(case)
    forward = gsbn.forward

    def late(**call: Any) -> Any:
        call["running_mean"][...] = np.nan
        return forward(**call)

    monkeypatch.setattr(gsbn, "forward", late)
    with pytest.raises(AssertionError, match="bytes changed"):
        judge_bad(case)
