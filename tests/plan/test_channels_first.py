"""The plans of calls with channels first: their launches fit, and their tiles and splits take every row once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gsbn._backward import How, run_channels_first
from gsbn._forward.channels_first import FORWARD_CHANNELS_FIRST
from gsbn._forward.operation import WHOLE_BATCH
from gsbn._gradients import NEEDS
from gsbn._host.run import call
from gsbn._plan import (
    Device,
    Limits,
    Matmul,
    Matrix,
    channels_first_obstacle,
    plan_backward_channels_first,
    plan_forward_channels_first,
)
from gsbn._plan.problem import ITEMSIZE, VECTORS, ceil_div
from gsbn._plan.program import Launch, Program
from gsbn._plan.sm90_variants import CHANNELS_FIRST_TILES, SM90_BLOCK_N
from tests.plan.fits import known, quotient
from tests.plan.seen import assert_steps_fit
from tests.support.fake_gpu import HOPPER, Array, gpu

H200 = Device((9, 0), 132, pairs=66)
NO_VECTORS = dict.fromkeys(VECTORS, 0)
ARGUMENTS = {"x", "weight", *VECTORS, "num_batches_tracked", "dy", "deviations", "vectors"}
# (N, C, L), O of the issue, but for L = 196, whose rows do not start on 16 bytes
SHAPES = [
    ((32, 64, 4096), 64), ((32, 64, 4096), 128), ((32, 128, 4096), 1024), ((16, 512, 512), 512), ((8, 64, 32768), 128),
    ((16, 128, 20480), 256), ((32, 64, 3136), 256),
]  # fmt: skip


def problem(x: tuple[int, int, int], n: int, dtype: str = "bfloat16", **options: Any) -> tuple[Matmul, int]:
    samples, k, length = x
    at = Matrix((k, 1), True)
    return Matmul(samples * length, n, k, dtype, options.pop("device", H200), at, at, at, **options), length


def forward(p: Matmul, length: int, **options: Any) -> Program:
    given: dict[str, Any] = {"training": True, "momentum": 0.1, "eps": 1e-5, "vectors": NO_VECTORS, **options}
    return plan_forward_channels_first(p, length, **given)


def backward(p: Matmul, length: int, **options: Any) -> Program:
    given: dict[str, Any] = {"needs": ("x", "weight", "gamma", "beta"), "dtypes": {"gamma": "float32", "beta": p.dtype}}
    return plan_backward_channels_first(p, length, **{**given, **options})


def defines(launch: Launch) -> dict[str, str]:
    return dict(launch.kernel.defines)


def first(fields: Mapping[str, int], part: int, block_m: int) -> tuple[int, int]:
    """As Samples in kernels/sm90/samples.cuh: the first tile of a part, and the rows before it."""
    tile = part * fields["tiles_of_part"] + min(part, fields["longer_parts"])
    sample = quotient(tile, fields["of_sample"])
    return tile, sample * fields["y_row"] + (tile - sample * fields["tiles_of_sample"]) * block_m


@given(
    st.integers(1, 40), st.integers(1, 1100), st.integers(8, 600), st.integers(1, 1100),
    st.sampled_from(["bfloat16", "float16"]), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([H200, H200.at_most(100), Device((9, 0), 16, pairs=0)]),
)  # fmt: skip
def test_every_plan_fits(
    samples: int,
    k: int,
    eighths: int,
    n: int,
    dtype: str,
    training: bool,
    saves: bool,
    cumulative: bool,
    device: Device,
) -> None:
    p, length = problem((samples, k, 8 * eighths), n, dtype, device=device)
    assume(channels_first_obstacle(dtype, n, k, length, device) is None)
    program = forward(p, length, training=training, saves=saves and training, momentum=None if cumulative else 0.1)
    assert_program_fits(program, device)
    launch = program.launches("forward_sm90")[0]
    assert_forward_fits(launch, p, length)
    assert launch.cooperative <= training
    for in_place in (False, True):
        program = backward(p, length, in_place=in_place)
        assert_program_fits(program, device)
        sums, dg = program.launches("channel_sums")[0], program.launches("channel_dg")[0]
        rows, splits = sums.fields["sums_rows"], sums.fields["splits"]
        assert (splits - 1) * rows < p.m // 8 <= splits * rows and sums.fields == dg.fields
        assert all(quotient(word, sums.fields["reciprocal"]) == word // eighths for word in (0, eighths, p.m // 8 - 1))
        assert_split_fits(program.launches("forward_sm90")[-1], p, length)


def assert_program_fits(program: Program, device: Device) -> None:
    assert_steps_fit(program, ARGUMENTS, known(), device.sms if device.limited else 2**31 - 1)
    for launch in program.launches():
        for _, (rows, cols, pitch, dtype, box_rows, box_cols, _, *deep) in launch.maps:
            size = ITEMSIZE[dtype]
            assert pitch % 16 == 0 and pitch >= cols * size and box_rows <= 256 and box_cols * size == 128 and rows > 0
            assert not deep or (deep[0] == 0 and deep[1] >= 1 and rows * pitch % 16 == 0)


def assert_split_fits(launch: Launch, p: Matmul, length: int) -> None:
    """The splits of dweight have all steps of 64 rows, none of which crosses a sample."""
    steps, splits = p.m // length * ceil_div(length, 64), launch.fields["parts_alone"]
    of_split, rest = divmod(launch.fields["k"], 64 * splits)
    assert rest == 0 and (splits - 1) * of_split < steps <= splits * of_split
    assert defines(launch)["K_IN_SAMPLES"] == "1" and launch.fields["y_row"] == length


def assert_forward_fits(launch: Launch, p: Matmul, length: int) -> None:
    """In training a CTA keeps to a block of features, and the parts of a block have each row once."""
    of = defines(launch)
    block_m, cluster = int(of["BLOCK_M"]), int(of["CLUSTER"])
    columns = ceil_div(p.n, SM90_BLOCK_N * cluster)
    clusters, rest = divmod(launch.grid, cluster)
    assert rest == 0 and clusters <= p.device.clusters(cluster)
    tiles = p.m // length * ceil_div(length, block_m)
    if of["MODE"] != "MODE_RECOMPUTE":
        return
    parts, rest = divmod(clusters, columns)
    assert rest == 0 and 1 <= parts <= tiles
    assert (launch.fields["tiles"], launch.fields["parts_alone"], launch.fields["y_row"]) == (tiles, parts, length)
    bounds = [first(launch.fields, part, block_m) for part in range(parts + 1)]
    assert bounds[0] == (0, 0) and bounds[-1] == (tiles, p.m)
    assert all(b > a and rows_b > rows_a for (a, rows_a), (b, rows_b) in pairwise(bounds))


@pytest.mark.parametrize("tile", CHANNELS_FIRST_TILES)
def test_limits_choose_the_tile(tile: tuple[int, int]) -> None:
    p, length = problem((3, 64, 784), 200, limits=Limits(sm90=tile))
    (launch,) = forward(p, length).launches()
    assert (int(defines(launch)["BLOCK_M"]), int(defines(launch)["CLUSTER"])) == tile


def test_more_features_than_a_share_of_the_gpu_holds() -> None:
    p, length = problem((4, 64, 256), 600, device=H200.at_most(4))
    with pytest.raises(ValueError, match="weight: expected at most 512 features on 4 SMs with channels first, got 600"):
        forward(p, length)


@pytest.mark.parametrize(("x", "n"), SHAPES)
def test_the_shapes_of_the_issue(x: tuple[int, int, int], n: int) -> None:
    """One launch forward, five backward, no copy, and dweight's partial products of at most 32 MiB."""
    p, length = problem(x, n)
    assert channels_first_obstacle(p.dtype, n, p.k, length, H200) is None
    assert [launch.kernel.name for launch in forward(p, length, saves=True).launches()] == ["forward_sm90"]
    program = backward(p, length, in_place=True)
    names = ["channel_sums", "channel_dg", "forward_sm90", "forward_sm90", "reduce_split_k"]
    assert [launch.kernel.name for launch in program.launches()] == names
    assert program.workspace <= 32 << 20


