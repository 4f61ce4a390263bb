"""Fixtures of the tests of gsbn.torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gsbn._cuda import kernels
from gsbn._plan import Device


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The activations of the calls of gsbn."""
    from gsbn.torch import _modules as modules

    made: list[Any] = []
    arguments = modules.arguments
    monkeypatch.setattr(modules, "arguments", lambda *a: made.append(a[3]) or arguments(*a))
    return made


@pytest.fixture
def ieee() -> Iterator[None]:
    """float32 without TF32, which is not PyTorch's default."""
    from tests.torch.layers import tf32

    with tf32(False):
        yield


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decisions for an H200, on any machine."""
    from gsbn.torch import _channels_first

    monkeypatch.setattr(kernels, "gpu", lambda device: Device((9, 0), 132, pairs=66))
    _channels_first._obstacle.cache_clear()
    yield
    _channels_first._obstacle.cache_clear()
