"""docs/call.svg: the picture is what its script draws, and the script says what is launched."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import gsbn
from tests.support import ROOT, fake_gpu

SCRIPT = ROOT / "docs" / "draw_call.py"

if not SCRIPT.is_file():
    pytest.skip("needs the source tree", allow_module_level=True)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("draw_call", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_drawn_by_its_script(script: Any) -> None:
    saved = SCRIPT.with_name("call.svg").read_text(encoding="utf-8")
    assert saved == script.picture(), "python docs/draw_call.py"


def launches_of(script: Any, dtype: str) -> tuple[list[Any], list[Any]]:
    """What gsbn launches for the drawn layer on an H200: forward and backward."""
    B, I, O = script.B, script.I, script.O
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        x, weight, dy = (fake_gpu.Array(shape, dtype) for shape in ((B, I), (O, I), (B, O)))
        names = ("scale", "bias", "gamma", "beta", "running_mean", "running_var")
        vectors = {name: fake_gpu.Array((O,), dtype) for name in names}
        _, saved = gsbn.forward(x, weight, **vectors, training=True, return_saved=True)
        forward = list(log)
        log.clear()
        gsbn.backward(dy, saved)
    return forward, log


def test_what_gsbn_launches(script: Any) -> None:
    forward, backward = launches_of(script, "bfloat16")
    for part, launches in (("Forward", forward), ("Backward", backward)):
        assert [launch.name for launch in launches] == [launch.name for launch in script.GSBN[part]]
    (launch,) = forward
    tiles = script.B // int(dict(launch.defines)["BLOCK_M"]) * (script.O // 128)
    assert dict(launch.defines)["MODE"] == "MODE_TRAINING"
    assert script.GSBN["Forward"][0].again == 1 - launch.grid / tiles, "the share of tiles that are deferred"


def test_what_the_text_below_the_picture_says(script: Any) -> None:
    text = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    assert "In float32 gsbn launches two kernels in the forward and six in the backward" in text
    assert [len(launches) for launches in launches_of(script, "float32")] == [2, 6]


def test_which_operators_pytorch_runs(script: Any) -> None:
    torch = pytest.importorskip("torch")
    linear, norm, scale = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Parameter(torch.ones(4))
    x = torch.randn(6, 8, requires_grad=True)
    drawn = {launch.name for part in script.PYTORCH.values() for launch in part}

    def operators(run: Any) -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        names = [event.name.removeprefix("aten::") for event in profile.events()]
        return [name for name in names if name in drawn]

    made: list[Any] = []
    found = {"Forward": operators(lambda: made.append(norm(linear(x) * scale)))}
    found["Backward"] = operators(lambda: made[0].backward(torch.ones_like(made[0])))
    for part, names in found.items():
        once = [launch.name for launch in script.PYTORCH[part]]
        once = [name for i, name in enumerate(once) if not (name.startswith("native") and name in once[:i])]
        assert sorted(names) == sorted(once)
