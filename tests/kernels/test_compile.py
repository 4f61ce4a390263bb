"""Each kernel compiles for each architecture that gsbn supports: NVRTC needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gsbn
from gsbn import _plan
from gsbn._cuda import driver as _driver
from gsbn._cuda import kernels as _kernels
from gsbn._plan import declared as _declared
from gsbn._plan.activations import PARAMETERS
from gsbn._plan.products import SM90_WORDS
from gsbn._plan.sources import Constants, Kernel, macros
from tests.support import ROOT

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


def covering(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Variants that together hold every pair of values of two macros that any variant of a file holds, by a greedy
    choice: a fifth finds what an edit breaks for one macro, or where two meet. tools/machine_code.py compiles all."""
    left = {k: {k.name, *((k.file, *pair) for pair in combinations(("", *k.defines), 2))} for k in kernels}
    chosen = []
    while left:
        best = max(left, key=lambda kernel: len(left[kernel]))
        chosen.append(best)
        held = left.pop(best)
        left = {kernel: more for kernel, pairs in left.items() if (more := pairs - held)}
    return chosen


@pytest.mark.timeout(1800)  # on one core that the other tests share
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy, which is not installed")
    every = list(_kernels.all_kernels(arch, PARAMETERS if arch in ("sm_75", "sm_90a") else ("relu",)))
    # sm_90a as for users; for others only errors matter, which a fast compilation finds in half the time
    cubins = _kernels.compile_all(arch, covering(every), *[] if arch == "sm_90a" else ["--Ofast-compile=max"])
    assert {kernel.name for kernel in cubins} == {kernel.name for kernel in every}
    assert {define for kernel in cubins for define in kernel.defines} == {d for kernel in every for d in kernel.defines}
    for kernel, cubin in cubins.items():
        assert cubin.startswith(b"\x7fELF"), kernel
        assert kernel.name.encode() + b"\0" in cubin, f"no symbol {kernel.name}"


def test_every_file_has_a_kernel() -> None:
    assert {kernel.file for kernel in _kernels.all_kernels()} == {p.stem for p in _declared.KERNEL_DIR.glob("*.cu")}


def test_every_name_is_a_global_function_of_its_file() -> None:
    for kernel in _kernels.all_kernels():
        source = (_declared.KERNEL_DIR / f"{kernel.file}.cu").read_text(encoding="utf-8")
        assert re.search(rf"__global__[^;{{]*\b{kernel.name}\s*\(", source), kernel


def test_parameters_follow_the_macros() -> None:
    """Some exist only if deviations are saved. plan/test_launches.py compares what is passed with what is declared."""
    for kernel in _kernels.all_kernels():
        if kernel.name == "forward_sm90":
            macros = "SAVE_DEVIATIONS", "SAVE_VECTORS", "RANKS"
            saves, saves_vectors, ranks = (dict(kernel.defines)[name] == "1" for name in macros)
            by_value, words = _declared.parameters(kernel)
            more = ("deviations",) * saves + ("saved",) * saves_vectors + ("ranks",) * ranks
            adds = "RESIDUAL" in dict(kernel.defines)
            more += ("renorm",) * ("RENORM" in dict(kernel.defines)) + ("residual",) * adds
            assert words == (*SM90_WORDS, *more)
            assert by_value == (
                "p", "x_map", "w_map", "y_map", *["deviations_map"] * saves, *["residual_map"] * adds
            )  # fmt: skip


def test_what_the_sources_do_not_declare_is_refused() -> None:
    kernel = next(kernel for kernel in _kernels.all_kernels() if kernel.name == "fold")
    with pytest.raises(TypeError, match=r"^fold takes \('w', 'w_folded', "):
        _kernels.launcher(kernel, 0, ("w", "b_folded", "w_folded"))
    with pytest.raises(TypeError, match=r"^fold takes a ldw, which is not among \['k'\]"):
        _declared.record(kernel, {"k": 1})
    with pytest.raises(KeyError):
        _declared.flags(vector_z=True)


