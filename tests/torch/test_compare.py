"""gsbn.torch.compare: what it measures, says and refuses, and that it leaves the model as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn import _timing as timing  # noqa: E402
from gsbn.torch import _variant as variant  # noqa: E402
from gsbn.torch import compare  # noqa: E402
from tests.torch.models import Doubled, I, Scale, row  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")

QUICK: dict[str, Any] = {"compile": False, "seconds": 0.01}
WORKS = ("inference", "training step")


def batch(rows: int = 20, device: str = "cpu") -> Any:
    return torch.randn(rows, I, generator=torch.Generator().manual_seed(0)).to(device)


def state_of(model: nn.Module) -> list[Any]:
    """All that a run could change, by value."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    copies = [None if t is None else t.detach().clone() for t in (*tensors, *generators)]
    return [*copies, [(type(m), m.training) for m in model.modules()]]


@pytest.mark.parametrize("mode", ["train", "eval", "frozen", "converted"])
def test_the_model_stays_as_it_is(mode: str, device: str) -> None:
    model = nn.Sequential(row(), nn.Dropout()).to(device).train(mode != "eval")
    x = batch(device=device).requires_grad_()
    (model(x) * 1).sum().backward()
    if mode == "frozen":
        model[0][1].eval()
    if mode == "converted":
        gsbn.torch.convert(model)
    before, of_x = state_of(model), (x.detach().clone(), x.grad.clone())
    result = compare(model, x, **QUICK)
    assert all(row.ms for row in result.rows)
    for a, b in zip(state_of(model), before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.equal(x, of_x[0]) and torch.equal(x.grad, of_x[1])


def test_it_converts_as_asked() -> None:
    model = nn.Sequential(row(), nn.Linear(6, 4))
    for linear, last in ((False, ()), (True, (("1",),))):
        result = compare(model, batch(), linear=linear, **QUICK)
        assert result.conversion.replaced == (("0.0", "0.1", "0.2"), *last)
        assert type(model[1]) is nn.Linear


def test_what_it_gives_on_a_cpu(calls: list[Any]) -> None:
    result = compare(row(Scale(6)), batch(), scales=(Scale,), **QUICK)
    assert result.conversion.replaced == (("0", "1", "2", "3"),) and "relu" in calls
    assert [row[:3] for row in result.rows] == [(w, "as called", v) for w in WORKS for v in ("plain", "gsbn")]
    for row_ in result.rows:
        assert row_.ms > 0 and row_.why == "" and row_.peak_bytes is None
        assert row_.speed_low <= row_.speed <= row_.speed_high
        assert (row_.speed == 1) >= (row_.variant == "plain")
        assert (row_.outputs is None) == (row_.variant == "plain")
        assert (row_.gradients is None) == (row_.variant == "plain" or row_.work == "inference")
        assert max(row_.outputs or 0, row_.gradients or 0) < 1e-5
    assert "CPU" in result.device and torch.__version__ in result.device


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = gsbn.torch._modules.fused
    monkeypatch.setattr(gsbn.torch._modules, "fused", lambda *a: 2 * fused(*a))
    for row_ in compare(row(), batch(), **QUICK).rows:
        if row_.variant == "gsbn":
            assert row_.outputs == pytest.approx(1, abs=1e-5)
            assert row_.gradients is None or row_.gradients == pytest.approx(1, abs=1e-4)


def test_the_plain_model_of_a_converted_one(calls: list[Any]) -> None:
    model = row()
    gsbn.torch.convert(model)
    made: list[Any] = []
    model[0].register_forward_hook(lambda *a: made.append(a))
    assert compare(model, batch(), **QUICK).conversion.left[0].why.endswith("has hooks or a forward of its own")
    assert made and not calls, "the hook is seen, so nothing is converted, and plain does not call gsbn"


def test_compiled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: honest(model, dynamic=dynamic, backend="eager"))
    result = compare(row(), batch(), seconds=0.01)
    assert [row.variant for row in result.rows[:4]] == ["plain", "compiled", "gsbn", "gsbn, compiled"]
    assert all(row.ms and (row.variant == "plain" or row.outputs < 1e-5) for row in result.rows)
    assert not result.notes[1:]
    drawn = compare(nn.Sequential(row(), nn.Dropout()), batch(), seconds=0.01)
    of_step = {row.variant: row for row in drawn.rows if row.work == "training step"}
    assert of_step["gsbn"].outputs < 1e-5 and of_step["gsbn"].gradients < 1e-4, "the same random numbers"
    assert of_step["compiled"].outputs is None and "random numbers" in drawn.notes[1]


