"""gsbn.torch with a process group: two ranks compute the same as one process with all their rows."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import ConvBatchNorm2d, LinearBatchNorm1d, SyncBatchNorm, _groups, linear_batch_norm  # noqa: E402
from tests.support.ranks import SIZE, Ranks  # noqa: E402
from tests.torch.layers import I, O, assert_same, batch, pair, step  # noqa: E402

if not distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

ROWS = 20
ALL = {"bias": True, "scale": True, "activation": "relu", "momentum": None}
SPLITS = [(13, 7), (19, 1), (20, 0), (0, 20)]


NCCL = pytest.param("nccl", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=["gloo", NCCL])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes on the CPU, and two with a GPU each."""
    if request.param == "nccl" and torch.cuda.device_count() < SIZE:
        pytest.skip(f"needs {SIZE} GPUs that this PyTorch sees")
    made = Ranks(request.param)
    yield made
    made.close()


def share(whole: Any, rank: int, split: tuple[int, ...]) -> Any:
    """The rows of a rank."""
    return whole.split(split)[rank]


def numbers(tensors: list[Any]) -> list[np.ndarray]:
    return [a.detach().double().cpu().numpy() for a in tensors]


def small(device: str = "cpu", dtype: Any = torch.float64, **options: Any) -> LinearBatchNorm1d:
    """The layer of layers.py, with the process group of all ranks."""
    layer, _ = pair(device, dtype, **options)
    layer.norm = sync(layer.norm)
    return layer


def sync(norm: Any, process_group: Any = None) -> Any:
    if isinstance(norm, gsbn.torch.BatchRenorm1d):
        norm.process_group = process_group or distributed.group.WORLD
        return norm
    made = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats,
                         process_group=process_group)  # fmt: skip
    made._parameters, made._buffers = norm._parameters, norm._buffers
    return made


def head() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(I, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.0)
    return nn.Sequential(*first, nn.Linear(6, O, bias=False), nn.BatchNorm1d(O, affine=False)).double()


# ---- one step


def a_step(rank: int, device: str, split: tuple[int, ...], options: Any, times: int = 2) -> Any:
    layer = small(device, **options)
    x, weights = batch(device), cosines(ROWS).to(device)
    for _ in range(times):
        layer.zero_grad()
        leaf = share(x, rank, split).clone().requires_grad_()
        y = layer(leaf)
        (y * share(weights, rank, split)).sum().backward()
    return [numbers(list(a)) for a in ((y, leaf.grad), (p.grad for p in layer.parameters()), layer.buffers())]


def cosines(rows: int) -> Any:
    return torch.arange(rows * O, dtype=torch.float64).reshape(rows, O).cos()


def of_one_process(options: Any, times: int = 2) -> Any:
    """The same by PyTorch's modules in one process, with all rows."""
    layer, plain = pair(**options)
    for _ in range(times):
        plain.zero_grad()
        leaf = batch().requires_grad_()
        y = plain(leaf)
        (y * cosines(ROWS)).sum().backward()
    gradients = dict(plain.named_parameters())
    of_parameters = [gradients[name].grad for name, _ in layer.named_parameters()]
    return [numbers(list(a)) for a in ((y, leaf.grad), of_parameters, plain.buffers())]


