"""gsbn.torch.convert: the model stays the same for PyTorch, and gsbn runs its consecutive modules."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import _modules as modules  # noqa: E402
from gsbn.torch import convert, revert  # noqa: E402
from tests.torch.layers import assert_same, batch, step  # noqa: E402
from tests.torch.models import Backwards, Doubled, I, Scale, call, converted, network, row  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")


def test_a_network(device: str, calls: list[Any]) -> None:
    plain = network().to(device)
    ours = copy.deepcopy(plain)
    parameters, state = list(ours.parameters()), list(ours.state_dict())
    report = convert(ours, scales=(Scale,))
    assert report.replaced == (
        ("encoder.0", "encoder.1", "encoder.2"),
        ("blocks.0.0", "blocks.0.1", "blocks.0.2", "blocks.0.3"),
        ("blocks.1.0", "blocks.1.1"),
    )
    assert report.left == ()
    assert str(report).splitlines()[0] == "replaced encoder.0 + encoder.1 + encoder.2"
    assert all(a is b for a, b in zip(parameters, ours.parameters(), strict=True))
    assert list(ours.state_dict()) == state == list(plain.state_dict())
    assert [type(m) for m in ours["encoder"]] == [type(m) for m in plain["encoder"]]
    for training in (True, True, False):
        ours.train(training), plain.train(training)
        assert_same(step(ours, batch(device), call(ours)), step(plain, batch(device), call(plain)))
    assert calls == ["relu", "relu", None] * 3


def test_an_optimiser_that_was_made_before_goes_on(calls: list[Any]) -> None:
    """Five steps of SGD before the conversion and five after it, and again after `revert`."""
    ours, plain = network(), network()
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for i in range(10):
            if model is ours and i in (2, 7):
                convert(ours, scales=(Scale,)) if i == 2 else revert(ours)
            optimizer.zero_grad()
            call(model)(batch() + i).square().mean().backward()
            optimizer.step()
    assert_same(list(ours.state_dict().values()), list(plain.state_dict().values()))
    assert len(calls) == 15


def test_revert_leaves_no_trace() -> None:
    model = row()
    before = set(vars(model))
    convert(model)
    assert type(model) is gsbn.torch.Sequential and isinstance(model, nn.Sequential)
    model(torch.randn(8, I))
    revert(model)
    assert type(model) is nn.Sequential and set(vars(model)) == before


def test_twice_is_once() -> None:
    model = row()
    assert convert(model) == convert(model)
    assert convert(model).replaced == (("0", "1", "2"),)


LEFT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "not in a row": (lambda: nn.ModuleList([nn.Linear(I, 6), nn.BatchNorm1d(6)]), "1",
                     "use LinearBatchNorm1d.from_modules"),
    "alone": (lambda: nn.BatchNorm1d(6), "", "not in an nn.Sequential"),
    "first": (lambda: nn.Sequential(nn.BatchNorm1d(I)), "0", "no nn.Linear or convolution stands before it"),
    "behind ReLU": (lambda: row(nn.ReLU()), "2", "follows a ReLU, not an nn.Linear, an nn.Conv1d"),
    "a strange scale": (lambda: row(nn.Identity(), Scale(6)), "3", "follows a Identity, not an nn.Linear"),
    "a large scale": (lambda: row(Scale(8, 6)), "2", "its Scale holds something else"),
    "other features": (lambda: nn.Sequential(nn.Linear(I, 6), nn.BatchNorm1d(5)), "1", "5 features, its nn.Linear 6"),
    "no inputs": (lambda: nn.Sequential(nn.Linear(0, 6), nn.BatchNorm1d(6)), "1", "its Linear has no inputs"),
    "a subclass": (lambda: nn.Sequential(nn.Linear(I, 6), Doubled(6)), "1", "it is a Doubled"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(6), nn.BatchNorm1d(6)), "1", "LazyLinear has no parameters yet"),
    "a lazy norm": (lambda: nn.Sequential(nn.Linear(I, 6), nn.LazyBatchNorm1d()), "1", "call the model once"),
    "a subclass of Sequential": (lambda: Backwards(*row()), "1",
                                 "its row is a Backwards, which has a forward of its own: put the modules in an nn."),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(I, 6)), nn.BatchNorm1d(6)), "1",
                    "remove the parametrization"),
    "pruned": (lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(I, 6), "weight", 0.5), nn.BatchNorm1d(6)), "1",
               "its Linear has hooks"),
    "devices": (lambda: nn.Sequential(nn.Linear(I, 6, device="meta"), nn.BatchNorm1d(6)), "1", "devices: cpu, meta"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left(what: str) -> None:
    make, name, why = LEFT[what]
    model = make()
    type_ = type(model)
    report = convert(model, scales=(Scale,))
    assert report.replaced == () and [left.name for left in report.left] == [name]
    assert why in report.left[0].why and f"left {name}: " in str(report)
    assert type(model) is type_


def test_a_report_of_nothing() -> None:
    assert str(convert(nn.Linear(3, 3))) == "nothing to replace"


def test_a_scale_is_one_only_by_its_class(calls: list[Any]) -> None:
    model = row(Scale(6))
    assert "or a class in scales=" in convert(model).left[0].why
    assert len(convert(model, scales=(Scale,)).replaced) == 1
    one = row(Scale(1))
    ours, plain = converted(one.double(), scales=(Scale,))
    assert_same(step(ours, batch()), step(plain, batch()))
    assert calls == ["relu"]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks(calls: list[Any], kind: str, at: int) -> None:
    """Hooks run if added before or after the conversion; gsbn runs again once they are removed."""
    ours, plain = converted(row(Scale(6)).double(), scales=(Scale,))
    seen: list[Any] = []
    handles = [getattr(m[at], f"register_{kind}_hook")(lambda *a, m=m: seen.append(m)) for m in (ours, plain)]
    assert_same(step(ours, batch()), step(plain, batch()))
    assert len(seen) == 2 and seen[0] is ours
    assert calls == ([None] if at == 3 else [])
    assert len(convert(ours, scales=(Scale,)).left) == (at < 3)
    handles[0].remove(), handles[1].remove()
    assert_same(step(ours, batch()), step(plain, batch()))
    assert calls[-1:] == ["relu"]


def test_hooks_on_all_modules(calls: list[Any]) -> None:
    model, seen = converted(row())[0], []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        model(torch.randn(8, I))
    finally:
        handle.remove()
    assert seen == ["Linear", "BatchNorm1d", "ReLU", "Sequential"] and calls == []


def test_children_that_change(calls: list[Any]) -> None:
    """Children that are replaced, added, parametrized or removed later take effect."""
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda m: m.__setitem__(1, nn.BatchNorm1d(6, eps=0.1).double()),
        lambda m: m.append(nn.Tanh()),
        lambda m: m.__setitem__(2, nn.Sigmoid()),
        lambda m: m.insert(1, nn.Identity()),
        lambda m: m.__delitem__(1),
        lambda m: parametrizations.weight_norm(m[0]) and None,
    )
    ours, plain = converted(row().double())
    for change in changes:
        for model in (ours, plain):
            torch.manual_seed(1)
            change(model)
        assert_same([ours(batch())], [plain(batch())])
    assert calls == ["relu", "relu", None, None]
    part = converted(row().double())[0][:2]
    assert type(part) is gsbn.torch.Sequential
    part(batch())
    assert calls[4:] == [None]


def test_one_module_in_two_places(calls: list[Any]) -> None:
    norm, linear = nn.BatchNorm1d(I), nn.Linear(I, I)
    model = nn.Sequential(linear, norm, nn.Sequential(linear, norm, nn.ReLU(inplace=True)), nn.Tanh(), norm).double()
    ours, plain = copy.deepcopy(model), model
    report = convert(ours)
    assert report.replaced == (("0", "1"), ("2.0", "2.1", "2.2"))
    assert [left.name for left in report.left] == ["4"]
    assert_same(step(ours, batch()), step(plain, batch()))
    assert calls == ["relu", None] or calls == [None, "relu"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(calls: list[Any], how: str) -> None:
    ours, plain = converted(row(Scale(6)).double(), scales=(Scale,))
    ours(batch()), plain(batch())
    made = copy.deepcopy(ours) if how == "deepcopy" else pickle.loads(pickle.dumps(ours))
    assert made[0] is not ours[0] and type(made) is gsbn.torch.Sequential
    made[0].weight.data += 1
    plain[0].weight.data += 1
    assert_same(step(made, batch()), step(plain, batch()))
    assert calls == ["relu", "relu"]


def test_frozen_statistics(calls: list[Any]) -> None:
    ours, plain = converted(row().double())
    for model in (ours, plain):
        model.train()[1].eval()
    assert_same(step(ours, batch()), step(plain, batch()))
    assert ours[1].num_batches_tracked == 0 and calls == ["relu"]


def test_a_norm_whose_statistics_were_taken_away_counts_on() -> None:
    ours, plain = converted(row())
    for model in (ours, plain):
        model[1].running_mean = model[1].running_var = None
        model(torch.randn(8, I))
        model.eval()(torch.randn(8, I))
    assert ours[1].num_batches_tracked == plain[1].num_batches_tracked == 1


def test_three_dimensions_are_left_to_the_modules(calls: list[Any]) -> None:
    """There the features are the last dimension for Linear, and the middle one for BatchNorm1d."""
    ours, plain = converted(nn.Sequential(nn.Linear(I, 6), nn.BatchNorm1d(6)).double())
    assert_same(step(ours, batch(shape=(4, 6, I))), step(plain, batch(shape=(4, 6, I))))
    errors = []
    for model in (ours, plain):
        with pytest.raises((ValueError, RuntimeError)) as error:
            model(batch(shape=(4, 5, I)))  # (N, L, C), which BatchNorm1d reads as (N, C, L)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and calls == []


def test_where_the_modules_win_they_run(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "wins", lambda x, norm: len(x) > 10)
    ours, plain = converted(row().double())
    for rows in (8, 20):
        assert_same(step(ours, batch(shape=(rows, I))), step(plain, batch(shape=(rows, I))))
    assert calls == ["relu"]


@pytest.mark.parametrize("training", [True, False])
def test_sync_batch_norm_of_one_process(device: str, calls: list[Any], training: bool) -> None:
    """It works as BatchNorm1d; only the class of the module changes, and `revert` restores it."""
    plain = row(Scale(6), momentum=None).to(device, torch.float64).train(training)
    ours = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    norm, printed, state = ours[2], repr(ours), list(ours.state_dict())
    shown = printed.replace("(\n", "(\n  one call of gsbn: 0 + 1 + 2 + 3\n", 1)
    assert str(convert(ours, scales=(Scale,))) == "replaced 0 + 1 + 2 + 3" == str(convert(ours, scales=(Scale,)))
    assert ours[2] is norm and type(norm) is gsbn.torch.SyncBatchNorm
    assert repr(ours) == shown and list(ours.state_dict()) == state
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same(step(model, batch(device)), step(copy.deepcopy(plain), batch(device)))
    assert calls == ["relu"] * 3
    revert(ours)
    assert type(norm) is nn.SyncBatchNorm and repr(ours) == printed
    assert_same([ours.eval()(batch(device))], [step(plain, batch(device)) and plain.eval()(batch(device))])


def test_sync_batch_norm_that_comes_later(calls: list[Any]) -> None:
    """PyTorch's own conversion to SyncBatchNorm, after gsbn's conversion."""
    ours, plain = converted(row().double())
    nn.SyncBatchNorm.convert_sync_batchnorm(ours)
    assert type(ours[1]) is nn.SyncBatchNorm
    assert_same(step(ours, batch()), step(plain, batch()))
    assert calls == ["relu"]


def test_revert_finds_a_sync_batch_norm_that_was_moved() -> None:
    model = nn.ModuleDict({"of": nn.Sequential(nn.Linear(I, 6), nn.SyncBatchNorm(6))})
    convert(model)
    norm = model["norm"] = model["of"].pop(1)
    model["own"] = layer = gsbn.torch.LinearBatchNorm1d(I, 6)
    layer.norm = gsbn.torch.SyncBatchNorm(6)
    assert type(norm) is gsbn.torch.SyncBatchNorm
    revert(model)
    assert (type(norm), type(layer.norm)) == (nn.SyncBatchNorm, gsbn.torch.SyncBatchNorm)


def test_lazy_modules_that_have_run(calls: list[Any]) -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    assert len(convert(model).left) == 1
    model(torch.randn(8, I))
    model(torch.randn(8, I))
    assert calls == [None] * 3


@pytest.mark.parametrize(("dtype", "autocast"), [("bfloat16", False), ("float32", True)])
def test_16_bits(device: str, dtype: str, autocast: bool) -> None:
    ours, plain = converted(row().to(device, getattr(torch, dtype)))
    results = []
    for model in (ours, plain):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            results.append(step(model, batch(device, getattr(torch, dtype), (64, I))))
    assert [a.dtype for a in results[0]] == [b.dtype for b in results[1]]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.05, atol=0.05)


def test_fx_traces_the_modules() -> None:
    ours, plain = converted(row().double())
    assert_same([torch.fx.symbolic_trace(ours)(batch())], [plain(batch())])


def test_precision_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(modules, "fused", lambda x, *a: seen.append(a[4]) or x)
    model = row()
    convert(model, precision="high")
    model(torch.randn(8, I))
    assert seen == ["high"]


def _data_parallel(store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    ours, plain = converted(row().double())
    parallel = nn.parallel.DistributedDataParallel(ours)
    for _ in range(2):
        assert_same(step(ours, batch(), parallel), step(plain, batch()))
    os._exit(0)  # a group that is destroyed holds the GIL while it waits for its threads, which may wait for the GIL


def test_data_parallel_of_one_process(tmp_path: Any) -> None:
    """DistributedDataParallel: its hooks see every gradient."""
    process = torch.multiprocessing.get_context("spawn").Process(target=_data_parallel, args=(f"{tmp_path}/store",))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((1,), {}, TypeError, r"model: expected an nn\.Module, got builtins\.int"),
        ((nn.ReLU(),), {"scales": Scale}, TypeError, "scales: expected a tuple of classes"),
        ((nn.ReLU(),), {"scales": (Scale(1),)}, TypeError, "scales: expected a tuple of classes"),
        ((nn.ReLU(),), {"precision": "low"}, ValueError, "precision: expected one of"),
        ((nn.ReLU(),), {"precision": None}, TypeError, "precision: expected one of"),
    ],
)
def test_errors(arguments: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        convert(*arguments, **options)


def test_revert_takes_modules() -> None:
    with pytest.raises(TypeError, match=r"^model: expected an nn\.Module, got builtins\.str$"):
        revert("model")  # type: ignore[arg-type]


def test_gsbns_own_layers_are_not_left() -> None:
    assert convert(nn.Sequential(gsbn.torch.LinearBatchNorm1d(I, 6))) == ((), ())


def test_a_traced_model_runs_its_modules() -> None:
    ours, plain = (model.eval() for model in converted(row().double()))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(ours, batch())
        torch.testing.assert_close(traced(2 * batch()), plain(2 * batch()))


@pytest.mark.parametrize("change", ["pruned", "parametrized"])
def test_a_scale_whose_parameter_was_replaced(change: str) -> None:
    """It is called itself then, before and after a first call."""
    ours, plain = converted(row(Scale(6)).double(), scales=(Scale,))
    x = torch.randn(12, ours[0].in_features, dtype=torch.float64)
    ours(x), plain(x)
    for model in (ours, plain):
        torch.manual_seed(0)
        if change == "pruned":
            torch.nn.utils.prune.l1_unstructured(model[1], "scale", 2)
        else:
            torch.nn.utils.parametrize.register_parametrization(model[1], "scale", nn.Softplus())
    assert_same([ours(x)], [plain(x)])