def test_a_variant_that_fails_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", fails)
    rows = compare(row(), batch(), seconds=0.01).rows
    assert all((row.ms is None) == ("compiled" in row.variant) for row in rows)
    assert rows[1].why == "it raised RuntimeError: InvalidCxxCompiler: No working C++ compiler found"


def test_one_row_of_input_is_for_inference_only() -> None:
    result = compare(row(), batch(1), **QUICK)
    assert all((row.ms is None) == (row.work == "training step") for row in result.rows)
    assert "more than 1 value per channel" in result.rows[-1].why and "more than 1 value" in str(result)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(I, 3), "as the model has no BatchNorm1d and no SyncBatchNorm."),
        (nn.Sequential(nn.Linear(I, 3), Doubled(3)), "left 1: it is a Doubled"),
    ],
)
def test_where_nothing_is_converted_it_says_so(model: nn.Module, said: str) -> None:
    result = compare(model, batch(), **QUICK)
    assert "Nothing was converted, so gsbn changes nothing here" in result.notes[-1] and said in " ".join(
        str(result).split()
    )
    assert [row.why for row in result.rows] == ["", "nothing was converted"] * 2


def test_what_it_prints() -> None:
    rows = compare(row(), batch(), **QUICK).rows
    measured = gsbn.torch.Measured(
        *WORKS[:1], "in a CUDA graph", "gsbn, compiled", 12345.6, 1.5, 1.4, 1.6, 3 << 40, 1e-7, 0.25
    )
    failed = gsbn.torch.Measured(*WORKS[:1], "in a CUDA graph", "plain", why="it raised " + "word " * 30)
    conversion = gsbn.torch.Conversion((("0", "1"),), (gsbn.torch.Left("5", "why " * 30),))
    result = gsbn.torch.Comparison("a GPU", conversion, ("a note " * 20,), (*rows, measured, failed))
    for width in (60, 80, 120):
        lines = result.table(width).splitlines()
        assert max(map(len, lines)) <= width
        figures = [line for line in lines if line.startswith("  ") and line[-1] in "-0123456789"]
        assert len(figures) == 5 and {len(line) for line in figures} == {59}, "aligned"
    assert str(result) == result.table(80) and "inference, in a CUDA graph\n  gsbn, compiled   12346  ~1.50" in str(
        result
    )
    sure = gsbn.torch.Comparison("a GPU", conversion, (), (measured._replace(speed_low=1.48, speed_high=1.52),))
    assert "12346   1.50" in str(sure)
    told = json.loads(json.dumps(result.as_dict()))
    assert told["replaced"] == [["0", "1"]] and told["left"][0]["name"] == "5" and told["rows"][-2]["gradients"] == 0.25
    wrong = result.rows[0]._replace(outputs=float("nan"))
    told = gsbn.torch.Comparison("a GPU", conversion, (), (wrong,)).as_dict()
    assert json.loads(json.dumps(told, allow_nan=False))["rows"][0]["outputs"] == "nan"


