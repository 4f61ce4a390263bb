"""1x1 convolutions of a converted model in sequence: they share nodes, and copies between them are left out."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402

from gsbn._timing import peak_bytes  # noqa: E402
from gsbn.torch import _transpose as transpose  # noqa: E402
from gsbn.torch import convert  # noqa: E402
from tests.torch.layers import I as INPUTS  # noqa: E402
from tests.torch.layers import assert_replay_is_a_step, assert_same, batch, channels_adjacent  # noqa: E402
from tests.torch.test_sequence import NODE, alone, assert_alike, gradients, nodes_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu", "ieee")
MODULES: dict[int, Any] = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}


def stack(dims: int, widths: tuple[int, ...], device: str = "cpu", dtype: Any = torch.float64) -> Any:
    """Layers with a bias or an average over all batches, and with ReLU or none; not converted."""
    torch.manual_seed(0)
    conv, norm = MODULES[dims]
    model = nn.Sequential()
    for i, (a, b) in enumerate(pairwise(widths)):
        model += nn.Sequential(conv(a, b, 1, bias=i % 2 == 1), norm(b, momentum=None if i == 1 else 0.1))
        model += nn.Sequential(*[nn.ReLU()] * (i != 1))
    return model.to(device, dtype)


def converted(*arguments: Any) -> Any:
    model = stack(*arguments)
    assert len(convert(model).replaced) == len(arguments[1]) - 1
    return model


def assert_alike_without_gradients(model: Any, x: Any, autocast: Any = None) -> None:
    with torch.no_grad(), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        for training in (True, False):
            model.train(training)
            theirs = alone(model)
            y, wanted = model(x), theirs(x)
            assert torch.equal(y, wanted) and y.stride() == wanted.stride()


SHAPES = {(8, INPUTS, 12): "PermuteBackward0", (4, INPUTS, 3, 5): "PermuteBackward0", (16, INPUTS, 1): "ViewBackward0"}


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("mode", ["training", "frozen", "one is frozen"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(device: str, shape: tuple[int, ...], mode: str, needs_x: bool) -> None:
    """Bit for bit as the layers alone; also in the numbers that PyTorch's modules compute, and in their layout."""
    model = converted(len(shape) - 2, (INPUTS, 12, 9, 5), device).train(mode != "frozen")
    model[4].train(mode == "training")
    x = channels_adjacent(batch(device, shape=shape)).requires_grad_(needs_x)
    assert nodes_of(model(x)) == [NODE]
    assert_alike(model, x, SHAPES[shape])
    assert_alike_without_gradients(copy.deepcopy(model), x)
    plain, found = stack(len(shape) - 2, (INPUTS, 12, 9, 5), device), []
    plain.load_state_dict(model.state_dict())
    for own, of in zip(plain.modules(), model.modules(), strict=True):
        own.training = of.training
    for each in (model, plain):
        y = each(x)
        found.append([y.detach(), *gradients(each, y, x), *each.buffers()])
    assert_same(*found)


def test_rows_of_rows(device: str) -> None:
    """Second derivatives against finite differences, and batched gradients."""
    model = converted(1, (INPUTS, 4, 3), device)
    model[1].momentum, model[2], model[4].momentum = 0.1, nn.SiLU(), 0.1
    names, values = zip(*model.named_parameters(), strict=True)

    def run(x: Any, *values: Any) -> Any:
        for name, value in zip(names, values, strict=True):
            owner, _, parameter = name.rpartition(".")
            model.get_submodule(owner)._parameters[parameter] = value
        y = model(x.transpose(1, 2))
        assert nodes_of(y) == [NODE]
        return y

    x = batch(device, shape=(3, 4, INPUTS)).requires_grad_()
    leaves = [x, *(value.detach().clone().requires_grad_() for value in values)]
    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
    of_some = lambda x, w, *rest: run(x, w, *leaves[2:])  # noqa: E731
    assert torch.autograd.gradgradcheck(of_some, leaves[:2], check_batched_grad=True)


def test_an_error_of_the_input(device: str) -> None:
    model = converted(1, (INPUTS, 12, 9), device)
    for run in (model, alone(model)):
        with pytest.raises(ValueError, match=f"^x: read as .* with C = {INPUTS} features"):
            run(batch(device, shape=(3, 5, INPUTS + 1)).transpose(1, 2))
    model[3] = nn.Conv1d(11, 9, 1, device=device, dtype=torch.float64)
    for run in (model, alone(model)):
        with pytest.raises(ValueError, match=r"^(weight: expected .*12|x: read as .* C = 11)"):
            run(batch(device, shape=(3, 5, INPUTS)).transpose(1, 2))


# ---- on a GPU


# Contiguous x, widths, and the name of the node of y
IN_PLACE, COPIES = NODE, "_TransposeBackward"
CONTIGUOUS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, str]] = {
    "in place": ((4, 64, 784), (64, 72, 264), torch.bfloat16, IN_PLACE),
    "in place, float16": ((3, 24, 9, 8), (24, 64, 40, 136), torch.float16, IN_PLACE),
    "in place, autocast": ((4, 64, 28, 28), (64, 72, 264), "autocast", IN_PLACE),
    "copies": ((8, 64, 28, 28), (64, 136, 200), torch.float32, COPIES),
    "copies in 16 bits": ((64, 64, 14, 14), (64, 136, 72), torch.bfloat16, COPIES),
    "copies, autocast": ((64, 64, 14, 14), (64, 136, 72), "autocast", COPIES),
}  # fmt: skip


