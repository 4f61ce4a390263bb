"""gsbn.bench's cases: presets, their names, and the floor of their times."""

from __future__ import annotations

from typing import Any

import pytest

from gsbn import bench


def test_the_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    rates = bench.Rates(copy=4e12, matrix={"bfloat16": 800e12})
    large, thin = bench.Case(4096, 4096, 4096, "bfloat16"), bench.Case(4096, 8, 8, "bfloat16")
    assert rates.floor(large) == large.flops / 800e12
    assert rates.floor(thin) == thin.least_bytes / 4e12
    assert thin.least_bytes == 2 * (4096 * 8 + 8 * 8 + 4096 * 8 + 8 * 8)


def test_presets_and_cases() -> None:
    assert (1024, 8192, 8192) in bench.PRESETS["kernelbench"]
    assert (16384, 4096, 4096) in bench.PRESETS["kernelbench"]
    for axis in range(3):
        assert {1023, 1024, 1025} <= {shape[axis] for shape in bench.PRESETS["sweep"]}
    chosen = bench.cases([(4, 5, 6)], ["tf32", "bfloat16"], [True, False])
    assert len(chosen) == 4
    assert (chosen[0].dtype, chosen[0].precision, chosen[0].kind) == ("float32", "high", "tf32")
    wrong: Any
    for wrong in ({"shapes": "nope"}, {"dtypes": ["f4"]}, {"directions": ["foo"]}):
        with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: expected one of"):
            bench.cases(**wrong)
    (one,) = bench.cases([(4, 5, 6)], ["float16"], activation="relu", scale=False)
    assert one.title == "(4, 5, 6) float16 training, relu, no scale"
    assert one.least_bytes == bench.Case(4, 5, 6, "float16").least_bytes - 6 * 2