class Heads(nn.Module):
    """Takes a dict and a number, gives a dict with a nested tuple, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = row(), nn.Linear(6, 2)

    def forward(self, batch: dict[str, Any], factor: float) -> Any:
        y = self.body(batch["x"] * factor)
        return {"logits": self.head(y), "more": (y, y.argmax(1))}


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nested_inputs_and_outputs_in_every_grad_mode(context: Any) -> None:
    leaf = batch().requires_grad_()
    given = {"x": leaf * 2, "names": ["a"]}  # no leaf, which copy.deepcopy refuses
    with context():
        result = compare(Heads(), given, 0.5, **QUICK)
    assert [row.why for row in result.rows] == [""] * 4
    assert result.rows[-1].gradients < 1e-5 and leaf.grad is None


def test_a_loss() -> None:
    given: list[Any] = []

    def loss(output: Any) -> Any:
        given.append(output["logits"].dtype)
        return output["logits"].square().mean()

    rows = compare(Heads(), {"x": batch()}, 1, loss=loss, autocast=torch.bfloat16, **QUICK).rows
    assert all(row.ms for row in rows) and set(given) == {torch.bfloat16}
    rows = compare(row(), batch(), loss=lambda y: y, **QUICK).rows
    assert (
        rows[0].ms and rows[2].why == "it raised TypeError: loss: expected a tensor of one element, got a torch.Tensor"
    )


def test_gradients_that_are_sparse() -> None:
    model = nn.Sequential(nn.Embedding(9, I, sparse=True), *row())
    rows = compare(model, torch.arange(20) % 9, **QUICK).rows
    assert rows[-1].ms and rows[-1].gradients < 1e-5


def test_without_gradients_there_is_no_step() -> None:
    rows = compare(row().requires_grad_(False), batch(), **QUICK).rows
    assert rows[0].ms and rows[2].why == "it raised ValueError: no output of the model requires grad"


def test_a_frozen_norm_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    model = row()
    forward = nn.BatchNorm1d.forward
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: seen.append(self.training) or forward(self, x))
    for frozen in (True, False):
        model.train()[1].train(not frozen)
        seen.clear()
        compare(model, batch(), **QUICK)
        assert any(seen) is not frozen


BAD: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "no module": (TypeError, {"model": 3}, "model: expected an nn.Module, got builtins.int"),
    "nothing": (TypeError, {"inputs": ()}, "inputs: expected"),
    "loss": (TypeError, {"loss": 3}, "loss: expected a function"),
    "scales": (TypeError, {"scales": Scale}, "scales: expected a tuple"),
    "precision": (ValueError, {"precision": "low"}, "precision: expected one of"),
    "autocast": (ValueError, {"autocast": torch.int8}, "autocast: expected torch.bfloat16"),
    "compile": (TypeError, {"compile": 1}, "compile: expected a bool"),
    "graph": (TypeError, {"graph": None}, "graph: expected a bool"),
    "seconds": (ValueError, {"seconds": 0}, "seconds: expected more than 0"),
    "seconds of no number": (TypeError, {"seconds": "1"}, "seconds: expected a number"),
    "meta": (ValueError, {"model": row().to("meta")}, "model: expected a CPU or one CUDA GPU, got tensors on meta"),
    "devices": (
        ValueError,
        {"model": nn.Sequential(row(), row().to("meta"))},
        "model: expected a CPU or one CUDA GPU, got tensors on cpu, meta",
    ),
    "no tensors": (
        ValueError,
        {"model": nn.ReLU(), "inputs": (3,)},
        "model: expected a CPU or one CUDA GPU, got tensors on no device",
    ),
    "input": (ValueError, {"inputs": (batch().to("meta"),)}, "inputs: expected tensors on cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_errors_before_anything_runs(case: str, calls: list[Any]) -> None:
    error, options, said = BAD[case]
    model, inputs, given = row(), (batch(),), {**QUICK, **options}
    model.register_forward_hook(lambda *a: calls.append("ran"))
    with pytest.raises(error, match=f"^{said}"):
        compare(given.pop("model", model), *given.pop("inputs", inputs), **given)
    assert not calls


def test_more_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"inputs: the model in eval.. does not take them; it raised RuntimeError: mat1"
    ):
        compare(row(), batch()[:, :3], **QUICK)
    with pytest.raises(TypeError, match="model: expected one that is neither scripted nor compiled"):
        compare(torch.compile(row()), batch(), **QUICK)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast: expected a call outside"):
        compare(row(), batch(), **QUICK)
    model = row()
    model.result = model(batch())
    with pytest.raises(ValueError, match=r"model: expected one that copy.deepcopy copies; it raised RuntimeError"):
        compare(model, batch(), **QUICK)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="model: expected one of a single process, got one that 2 processes share"):
        compare(nn.Sequential(nn.Linear(I, 6), nn.SyncBatchNorm(6)), batch(), **QUICK)
    assert compare(row(), batch(), **QUICK).rows[0].ms, "which no other rank shares"


def test_trials_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def trial(index: int) -> Any:
        return lambda: float(order.append(index) or (100 if len(order) <= 3 else len(order) % 3 + 10 * index))

    samples = timing.in_turns([trial(i) for i in range(3)], 1e-9)
    assert len(order) == 3 * (1 + timing.LEAST_ROUNDS)
    assert all(sorted(order[i : i + 3]) == [0, 1, 2] for i in range(0, len(order), 3)), "each once in a round"
    assert {tuple(order[i : i + 3]) for i in range(0, len(order), 3)} == {
        (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (0, 1, 2)
    }  # fmt: skip
    assert [{round(sample, -1) for sample in of_one} for of_one in samples] == [{0}, {10}, {20}], "no first round"
    assert timing.in_turns([], 100) == []


def test_a_drifting_clock_does_not_change_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that double from round to round: the ratio within a round stays, that of medians of few rounds need not."""
    drift = [[2.0**i * factor for i in range(7)] for factor in (1.0, 0.5)]
    monkeypatch.setattr(gsbn.torch._compare, "in_turns", lambda trials, seconds: drift)
    for row_ in compare(row(), batch(), **QUICK).rows:
        assert row_.speed == row_.speed_low == row_.speed_high == (1 if row_.variant == "plain" else 2)


