"""Calls of an autocast region that share a weight: one cast of it, and one gradient."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd import Function  # noqa: E402

from gsbn.torch import LinearBatchNorm1d, _nodes, linear_batch_norm  # noqa: E402
from gsbn.torch._autograd import shaped  # noqa: E402
from gsbn.torch._shared import SharedGradient, _Sum  # noqa: E402
from tests.torch.layers import assert_replay_is_a_step  # noqa: E402

# ---- what the calls leave, on any device


class Product(Function):
    """x wᵀ, whose backward leaves dg and x."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, shared: Any) -> Any:
        ctx.save_for_backward(x, weight.detach())
        ctx.shared = shared
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dg: Any) -> Any:
        x, weight = ctx.saved_tensors
        return dg @ weight, ctx.shared.leave(dg, x), None


class Several:
    """Three calls with one weight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mm, addmm = torch.mm, torch.addmm  # on a CPU PyTorch's have no `out_dtype`
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a, b))
        monkeypatch.setattr(torch, "addmm", lambda c, a, b, out_dtype, out: addmm(c, a, b, out=out))
        self.weight = torch.randn(5, 4, requires_grad=True)
        self.own, self.shared = shaped(self.weight, self.weight.shape), SharedGradient()
        self.shared.share(self.own)
        self.shared.share(self.own)  # the third call
        self.xs = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
        self.dys = [torch.randn(3, 5) for _ in range(3)]
        self.ys = [Product.apply(x, self.own, self.shared) for x in self.xs]

    def expected(self, *calls: int) -> Any:
        return sum(self.dys[i].t() @ self.xs[i].detach() for i in calls)

    def gradient(self, *calls: int, **options: Any) -> Any:
        ys, dys = [self.ys[i] for i in calls], [self.dys[i] for i in calls]
        return torch.autograd.grad(ys, self.weight, dys, **options)[0]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Several:
    return Several(monkeypatch)


def test_gradient_is_the_sum_over_the_calls_of_a_backward(several: Several) -> None:
    for calls in ((0,), (2, 1), (0, 1, 2)):  # not all calls need be a part of a backward
        torch.testing.assert_close(several.gradient(*calls, retain_graph=True), several.expected(*calls))
    torch.testing.assert_close(several.gradient(0, 1, 2), several.expected(0, 1, 2))
    assert not several.shared._sums


def test_no_more_is_kept_than_the_gradient_takes(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    """dg and x of 5 and 4 columns are smaller than dweight up to 4 rows; the calls have 3."""
    kept: list[int] = []
    add = _Sum.add
    monkeypatch.setattr(_Sum, "add", lambda s, *a: (add(s, *a), kept.append(len(s._pairs))))
    torch.testing.assert_close(several.gradient(0, 1, 2), several.expected(0, 1, 2))
    assert kept == [0, 1]


def test_backward_without_the_gradient_leaves_nothing(several: Several) -> None:
    torch.autograd.grad(several.ys, several.xs, several.dys, retain_graph=True)
    assert not several.shared._sums
    torch.testing.assert_close(several.gradient(1), several.expected(1))


def test_backward_that_failed_does_not_count(several: Several) -> None:
    def fail(_: Any) -> None:
        raise ArithmeticError

    handle = several.ys[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        several.gradient(2, 1, 0, retain_graph=True)
    handle.remove()
    torch.testing.assert_close(several.gradient(0, 2), several.expected(0, 2))


def test_other_gradients_of_the_weight_are_added(several: Several) -> None:
    more = torch.randn(5, 4)
    for of in (several.own, several.weight):  # of the shared tensor, as from a call that leaves nothing; of the weight
        ys, dys = [(of * more).sum(), *several.ys], [None, *several.dys]
        (found,) = torch.autograd.grad(ys, several.weight, dys, retain_graph=True)
        torch.testing.assert_close(found, several.expected(0, 1, 2) + more)


def test_gradient_is_that_of_the_parameter_alone(several: Several) -> None:
    """`backward` takes it over as `.grad`; a second one adds to it, and leaves an alias of the first as it was."""
    torch.autograd.backward(several.ys, several.dys, retain_graph=True)
    first = several.weight.grad
    kept = first.clone()
    torch.testing.assert_close(kept, several.expected(0, 1, 2))
    several.weight.grad = None
    torch.autograd.backward(several.ys[:1], several.dys[:1])
    assert first.equal(kept)


def test_calls_share_nothing_where_hooks_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint would not free the cast weight that a node keeps beside autograd's saved tensors."""
    asked: list[Any] = []
    share = _nodes.shared_weight
    monkeypatch.setattr(_nodes, "shared_weight", lambda *a: asked.append(a[2]) or share(*a))
    x, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    linear_batch_norm(x, weight, training=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        linear_batch_norm(x, weight, training=True)
    assert asked == [6, None]


def test_changes_of_the_weight_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched gradients compute the call again from the weight, and not from an alias with a count of its own."""
    share = _nodes.shared_weight
    aliased = lambda weight, *a: (shaped(weight, weight.shape), *share(weight, *a)[1:])  # noqa: E731
    monkeypatch.setattr(_nodes, "shared_weight", aliased)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_batch_norm(x, weight, training=True)
    dys = torch.randn(3, *y.shape, dtype=y.dtype)
    found = torch.autograd.grad(y, (x, weight), dys, is_grads_batched=True, retain_graph=True)
    assert [each.shape for each in found] == [(3, 6, 4), (3, 5, 4)]
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation since the forward"):
        torch.autograd.grad(y, (x, weight), dys, is_grads_batched=True)


# ---- the calls, on a GPU

ONE_NODE, TWO_NODES = (512, 1024), (1024, 4096)  # rows, and features in and out


def views(rows: int, features: int) -> tuple[Any, list[Any], list[Any]]:
    """A layer, two inputs, and the gradients of its outputs."""
    layer = LinearBatchNorm1d(features, features, device="cuda", activation="relu")
    xs = [torch.randn(rows, features, device="cuda", requires_grad=True) for _ in range(2)]
    return layer, xs, [torch.randn(rows, features, device="cuda", dtype=torch.bfloat16) for _ in range(2)]


def outputs(layer: Any, xs: Any, **options: Any) -> list[Any]:
    with torch.autocast("cuda", torch.bfloat16, **options):
        return [layer(x) for x in xs]


def error(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def bound(rows: int) -> float:
    """How far two float32 sums of the same products over the rows of two views may be apart, norm-wise.

    The tensor core truncates a sum once for 16 terms, by up to 2^-23 of it. Partial sums of terms with random signs are
    no larger than the result, up to a small factor, here 2; and the errors of both sums add up.
    """
    return 2 * 2 * (2 * rows / 16) * 2.0**-23


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "features"), [(2048, 64), ONE_NODE, TWO_NODES])
def test_calls_of_an_autocast_region_share_the_cast_weight(rows: int, features: int) -> None:
    """As PyTorch's own Linear does. Without autocast's cache each call casts; a new region casts the new weight."""
    layer, xs, _ = views(rows, features)
    weight = layer.linear.weight

    def casts(**options: Any) -> set[int]:
        with torch.autocast("cuda", torch.bfloat16, **options):
            ys = [layer(x) for x in xs]
            of_linear = nn.functional.linear(xs[0], weight)
        two = (rows, features) == TWO_NODES
        nodes = [y.grad_fn.next_functions[0][0] if two else y.grad_fn for y in ys]
        found = [node.saved_tensors[1] if features == 64 else node.cast for node in nodes]
        assert all(cast.equal(weight.bfloat16()) for cast in found)
        return {*(cast.data_ptr() for cast in found), of_linear.grad_fn._saved_mat2.data_ptr()}

    assert len(casts()) == 1
    with torch.no_grad():
        weight.mul_(0.5)
    assert len(casts()) == 1
    assert len(casts(cache_enabled=False)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("through", [True, False])  # whether x has a gradient
@pytest.mark.parametrize(("rows", "features"), [(2048, 64), ONE_NODE, TWO_NODES])
def test_gradients_of_two_views(rows: int, features: int, through: bool, keeps: bool) -> None:
    """They are those of calls that share nothing: all but that of the weight bit for bit."""
    layer, xs, dys = views(rows, features)
    for x in xs:
        x.requires_grad_(through)
    wanted = [*layer.parameters(), *(xs if through else ())]
    alone = torch.autograd.grad(outputs(layer, xs, cache_enabled=False), wanted, dys)
    ys = outputs(layer, xs)
    for _ in range(1 + keeps):
        found = torch.autograd.grad(ys, wanted, dys, retain_graph=keeps)
        assert error(found[0], alone[0]) <= bound(rows)
        assert found[0].dtype is torch.float32 and found[0].is_contiguous()
        assert all(a.equal(b) for a, b in zip(found[1:], alone[1:], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "features"), [ONE_NODE, TWO_NODES])
def test_no_memory_holds_the_gradients_of_both_views(rows: int, features: int) -> None:
    """The memory of the second gradient is saved."""
    layer, xs, dys = views(rows, features)

    def peak(**options: Any) -> int:
        ys = outputs(layer, xs, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.backward(ys, dys)
        layer.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    peak(), peak(cache_enabled=False)  # the first calls allocate cuBLAS' workspace
    saved = 4 * features * features - 2 * 2 * rows * features  # a gradient, less dg and x of a view in 16 bits
    assert peak() <= peak(cache_enabled=False) - saved + 4096
    assert not layer.linear.weight._backward_hooks


@pytest.mark.gpu
def test_one_node_frees_a_large_cast_early(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, features = 512, 2048
    layer, xs, dys = views(rows, features)
    wanted = [*layer.parameters(), xs[0]]

    def gradients() -> tuple[Any, int]:
        y = outputs(layer, xs[:1])[0]
        assert y.grad_fn.name() == "_WholeBackward"
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.autograd.grad(y, wanted, dys[0]), torch.cuda.max_memory_allocated()

    gradients()  # the first call allocates cuBLAS' workspace
    early, peak = gradients()
    monkeypatch.setattr(_nodes, "_LARGE", features * features + 1)
    gradients()
    late, peak_of_late = gradients()
    assert peak <= peak_of_late - features * features  # half of the cast's bytes
    assert error(early[0], late[0]) <= bound(rows)
    assert all(a.equal(b) for a, b in zip(early[1:], late[1:], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "features"), [ONE_NODE, TWO_NODES])
def test_backward_through_one_view_of_two(rows: int, features: int) -> None:
    layer, xs, dys = views(rows, features)
    weight = layer.linear.weight
    alone = [
        torch.autograd.grad(y, weight, dy)[0]
        for y, dy in zip(outputs(layer, xs, cache_enabled=False), dys, strict=True)
    ]
    ys = outputs(layer, xs)
    for i in (1, 0):
        torch.autograd.grad(ys[i], xs[i], dys[i], retain_graph=True)  # leaves nothing behind
        (found,) = torch.autograd.grad(ys[i], weight, dys[i], retain_graph=True)
        assert error(found, alone[i]) <= bound(rows)


@pytest.mark.gpu
def test_other_uses_of_the_weight_in_the_region() -> None:
    """A third call on another stream, one of more rows, and PyTorch's own product have gradients of their own."""
    rows, features = ONE_NODE
    layer, xs, dys = views(rows, features)
    weight = layer.linear.weight
    many, side = torch.randn(4 * features, features, device="cuda"), torch.cuda.Stream()
    dy_of_many = torch.randn_like(many, dtype=torch.bfloat16)

    def gradient(**options: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16, **options):
            ys = [layer(xs[0]), layer(many), nn.functional.linear(xs[0], weight), layer(xs[1])]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ys.append(layer(xs[1]))
        dys_of = [dys[0], dy_of_many, dys[0], dys[1], dys[0]]
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return torch.autograd.grad(ys, weight, dys_of)[0]

    # PyTorch's own product has a gradient in bfloat16, which is rounded alike in both
    assert error(gradient(), gradient(cache_enabled=False)) <= bound(rows + 2 * features)


@pytest.mark.gpu
def test_two_views_in_a_cuda_graph() -> None:
    rows, features = ONE_NODE
    layer, xs, dys = views(rows, features)

    def step() -> Any:
        return torch.autograd.grad(outputs(layer, xs), list(layer.parameters()), dys)

    assert_replay_is_a_step(step)


@pytest.mark.gpu
def test_second_derivatives_of_two_views() -> None:
    """They are refused, as of one view under autocast."""
    layer, xs, dys = views(*ONE_NODE)
    with pytest.raises(RuntimeError, match="no second derivatives under autocast"):
        torch.autograd.grad(outputs(layer, xs), layer.linear.weight, dys, create_graph=True)


@pytest.mark.gpu
def test_frozen_statistics_share_too() -> None:
    rows, features = ONE_NODE
    weight = torch.randn(features, features, device="cuda", requires_grad=True)
    mean, var = torch.zeros(features, device="cuda"), torch.ones(features, device="cuda")
    xs = [torch.randn(rows, features, device="cuda") for _ in range(2)]

    def gradient(**options: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16, **options):
            ys = [linear_batch_norm(x, weight, running_mean=mean, running_var=var, activation="relu") for x in xs]
        return torch.autograd.grad([y.float().square().sum() for y in ys], weight)[0]

    assert error(gradient(), gradient(cache_enabled=False)) <= bound(rows)
