"""PyTorch's tests of SyncBatchNorm in distributed_test.py, with gsbn in its place, on two GPUs and on the CPU.

On the CPU `cuda` does not move a tensor, and DistributedDataParallel gets no device.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's test suites import it: pip install expecttest")
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import _modules  # noqa: E402
from tests.support.ranks import SIZE, Ranks  # noqa: E402

if not distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

DDP = "test_DistributedDataParallel_SyncBatchNorm"
ON_CPUS = [
    DDP,
    *(f"{DDP}_{more}" for more in ("2D_Input", "Channels_Last", "Diff_Input_Sizes_Running_Value", "No_Affine")),
    *(f"{DDP}_{more}" for more in ("Diff_Input_Sizes_gradient", "Single_Input_Per_Process")),
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
]
ON_GPUS_ALONE = {
    f"{DDP}_half": "it asks for a tensor on a device by its number, which is a GPU's",
    "test_ddp_inference": "it asks for a tensor on a device by its number, which is a GPU's",
}
LEFT = {
    "test_SyncBatchNorm_process_group": "it asks convert_sync_batchnorm what group it gave torchvision's ResNet",
    "test_ddp_sync_bn_training_vs_eval": "PyTorch skips it itself",
    "test_sync_bn_logged": "it asks whether DistributedDataParallel logs a module of PyTorch's own class",
}


class InItsPlace(gsbn.torch.SyncBatchNorm):
    """nn.SyncBatchNorm by gsbn, after a Linear that is the identity."""

    convert_sync_batchnorm = nn.SyncBatchNorm.convert_sync_batchnorm
    calls = 0

    def forward(self, x: Any) -> Any:
        type(self).calls += 1
        linear = SimpleNamespace(_parameters={"weight": torch.eye(x.shape[1]).to(x), "bias": None})
        rows = x.flatten(2) if x.dim() > 3 else x
        return _modules.fused(rows, linear, None, self, None, "highest", "auto").reshape(x.shape)


def suite(backend: str) -> Any:
    """PyTorch's suite, which reads its backend from the environment when imported."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(SIZE), TEMP_DIR=tempfile.gettempdir())
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    return DistributedTest._DistTestBase


@contextmanager
def without_devices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", lambda self, *_: self)
        patch.setattr(nn.Module, "cuda", lambda self, *_: self)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(nn.parallel, "DistributedDataParallel", lambda model, **_: DistributedDataParallel(model))
        yield


def on_a_rank(rank: int, device: str, name: str) -> int:
    """Run one test, and return the number of calls of gsbn."""
    base = suite("gloo" if device == "cpu" else "nccl")
    from torch.testing._internal.common_utils import TestCase

    case = type("Case", (base, TestCase), {"rank": rank, "runTest": None})()
    case._barrier = lambda **_: distributed.barrier()
    torch.manual_seed(0)
    InItsPlace.calls = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn, "SyncBatchNorm", InItsPlace)
        if device == "cpu":
            patch.setattr(sys.modules[base.__module__], "DistributedDataParallel", None)
            with without_devices():
                inspect.unwrap(getattr(base, name))(case)
        else:
            getattr(case, name)()
    return InItsPlace.calls


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "nccl" and torch.cuda.device_count() < SIZE:
        pytest.skip(f"needs {SIZE} GPUs that this PyTorch sees")
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("name", [*ON_CPUS, *ON_GPUS_ALONE])
def test_sync_batch_norm(ranks: Ranks, name: str) -> None:
    if ranks.backend == "gloo" and name in ON_GPUS_ALONE:
        pytest.skip(ON_GPUS_ALONE[name])
    assert ranks(on_a_rank, name)[0]


def test_nothing_is_passed_over() -> None:
    """Every test of the suite that mentions SyncBatchNorm runs, or is left out for a reason."""
    from torch.testing._internal.distributed import __file__ as package

    text = (Path(package).parent / "distributed_test.py").read_text(encoding="utf-8")
    tests = re.findall(r"^        def (test_\w+)\((.*?)(?=^        @|^        def |\Z)", text, re.MULTILINE | re.DOTALL)
    found = {name for name, body in tests if re.search("SyncBatchNorm|sync_bn", name + body)}
    assert found == {*ON_CPUS, *ON_GPUS_ALONE, *LEFT}