def test_a_record_holds_what_its_kernel_declares() -> None:
    of = {kernel.name: kernel for kernel in _kernels.all_kernels()}
    names = ("bias", "scale", "gamma", "beta", "running_mean", "running_var")
    record = _declared.record(
        of["fold"], {"k": 3, "m": 7, "eps": 0.5, "number": 2, "ldw": 4, **dict.fromkeys(names, 9)}
    )
    assert (record.dtype.names, record.tolist()) == (("k", "ldw", *names, "eps", "number"), [(3, 4, *[9] * 6, 0.5, 2)])
    assert _declared.record_dtype(of["split_tiles"]) == _declared.record_dtype(of["take_maxima"])
    assert _declared.record_dtype(of["split_tiles"]) != _declared.record_dtype(of["split_limbs"])
    arrays = dict.fromkeys(("m", "n", "lda", "vector", "of_columns", "of_rows", "ld_limbs"), (1, -2, 3))
    record = _declared.record(of["take_maxima"], arrays | {"maxima_rows": 64})
    assert record.tobytes() == np.array([1, -2, 3] * 7 + [64], np.int64).tobytes()
    assert _declared.flags(vector_x=True, units=True, alone=False) == 1 + 16
    assert [_declared.kind_code(dtype) for dtype in ("float32", "float64", "float16", "bfloat16")] == [1, 2, 3, 4]


def test_constants_are_read_as_the_compiler_reads_them() -> None:
    """With the macros of a variant, through headers, and by the precedence of C."""
    limbs = {"ELEMENT": "ELEMENT_LIMBS", "FEATURES": "128", "CHUNKS": "2"}
    skinny = Constants("skinny/config.cuh", limbs)
    assert (skinny["CTA"], skinny["TILE_ROWS"], skinny["BLOCK_ROWS"]) == (256, 64, 128)
    fused = {"T_TYPE": "__half", "D_TYPE": "double", "G_TYPE": "double", "CLUSTER": "2"}
    assert [Constants("backward_fused.cu", fused)[name] for name in ("VEC", "WORDS", "STAGES")] == [8, 5, 1]
    assert Constants("sm90/config.cuh", {"OCCUPANCY": "2"})["CONSUMER_REGISTERS"] == (3 * 80 - 64) // 2
    with pytest.raises(KeyError, match="NO_SUCH_NAME"):
        skinny["NO_SUCH_NAME"]
    assert macros("sm90/modes.cuh", "MODE_")[:2] == ("MODE_GEMM", "MODE_INFERENCE")


def test_every_kernel_waits_for_the_one_ahead() -> None:
    """Each may be launched so that it begins before the kernel ahead has ended. `cta.begin` waits in forward_sm90."""
    call = r"(?:await_kernel_ahead\((?:true|RANKS|ranks != nullptr|)\)|cta\.begin\(\));"
    wait = re.compile(rf"[{{\n] +(?:if \((!?)(\w+)\) )?{call}[ \n]")
    assert re.search(rf"void begin\(\) const {{[^}}]*{call}", _declared.text("sm90/cta.cuh"))
    for path in _declared.KERNEL_DIR.glob("*.cu"):
        bodies = path.read_text(encoding="utf-8").split("__global__")[1:]
        assert bodies
        for body in bodies:
            found = {(negated, condition) for negated, condition in wait.findall(body)}
            pairs = (("", condition) in found and ("!", condition) in found for _, condition in found)
            assert ("", "") in found or any(pairs), path.name


@pytest.mark.parametrize(("arch", "most"), [("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_90a", 227)])
def test_a_launch_gives_the_shared_memory_that_its_variant_declares(arch: str, most: int) -> None:
    """Also where macros are added to a variant whose shared memory is known. A CTA has at most so many KiB."""
    declared = 0
    for kernel in _kernels.all_kernels(arch):
        if "int SHARED_BYTES" in _declared.text(f"{kernel.file}.cu"):
            assert kernel.shared == Constants(f"{kernel.file}.cu", dict(kernel.defines))["SHARED_BYTES"], kernel
            declared += 1
        assert kernel.shared <= most << 10, kernel
    assert declared


