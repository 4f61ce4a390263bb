"""Rematerialization: which forwards store no deviations, and what the backwards launch that compute g again."""

from __future__ import annotations

import ast
from typing import Any

import pytest

import gsbn
from gsbn._forward import forward_within
from gsbn._plan import Device, Limits, chooses_remat
from gsbn._plan.problem import REMAT_ROWS
from gsbn._plan.skinny import SUMS_FEATURES, remat_backward
from tests.plan.fits import H200, contiguous
from tests.support import fake_gpu

BACKWARD = ["skinny_sums", "skinny_backward", "reduce_split_k"]
ANY = Limits()
SHAPES = [
    (131071, 96, 200),
    (50000, 64, 1024),
    (802816, 128, 128),
    (1000000, 64, 64),
    (65536, 64, 128),
    (50000, 128, 512),
    (65536, 104, 1000),
    (6000, 64, 1024),
    (12000, 64, 512),
]


def arrays(rows: int, inputs: int, features: int, dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    x, weight = fake_gpu.Array((rows, inputs), dtype), fake_gpu.Array((features, inputs), dtype)
    return {"x": x, "weight": weight, "gamma": fake_gpu.Array((features,), "float32"), **more}


def step(given: dict[str, Any], limits: Limits = ANY, **options: Any) -> tuple[Any, list[Any]]:
    """What a forward in training saves, and the launches of its backward."""
    needs, sms = options.pop("needs", gsbn.Gradients._fields[:6]), options.get("sms")
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        y, saved = forward_within(limits, **given, training=True, return_saved=True, **options)
        log.clear()
        gsbn.backward(fake_gpu.Array(y.shape, y.dtype), saved, needs=needs, sms=sms)
        return saved, list(log)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_short_rows_store_no_deviations(shape: tuple[int, int, int], dtype: str) -> None:
    saved, log = step(arrays(*shape, dtype))
    assert (saved.deviations.shape, saved.deviations.dtype) == ((shape[0], 0), dtype)
    assert saved.vectors.shape == (REMAT_ROWS, shape[2])
    assert [launch.name for launch in log] == BACKWARD


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((802816, 128, 128), {"sms": 40}),  # a backward may then have too few SMs
        ((802816, 128, 128), {"groups": 2}),
        ((802816, 128, 128), {"groups": 7}),
        ((802816, 128, 128), {"renorm": (3.0, 5.0)}),
        ((802816, 128, 128), {"gemm": "cublas"}),
        ((802816, 128, 128), {"limits": Limits(remat=False)}),
        ((802816, 128, 128), {"limits": Limits(skinny=True)}),
        ((1000000, 32, 32), {}),  # two launches that make g twice take less time
        ((20000, 128, 256), {}),  # its forward defers tiles
        ((16, 64, 128), {}),  # few rows keep float64
        ((3000, 64, 1024), {}),  # too few rows for clusters
        ((6000, 64, 512), {}),
        ((65536, 512, 512), {}),  # long rows
    ],
)
def test_others_store_them(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    given = arrays(*shape)
    if "renorm" in options:
        given |= {name: fake_gpu.Array((shape[2],), "float32") for name in ("running_mean", "running_var")}
    saved, log = step(given, **options)
    assert saved.deviations.shape[-1] >= shape[2]
    assert "skinny_sums" not in [launch.name for launch in log]


def test_float32_columns_and_frozen_statistics_store_them() -> None:
    shape = (802816, 128, 128)
    assert step(arrays(*shape, "float32"))[0].deviations.shape == shape[::2]
    columns = fake_gpu.Array(shape[:2], "bfloat16", (2, 2 * shape[0]))
    assert step(arrays(*shape) | {"x": columns})[0].deviations.shape == shape[::2]
    running = {name: fake_gpu.Array((shape[2],), "float32") for name in ("running_mean", "running_var")}
    with fake_gpu.gpu(fake_gpu.HOPPER):
        _, saved = gsbn.forward(**arrays(*shape), **running, return_saved=True)
    assert saved.deviations.shape == shape[::2]


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        (("x",), BACKWARD[:2]),
        (("weight", "scale"), BACKWARD),
        (("gamma", "beta"), ["skinny_sums", "backward_dg"]),
        (("x", "beta"), BACKWARD[:2]),
        ((), []),
    ],
)
def test_what_is_needed(needs: tuple[str, ...], names: list[str]) -> None:
    given = arrays(131071, 96, 200, beta=fake_gpu.Array((200,), "float32"))
    assert [launch.name for launch in step(given, needs=needs)[1]] == names


def test_a_residual_is_added_to_a_forward_that_stores_none() -> None:
    residual = fake_gpu.Array((131071, 200), "bfloat16")
    saved, log = step(arrays(131071, 96, 200, residual=residual), activation="relu", needs=gsbn.Gradients._fields)
    assert saved.deviations.shape == (131071, 0)
    assert [launch.name for launch in log] == ["activate_backward", *BACKWARD]


OF_ANY_WIDTH = [(5000 + 17 * n, 8, n) for n in range(1, 1025)]


