"""What calls launch, on a fake GPU: grids, addresses and cooperative launches, for any shape and option."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import _plan
from gsbn._backward import How, backward_within, run
from gsbn._cuda import device as _device
from gsbn._cuda import driver as _driver
from gsbn._host import run as _run
from gsbn._plan import declared as _declared
from gsbn._plan.activations import macros
from gsbn._plan.products import SM90_WORDS
from gsbn._plan.sm90_variants import MODES, forward_sm90
from gsbn._plan.tensor_maps import L2_256B
from gsbn._plan.variants import skinny_product, tall_product
from gsbn._ranks import group as _group
from tests.support import fake_gpu


@pytest.mark.parametrize("device", [fake_gpu.HOPPER, fake_gpu.AMPERE], ids=["Hopper", "Ampere"])
def test_every_launch_is_as_promised(device: fake_gpu._plan.Device) -> None:
    """At most `sms` CTAs, so at most `sms` SMs; only addresses of this call's arrays; cooperative only if necessary."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        call = fake_gpu.draw(seed)
        with fake_gpu.gpu(device) as (kind, log):
            if (refusal := call.make()) is not None:
                assert refusal.startswith("gemm: ")
                continue
            arrays = [a for a in (*call.arrays.values(), call.dy, *kind.made) if a is not None]
        known = {a.pointer >> 32 for a in arrays} | {0}
        sms = call.options["sms"]
        most = sms if sms is not None and sms < device.sms else 2**31 - 1
        preparing = 0  # launches of gsbn.prepare, which has no `sms`
        if call.prepared:
            preparing = 2 if log[1].name == "split_limbs" and log[1].words[0] == 0 else 1
        for i, launch in enumerate(log):
            seen[launch.name] += 1
            if launch.name == "cuBLAS":
                continue
            prepares = i < preparing
            assert launch.limited == (not prepares and most == sms), (
                seed,
                launch,
            )  # limited: it begins after the one ahead has ended
            assert 1 <= launch.grid <= (2**31 - 1 if prepares else most), (seed, launch)
            assert {word >> 32 for word in launch.words} <= known, (seed, launch)
            if launch.cooperative:
                assert launch.name == "forward_sm90" and call.options["training"]
                assert len(call.arrays["x"].shape) == 2
                assert call.arrays["x"].shape[0] > 32 or call.options["momentum"] is None
    hopper = {"forward_sm90", "split_limbs"}
    assert set(seen) >= {"gemm_tiled", "scale_stats", "normalize", "copy_matrix", "cuBLAS"}
    assert set(seen) >= {"backward_sums", "backward_dg", "backward_fused", "sum_features"}
    assert hopper <= set(seen) if device == fake_gpu.HOPPER else not hopper & set(seen)