@pytest.mark.parametrize("name", ["common/common.cuh", "normalize.cu"])
def test_an_edited_kernel_is_not_served_from_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of all files, also headers, is part of the name of a compiled kernel."""
    pytest.importorskip("cupy", reason="the name of a compiled file has NVRTC's version, which CuPy knows")
    folder = tmp_path / "kernels"
    shutil.copytree(_declared.KERNEL_DIR, folder)
    monkeypatch.setattr(_kernels, "KERNEL_DIR", folder)
    kernel = next(iter(_kernels.all_kernels()))
    monkeypatch.setattr(_kernels, "_compile", lambda *_: b"")
    monkeypatch.setattr(_kernels, "_cache_folder", lambda: tmp_path)
    digests, files = [], []
    for edit in ("", "// edited\n"):
        (folder / name).write_text((folder / name).read_text(encoding="utf-8") + edit, encoding="utf-8")
        _kernels.digest.cache_clear()
        digests.append(_kernels.digest())
        files.append(_kernels.compiled(kernel, (9, 0)))
    monkeypatch.undo()
    _kernels.digest.cache_clear()
    assert digests[0] == _kernels.digest() != digests[1]
    assert files[0] != files[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for compiled kernels."""
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy, which is not installed")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    _kernels._cache_folder.cache_clear()
    yield tmp_path / "cache"
    _kernels._cache_folder.cache_clear()


FOLD = _plan.fold("float32")


def code_in(file: Path) -> bytes:
    """The file without its checksum."""
    return file.read_bytes()[:-32]


def test_what_was_compiled_is_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _kernels.compiled(FOLD, (8, 0))
    assert list(cache.iterdir()) == [file] and file.read_bytes().startswith(b"\x7fELF")
    monkeypatch.setattr(_kernels, "_compile", lambda kernel, arch: arch.encode())  # a new compilation would show
    assert _kernels.compiled(FOLD, (8, 0)) == file and file.read_bytes().startswith(b"\x7fELF")
    others = [_kernels.compiled(FOLD, (9, 0)), _kernels.compiled(_plan.fold("float16"), (8, 0))]
    assert [code_in(other) for other in others] == [b"sm_90", b"sm_80"]
    monkeypatch.setattr(_kernels, "digest", lambda: "of other sources")
    assert _kernels.compiled(FOLD, (8, 0)) not in (file, *others)
    assert len(list(cache.iterdir())) == 4


def test_a_gpu_that_nvrtc_does_not_know_gets_ptx(cache: Path) -> None:
    file = _kernels.compiled(FOLD, (99, 0))
    assert file.suffix == ".ptx" and b".visible .entry fold(" in code_in(file)


