"""tests/support/remember.py computes anew what it has not seen, and gives what may be changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.remember import remembered


def test_equal_arguments_are_computed_once() -> None:
    calls: list[Any] = []

    @remembered
    def double(arrays: Any, number: float = 1.0, *, flag: Any = None) -> dict[str, np.ndarray]:
        calls.append((arrays, number, flag))
        return {name: 2 * number * a for name, a in arrays.items()}

    x = np.arange(6.0).reshape(2, 3)
    first = double({"x": x})
    first["x"] += 1
    assert double({"x": x.copy(order="F")})["x"].tolist() == (2 * x).tolist() and len(calls) == 1
    others: list[Any] = [
        ({"x": x.astype(np.float32)}, 1.0, None), ({"x": x.reshape(3, 2)}, 1.0, None), ({"x": x + 1}, 1.0, None),
        ({"y": x}, 1.0, None), ({"x": x}, 2.0, None), ({"x": x}, 1.0, ("elu", 0.5)), ({"x": x}, 1.0, True),
        ({"x": np.asarray([0.0])}, 1.0, None), ({"x": np.asarray([-0.0])}, 1.0, None),
    ]  # fmt: skip
    for i, (arrays, number, flag) in enumerate(others):
        for _ in range(2):
            for name, found in double(arrays, number, flag=flag).items():
                np.testing.assert_array_equal(found, 2 * number * arrays[name])
        assert len(calls) == i + 2
    double({"x": x})
    assert len(calls) == len(others) + 2, "it was too long ago"