def of_a_convolution(rank: int, device: str, split: tuple[int, ...], last: bool, process_group: bool = True) -> Any:
    """A step of the samples of a rank, with channels last or contiguous; y is in PyTorch's format for them."""
    torch.manual_seed(0)
    group = distributed.group.WORLD if process_group else None
    layer = ConvBatchNorm2d(I, O, activation="relu", dtype=torch.float64, process_group=group).to(device)
    x = share(batch("cpu", shape=(ROWS, I, 2, 3)), rank, split).to(device)
    leaf = x.to(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()
    y = layer(leaf)
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    (y * share(cosines(6 * ROWS).view(ROWS, O, 2, 3), rank, split).to(device)).sum().backward()
    return [numbers(list(a)) for a in ((y, leaf.grad), (p.grad for p in layer.parameters()), layer.buffers())]


@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_convolutions(ranks: Ranks, split: tuple[int, ...], last: bool) -> None:
    """As test_a_step_is_that_of_one_process, of 6 rows a sample: sums of 120 rows end below 1e-11."""
    found = ranks(of_a_convolution, split, last)
    rows, gradients, buffers = of_a_convolution(0, "cpu", (ROWS, 0), last, False)
    for i, whole in enumerate(rows):
        np.testing.assert_allclose(np.concatenate([of[0][i] for of in found]), whole, rtol=0, atol=1e-11)
    for i, whole in enumerate(gradients):
        np.testing.assert_allclose(sum(of[1][i] for of in found), whole, rtol=0, atol=1e-11)
    for i, whole in enumerate(buffers):
        np.testing.assert_allclose(found[0][2][i], whole, rtol=0, atol=1e-11)
        np.testing.assert_array_equal(found[0][2][i], found[1][2][i])


@pytest.mark.parametrize(
    "options",
    [ALL, {"track_running_stats": False}, ALL | {"renorm": (1.25, 0.5, 1)}],
    ids=["all", "no statistics", "renorm"],
)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_step_is_that_of_one_process(ranks: Ranks, split: tuple[int, ...], options: dict[str, Any]) -> None:
    """Ranks have their rows of y and dx, gradients of parameters add up, and the statistics have the same bits.

    In float64: chains of some 30 roundings of 1.1e-16, through weights and dy near 1 and sums of 20 rows, end below
    1e-12.
    """
    found = ranks(a_step, split, options)
    rows, gradients, buffers = of_one_process(options)
    for i, whole in enumerate(rows):
        np.testing.assert_allclose(np.concatenate([of[0][i] for of in found]), whole, rtol=0, atol=1e-12)
    for i, whole in enumerate(gradients):
        np.testing.assert_allclose(sum(of[1][i] for of in found), whole, rtol=0, atol=1e-12)
    for i, whole in enumerate(buffers):
        np.testing.assert_allclose(found[0][2][i], whole, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found[0][2][i], found[1][2][i])


def errors(rank: int, device: str, shape: tuple[int, int], split: tuple[int, ...], cast: bool) -> Any:
    """The norm-wise errors of PyTorch's modules, with all rows in one process, and of ours."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(*shape), nn.BatchNorm1d(shape[1])).to(device)
    ours, truth = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)), copy.deepcopy(plain).double()
    gsbn.torch.convert(ours)
    x, dy = (torch.randn(sum(split), n, device=device) for n in shape)
    results = []
    for model in (truth, plain, ours):
        at, slope = (share(a, rank, split) if model is ours else a for a in (x, dy))
        at = at.to(model[0].weight.dtype, copy=True).requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=cast and model is not truth):
            y = model(at)
        y.backward(slope.to(y.dtype))
        of_rows, sums = [y.detach(), at.grad], [model[0].weight.grad, model[1].weight.grad, model[1].bias.grad]
        if model is ours:
            for gradient in sums:
                distributed.all_reduce(gradient)
        else:
            of_rows = [share(a, rank, split) for a in of_rows]
        results.append([a.double() for a in (*of_rows, *sums, model[1].running_mean, model[1].running_var)])
    exact, *found = results
    return y.grad_fn.name(), *(
        [float((a - e).norm() / e.norm()) for a, e in zip(of, exact, strict=True)] for of in found
    )


def assert_as_accurate(ranks: Ranks, shape: tuple[int, int], split: tuple[int, ...], cast: bool, node: str) -> None:
    """The accuracy rule: at most 1.05 times the error of PyTorch's modules plus a quarter of eps."""
    eps = torch.finfo(torch.bfloat16 if cast else torch.float32).eps
    for name, theirs, ours in ranks(errors, shape, split, cast):
        assert name == node
        for mine, its in zip(ours, theirs, strict=True):
            assert mine <= 1.05 * its + eps / 4


def test_as_accurate_as_one_process(ranks: Ranks) -> None:
    assert_as_accurate(ranks, (96, 80), (500, 140), False, "_WholeBackward")


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("ranks", [NCCL], indirect=True)
def test_large_calls(ranks: Ranks, cast: bool) -> None:
    """So large that there are two autograd nodes; the backward of the second one exchanges the sums."""
    assert_as_accurate(ranks, (4096, 2048), (1500, 500), cast, "_NormBackward")


# ---- as a part of PyTorch


def ten_steps(rank: int, device: str, split: tuple[int, ...]) -> Any:
    """Ten steps of SGD under DistributedDataParallel, which averages gradients: the loss is the mean of the batch."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(head()).to(device)
    report = gsbn.torch.convert(model)
    assert len(report.replaced) == 2 and not report.left
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for i in range(10):
        optimizer.zero_grad()
        loss = parallel(share(batch(device) + i, rank, split)).pow(3).sum() / (ROWS * O)
        (loss * SIZE).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.state_dict()), numbers(list(model.state_dict().values()))


@pytest.mark.parametrize("split", [(10, 10), (15, 5), (20, 0)], ids=str)
def test_data_parallel(ranks: Ranks, split: tuple[int, ...]) -> None:
    """In float64 a step has an error of at most 1e-13, and each of ten steps may double it: below 1e-10."""
    plain = head()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for i in range(10):
        optimizer.zero_grad()
        loss = plain(batch() + i).pow(3).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (ours, names, state), (others, _, same) = ranks(ten_steps, split)
    assert names == list(plain.state_dict())
    np.testing.assert_allclose(np.add(ours, others), losses, rtol=0, atol=1e-10)
    for mine, its, whole in zip(state, same, numbers(list(plain.state_dict().values())), strict=True):
        np.testing.assert_array_equal(mine, its)
        np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-10)


def in_other_ways(rank: int, device: str, split: tuple[int, ...]) -> None:
    x = share(batch(device), rank, split)
    layer = small(device, **ALL)
    for training in (True, False):
        again = copy.deepcopy(layer).train(training)
        wanted = step(copy.deepcopy(layer).train(training), x)
        found = step(again, x, lambda x, m=again: checkpoint(m, x, use_reentrant=False))
        assert_same(found[:-3], wanted[:-3], close=0)
        assert again.norm.num_batches_tracked == 2 * training
    # The function, and three dimensions
    state = dict(zip(("running_mean", "running_var"), (b.clone() for b in layer.norm.buffers()), strict=False))
    y = linear_batch_norm(
        x, layer.linear.weight, layer.scale, bias=layer.linear.bias, gamma=layer.norm.weight, beta=layer.norm.bias,
        **state, training=True, activation="relu", process_group=distributed.group.WORLD,
    )  # fmt: skip
    long = x.reshape(len(x), I, 1).requires_grad_()
    z = layer(long)
    assert y.equal(layer(x)) and z.squeeze(2).equal(y)
    (y.sum() + z.sum()).backward()
    # Under autocast, in 16 bits
    wide, narrow = small(device, torch.float32, scale=True), small(device, torch.float32, scale=True)
    narrow.linear.bfloat16()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = wide(x.float())
    assert y.dtype == torch.bfloat16 and y.equal(narrow(x.bfloat16()))


@pytest.mark.parametrize("split", [(13, 7), (20, 0)], ids=str)
def test_other_ways_to_run_it(ranks: Ranks, split: tuple[int, ...]) -> None:
    ranks(in_other_ways, split)


def compiled(rank: int, device: str) -> None:
    model = nn.Sequential(small(device, **ALL), nn.Linear(O, I, device=device, dtype=torch.float64), *head())
    model = model.to(device)
    model[-1] = sync(model[-1], distributed.new_group([0, 1]))
    gsbn.torch.convert(model)
    again = copy.deepcopy(model)
    run = torch.compile(again, fullgraph=True, backend="aot_eager")
    x = share(batch(device), rank, (13, 7))
    assert_same(step(again, x, run), step(model, x), 1e-12)


def test_compiled(ranks: Ranks) -> None:
    ranks(compiled)


# ---- nothing to share


def alone(rank: int, device: str) -> None:
    """Calls of one rank alone; they would never end if they waited for the other."""
    one, member = distributed.new_group([0]), distributed.new_group([0, 1])
    if rank == 1:
        assert one is distributed.GroupMember.NON_GROUP_MEMBER
    layer, plain = pair(device)
    other = copy.deepcopy(plain)
    layer.norm = sync(layer.norm, one)
    assert_same(step(layer, batch(device)), step(plain, batch(device)))
    layer.norm = sync(layer.norm, member)
    for statistics in (True, False):
        if rank == 1:
            assert_same(step(layer.eval(), batch(device)), step(plain.eval(), batch(device)))
            layer.train().norm.eval(), plain.train().norm.eval()  # frozen
            assert_same(step(layer, batch(device)), step(plain, batch(device)))
        for norm in (layer.norm, plain.norm) if statistics else ():
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    if rank == 1:
        state = {"running_mean": other.norm.running_mean, "running_var": other.norm.running_var}
        linear_batch_norm(batch(device), other.linear.weight, **state, process_group=member)


def test_nobody_waits_without_need(ranks: Ranks) -> None:
    """A group of one rank, a rank that is not a member, and inference with running or batch statistics."""
    ranks(alone)


def test_without_distributed() -> None:
    """Without a process group the layer works as BatchNorm1d."""
    layer, plain = pair(**ALL)
    layer.norm = sync(layer.norm)
    assert_same(step(layer, batch()), step(plain, batch()))


# ---- one group for all, copies, errors


def options(rank: int, device: str) -> None:
    """A group has the timeout of its ProcessGroup, or is set up with other options before the first call."""
    from datetime import timedelta

    patient = distributed.new_group([0, 1], timeout=timedelta(hours=2))
    found = _groups.group_of(patient, torch.device(device))
    assert found is not None and found.timeout == 7200.0
    with pytest.raises(RuntimeError, match=r"^process_group: .* got one that has its group already$"):
        gsbn.torch.group(patient, timeout=1.0)
    quick = distributed.new_group([0, 1])
    made = gsbn.torch.group(quick, timeout=77.0, peer_memory=False, device=device)
    assert made is not None and (made.timeout, made._peer_memory) == (77.0, False)
    layer = small(device)
    layer.norm = sync(layer.norm, quick)
    layer(share(batch(device), rank, (13, 7)))
    assert _groups.group_of(quick) is made
    assert gsbn.torch.group(distributed.GroupMember.NON_GROUP_MEMBER) is None
    with pytest.raises(TypeError, match=r"^process_group: expected a torch.distributed ProcessGroup"):
        gsbn.torch.group("nccl")


def test_options_of_a_group(ranks: Ranks) -> None:
    ranks(options)


def without_a_current_device(rank: int, device: str) -> None:
    """Like nn.SyncBatchNorm, a layer works on a device that is not the current one."""
    x = share(batch(device), rank, (13, 7))
    of_x = x.device
    with torch.cuda.device(0):
        layer = small(device)
        layer.norm = sync(layer.norm, distributed.new_group([0, 1]))
        layer(x)
        torch.cuda.synchronize(of_x)


def test_the_current_device_may_be_another(ranks: Ranks) -> None:
    if ranks.backend == "gloo":
        pytest.skip("a CPU is always current")
    ranks(without_a_current_device)


def life(rank: int, device: str) -> None:
    x = share(batch(device), rank, (13, 7))
    process_group = distributed.new_group([0, 1])
    before = len(_groups._groups)
    layers = [LinearBatchNorm1d(I, O, device=device, process_group=process_group).double() for _ in range(2)]
    layers.append(copy.deepcopy(layers[0]))
    for layer in layers:
        assert layer.norm.process_group is process_group and list(layer.state_dict()) == list(pair()[0].state_dict())
        layer(x)
    assert len(_groups._groups) == before + 1
    memory = io.BytesIO()
    torch.save(layers[0].state_dict(), memory)
    layers[1].load_state_dict(torch.load(io.BytesIO(memory.getvalue())))
    assert layers[1](x).equal(layers[0](x))
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(layers[0])
    group = _groups.group_of(process_group)
    del layer, layers
    distributed.barrier()
    distributed.destroy_process_group(process_group)
    del process_group
    assert len(_groups._groups) == before
    with pytest.raises(RuntimeError, match="it is closed"):
        group.check()
    # With the group of all ranks it can be pickled
    layer = LinearBatchNorm1d(I, O, device=device, dtype=torch.float64, process_group=distributed.group.WORLD)
    assert pickle.loads(pickle.dumps(layer))(x).equal(layer(x))
    assert layer(x).equal(layer(x))


def test_one_group_as_long_as_its_process_group(ranks: Ranks) -> None:
    ranks(life)


def wrong(rank: int, device: str) -> None:
    weight, x = batch(device, shape=(O, I)), batch(device)
    with pytest.raises(
        TypeError, match=r"process_group: expected a torch\.distributed ProcessGroup or None, got 'all'"
    ):
        linear_batch_norm(x, weight, training=True, process_group="all")
    layer, few = small(device), share(x[:1], rank, (1, 0))
    layer.norm.process_group = distributed.new_group([0, 1])
    if device != "cpu":  # the host does not wait there, so the next call raises
        layer(few)
        torch.cuda.synchronize()
    with pytest.raises((ValueError, RuntimeError), match="Expected more than 1 value per channel"):
        layer(few)
    if device == "cpu":
        # As for a SyncBatchNorm that is called by itself
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
            SyncBatchNorm(I).double()(x)
        with pytest.raises(RuntimeError, match=f"rank {1 - rank} makes .* of {O + 1 - rank} features"):
            linear_batch_norm(x, batch(shape=(O + rank, I)), training=True, process_group=distributed.new_group([0, 1]))
    else:
        torch.manual_seed(0)
        theirs = nn.SyncBatchNorm(I, device=device, dtype=torch.float64)
        assert_same(step(sync(copy.deepcopy(theirs)), share(x, rank, (13, 7))), step(theirs, share(x, rank, (13, 7))))


def test_errors(ranks: Ranks) -> None:
    ranks(wrong)