def test_a_failed_compilation_leaves_nothing(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"fold\.cu for sm_80:\n"):
        _kernels.compiled(FOLD._replace(defines=(("X_TYPE", "no_type"),)), (8, 0))
    assert not list(cache.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fcntl")
def test_processes_that_start_together_compile_a_kernel_once(cache: Path) -> None:
    """As ranks do. Each says whether it compiled; all load the same code."""
    program = """
import time
from gsbn import _plan
from gsbn._cuda import kernels
def slow(kernel, arch):
    print("compiled")
    time.sleep(1)
    return b"code"
kernels._compile = slow
print(kernels._find(_plan.fold("float32"), (8, 0))[1])
"""
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [rank.communicate()[0] for rank in ranks]
    assert sorted(said) == ["b'code'\n"] * 3 + ["compiled\nb'code'\n"]
    assert [code_in(file) for file in cache.iterdir()] == [b"code"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fcntl")
def test_no_process_waits_long_for_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may have been stopped while it compiled, or killed."""
    import fcntl

    file = _kernels._find(FOLD, (8, 0))[0]
    file.unlink()
    lock = file.with_suffix(".lock")
    lock.touch()  # left by a process that was killed
    assert _kernels._find(FOLD, (8, 0))[0].exists() and not lock.exists()
    file.unlink()
    monkeypatch.setattr(_kernels, "LONGEST_WAIT", 0.1)
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert _kernels._find(FOLD, (8, 0))[0].exists()


def test_kernels_are_compiled_where_the_cache_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file in the folder's place")
    file, code = _kernels._find(FOLD, (8, 0))
    assert not file.exists() and code.startswith(b"\x7fELF")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that were compiled, by a compiler that takes 10 ms for each."""
    kernels: list[Kernel] = []

    def compile_(kernel: Kernel, *_: str) -> bytes:
        kernels.append(kernel)
        time.sleep(0.01)
        return b"code"

    monkeypatch.setattr(_kernels, "_compile", compile_)
    return kernels


def test_a_warm_up_without_a_cache_ends(cache: Path, compiled: list[Kernel]) -> None:
    cache.write_text("a file in the folder's place")
    with pytest.raises(OSError, match=r"^cannot write to .* CUPY_CACHE_DIR"):
        gsbn.warm_up(arch="sm_80")
    assert len(compiled) < len(list(_kernels.all_kernels("sm_80"))) / 2, "it went on after the first error"


@pytest.mark.usefixtures("cache")
def test_a_warm_up_that_is_interrupted_ends(compiled: list[Kernel]) -> None:
    """By Ctrl-C, or by what `progress` raises."""

    def progress(done: int, total: int, name: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gsbn.warm_up(progress, arch="sm_80")
    assert 5 <= len(compiled) < len(list(_kernels.all_kernels("sm_80"))) / 2


def test_a_read_only_cache_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container image with a filled cache. A read-only file system refuses a rename also to root."""
    file = _kernels.compiled(FOLD, (8, 0))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((tempfile, "NamedTemporaryFile"), (os, "replace"), (Path, "mkdir")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(_kernels, "_compile", lambda *_: pytest.fail("it was compiled already"))
    assert _kernels._find(FOLD, (8, 0)) == (file, code_in(file))


@pytest.mark.parametrize("damage", [lambda whole: whole[:100], lambda whole: b"", lambda whole: whole[:-1] + b"\0"])
def test_a_damaged_file_is_compiled_again(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    file = _kernels.compiled(FOLD, (8, 0))
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert _kernels._find(FOLD, (8, 0)) == (file, whole[:-32])
    assert file.read_bytes() == whole


def test_a_full_disk_leaves_no_pieces(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tempfile.NamedTemporaryFile

    def full(*arguments: Any, **options: Any) -> Any:
        new = real(*arguments, **options)

        def write(data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        new.write = write
        return new

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    file, code = _kernels._find(FOLD, (8, 0))
    assert code.startswith(b"\x7fELF") and not file.exists() and not list(cache.iterdir())


def test_warming_up_for_another_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "_compile", lambda kernel, arch: arch.encode())
    steps: list[int] = []
    count = gsbn.warm_up(lambda done, total, name: steps.append(done), arch="sm_90")
    assert count == len(list(_kernels.all_kernels("sm_90a"))) and steps == list(range(count + 1))
    assert {code_in(file) for file in cache.iterdir()} == {b"sm_90", b"sm_90a"}
    more = gsbn.warm_up(arch="sm_90", activations=["relu", "silu", ("elu", 2), ("elu", 2.0)])
    assert more == len(list(_kernels.all_kernels("sm_90a", ("relu", "silu", ("elu", 2.0))))) > count
    assert gsbn.warm_up(arch="sm_90", activations=()) < count
    for activations, error in (("silu", TypeError), (3, TypeError), (["tanh"], ValueError), ([3], TypeError)):
        with pytest.raises(error, match=r"^activations?: expected"):
            gsbn.warm_up(arch="sm_90", activations=activations)
    assert gsbn.warm_up(arch="sm_86") == len(list(_kernels.all_kernels("sm_86"))) < count
    for wrong in ("sm_70", "90", "sm_", "hopper", "compute_90"):
        with pytest.raises(ValueError, match=r"^arch: expected a compute capability"):
            gsbn.warm_up(arch=wrong)
    with pytest.raises(TypeError, match=r"^arch: expected a string or None, got 90$"):
        gsbn.warm_up(arch=90)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^progress: expected a function or None, got 'sm_90'$"):
        gsbn.warm_up("sm_90")  # type: ignore[arg-type]


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_launch_reads_its_own_parameters(overlapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the same kernel is launched meanwhile by other threads, or by this one in a signal handler."""
    pytest.importorskip("cupy", reason="the launcher is CuPy's driver's")
    wrong: list[Any] = []
    together = threading.Barrier(4)

    def launch(_: int, grid: int, *rest: Any) -> None:
        """A slow driver; the grid says what it should read."""
        depth = grid % 3
        if depth:
            run(grid - 1)
        parameters = (ctypes.c_uint64 * 5).from_address(rest[-2])
        words = [ctypes.c_uint64.from_address(at).value for at in parameters[2:]]
        if (*parameters[:2], *words) != (grid, grid + 1, grid + 2, grid + 3, 2**64 - 1):
            wrong.append((grid, list(parameters), words))

    @ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
    def launch_ex(config: int, kernel: int, parameters: int, extra: None) -> int:
        told = _driver.LaunchConfig.from_address(config)
        sizes = told.gy, told.gz, told.bx, told.by, told.bz, told.shared, told.stream, told.count
        if (*sizes, told.attributes) != (1, 1, 32, 1, 1, 40, 7 << 40, 1, ctypes.addressof(_driver.OVERLAPPING)):
            wrong.append((sizes, told.attributes))
        launch(kernel, told.gx, parameters, extra)
        return kernel - (5 << 40)

    def run(grid: int) -> None:
        launcher.launch(grid, 32, (grid, grid + 1), (grid + 2, grid + 3, 2**64 - 1), 7 << 40)

    def many(first: int) -> None:
        together.wait()
        for i in range(500):
            run(30_000 * first + 3 * i + 2)

    at = ctypes.cast(launch_ex, ctypes.c_void_p).value  # as a function without argtypes, like the driver's
    monkeypatch.setattr(_kernels, "launch_kernel_ex", lambda: ctypes.CFUNCTYPE(ctypes.c_int)(at))
    launcher = _kernels.Launcher(SimpleNamespace(ptr=5 << 40), 40, overlapping=overlapping)
    if not overlapping:
        monkeypatch.setattr(launcher, "_launch", launch)
    threads = [threading.Thread(target=many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert len(launcher._free) <= 12  # three concurrent launches in each thread


def test_machine_code_tells_an_edit_of_the_code_from_one_of_the_text(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy, which is not installed")
    root = ROOT
    for folder in ("gsbn", "kernels", "tools"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        tool = [sys.executable, str(tmp_path / "tools" / "machine_code.py"), "fold", "X_TYPE=float"]
        return subprocess.run([*tool, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)

    first = run()
    assert re.fullmatch(r"[0-9a-f]{12} \d+ \d+ \d+ \d+ fold X_TYPE=float\n", first.stdout), first
    before, kernel = tmp_path / "before.txt", tmp_path / "kernels" / "fold.cu"
    before.write_text(first.stdout)
    text = kernel.read_text()
    kernel.write_text("// A line more than there was.\n" + text)
    assert run("--against", str(before)).returncode == 0
    assert "sqrt(" in text
    kernel.write_text(text.replace("sqrt(", "fabs("))
    edited = run("--against", str(before))
    assert (edited.returncode, edited.stdout.split(":")[0]) == (1, "differs"), edited
