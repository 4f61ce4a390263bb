"""Compute 1x1 convolutions and linear layers of contiguous (N, C, L) and (N, C, H, W).

torch.compile records one operator for a call IN_PLACE, and compiles the copies of the other calls itself.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import get_autocast_dtype, is_autocast_enabled, is_grad_enabled

from .._arrays.check import checked_activation
from .._arrays.dynamo import constant_in_graphs
from .._cuda import kernels
from .._forward.channels_first import forward_channels_first
from .._forward.operation import WHOLE_BATCH
from .._plan import LEAST_LENGTH, MOST_ROWS, channels_first_obstacle
from ._autograd import are_static, cast, is_compiling, is_exporting, is_watched, shaped, widens
from ._nodes import apply
from ._operators import recorded

IN_PLACE, COPIES = "in place", "copies"  # x and y as they are; or transposed, by a launch each
_COPIED = 2**20  # the least elements of x and y for which copies cost less than what PyTorch's modules launch
# Beside Inductor: the least elements with a backward in 16 bits, of images and of other tensors; and the least elements
# of a float32 weight without a backward
_COMPILED_IMAGES, _COMPILED, _COMPILED_WEIGHT = 3 * 2**19, 2**23, 2**13


def way_of(x: Any, weight: Any, vectors: tuple[Any, ...], options: tuple[Any, ...]) -> str | None:
    """Return how gsbn computes the call of an x that is not taken in rows: IN_PLACE, COPIES, or None if PyTorch's
    operators copy.

    Kernels that read in place keep nothing for a backward with frozen statistics.
    """
    compiling = is_compiling()
    if not x.is_cuda or not (_is_recordable(x, weight) if compiling else not is_watched()):
        return None
    if not (x.is_contiguous() or (compiling and weight.dim() == 3)) or x.numel() == 0:
        return None  # a program makes x of a Conv1d contiguous, as PyTorch does
    dtype = autocast_dtype(x)
    if dtype is None and weight.dtype is not x.dtype:
        return None  # the call raises the error
    training, *_, gemm = options
    # TMA needs addresses on 16 bytes; a recorded program copies what starts elsewhere
    if gemm not in ("auto", "sm90") or not (compiling or x.data_ptr() % 16 == 0):
        return COPIES
    if not training and _needs_gradients(x, weight, vectors):
        return COPIES
    n, _, *sizes = x.shape
    (features, k), length = weight.shape[:2], prod(sizes)
    serves = n * length <= MOST_ROWS and _serves(str(dtype or x.dtype)[6:], x.device.index, features, k, length)
    return IN_PLACE if serves else COPIES


def _is_recordable(x: Any, weight: Any) -> bool:
    """Return whether torch.compile may record what way_of decides, which is then the way of each run of the program.

    The number of samples may vary. An exported program may run on another GPU.
    """
    return not is_exporting() and are_static(*x.shape[1:], weight.shape[0])


def beats_modules(x: Any, weight: Any, vectors: tuple[Any, ...], training: bool, precision: str) -> bool:
    """Return whether gsbn is faster than a convolution of this weight and a norm, of PyTorch, for a contiguous x.

    With copies it is in float32, where cuDNN may not use TF32, and in 16 bits for images that cuDNN does not take well,
    whose samples are short or not a multiple of 16 bytes. Without a backward PyTorch's modules move fewer bytes if
    there are more inputs than features. Inductor fuses the norm with other passes, which serves small calls better, but
    it also turns images to channels last and back. docs/history/channels_first.md has the figures.
    """
    way = way_of(x, weight, vectors, (training, "auto"))
    if way is None:
        return False
    n, _, *sizes = x.shape
    (features, k), length, dtype = weight.shape[:2], prod(sizes), autocast_dtype(x) or x.dtype
    elements, backward = n * length * (k + features), training or _needs_gradients(x, weight, vectors)
    compiled, images = is_compiling(), x.dim() > 3
    if way == IN_PLACE:
        return not (compiled and backward) or elements >= (_COMPILED_IMAGES if images else _COMPILED)
    if dtype is torch.float32:
        if elements < _COPIED or precision != "highest" or _convolves_in_tf32():
            return False
        if compiled:
            return backward or images or k * features >= _COMPILED_WEIGHT
        slow_elsewhere = min(k, features) >= 128  # the product takes longer than the copies
    elif dtype.itemsize == 2 and (length % 8 or length < LEAST_LENGTH):
        if elements < (_COMPILED_IMAGES if compiled else _COPIED):
            return False
        slow_elsewhere = length < LEAST_LENGTH  # cuDNN's product of such short samples
    else:
        return False
    return features >= k or slow_elsewhere or backward


def autocast_dtype(x: Any) -> Any:
    """Return the dtype to which autocast casts x, or None."""
    return get_autocast_dtype("cuda") if is_autocast_enabled("cuda") and x.dtype is not torch.float64 else None


@constant_in_graphs
def _convolves_in_tf32() -> bool:
    of_conv = getattr(torch.backends.cudnn, "conv", None)  # new in PyTorch 2.9; with it, allow_tf32 may raise
    return bool(torch.backends.cudnn.allow_tf32 if of_conv is None else of_conv.fp32_precision == "tf32")


@constant_in_graphs
def _serves(dtype: str, device: int, n: int, k: int, length: int) -> bool:
    return dtype in ("float16", "bfloat16") and _obstacle(dtype, device, n, k, length) is None


@lru_cache(maxsize=1024)
def _obstacle(dtype: str, device: int, n: int, k: int, length: int) -> str | None:
    return channels_first_obstacle(dtype, n, k, length, kernels.gpu(device))


def _needs_gradients(x: Any, weight: Any, vectors: tuple[Any, ...]) -> bool:
    return is_grad_enabled() and any(of is not None and of.requires_grad for of in (x, weight, *vectors))


def channels_first(x: Any, weight: Any, vectors: tuple[Any, ...], state: Any, options: Any, activation: Any) -> Any:
    """Return a contiguous y for a contiguous x IN_PLACE. `weight` has shape (O, C), and `vectors` are bias, gamma and
    beta."""
    activation, dtype = checked_activation(activation), autocast_dtype(x)
    (n, k, *sizes), features = x.shape, weight.shape[0]
    rows, (bias, gamma, beta) = x.view(n * prod(sizes), k), vectors
    length, differentiate = prod(sizes), _needs_gradients(x, weight, vectors)
    if is_compiling():
        training, *more = options
        wide = differentiate and widens(dtype, weight)
        tensors = cast(rows, dtype), weight if wide else cast(weight, dtype), bias, None, gamma, beta, *state
        of_call = 1.0, *more, None, None, None, 1, None  # no process group, renorm, limits and residual, and one group
        y = recorded(tensors, training, differentiate, wide, activation, *of_call, length=length)
        return y.view(n, features, *sizes)
    options = *options, differentiate, None, activation, *WHOLE_BATCH
    if differentiate:
        return apply(rows, weight, bias, None, gamma, beta, state, options, dtype, None, (n, *sizes))
    arrays = cast(rows, dtype), cast(weight, dtype), None, bias, gamma, beta, *state, None, None, None
    return shaped(forward_channels_first(arrays, options, length), (n, features, *sizes))
