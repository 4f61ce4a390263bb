"""Jump of kernels/common/activation.cuh gives what settle gives, from thresholds that it finds once for a feature."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gsbn._plan.declared import KERNEL_DIR
from tests.support import on_cpu

CODE = r"""
#include "common/activation.cuh"
using T = TYPE;
extern "C" __global__ void compare(const float* slope, const float* offset, const float* v, int each, T* rounded,
                                   T* settled, T* by_jump) {
    const int feature = blockIdx.x;
    const Jump<Activation<T>, T> jump(Jump<Activation<T>, T>::least(slope[feature], offset[feature]));
    for (int i = threadIdx.x; i < each; i += STEP) {
        const size_t at = size_t(feature) * each + i;
        from_float(v[at], rounded[at]);
        settled[at] = settle<T, T>(v[at], slope[feature], offset[feature]);
        from_float(jump.settle(v[at]), by_jump[at]);
    }
}
"""
EVERY = r"""
extern "C" void of_all(int features, const float* slope, const float* offset, const float* v, int each, T* rounded,
                       T* settled, T* by_jump) {
    for (blockIdx.x = 0; blockIdx.x < features; ++blockIdx.x)
        compare(slope, offset, v, each, rounded, settled, by_jump);
}
"""
DTYPES = ["__half", "__nv_bfloat16"]
ACTIVATIONS = [("Relu", 0.0), ("LeakyRelu", 0.01), ("LeakyRelu", -0.5), ("Elu", 0.5)]
LEAST, MOST = 2.0**-126, {"__half": 65504.0, "__nv_bfloat16": 3.38e38}


def features() -> tuple[np.ndarray, np.ndarray]:
    """Slopes and offsets: ordinary ones, extreme ones, each slope that is not infinite with each offset."""
    rng = np.random.default_rng(1)
    numbers = np.abs(rng.standard_normal(24)).astype("f4")
    extreme = np.array([0, 1, 2**-25, 2**-24, 3e-8, 1e-30, LEAST, 1e-6, 7e4, 1e30, 3e38, np.inf, np.nan], "f4")
    each = np.concatenate([numbers, -numbers, extreme, -extreme])
    slope, offset = np.meshgrid(each[~np.isinf(each)], each)
    return np.ascontiguousarray(slope.ravel()), np.ascontiguousarray(offset.ravel())


def deviations(slope: np.ndarray, offset: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers around each feature's jump, some units of float32 and of 16 bits away, and anywhere; none subnormal."""
    rng = np.random.default_rng(2)
    with np.errstate(all="ignore"):
        jump = np.nan_to_num(-offset.astype("f8") / slope, nan=0, posinf=0, neginf=0)[:, None]
        units = np.concatenate([np.arange(-40, 41) * unit for unit in (2.0**-24, 2.0**-13, 2.0**-10)])
        near = np.concatenate([jump * (1 + units), jump + units, units * 2.0**-14 + 0 * jump], axis=1)
        random = rng.standard_normal((len(slope), 64)) * 10.0 ** rng.integers(-9, 4, (len(slope), 64))
        v = np.concatenate([near, random], axis=1).clip(-MOST[dtype], MOST[dtype]).astype("f4")
    v[np.abs(v) < LEAST] = 0
    v[:, :3] = np.nan, np.inf, -np.inf
    return v


def macros(activation: tuple[str, float], dtype: str, threads: int) -> dict[str, str]:
    name, parameter = activation
    return {"ACTIVATION": name, "ACTIVATION_PARAMETER": str(parameter), "TYPE": dtype, "STEP": str(threads)}


def assert_alike(given: tuple[np.ndarray, ...], made: list[Any], dtype: str) -> None:
    slope, offset, v = given
    rounded, settled, by_jump = (a.astype("i4") for a in made)
    most = 0x7C00 if dtype == "__half" else 0x7F80
    nan = ((settled & 0x7FFF) > most) & ((by_jump & 0x7FFF) > most)
    zero = ((settled | by_jump) & 0x7FFF) == 0  # of either sign
    wrong = np.argwhere((settled != by_jump) & ~nan & ~zero)[:9]
    assert not len(wrong), [(slope[i], offset[i], v[i, j], hex(settled[i, j]), hex(by_jump[i, j])) for i, j in wrong]
    assert (settled != rounded).mean() > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_jump_settles_like_settle(activation: tuple[str, float], dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    from cuda.pathfinder import find_nvidia_header_directory

    options = ("-std=c++20", "-ftz=true", f"-I{KERNEL_DIR}", f"-I{find_nvidia_header_directory('cudart')}")
    options += tuple(f"-D{name}={value}" for name, value in macros(activation, dtype, 128).items())
    slope, offset = features()
    v = deviations(slope, offset, dtype)
    made = [cupy.full(v.shape, 0x7BCD, "u2") for _ in range(3)]
    kernel = cupy.RawKernel(CODE, "compare", options)
    kernel((len(slope),), (128,), (*map(cupy.asarray, (slope, offset, v)), v.shape[1], *made))
    assert_alike((slope, offset, v), list(map(cupy.asnumpy, made)), dtype)


@pytest.mark.skipif(on_cpu.why_not() is not None, reason=str(on_cpu.why_not()))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_a_cpu(activation: tuple[str, float], dtype: str, tmp_path: Path) -> None:
    on_cpu.write_sources(tmp_path)
    library = on_cpu.library_of("jump", CODE + EVERY, macros(activation, dtype, 1).items(), tmp_path)
    slope, offset = features()
    v = deviations(slope, offset, dtype)
    made = [np.full(v.shape, 0x7BCD, "u2") for _ in range(3)]
    given = [a.ctypes.data_as(ctypes.c_void_p) for a in (slope, offset, v, *made)]
    library.of_all(len(slope), *given[:3], v.shape[1], *given[3:])
    assert_alike((slope, offset, v), made, dtype)
