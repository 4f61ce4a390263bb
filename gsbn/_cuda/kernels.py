"""Compile, cache and launch the kernels. Only this file uses CuPy's raw modules and NVRTC."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .. import _plan
from .._plan import Kernel
from .._plan.declared import KERNEL_DIR, parameters, source
from .._plan.sm90_variants import ARCH
from .device import on_device
from .driver import OVERLAPPING, check, launch_kernel_ex, pointer, resident_clusters


@cache
def digest() -> str:
    """Return a digest of all files in kernels/, headers too. It is part of a compiled kernel's key."""
    import hashlib  # takes 10 ms, so not at `import gsbn`

    hasher = hashlib.sha256()
    for path in sorted(KERNEL_DIR.rglob("*.cu*")):
        hasher.update(path.relative_to(KERNEL_DIR).as_posix().encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()[:16]


def all_kernels(arch: str | None = None, activations: Collection[Any] = ("relu",)) -> Iterator[Kernel]:
    """Yield all variants that a plan can launch without an activation and with these activations.

    With `arch`, yield only the variants for this architecture.
    """
    yield from (kernel for kernel in _plan.every_kernel(activations) if arch is None or kernel.arch in (None, arch))


def usable(capability: tuple[int, int], activations: Collection[Any]) -> Iterator[Kernel]:
    """Return the variants that a GPU of this compute capability can run."""
    hopper = _plan.Device(capability, sms=0, sm90a=_compiles_sm90a()).hopper
    return all_kernels(ARCH if hopper else "any other", activations)


def _compiles_sm90a() -> bool:
    """Return whether this NVRTC compiles the kernels for Hopper well: before 12.9 it serialises wgmma."""
    from cupy.cuda import nvrtc

    return bool(nvrtc.getVersion() >= (12, 9))


_MAX_DYNAMIC_SHARED_SIZE_BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14  # CU_FUNC_ATTRIBUTE_...
_locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)  # one per file or module, so others can compile
LONGEST_WAIT = 120  # seconds that a process waits for another that compiles the same kernel


def _options(kernel: Kernel) -> tuple[str, ...]:
    return (
        "-std=c++20",
        "-ftz=true",  # as CuPy does
        *(f"-D{name}={value}" for name, value in kernel.defines),
    )


def _compile(kernel: Kernel, arch: str, *more: str) -> bytes:
    """Compile a variant by NVRTC. Return its cubin, or its PTX if arch begins with compute_. This needs no GPU."""
    from cuda.pathfinder import find_nvidia_header_directory
    from cupy.cuda import nvrtc

    headers = (KERNEL_DIR, find_nvidia_header_directory("cudart"))
    program = nvrtc.createProgram(source(f"{kernel.file}.cu"), f"{kernel.file}.cu", (), ())
    try:
        includes = (f"-I{folder}" for folder in headers)
        nvrtc.compileProgram(program, (*_options(kernel), *more, *includes, f"-arch={arch}"))
        return (nvrtc.getPTX if arch.startswith("compute") else nvrtc.getCUBIN)(program)  # type: ignore[no-any-return]
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{kernel.file}.cu for {arch}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def compiled(kernel: Kernel, capability: tuple[int, int]) -> Path:
    """Return the file of a variant's machine code for a GPU of this compute capability.

    The variant is compiled if the file does not exist.

    The file is in CuPy's folder for compiled kernels (the environment variable CUPY_CACHE_DIR, by default
    ~/.cupy/kernel_cache). If this folder is not writable, the file does not exist. For a GPU that NVRTC does not know,
    the file has PTX, which the driver compiles.
    """
    return _find(kernel, capability)[0]


def _find(kernel: Kernel, capability: tuple[int, int]) -> tuple[Path, bytes]:
    """Return the file of `compiled`, and the machine code."""
    import hashlib

    from cupy.cuda import nvrtc

    number, known = 10 * capability[0] + capability[1], nvrtc.getSupportedArchs()
    arch = kernel.arch or (f"sm_{number}" if number in known else f"compute_{max(known)}")
    what = (kernel.file, digest(), *_options(kernel), arch, nvrtc.getVersion())
    name = f"gsbn_{kernel.file}_{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}"
    file = _cache_folder() / (name + (".ptx" if arch.startswith("compute") else ".cubin"))
    with _locks[file]:  # a file may hold several kernels
        code = _read(file)
        if code is None:
            with _lock_among_processes(file):
                code = _read(file)  # another process may have compiled it meanwhile
                if code is None:
                    code = _compile(kernel, arch)
                    _write(file, code)
    return file, code


