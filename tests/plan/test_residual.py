"""Plans of a residual: a forward's one launch adds it, or one after it; and one launch makes the gradient."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsbn
from gsbn import _plan
from gsbn._forward import forward_within
from gsbn._gradients import NEEDS
from gsbn._plan import ITEMSIZE, Limits, Matmul, Matrix, place_of_u, then_activate
from gsbn._plan.activate import plan_activate_backward, plan_residual
from gsbn._plan.backward import Asked, plan_backward
from gsbn._plan.copies import vector_rows, whole_words
from gsbn._plan.declared import parameters
from gsbn._plan.program import ABSENT, Array, Launch, Program
from gsbn._plan.sources import Kernel
from gsbn._plan.variants import activate, activate_backward
from tests.plan.fits import ARGUMENTS, known, largest_grid, matrices, problems
from tests.plan.seen import assert_steps_fit, plan
from tests.support import fake_gpu

ACTIVATIONS = st.sampled_from([None, "relu", "silu"])
NAMES = ARGUMENTS | {"residual", "kept", "u"}


def assert_fits(program: Program, p: Matmul) -> Launch:
    """Returns the last launch."""
    kernels = known("sm_90a", ("relu", "silu"))
    assert_steps_fit(program, NAMES, kernels, largest_grid(p.device))
    last = program.steps[-1]
    assert isinstance(last, Launch) and set(last.passed) == set(parameters(last.kernel)[1])
    item = (activate_backward if last.kernel.name == "activate_backward" else activate)(p.dtype)[1]
    assert last.fields["m"] * last.fields["n"] == p.m * p.n <= last.grid * item or p.device.limited
    return last


@given(
    data=st.data(),
    p=problems(),
    gemm=st.sampled_from(["auto", "cublas", "tiled", "sm90"]),
    out=st.booleans(),
    keeps=st.booleans(),
    training=st.booleans(),
    activation=ACTIVATIONS,
)
def test_a_forward_fits(
    data: st.DataObject, p: Matmul, gemm: str, out: bool, keeps: bool, training: bool, activation: Any
) -> None:
    residual = data.draw(matrices(p.m, p.n))
    p = p if out else p._replace(y=Matrix((p.n, 1), True))
    of_u, how = place_of_u(p, out=out, keeps=keeps)
    try:
        plain = plan(of_u, training=training and p.m > 1, gemm=gemm, saved=keeps, **how).program
    except ValueError:  # the gemm does not serve it
        return
    program = then_activate(plain, p, activation, out=out, keeps=keeps, residual=residual)
    last = assert_fits(program, p)
    assert program.steps[:-1] == plain.steps and (program.workspace, program.lent) == (plain.workspace, plain.lent)
    contiguous = p.y.aligned and p.y.strides == (p.n, 1)
    y = "out" if out else "y"
    u = y if contiguous and not keeps else "u"
    assert last.passed == {"u": u, "y": y, "residual": "residual", "v": "u" if keeps else ABSENT}
    assert (last.fields["residual_row"], last.fields["residual_col"]) == residual.strides
    assert (last.fields["y_row"], last.fields["y_col"]) == p.y.strides
    made = {array.name: array for array in program.arrays}
    assert ("u" in made) == (u == "u") and ("y" in made) != out
    assert u == y or made["u"] == Array("u", (p.m, p.n), p.dtype, scratch=not keeps)
    if keeps:  # what the caller finds by its place
        assert [array.name for array in program.arrays[-2:]] == ["deviations", "vectors"]


@given(data=st.data(), p=problems(), training=st.booleans(), saves=st.booleans(), activation=ACTIVATIONS)
def test_the_one_launch_takes_it_where_it_can(
    data: st.DataObject, p: Matmul, training: bool, saves: bool, activation: Any
) -> None:
    residual = data.draw(matrices(p.m, p.n))
    options = {"training": training and p.m > 1, "saves": saves}
    program = _plan.plan_forward(p, **options, activation=activation, residual=residual, out=True)
    assert_steps_fit(program, NAMES, known("sm_90a", ("relu", "silu")), largest_grid(p.device))
    plain = _plan.plan_forward(p, **options, out=True)
    if not program.adds_residual:  # and then nothing activates either
        assert program == plain
        return
    size, launch = ITEMSIZE[p.dtype], program.launch("forward_sm90")
    assert launch is not None and size == 2 and (saves or not options["training"])
    for at in (p.y, residual):
        assert whole_words(at, p.n, size)
    assert launch.fields["residual_row"] == residual.strides[0]
    before = plain.launch("forward_sm90")
    assert before is not None and set(launch.passed) == {*before.passed, "residual"} == set(
        parameters(launch.kernel)[1]
    )
    assert launch.maps[:-1] == before.maps and launch.maps[-1][0] == "residual"
    assert (program.arrays, program.workspace, launch.grid) == (plain.arrays, plain.workspace, before.grid)


@given(data=st.data(), p=problems(), training=st.booleans(), needs=st.sets(st.sampled_from(NEEDS), min_size=1))
def test_a_backward_fits(data: st.DataObject, p: Matmul, training: bool, needs: set[str]) -> None:
    """One launch makes the gradient of the residual, which takes the place of dy: that of the sums where it can."""
    kept = data.draw(matrices(p.m, p.n))
    asked = Asked(training=training and p.m > 1, needs=tuple(needs), kept=kept, residual_activation="relu")
    program = plan_backward(p, asked)
    assert_steps_fit(program, NAMES, known("sm_90a", ("relu", "silu")), largest_grid(p.device))
    makers = [of for of in program.launches() if "dv" in of.passed]
    dv = "gradient of residual" if "residual" in needs else "dv"
    assert [of.passed["dv"] for of in makers] == [dv] and makers[0].passed["dy"] == "dy"
    assert all(name != "dy" for of in program.launches() for name in of.passed.values() if of is not makers[0])
    if makers[0].kernel.name == "backward_sums":
        size = ITEMSIZE[p.dtype]
        assert p.n * size % 16 == 0 and vector_rows(p.y, size) and vector_rows(kept, size)
        assert (makers[0].fields["dy_row"], makers[0].fields["kept_row"]) == (p.y.strides[0], kept.strides[0])
        assert makers[0].passed["kept"] == "kept"


@given(data=st.data(), p=problems(), activation=ACTIVATIONS, keeps=st.booleans())
def test_what_stands_alone_fits(data: st.DataObject, p: Matmul, activation: Any, keeps: bool) -> None:
    of_other = data.draw(matrices(p.m, p.n))
    contiguous = p._replace(y=Matrix((p.n, 1), True))
    last = assert_fits(plan_residual(contiguous, activation, of_other, keeps=keeps), p)
    assert last.passed == {"u": "u", "y": "y" if keeps else "u", "residual": "residual", "v": "u" if keeps else ABSENT}
    last = assert_fits(plan_activate_backward(p, activation, None if activation is None else of_other), p)
    at = p.y if activation is None else of_other
    assert last.passed == {"dy": "dy", "v": "dy" if activation is None else "kept", "dv": "dv"}
    assert [last.fields[name] for name in ("dy_row", "dy_col", "v_row", "v_col")] == [*p.y.strides, *at.strides]


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("layout", ["new", "contiguous", "padded", "unaligned"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_calls_launch_what_was_planned(dtype: str, layout: str, activation: Any) -> None:
    B, I, O, size = 300, 64, 72, ITEMSIZE[dtype]
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        x, weight, residual, dy = (fake_gpu.Array(of, dtype) for of in ((B, I), (O, I), (B, O), (B, O)))
        at = fake_gpu.Array((1,), dtype).pointer + size * (layout == "unaligned")
        out = (
            None
            if layout == "new"
            else fake_gpu.Array((B, O), dtype, ((O + 8 * (layout == "padded")) * size, size), at)
        )
        options: dict[str, Any] = {"training": True, "activation": activation, "residual": residual, "out": out}
        y = gsbn.forward(x, weight, **options)
        u, of_y, of_residual, v = log[-1].words
        assert log[-1].name == "activate" and ("RESIDUAL", "1") in log[-1].defines
        assert (of_y, of_residual, v) == (y.pointer, residual.pointer, 0) and out in (None, y)
        assert (u == y.pointer) == (layout in ("new", "contiguous"))
        assert all("ACTIVATION" not in dict(launch.defines) for launch in log[:-1])

        y, saved = gsbn.forward(x, weight, **options, return_saved=True)
        if dtype == "bfloat16" and layout in ("new", "contiguous") and activation != "silu":  # in the epilogue
            u, v, joined = 0, 0, log[-1]
            assert joined.name == "forward_sm90" and ("RESIDUAL", "1") in joined.defines
            assert residual.pointer in joined.words and y.pointer in joined.words
            assert (activation is not None) == ("ACTIVATION" in dict(joined.defines))
        else:
            u, of_y, _, v = log[-1].words
            assert v == (u if activation == "silu" else 0) and of_y == y.pointer
        assert saved.kept is (None if activation is None else y) or (activation == "silu" and saved.kept.pointer == u)
        log.clear()
        gradients = gsbn.backward(dy, saved)
        of_residual, (first, *others) = gradients.residual.pointer, log
        if activation is None:  # a copy, and a backward of dy itself
            assert first.name == "activate_backward" and first.words == (dy.pointer, dy.pointer, of_residual)
            assert all(of_residual not in launch.words for launch in others)
        else:
            file = "activate" if first.name == "activate_backward" else first.name
            words = dict(zip(parameters(Kernel(first.name, file, first.defines))[1], first.words, strict=True))
            assert first.name == "activate_backward" or ("RESIDUAL", "1") in first.defines
            assert (words["dy"], words["dv"]) == (dy.pointer, of_residual)
            assert words.get("kept", words.get("v")) == saved.kept.pointer
            assert any(of_residual in launch.words for launch in others)
            assert all("ACTIVATION" not in dict(launch.defines) and dy.pointer not in launch.words for launch in others)
        log.clear()
        alone = gsbn.backward(dy, saved, needs=("residual",))
        assert [launch.name for launch in log] == ["activate_backward"] and alone.x is None
        log.clear()
        gsbn.backward(dy, saved, needs=("weight",))
        assert ("activate_backward" in [launch.name for launch in log]) == (activation is not None)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("by_runs", [True, False])
def test_ghost_batches_are_added_to_at_once(by_runs: bool, activation: Any) -> None:
    """Also where each is a call of its own: these make parts of one u."""
    B, I, O, groups = 4096, 64, 256, 4
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        x, weight, residual = (fake_gpu.Array(of, "bfloat16") for of in ((B, I), (O, I), (B, O)))
        options: dict[str, Any] = {"training": True, "activation": activation, "groups": groups, "return_saved": True}
        y, saved = forward_within(Limits(by_runs=by_runs), x, weight, **options, residual=residual)
    *before, last = log
    assert last.name == "activate" and [launch.name for launch in before].count("forward_sm90") == (
        groups if by_runs else [launch.name for launch in before].count("forward_sm90")
    )
    assert last.words[1:3] == (y.pointer, residual.pointer)
    assert last.words[0] == (saved.kept if activation == "silu" else y).pointer
    if by_runs:
        maps = [launch.records for launch in before if launch.name == "forward_sm90"]
        starts = [last.words[0] + i * B // groups * O * 2 for i in range(groups)]
        assert all(str(start) in repr(records) for start, records in zip(starts, maps, strict=True))


def test_limits_on_sms_hold_for_every_launch() -> None:
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        x, weight, residual, dy = (
            fake_gpu.Array(of, "float32") for of in ((5000, 64), (512, 64), (5000, 512), (5000, 512))
        )
        options: dict[str, Any] = {"training": True, "activation": "gelu", "sms": 7}
        _, saved = gsbn.forward(x, weight, **options, residual=residual, return_saved=True)
        gsbn.backward(dy, saved, sms=7)
    assert {"activate", "backward_sums"} <= {launch.name for launch in log}
    assert [("RESIDUAL", "1") in of.defines for of in log if of.name == "backward_sums"] == [True]
    assert all(launch.grid <= 7 and launch.limited for launch in log if launch.name != "cuBLAS")


def test_a_rank_without_rows_adds_nothing() -> None:
    p = Matmul(0, 64, 32, "float32", _plan.Device((9, 0), 132), *[Matrix((32, 1), True)] * 2, Matrix((64, 1), True))
    of_u, how = place_of_u(p, out=False, keeps=True)
    plain = plan(of_u, training=True, ranks="between", saved=True, **how).program
    program = then_activate(plain, p, "silu", out=False, keeps=True, residual=Matrix((64, 1), True))
    assert program.steps == plain.steps and program.made("y") is not None and program.made("u") is not None