def contiguous(what: str) -> tuple[Any, Any]:
    """The model of a case, and its x."""
    shape, widths, dtype, _ = CONTIGUOUS[what]
    of_x = torch.float32 if dtype == "autocast" else dtype
    return converted(len(shape) - 2, widths, "cuda", of_x), batch("cuda", of_x, shape).requires_grad_()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("what", CONTIGUOUS)
def test_contiguous(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as the layers alone, with two transposes in all in each direction, or none."""
    *_, dtype, node = CONTIGUOUS[what]
    autocast, turns = torch.bfloat16 if dtype == "autocast" else None, []
    run = transpose.transpose
    model, x = contiguous(what)
    assert_alike(model, x, node, autocast)
    monkeypatch.setattr(transpose, "transpose", lambda *a: turns.append(a) or run(*a))
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast is not None):
        y = model(x)
    found = gradients(model, y, x)
    assert y.is_contiguous() and found[0].is_contiguous()
    assert len(turns) == (4 if node == COPIES else 0)
    y += 1  # y is no view that autograd forbids to change
    turns.clear()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast is not None):
        model(x)
    assert len(turns) == (2 if node == COPIES else 0)
    assert_alike_without_gradients(model, x, autocast)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_layer_that_pytorch_takes_leaves_the_others_alone() -> None:
    """With frozen statistics no kernel keeps in place what a backward needs."""
    model = converted(1, (64, 72, 264, 40), "cuda", torch.bfloat16)
    model[4].eval()
    x = batch("cuda", torch.bfloat16, (64, 64, 200)).requires_grad_()
    assert nodes_of(model(x)) == ["_WholeBackward"] * 2
    assert_alike(model, x, "_WholeBackward")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_large_layer_in_place_has_a_node_of_its_own() -> None:
    """If a Linear of its sizes has."""
    model = converted(1, (320, 264, 16, 24), "cuda", torch.float32)
    x = batch("cuda", torch.float32, (40, 320, 1600)).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        assert nodes_of(model(x)) == [NODE, "_WholeBackward"]
    assert_alike(model, x, NODE, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_gradients_of_gradients_in_place() -> None:
    """By PyTorch's own operators, so the same as of the layers alone but for the order of additions in bfloat16."""
    model = converted(1, (64, 72, 32), "cuda", torch.bfloat16)
    model[4].momentum = 0.1
    theirs, found = alone(model), []
    for run, of in ((model, model), (theirs, theirs.model)):  # type: ignore[attr-defined]
        x = batch("cuda", torch.bfloat16, (4, 64, 128)).requires_grad_()
        (gradient,) = torch.autograd.grad(run(x).sin().sum(), x, create_graph=True)
        assert gradient.shape == x.shape
        found.append([gradient.detach(), *torch.autograd.grad(gradient.sin().sum(), [x, of[0].weight])])
    for a, b in zip(*found, strict=True):
        assert float((a.double() - b.double()).norm()) < 0.05 * float(b.double().norm())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("what", ["in place", "copies"])
def test_gradients_in_any_layout(what: str) -> None:
    """dy may be any view, and start anywhere."""
    model, x = contiguous(what)
    dy = torch.randn_like(model(x).detach())
    off = torch.empty(dy.numel() + 1, device="cuda", dtype=dy.dtype)[1:].view(dy.shape).copy_(dy)
    for given in (channels_adjacent(dy), off, dy[:1].expand_as(dy), dy._neg_view()):
        found = torch.autograd.grad(model(x), x, given)
        assert torch.equal(found[0], torch.autograd.grad(model(x), x, given.clone().contiguous())[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("what", ["in place", "copies"])
def test_hooks_see_what_is_saved(what: str) -> None:
    model, x = contiguous(what)
    plain = copy.deepcopy(model)
    for _ in range(2):  # the first time some scratch memory stays
        y = None
        before = torch.cuda.memory_allocated()
        with save_on_cpu():
            y = model(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    found = gradients(model, y, x)
    y = plain(x)
    wanted = gradients(plain, y, x)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    assert kept < 0.1 * y.nbytes


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("what", ["in place", "copies"])
def test_in_a_cuda_graph_and_no_more_memory(what: str) -> None:
    model, x = contiguous(what)
    model[4].momentum = 0.1
    theirs, peaks = alone(model), []

    def step(run: Any = model, of: Any = model) -> list[Any]:
        y = run(x)
        return [y.detach(), *gradients(of, y, x)]

    for run, of in ((model, model), (theirs, theirs.model)):  # type: ignore[attr-defined]
        step(run, of)
        peaks.append(peak_bytes(torch, partial(step, run, of)))
    assert peaks[0] <= 1.02 * peaks[1]
    assert_replay_is_a_step(step)