@contextlib.contextmanager
def _lock_among_processes(file: Path) -> Iterator[None]:
    """Lock a file of machine code, so that ranks that start together do not all compile the same kernel.

    After `LONGEST_WAIT`, on Windows and in a folder without locks the caller goes on without the lock.
    """
    lock = file.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            lock.parent.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(lock.open("wb"))
            stack.callback(_remove, lock)  # a process that still waits for it will find the machine code
            until = time.monotonic() + LONGEST_WAIT
            while time.monotonic() < until:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        yield


def _remove(file: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file)


@cache
def _cache_folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _read(file: Path) -> bytes | None:
    """Return the code in a file, before its checksum, or None if the file does not exist or is damaged."""
    import hashlib

    try:
        found = file.read_bytes()
    except OSError:
        return None
    code, checksum = found[:-32], found[-32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(file: Path, code: bytes) -> None:
    """Write a file whole or not at all, even if other processes write it, too.

    If the folder is read-only or full, nothing is written.
    """
    import hashlib
    import tempfile

    new = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.stem, suffix=".tmp", delete=False) as new:
            new.write(code + hashlib.sha256(code).digest())
        os.replace(new.name, file)
    except OSError:
        if new is not None:
            _remove(new.name)


@cache
def gpu(device: int) -> _plan.Device:
    """Return those properties of the GPU with this number that a plan depends on."""
    import cupy

    handle = cupy.cuda.Device(device)
    found = _plan.Device(_capability(device), handle.attributes["MultiProcessorCount"], _compiles_sm90a())
    if not found.hopper:
        return found
    # MPS may give a process fewer SMs than the device has, and fewer clusters than these SMs could form.
    shared = handle.attributes["MaxSharedMemoryPerBlockOptin"]
    with on_device(device):
        function = launcher(_plan.fill_sm(shared), device).pointer
        sms, pairs, fours, eights, sixteens = (
            resident_clusters(function, _plan.SM90_THREADS, size, shared) for size in (1, 2, 4, 8, 16)
        )
    bandwidth = _bandwidth(handle.attributes)
    return found._replace(sms=sms, pairs=pairs, fours=fours, eights=eights, sixteens=sixteens, bandwidth=bandwidth)


def _bandwidth(attributes: Mapping[str, Any]) -> float:
    """Return `Device.bandwidth`. It is 1 where it is unknown, and for memory nearly as fast as an H200's."""
    # the divisor is an H200's, in kHz and bits
    part = attributes.get("MemoryClockRate", 0) * attributes.get("GlobalMemoryBusWidth", 0) / (3_201_000 * 6144)
    return round(part, 2) if 0.1 < part < 0.9 else 1.0


@cache
def _capability(device: int) -> tuple[int, int]:
    import cupy

    major, minor = divmod(int(cupy.cuda.Device(device).compute_capability), 10)
    return major, minor


_CONFIG = "7I4x2QI4x"  # LaunchConfig
_ATTRIBUTES = ctypes.addressof(OVERLAPPING)


