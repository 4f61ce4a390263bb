"""Hide the GPUs of this machine."""

import pytest

from gsbn._cuda import device as _device


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "gpu_obstacle", lambda: "hidden by the test")
