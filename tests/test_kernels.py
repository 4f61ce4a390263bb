"""Every kernel compiles for every architecture that gsbn serves: NVRTC needs no GPU and no driver."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from gsbn import _kernels

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy, which is not installed")
    cubins = _kernels.compile_all(arch)
    assert set(cubins) == set(_kernels.all_kernels(arch))
    for kernel, cubin in cubins.items():
        assert cubin.startswith(b"\x7fELF"), kernel
        assert kernel.name.encode() + b"\0" in cubin, f"no symbol {kernel.name}"


def test_every_file_has_a_kernel() -> None:
    assert {kernel.file for kernel in _kernels.all_kernels()} == {p.stem for p in _kernels.KERNEL_DIR.glob("*.cu")}


def test_every_name_is_a_global_function_of_its_file() -> None:
    for kernel in _kernels.all_kernels():
        source = (_kernels.KERNEL_DIR / f"{kernel.file}.cu").read_text(encoding="utf-8")
        assert re.search(rf"__global__[^;{{]*\b{kernel.name}\s*\(", source), kernel


@pytest.mark.parametrize("name", ["common.cuh", "normalize.cu"])
def test_an_edited_kernel_is_not_served_from_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's cache does not see an edited header: the digest of all files is part of the options."""
    folder = tmp_path / "kernels"
    shutil.copytree(_kernels.KERNEL_DIR, folder)
    monkeypatch.setattr(_kernels, "KERNEL_DIR", folder)
    digests = []
    for edit in ("", "// edited\n"):
        (folder / name).write_text((folder / name).read_text(encoding="utf-8") + edit, encoding="utf-8")
        _kernels.digest.cache_clear()
        digests.append(_kernels.digest())
    monkeypatch.undo()
    _kernels.digest.cache_clear()
    assert digests[0] == _kernels.digest() != digests[1]
    kernel = next(iter(_kernels.all_kernels()))
    assert any(_kernels.digest() in option for option in _kernels._options(kernel))
