"""Plans of a backward without a norm: every shape, layout and set of gradients has one that fits together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsbn._plan import ITEMSIZE, Matmul, Matrix, place_of_u, then_activate
from gsbn._plan.copies import vector_rows
from gsbn._plan.gemm import CUBLAS_SMS
from gsbn._plan.limbs import FOR_DX
from gsbn._plan.program import Launch
from gsbn._plan.variants import activate
from tests.plan.fits import ARGUMENTS, H200, assert_limbs_fit, contiguous, known, largest_grid, problems
from tests.plan.seen import assert_steps_fit, backward_plan, plan


@given(
    p=problems(),
    needs=st.sets(st.sampled_from(["x", "weight", "bias"])),
    gemm=st.sampled_from(["auto", "cublas", "tiled", "sm90"]),
    precision=st.sampled_from(["highest", "high"]),
    active=st.booleans(),
    of_y=st.sampled_from([None, (1, 0), (2, 2), (3, 1)]),
)
def test_a_backward_fits(p: Matmul, needs: set[str], gemm: str, precision: str, active: bool, of_y: Any) -> None:
    options: dict[str, Any] = {"training": False, "identity": True, "needs": tuple(sorted(needs)), "gemm": gemm}
    options |= {"precision": precision, "activation": "relu" if active else None}
    if active:
        own = (p.n, 1) if of_y is None else (p.n * of_y[0], of_y[1]) if of_y[1] else (1, p.m)
        options["y"] = Matrix(own, p.n * ITEMSIZE[p.dtype] % 16 == 0)
    has_bfloat16 = p.device.capability >= (8, 0) or p.dtype != "bfloat16"
    too_few_sms = p.device.limited and p.device.sms < CUBLAS_SMS
    if gemm == "cublas" and (too_few_sms or not has_bfloat16) and needs & {"x", "weight"}:
        with pytest.raises(ValueError, match=r"^gemm: expected .+, got 'cublas'"):
            backward_plan(p, **options)
        return
    program = backward_plan(p, **options).program
    assert_steps_fit(program, ARGUMENTS, known(), largest_grid(p.device))
    launched = [launch.kernel.name for launch in program.launches()]
    passes = [name for name in launched if name.startswith("backward_")]
    products = bool(needs & {"x", "weight"})
    # dy itself is dg without an activation; only the bias's gradient needs sums
    assert bool(passes) == ("bias" in needs or (active and products))
    for launch in program.launches():
        if launch.kernel.name in passes:
            assert dict(launch.kernel.defines)["IDENTITY"] == "true" and "vectors" not in launch.passed.get("d", "")
            assert (launch.passed["d"] == "absent") == (not active) or launch.kernel.name == "backward_dg"
            assert (launch.passed.get("dg", "absent") == "absent") == (not (active and products)) or (
                launch.kernel.name == "backward_sums"
            )
    if products and not active and not vector_rows(p.y, ITEMSIZE[p.dtype]):
        assert {"copy_rows", "copy_matrix"}.intersection(launched)


@given(p=problems(), gemm=st.sampled_from(["auto", "cublas", "tiled", "sm90"]), out=st.booleans())
def test_a_forward_that_keeps_u_fits(p: Matmul, gemm: str, out: bool) -> None:
    """The same launches make u as make y without an activation; one more makes y, wherever it lies."""
    p = p if out else p._replace(y=Matrix((p.n, 1), True))
    of_u, result = place_of_u(p, out=out, keeps=True)
    assert of_u == p._replace(y=Matrix((p.n, 1), True)) and not result["out"]
    try:
        plain = plan(of_u, training=False, gemm=gemm, eps=0.0, **result).program
    except ValueError:  # the gemm does not serve it
        return
    program = then_activate(plain, p, "silu", out=out, keeps=True)
    assert_steps_fit(program, ARGUMENTS, known("sm_90a", ("silu",)), largest_grid(p.device))
    *before, last = program.steps
    assert isinstance(last, Launch) and last.kernel.name == "activate"
    assert [type(step) for step in before] == [type(step) for step in plain.steps]
    assert all("ACTIVATION" not in dict(step.kernel.defines) for step in before if isinstance(step, Launch))
    assert last.passed == {"u": "u", "y": "out" if out else "y"} and last.fields["m"] * last.fields["n"] == p.m * p.n
    assert (last.fields["y_row"], last.fields["y_col"]) == p.y.strides
    assert last.grid * activate(p.dtype)[1] >= p.m * p.n or p.device.limited


@given(
    p=problems(),
    needs=st.sets(st.sampled_from(["x", "weight"]), min_size=1),
    precision=st.sampled_from(["highest", "high"]),
    training=st.booleans(),
)
def test_the_products_of_a_given_dg(p: Matmul, needs: set[str], precision: str, training: bool) -> None:
    """The second half of a backward: any dg serves, and one whose rows do not start on 16 bytes is copied."""
    options = {"training": training, "norm": False, "needs": tuple(sorted(needs)), "precision": precision}
    program = backward_plan(p, **options).program
    assert_steps_fit(program, ARGUMENTS, known(), largest_grid(p.device))
    assert not [launch for launch in program.launches() if launch.kernel.name.startswith("backward_")]
    copied = any(array.name == "copy of dy" for array in program.arrays)
    assert copied != vector_rows(p.y, ITEMSIZE[p.dtype])


def test_the_last_layer_of_a_head_makes_limbs_of_dy_once() -> None:
    p = contiguous(2048, 8192, 8192, "float32")
    options = {"training": False, "identity": True, "activation": None}
    found = backward_plan(p, needs=("x", "weight", "bias"), **options).program
    names = [launch.kernel.name for launch in found.launches()]
    assert names.count("forward_sm90") == 2
    of = [{launch.passed[name] for name in "abc"} - {"absent"} for launch in found.launches("split_tiles")]
    assert of == [{"dy", "weight"}, {"x"}]
    alone = backward_plan(p, needs=("x", "weight"), **options).program
    assert not [launch for launch in alone.launches() if launch.kernel.name.startswith("backward_")]


def test_limbs_of_x_lie_over_those_for_dx_if_they_are_many() -> None:
    """x's limbs, 64 MiB, take no memory of their own if dg belongs to autograd."""
    options = {"training": True, "needs": ("x", "weight"), "norm": False}
    limbs = 4 * 2048 * 8192
    large = backward_plan(contiguous(2048, 8192, 8192, "float32"), **options)
    assert 2 * limbs < large.workspace < 2 * limbs + 2**20
    assert_limbs_fit(large.limbs, H200, 0, {"dweight": 4 * 8192 * 8192, FOR_DX: limbs})
    made, late = large.program.launches("split_tiles")
    of_dg = next(name for name in "abc" if made.passed[name] == "dy")
    assert late.passed["a_transposed"] == made.passed[f"{of_dg}_limbs"]
    small = backward_plan(contiguous(512, 2048, 2048, "float32"), **options)
    assert len(small.program.launches("split_tiles")) == 1
