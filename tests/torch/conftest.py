"""Fixtures of the tests of gsbn.torch."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The activations of the calls of gsbn."""
    from gsbn.torch import _modules as modules

    made: list[Any] = []
    arguments = modules.arguments
    monkeypatch.setattr(modules, "arguments", lambda *a: made.append(a[3]) or arguments(*a))
    return made