def test_reasons() -> None:
    assert variant.reason(KeyError()) == "it raised KeyError"
    last = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    last.__context__ = ValueError("cannot be captured")
    assert variant.reason(last) == "it raised ValueError: cannot be captured"


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_run_on_the_gpu(dtype: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    x = torch.randn(512, 256, device="cuda")
    result = compare(copy.deepcopy(model), x, autocast=dtype, seconds=0.1)
    assert len(result.rows) == 16 and [row.why for row in result.rows] == [""] * 16
    for row_ in result.rows:
        assert row_.ms > 0 and row_.peak_bytes >= x.nbytes // (2 if dtype else 1)
        close = 1e-5 if dtype is None else 3e-2
        assert row_.variant == "plain" or max(row_.outputs, row_.gradients or 0) < close
    graphs = [row for row in result.rows if row.way == "in a CUDA graph"]
    assert [row.variant for row in graphs] == ["plain", "compiled", "gsbn", "gsbn, compiled"] * 2
    assert len(compare(model, x, graph=False, **QUICK).rows) == 4


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_the_gpu_as_it_was() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")

    class Waits(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * float(x.sum().item() > 0)

    model = nn.Sequential(row(), nn.Dropout(), Waits()).cuda()
    stream, before = torch.cuda.current_stream(), state_of(model)
    rows = compare(model, batch(device="cuda"), **QUICK).rows
    assert all((row.ms is None) == (row.way == "in a CUDA graph") for row in rows)
    assert all(row.why.startswith("it raised") for row in rows if row.ms is None)
    assert torch.cuda.current_stream() == stream
    for a, b in zip(state_of(model), before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.isfinite(torch.rand(3, device="cuda")).all(), "random numbers can be drawn"