@pytest.mark.parametrize("shapes", [[*SHAPES, (4500, 64, 1000), (30000, 128, 120)], OF_ANY_WIDTH], ids=["named", "any"])
def test_ctas_cover_rows_and_features_once(shapes: list[tuple[int, int, int]]) -> None:
    for rows, inputs, features in shapes:
        p = contiguous(rows, features, inputs, "bfloat16", H200)
        found, sums = remat_backward(p, None)
        cluster = int(dict(sums.kernel.defines).get("CLUSTER", 1))
        blocks = -(-features // sums.features)
        assert sums.features <= SUMS_FEATURES and sums.features % 8 == 0
        assert sums.ctas == blocks * cluster * sums.splits <= H200.sms
        assert (sums.splits - 1) * cluster * sums.rows < rows <= sums.splits * cluster * sums.rows
        assert sums.rows % sums.tile == 0
        assert found.rows * (found.ctas // int(dict(found.kernel.defines).get("CLUSTER", 1))) >= rows


def test_too_few_sms_are_refused() -> None:
    given = arrays(50000, 64, 1024)
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        y, saved = gsbn.forward(**given, training=True, return_saved=True)
        dy = fake_gpu.Array(y.shape, y.dtype)
        log.clear()
        with pytest.raises(ValueError, match=r"^sms: expected at least 8 for 50000 rows and 1024 features"):
            gsbn.backward(dy, saved, sms=7)
        assert not log
        for sms in (8, 40, 100):
            log.clear()
            gsbn.backward(dy, saved, sms=sms)
            assert max(launch.grid for launch in log) <= sms


def test_all_ctas_run_at_once_on_few_sms() -> None:
    given = arrays(2000000, 64, 1000)
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        y, saved = gsbn.forward(**given, training=True, return_saved=True)
        dy = fake_gpu.Array(y.shape, y.dtype)
        with pytest.raises(ValueError, match=r"^sms: expected at least 32 for 2000000 rows"):
            gsbn.backward(dy, saved, sms=20)
        log.clear()
        gsbn.backward(dy, saved, sms=32)
        assert max(launch.grid for launch in log) <= 32


@pytest.mark.parametrize("strides", [(0, 0), (2, 0), (0, 2), (2, 2 * 131071), (402, 2), (-400, 2)])
def test_any_dy_is_read_in_rows_on_16_bytes(strides: tuple[int, int]) -> None:
    given = arrays(131071, 96, 200)
    with fake_gpu.gpu(fake_gpu.HOPPER) as (_, log):
        y, saved = gsbn.forward(**given, training=True, return_saved=True)
        log.clear()
        gsbn.backward(fake_gpu.Array(y.shape, y.dtype, strides), saved)
    copy, *launches = log
    assert copy.name in ("copy_matrix", "copy_rows")
    assert [launch.name for launch in launches] == BACKWARD
    (dy, what), again = (ast.literal_eval(launch.records[1]) for launch in launches[:2])  # of the tensor maps
    assert (dy, what) == again and dy in copy.words and what[2] % 16 == 0


def test_other_gpus_store_them() -> None:
    p = contiguous(802816, 128, 128, "bfloat16", Device((8, 0), 108))
    assert not chooses_remat(p, reads_count=False)


def test_no_rows_store_none() -> None:
    assert not chooses_remat(contiguous(0, 128, 128, "bfloat16", fake_gpu.HOPPER), reads_count=False)


@pytest.mark.parametrize("shape", [*SHAPES, (20000, 128, 256), (1000000, 32, 32), (300, 64, 64), (50000, 60, 512)])
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_a_recorded_program_learns_the_choice_before_the_call(shape: tuple[int, int, int], momentum: Any) -> None:
    """`chooses_remat` decides as an eager call does. Without clusters, it holds on few SMs, too."""
    rows, inputs, features = shape
    p = contiguous(rows, features, inputs, "bfloat16", fake_gpu.HOPPER)
    chosen = chooses_remat(p, reads_count=momentum is None)
    running = {name: fake_gpu.Array((features,), "float32") for name in ("running_mean", "running_var")}
    given = arrays(*shape, **running, num_batches_tracked=fake_gpu.Array((), "int64"))
    saved, _ = step(given, momentum=momentum)
    assert chosen == (saved.deviations.shape == (rows, 0))
    if chosen and features <= 256:
        with fake_gpu.gpu(fake_gpu.HOPPER):
            _, saved = forward_within(Limits(remat=True), **given, training=True, return_saved=True, sms=20)
        assert saved.deviations.shape == (rows, 0)


@pytest.mark.parametrize("limits", [Limits(recompute=False), Limits(cluster_batch=True)])
def test_limits_of_the_mode_hold(limits: Limits) -> None:
    assert step(arrays(131071, 96, 200), limits)[0].deviations.shape == (131071, 200)


def test_a_copy_of_y_counts() -> None:
    """A y in columns is copied after the one launch; the skinny kernels write it directly."""
    out = fake_gpu.Array((44000, 48), "bfloat16", (2, 2 * 44000))
    assert step(arrays(44000, 96, 48))[0].deviations.shape == (44000, 0)
    assert step(arrays(44000, 96, 48, out=out))[0].deviations.shape == (44000, 48)