@pytest.mark.parametrize(
    ("dtype", "n", "k", "length", "device", "why"),
    [
        ("bfloat16", 64, 64, 4096, Device((8, 0), 108), "9.0"),
        ("float32", 64, 64, 4096, H200, "16 bits"),
        ("bfloat16", 64, 64, 196, H200, "samples of 8, 16"),
        ("bfloat16", 64, 64, 56, H200, "from 64 on"),
        ("float16", 64, 2**15 + 8, 4096, H200, "lose digits"),
        ("bfloat16", 128 * 133, 64, 4096, H200, "one block of features"),
        ("bfloat16", 64, 64, 2**31, H200, "smaller sizes"),
        ("bfloat16", 64, 3, 784, H200, None),
    ],
)
def test_what_is_not_served(dtype: str, n: int, k: int, length: int, device: Device, why: str | None) -> None:
    found = channels_first_obstacle(dtype, n, k, length, device)
    assert found is None if why is None else why in str(found)


@pytest.mark.parametrize("needs", [("x", "weight", "bias", "gamma", "beta"), ("weight",), ("x",), ("gamma",)])
@pytest.mark.parametrize("inputs", [64, 3])
def test_calls_launch_what_was_planned(needs: tuple[str, ...], inputs: int) -> None:
    """Through the path of every call: parameters by name, addresses, a copy of a weight in rows of 6 bytes."""
    m, n, length = 3 * 784, 72, 784
    with gpu(HOPPER) as (_, log):
        of = {name: Array((n,), "float32") for name in ("gamma", "beta", "mean", "var", "bias")}
        x, weight = Array((m, inputs), "bfloat16"), Array((n, inputs), "bfloat16")
        vectors = None, of["bias"], of["gamma"], of["beta"]
        arrays = x, weight, *vectors, of["mean"], of["var"], Array((), "int64"), None, None, None
        options = True, 0.1, 1e-5, "highest", "auto", True, None, "relu", *WHOLE_BATCH, 1.0, length
        y, saved = call(FORWARD_CHANNELS_FIRST, arrays, options)
        copies = 0 if inputs == 64 else 1
        assert [launch.name for launch in log] == ["copy_rows"] * copies + ["forward_sm90"]
        assert y.shape == saved.deviations.shape == (m, n)
        log.clear()
        how = How.of(saved, needs)
        kept = x if "weight" in needs else None, weight if "x" in needs else None
        arrays = y, *kept, saved.deviations, saved.vectors, None
        found = run_channels_first(_kind(), arrays, how, length)
        shapes = {"x": (m, inputs), "weight": (n, inputs)}
        for gradient, name in zip(found, NEEDS, strict=True):
            assert (gradient is None) is (name not in needs)
            assert gradient is None or gradient.shape == shapes.get(name, (n,))
        names = ["copy_rows"] * (copies if "x" in needs else 0) + ["channel_sums", "channel_dg"]
        names += ["forward_sm90"] * ("x" in needs) + ["forward_sm90", "reduce_split_k"] * ("weight" in needs)
        assert [launch.name for launch in log] == names


def _kind() -> Any:
    from gsbn._arrays import kinds

    return kinds._kinds[Array]