class Launcher:
    """A kernel on a device.

    A launch calls the driver directly, because CuPy's launcher would build an object for every argument. With
    `overlapping`, a kernel that is not cooperative may begin before the kernel ahead of it in the stream has ended; it
    waits for that kernel itself (await_kernel_ahead in kernels/common/common.cuh).
    """

    def __init__(self, function: Any, shared: int = 0, cooperative: bool = False, overlapping: bool = False) -> None:
        from cupy.cuda import driver

        self._function = function  # keeps the module loaded
        self.pointer, self._shared, self._cooperative = function.ptr, shared, cooperative
        self._launch = driver.launchCooperativeKernel if cooperative else driver.launchKernel
        self._overlapping = overlapping and not cooperative
        if self._overlapping:
            self._launch, self._kernel = launch_kernel_ex(), pointer(self.pointer)
        self._free: list[_Parameters] = []  # concurrent launches take one each

    def launch(self, grid: int, block: int, values: tuple[int, ...], words: tuple[int, ...], stream: int) -> None:
        """Launch the kernel.

        `values` are the addresses of the parameters that are passed by value. They come first, and 64-bit `words`
        follow.
        """
        try:
            parameters = self._free.pop()  # safe with threads and signals: this launch owns it until it is appended
        except IndexError:
            parameters = _Parameters(len(values), len(words))
        parameters.pack(
            parameters.memory, 0, grid, 1, 1, block, 1, 1, self._shared, stream, _ATTRIBUTES, 1, *words, *values
        )  # fmt: skip
        if self._overlapping:
            if result := self._launch(parameters.config, self._kernel, parameters.pointer, None):
                check(result, "launching a kernel")
        elif self._cooperative:
            self._launch(self.pointer, grid, 1, 1, block, 1, 1, self._shared, stream, parameters.at)
        else:
            self._launch(self.pointer, grid, 1, 1, block, 1, 1, self._shared, stream, parameters.at, 0)
        self._free.append(parameters)  # the driver has copied them


class _Parameters:
    """The memory that the driver reads at a launch, packed in one call.

    It has the LaunchConfig of an overlapping launch, the words, then an address for each value and each word.
    """

    def __init__(self, values: int, words: int) -> None:
        packed = struct.Struct(f"{_CONFIG}{words + values}Q")
        self.memory = (ctypes.c_uint64 * (packed.size // 8 + words))()
        config = ctypes.addressof(self.memory)
        start = config + struct.calcsize(_CONFIG)
        self.memory[packed.size // 8 :] = list(range(start, start + 8 * words, 8))
        self.at = start + 8 * words
        self.pack, self.config, self.pointer = packed.pack_into, pointer(config), pointer(self.at)


@cache
def _overlaps(device: int) -> bool:
    """Return whether a launch may begin before the kernel ahead has ended (await_kernel_ahead).

    Graphs support this from CUDA 12.3 on.
    """
    from cupy.cuda import runtime

    return _capability(device) >= (9, 0) and runtime.driverGetVersion() >= 12030


_modules: dict[tuple[str, tuple[tuple[str, str], ...], int], Any] = {}
_launchers: dict[tuple[Kernel, int, bool, bool], Launcher] = {}


def launcher(
    kernel: Kernel,
    device: int,
    words: tuple[str, ...] | None = None,
    *,
    cooperative: bool = False,
    limited: bool = False,
) -> Launcher:
    """Return the launcher of a kernel on a device, which must be the current one. Compile the kernel if necessary.

    `words` are the names of the parameters that the caller will pass, in order. Raises TypeError if the source declares
    others. Launches of a `limited` call do not overlap with the kernel ahead, because both together would occupy more
    SMs.
    """
    if words is not None and words != parameters(kernel)[1]:
        raise TypeError(f"{kernel.name} takes {parameters(kernel)[1]}, not {words}")
    key = kernel, device, cooperative, limited
    found = _launchers.get(key)
    if found is None:
        from cupy.cuda import driver, function

        of_file = (kernel.file, kernel.defines, device)
        with _locks[of_file]:
            if of_file not in _modules:
                _modules[of_file] = module = function.Module()  # as in a RawModule, but its code need not be in a file
                module.load(_find(kernel, _capability(device))[1])
            raw = _modules[of_file].get_function(kernel.name)
            if kernel.shared:
                driver.funcSetAttribute(raw.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared)
            if kernel.arch:  # on Hopper a cluster may have 16 CTAs
                driver.funcSetAttribute(raw.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            found = Launcher(raw, kernel.shared, cooperative, _overlaps(device) and not limited)
            _launchers[key] = found
    return found


def compile_all(arch: str, kernels: Collection[Kernel], *more: str) -> dict[Kernel, bytes]:
    """Return the cubins of these variants for an architecture such as "sm_90a". This needs no GPU.

    `more` are further options of NVRTC.
    """
    from concurrent.futures import ThreadPoolExecutor

    variants = {(kernel.file, kernel.defines): kernel for kernel in kernels}  # a cubin may hold several kernels
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda kernel: _compile(kernel, arch, *more), variants.values())
        cubins = dict(zip(variants, made, strict=True))
    return {kernel: cubins[kernel.file, kernel.defines] for kernel in kernels}
