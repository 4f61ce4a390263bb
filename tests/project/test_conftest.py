"""What tests/conftest.py adds to pytest."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


@pytest.mark.parametrize("told", ["CUDA error: an illegal memory access was encountered", "another error"])
def test_tests_after_an_access_out_of_bounds_name_the_test_that_made_it(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_lost", [])
    first, second, on_cpu = (item(name, gpu) for name, gpu in (("first", True), ("second", True), ("on_cpu", False)))
    conftest.pytest_runtest_setup(first)
    report(first, RuntimeError(told))
    report(second, RuntimeError(f"{told}, again"))
    conftest.pytest_runtest_setup(on_cpu)
    lost = "illegal" in told
    with pytest.raises(pytest.fail.Exception, match=r"since first$") if lost else contextlib.nullcontext():
        conftest.pytest_runtest_setup(second)


def item(name: str, gpu: bool) -> Any:
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda marker: gpu and marker == "gpu")


def report(of: Any, error: Exception) -> None:
    call: Any = SimpleNamespace(excinfo=SimpleNamespace(value=error))
    hook = conftest.pytest_runtest_makereport(of, call)
    next(hook)
    with contextlib.suppress(StopIteration):
        hook.send("the report")