@pytest.mark.parametrize(("sms", "planned"), [(None, 40), (100, 40), (30, 30)])
def test_a_stream_of_a_green_context_has_no_more_sms_than_that(
    sms: int | None, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on it is planned for the smaller number; the next one on another stream has all SMs again."""
    monkeypatch.setattr(_driver, "sms_of_stream", {7 << 20: 40, 8 << 20: None}.get)
    x, weight, dy = (fake_gpu.Array(shape, "float32") for shape in ((3000, 520), (1032, 520), (3000, 1032)))

    def launches(stream: int, sms: int | None) -> list[tuple[str, bool, int]]:
        with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
            kind.current = stream
            _, saved = gsbn.forward(x, weight, training=True, sms=sms, return_saved=True)
            gsbn.backward(dy, saved, sms=sms)
            described = gsbn.describe(x, weight, training=True, sms=sms, return_saved=True)
        assert described.kernels == tuple(launch.name for launch in log[: len(described.kernels)])
        return [(launch.name, launch.limited, launch.grid) for launch in log]

    found = launches(7 << 20, sms)
    assert found == launches(8 << 20, planned) != launches(8 << 20, None)
    assert all(limited and grid <= planned for name, limited, grid in found if name != "cuBLAS")
    with pytest.raises(TypeError, match=r"^sms: expected a number of SMs or None, got 1\.5"):
        launches(7 << 20, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("act", ["forward", "backward", "fold", "prepare"])
def test_a_default_stream_of_a_green_context_is_refused(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the primary context, where gsbn works, the same handle is another stream."""
    x, weight, running = (
        fake_gpu.Array((64, 40), "float32"),
        fake_gpu.Array((24, 40), "float32"),
        fake_gpu.Array((24,), "float32"),
    )
    current = [1]  # what fake_gpu.gpu calls the primary context
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        y, saved = gsbn.forward(x, weight, training=True, return_saved=True)
        calls = {
            "forward": lambda: gsbn.forward(x, weight, training=True),
            "backward": lambda: gsbn.backward(y, saved),
            "fold": lambda: gsbn.fold(weight, None, running, running),
            "prepare": lambda: gsbn.prepare(weight),
        }
        found = _device.cuda()
        found.runtime.getDevice, found.runtime.setDevice = lambda: 0, lambda _: current.__setitem__(0, 1)
        found.current_context = lambda: current[0]
        found.set_context = lambda context: current.__setitem__(0, context)
        launched = len(log)
        monkeypatch.setattr(_driver, "sms_of_stream", lambda stream: 40 if stream == 0 and current[0] == 2 else None)
        current[0] = 2
        with pytest.raises(RuntimeError, match="default stream of a green context of 40 SMs"):
            calls[act]()
        assert (len(log), current[0]) == (launched, 2)
        kind.current = 8 << 20  # a stream that was created in the primary context
        calls[act]()
        assert (len(log) > launched, current[0]) == (True, 2)


def test_a_call_launches_the_same_every_time() -> None:
    assert list(fake_gpu.lines(30)) == list(fake_gpu.lines(30))


@pytest.mark.parametrize("transposed", [False, True])
def test_fold_is_one_launch_after_a_copy_of_a_transposed_weight(transposed: bool) -> None:
    n, k = 24, 40
    weight = fake_gpu.Array((n, k), "bfloat16", (2, 2 * n) if transposed else None)
    vectors = {name: fake_gpu.Array((n,), "float32") for name in ("scale", "running_mean", "running_var", "gamma")}
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        w, b = gsbn.fold(weight, **vectors)
    assert [launch.name for launch in log] == ["copy_matrix"] * transposed + ["fold"]
    passed = dict(zip(_declared.parameters(_plan.fold("bfloat16"))[1], log[-1].words, strict=True))
    code = 8 + _declared.kind_code("float32")  # stride 1
    codes = dict.fromkeys(("bias", "beta"), 0) | dict.fromkeys(vectors, code)
    record = _declared.record(_plan.fold("bfloat16"), {"k": k, "ldw": k, "eps": 1e-5, "number": 1.0, **codes})
    assert log[-1].grid == n
    assert log[-1].records == (record.tobytes().hex(),)
    assert passed.pop("w") == (log[0].words[1] if transposed else weight.pointer)
    assert (passed.pop("w_folded"), passed.pop("b_folded")) == (w.pointer, b.pointer)
    assert passed == {name: array.pointer for name, array in vectors.items()} | {"bias": 0, "beta": 0}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("rows", [2048, 20480])
def test_rows_off_16_bytes_are_copied_in_one_launch(rows: int, prepared: bool) -> None:
    """One launch before it copies both operands, and one after it y if tiles are deferred; a prepared weight needs no
    copy."""
    x, weight = fake_gpu.Array((rows, 2047), "bfloat16"), fake_gpu.Array((2047, 2047), "bfloat16")
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        operand = gsbn.prepare(weight) if prepared else weight
        log.clear()
        y = gsbn.forward(x, operand, training=True, gemm="sm90")
    assert [launch.name for launch in log] == ["copy_rows", "forward_sm90", *["copy_rows"] * (rows > 2048)]
    before, one, *after = (launch.words for launch in log)
    assert (before[0], before[2]) == (x.pointer, 0 if prepared else weight.pointer)
    if after:
        assert after[0][1] == y.pointer and after[0][2:] == (0,) * 4
    else:
        assert one[0] == y.pointer


def test_a_backward_writes_rows_that_start_anywhere() -> None:
    """dx and dw are written directly, without a copy."""
    x, weight, dy = (fake_gpu.Array(of, "bfloat16") for of in ((2048, 2047), (2047, 2047), (2048, 2047)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        _, saved = gsbn.forward(x, weight, training=True, return_saved=True)
        log.clear()
        gsbn.backward(dy, saved, needs=("x", "weight"))
    assert [launch.name for launch in log] == ["copy_rows", "backward_fused", "forward_sm90", "forward_sm90"]
    assert {launch.words[0] for launch in log[-2:]} <= {made.pointer for made in kind.made}


@pytest.mark.parametrize("shape", [(512, 2048, 2048), (320, 132, 136)])
def test_the_limbs_of_a_backward_take_three_launches(shape: tuple[int, int, int]) -> None:
    """One takes all maxima, one splits the weight and dg both ways, one splits x over dg; no launch clears memory."""
    (B, I, O), of_both = shape, _plan.Limits(limbs_rs=False)
    x, weight, dy = (fake_gpu.Array(of, "float32") for of in ((B, I), (O, I), (B, O)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        _, saved = gsbn.forward(x, weight, training=True, return_saved=True, gemm="sm90")
        log.clear()
        backward_within(of_both, dy, saved, needs=("x", "weight"))
        names = ["backward_fused", "take_maxima", "split_tiles", "forward_sm90", "split_tiles", "forward_sm90"]
        assert [launch.name for launch in log] == names
        _, maxima, first, dx, second, dw = (launch.words for launch in log)
        dweight = kind.made[-2].pointer
        assert maxima[:3] == (weight.pointer, first[1], x.pointer) and first[0] == weight.pointer
        assert second[0] == x.pointer and second[5] == first[1]  # x's limbs overwrite dg's
        assert (first[5] == dweight, first[9] == first[1]) == (O % 64 == 0, O % 64 == 0)
        assert dx[0] != dw[0] == dweight
        log.clear()
        backward_within(of_both, dy, saved, needs=("x",))
        names = ["backward_fused", "take_maxima", "split_limbs", "split_tiles", "forward_sm90"]
        assert [launch.name for launch in log] == names


@pytest.mark.parametrize("needs", [("x", "weight"), ("x",)])
def test_few_rows_split_dg_and_take_the_weight_as_it_is(needs: tuple[str, ...]) -> None:
    """dx takes the weight MN-major; dw takes limbs of dg's and x's transposes, as without dx."""
    B, I, O = 128, 4096, 8192
    x, weight, dy = (fake_gpu.Array(of, "float32") for of in ((B, I), (O, I), (B, O)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        _, saved = gsbn.forward(x, weight, training=True, return_saved=True)
        log.clear()
        gsbn.backward(dy, saved, needs=needs)
    names = ["backward_fused", "split_limbs", "forward_sm90"]
    if "weight" in needs:
        names = ["backward_fused", "take_maxima", "split_tiles", "forward_sm90", "split_tiles", "forward_sm90"]
    assert [launch.name for launch in log] == names
    i = names.index("forward_sm90")
    passed = dict(zip(SM90_WORDS, log[i].words, strict=True))
    assert (passed["x_exponents"] >> 32, passed["w_exponents"]) == (kind.made[-1].pointer >> 32, 0)
    _, dg_map, weight_map, _ = log[i].records
    assert weight_map == repr((weight.pointer, (O, I, 4 * I, "float32", 64, 32, L2_256B)))
    of_dg = log[i - 1].words[1 if names[i - 1] == "split_limbs" else 8]
    assert dg_map.startswith(f"({of_dg}, ({B}, {O}, ")
    for launch in log:
        assert launch.name == "forward_sm90" or weight.pointer not in launch.words


@pytest.mark.parametrize("needs", [("x", "weight"), ("x",)])
def test_limbs_overwrite_dg_when_all_else_has_read_it(needs: tuple[str, ...]) -> None:
    """With many rows dw comes first and takes dg itself: scratch has dg, partial products of dw, the weight's limbs."""
    B, I, O = 65536, 512, 1024
    x, weight, dy = (fake_gpu.Array(of, "float32") for of in ((B, I), (O, I), (B, O)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        _, saved = gsbn.forward(x, weight, training=True, return_saved=True)
        log.clear()
        kind.made.clear()
        gsbn.backward(dy, saved, needs=needs)
    of_dw = ["tall_product", "reduce_split_k"] if "weight" in needs else []
    names = ["backward_sums", "backward_dg", *of_dw, "take_maxima", "split_limbs", "split_tiles", "forward_sm90"]
    assert [launch.name for launch in log] == names
    split, tiles = (next(launch.words for launch in log if launch.name == of) for of in ("split_limbs", "split_tiles"))
    dg, workspace = split[0], kind.made[-1]
    assert split[1] == dg and dg >> 32 == tiles[3] >> 32 == workspace.pointer >> 32
    assert workspace.shape[0] < 4 * (B * O + O * I) + (12 << 20)


def test_a_backward_asks_again_where_the_kept_y_starts() -> None:
    """y, which `gsbn.linear` keeps, may be the caller's `out`: alike but for its address, it may need a copy."""
    x, weight, dy = (fake_gpu.Array(of, "bfloat16") for of in ((64, 32), (48, 32), (64, 48)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        copies = []
        for beside in (0, 2, 0):
            y = fake_gpu.Array((64, 48), "bfloat16")
            out = fake_gpu.Array(y.shape, y.dtype, y.strides, y.pointer + beside)
            _, saved = gsbn.linear(x, weight, activation="relu", out=out, return_saved=True)
            log.clear()
            gsbn.backward(dy, saved)
            copies.append([launch.name for launch in log if launch.name.startswith("copy")])
    assert copies == [[], ["copy_rows"], []]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("shape", [(100000, 128, 128), (70001, 61, 201), (50000, 64, 1500)])
def test_dx_of_many_short_rows_is_one_launch(shape: tuple[int, int, int], column_major: bool, in_place: bool) -> None:
    """It takes dg itself, which dw reads later, and the weight K-major: a copy, or a column-major weight."""
    B, I, O = shape
    pitch = -(-O // 4) * 4
    x, weight, dy = (fake_gpu.Array(of, "float32") for of in ((B, I), (O, I), (B, O)))
    if column_major:
        weight = fake_gpu.Array((O, I), "float32", (4, 4 * pitch))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (kind, log):
        _, saved = gsbn.forward(x, weight, training=True, return_saved=True)
        log.clear()
        kind.made.clear()
        how = How.of(saved, ("x", "weight"))._replace(in_place=in_place)
        (dx, dweight, *_), _ = run(kind, (dy, *saved[:4], None), how)
    copies = ["copy_matrix"] * (not column_major) + ["copy_rows"] * (O % 4 > 0)  # of the weight, and of dy
    names = [*copies, "backward_sums", "backward_dg", "skinny_product", "tall_product", "reduce_split_k"]
    assert sorted(launch.name for launch in log) == sorted(names) and [launch.name for launch in log[-3:]] == names[-3:]
    kernel, launch, of_dw = skinny_product(64 if I <= 64 else 128, 2), log[-3], log[-2]
    passed = dict(zip(_declared.parameters(kernel)[1], launch.words, strict=True))
    dg, of_x, parts = of_dw.words
    assert (of_x, log[-1].words) == (x.pointer, (parts, dweight.pointer))
    copy = next((launch.words[1] for launch in log if launch.name == "copy_matrix"), weight.pointer)
    assert passed == {"x": dg, "w": copy, "g": dx.pointer}
    assert (dg == saved.deviations.pointer) == in_place
    record = np.frombuffer(bytes.fromhex(launch.records[0]), _declared.record_dtype(kernel))[0]
    ldw = pitch if column_major else _plan.in_rows(O, 4).strides[0]
    assert [int(record[name]) for name in ("m", "n", "k", "ldx", "ldw", "ldg")] == [B, I, O, pitch, ldw, I]
    assert record["flags"] & 6 == 2 and (("ANY_ROWS", "1") in launch.defines) == (I % 4 > 0)
    assert launch.grid == -(-B // int(record["stats_rows"])) <= fake_gpu.HOPPER.sms
    record = np.frombuffer(bytes.fromhex(of_dw.records[0]), _declared.record_dtype(tall_product()))[0]
    assert [int(record[name]) for name in ("m", "n", "k", "lda", "ldb")] == [B, O, I, pitch, I]
    blocks, parts = -(-O // 128) * -(-I // 128), -(-B // int(record["rows"]))
    assert (record["flags"], of_dw.grid) == (I % 4 == 0, blocks * parts)


class Alone:
    """A communicator that must not be called."""

    rank, size, on_host = 0, 2, True

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        raise AssertionError("a prepared call asks nobody")

    def close(self) -> None:
        pass


def exchange(waits: bool) -> SimpleNamespace:
    """The exchange of a group on a fake GPU."""
    return SimpleNamespace(
        waits=waits, size=2, features=1 << 20, address=1, device=0, obstacle=lambda: "",
        begin=lambda *_: None, end=lambda *_: None, gather=lambda *_: None,
    )  # fmt: skip


@pytest.mark.parametrize("waits", [True, False], ids=["peer memory", "NCCL"])
@pytest.mark.parametrize("rows", [0, 1, 2, 40, 1024, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_launches_that_wait_for_other_ranks_leave_sms_free(dtype: str, rows: int, waits: bool) -> None:
    """Another GPU may wait for a kernel that has not started here: some SMs stay free, with one or two CTAs per SM."""
    group = _group.Group(Alone(), 10.0, True)
    group._exchange = exchange(waits)
    waiting = {"merge_statistics": 1, "merge_sums": 1, "backward_fused": 2}
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        x, weight, dy = (fake_gpu.Array(shape, dtype) for shape in ((rows, 8192), (8192, 8192), (rows, 8192)))
        _, saved = gsbn.forward(x, weight, training=True, group=group, return_saved=True)
        gsbn.backward(dy, saved)
    for launch in log:
        name, in_the_launch = launch.name, ("RANKS", "1") in launch.defines
        ctas = 1 if in_the_launch else waiting.get(name, 0) * waits
        if ctas:
            assert launch.grid <= ctas * (fake_gpu.HOPPER.sms - _plan.problem.ROOM), (name, launch.grid)
    names = [launch.name for launch in log]
    if rows >= 1024:
        assert ("merge_statistics" not in names) == (waits and dtype != "float64")
    assert ("merge_sums" not in names) == (waits and 1 <= rows <= 1024 and "backward_fused" in names)
    assert names.count("merge_sums") in ((0, 1) if waits else (2,))


@pytest.mark.parametrize("waits", [True, False], ids=["peer memory", "NCCL"])
def test_skinny_kernels_with_a_group(waits: bool) -> None:
    """The skinny kernels serve there, too, on SMs that leave room, with merge_statistics between them."""
    group = _group.Group(Alone(), 10.0, True)
    group._exchange = exchange(waits)
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        x, weight = fake_gpu.Array((100000, 32), "bfloat16"), fake_gpu.Array((32, 32), "bfloat16")
        gsbn.forward(x, weight, training=True, group=group)
    merges = ["merge_statistics"] if waits else ["merge_statistics", "merge_statistics"]
    assert [launch.name for launch in log] == ["skinny_stats", *merges, "skinny_normalize"]
    if waits:
        assert all(launch.grid <= fake_gpu.HOPPER.sms - _plan.problem.ROOM for launch in log)


def test_errors_are_raised_before_other_ranks_are_asked() -> None:
    group = _group.Group(Alone(), 10.0, True)
    with fake_gpu.gpu(fake_gpu.HOPPER):
        x, weight = fake_gpu.Array((8, 16), "float32"), fake_gpu.Array((32, 16), "float32")
        running = {name: fake_gpu.Array((32,), "float32") for name in ("running_mean", "running_var")}
        with pytest.raises(ValueError, match="group: expected None in inference"):
            gsbn.forward(x, weight, **running, group=group)
        with pytest.raises(ValueError, match=r"^weight: expected shape"):
            gsbn.forward(x, fake_gpu.Array((32, 15), "float32"), training=True, group=group)


@pytest.mark.parametrize(
    ("dtype", "needs", "sms", "overlaps"),
    [
        ("bfloat16", ("x", "weight"), None, True),
        ("bfloat16", ("weight",), None, False),
        ("bfloat16", ("x", "weight"), 100, False),
        ("float32", ("x", "weight"), None, False),
    ],
)
def test_only_dw_after_dx_overlaps_with_it(dtype: str, needs: tuple[str, ...], sms: int | None, overlaps: bool) -> None:
    """Without dx it must wait for dg; limbs of the weight may lie in dweight's memory; two launches take more SMs."""
    x, weight, dy = (fake_gpu.Array(shape, dtype) for shape in ((128, 1024), (512, 1024), (128, 512)))
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        _, saved = gsbn.forward(x, weight, training=True, gemm="sm90", return_saved=True)
        log.clear()
        gsbn.backward(dy, saved, needs=needs, sms=sms)
    products = [launch.records[0] for launch in log if dict(launch.defines).get("MODE") == str(MODES["gemm"])]
    record = _declared.record_dtype(forward_sm90("bfloat16", "gemm", 64, 1))
    flags = [np.frombuffer(bytes.fromhex(of), record)[0]["flags"] for of in products]
    words = _declared.flags(vector_y=True)
    assert flags == [words] * (len(needs) - 1) + [words | _declared.flags(independent=overlaps)]


@pytest.mark.parametrize("activation", ["silu", ("leaky_relu", -0.25)])
def test_an_activation_changes_kernels_and_no_launch(activation: Any) -> None:
    """A call launches what it launches with relu, each kernel that knew of relu compiled for this activation."""
    for seed in range(60):
        logs = []
        for each in ("relu", activation):
            fake_gpu.Array._free = itertools.count(1 << 32, 1 << 32)
            call = fake_gpu.draw(seed)
            with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
                call._replace(options={**call.options, "activation": each}).make()
            logs.append(log)
        relu = dict(logs[0][-1].defines).get("ACTIVATION") if logs[0] else None
        assert relu in (None, "Relu")
        for theirs, ours in zip(*logs, strict=True):
            expected = tuple(pair for pair in theirs.defines if pair != ("ACTIVATION", "Relu"))
            expected += macros(activation) if expected != theirs.defines else ()
            assert ours == theirs._replace(defines=expected)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_linear_keeps_what_its_backward_reads(dtype: str, out: bool) -> None:
    """y where that tells the gradient, else u, of which a launch more makes y."""
    for activation in ("relu", "silu"):
        with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
            x, weight = fake_gpu.Array((300, 520), dtype), fake_gpu.Array((264, 520), dtype)
            bias = fake_gpu.Array((264,), dtype)
            given = {"out": fake_gpu.Array((300, 264), dtype)} if out else {}
            y, saved = gsbn.linear(x, weight, bias, activation, return_saved=True, **given)  # type: ignore[arg-type,call-overload]
            forward = len(log)
            gsbn.backward(fake_gpu.Array((300, 264), dtype), saved)
        assert (y is given["out"]) if out else (y.shape == (300, 264))
        assert (saved.deviations is y) == (activation == "relu") and saved.deviations.shape == (300, 264)
        last = log[forward - 1]
        if activation == "silu":
            assert (last.name, last.words) == ("activate", (saved.deviations.pointer, y.pointer))
        passes = [launch for launch in log[forward:] if launch.name.startswith("backward_")]
        assert passes and all(("IDENTITY", "true") in launch.defines for launch in passes)
        assert all(saved.deviations.pointer in launch.words for launch in passes)


@pytest.mark.parametrize("seed", range(40))
def test_equal_calls_are_planned_once(seed: int) -> None:
    """A key that cannot be made would plan every call again, without an error."""
    call = fake_gpu.draw(seed)
    with fake_gpu.gpu(fake_gpu.HOPPER):
        if call.make() is None:
            planned = len(_run._found)
            assert planned and call.make() is None and len(_run._found) == planned
