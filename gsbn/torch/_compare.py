"""Compare the time, the memory and the results of a model with gsbn and with PyTorch's own modules."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from .._timing import in_turns, median_interval
from .._typing import Precision
from .._values import flag, real_number, shown, type_name
from ._convert import Conversion, convert, revert
from ._modules import SyncBatchNorm
from ._variant import WORKS, Setting, Variant, reason, tensors_in

_PLAIN = "plain"
_VARIANTS = {  # whether `convert` changes the model, and whether torch.compile compiles it
    _PLAIN: (False, False),
    "compiled": (False, True),
    "gsbn": (True, False),
    "gsbn, compiled": (True, True),
}
_CALLED, _GRAPH = "as called", "in a CUDA graph"
_SHARING = (nn.SyncBatchNorm, SyncBatchNorm, nn.parallel.DistributedDataParallel)
_LEGEND = (
    "ms: median time of a call. speed: plain's time over this one's; with ~ its 95 % interval is wider than a tenth of "
    "it, so the machine was busy: try more seconds. MiB: peak memory of a call, beyond parameters and "
    "inputs. outputs, gradients: norm of the difference from plain's, over the norm of plain's."
)


class Measured(NamedTuple):
    """A row of a `Comparison`: one variant of the model, which does one kind of work in one way.

    Attributes
    ----------
    work : {"inference", "training step"}
    way : {"as called", "in a CUDA graph"}
    variant : {"plain", "compiled", "gsbn", "gsbn, compiled"}
    ms : float or None
        The median time of a call in milliseconds. None if there is no time; `why` then has the reason.
    speed : float or None
        The time of "plain" divided by the time of this variant: the median of this ratio over all rounds. Above 1 this
        variant is faster.
    speed_low, speed_high : float or None
        The ends of an interval that contains the true `speed` with 95 % confidence.
    peak_bytes : int or None
        The most memory that a call takes beyond parameters and inputs; None on a CPU.
    outputs, gradients : float or None
        The norm of the difference from the tensors of "plain", divided by the norm of the tensors of "plain". Each norm
        is taken over all tensors together. None for "plain", and if there is nothing to compare.
    why : str
        The reason why there is no time; empty if there is one.
    """

    work: str
    way: str
    variant: str
    ms: float | None = None
    speed: float | None = None
    speed_low: float | None = None
    speed_high: float | None = None
    peak_bytes: int | None = None
    outputs: float | None = None
    gradients: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. As a string it is a table of at most 80 columns.

    Attributes
    ----------
    device : str
        The device that the model ran on, and the version of PyTorch.
    conversion : Conversion
        What `convert` replaced, and what it left and why.
    notes : tuple of str
        Sentences that a reader of the figures must know, such as that nothing was converted.
    rows : tuple of Measured
    """

    device: str
    conversion: Conversion
    notes: tuple[str, ...]
    rows: tuple[Measured, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything in JSON's types. A difference that is not finite becomes a string."""
        replaced, left = self.conversion
        return {
            "device": self.device,
            "replaced": [list(names) for names in replaced],
            "left": [each._asdict() for each in left],
            "notes": list(self.notes),
            "rows": [{name: _in_json(value) for name, value in row._asdict().items()} for row in self.rows],
        }

    def table(self, width: int = 80) -> str:
        """Return the table. Sentences are wrapped at `width` characters; the figures need 59."""
        head = [self.device, *self.notes, *(str(self.conversion).splitlines() if any(self.conversion) else ())]
        lines = [part for line in head for part in textwrap.wrap(line, width, subsequent_indent="  ")]
        lines += ["", f"{'ms':>24}{'speed':>7}{'MiB':>9}{'outputs':>9}{'gradients':>10}"]
        for (work, way), rows in groupby(self.rows, lambda row: row[:2]):
            lines.append(f"{work}, {way}")
            for row in rows:
                if row.ms is None:
                    lines += textwrap.wrap(f"  {row.variant}: {row.why}", width, subsequent_indent="    ")
                else:
                    lines.append(f"  {row.variant:14}{_figures(row)}")
        return "\n".join([*lines, "", *textwrap.wrap(_LEGEND, width)])

    def __str__(self) -> str:
        return self.table()


def compare(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    scales: tuple[type, ...] = (),
    precision: Precision = "highest",
    trace: bool = False,
    linear: bool = False,
    autocast: torch.dtype | None = None,
    compile: bool = True,
    graph: bool = True,
    seconds: float = 2.0,
) -> Comparison:
    """Measure whether gsbn helps a model.

    The model is measured as it is, compiled by torch.compile, changed by `convert`, and with both. Two kinds of work
    are timed: inference in ``eval()`` without gradients, and a training step (forward and backward, no optimiser). Each
    is timed as called and, on a GPU, in a CUDA graph. Everything runs on copies: the model, its gradients and modes,
    the inputs and the state of PyTorch's random numbers stay as they are. ``print`` the result to see a table.

    Parameters
    ----------
    model : nn.Module
        A model on a CPU or on one CUDA GPU. If it has been converted, "plain" is a copy that `revert` has changed back.
    *inputs : Any
        The arguments that the model is called with. Tensors may be in tuples, lists and dicts. If a tensor requires
        grad, its gradient is computed and compared, too.
    loss : callable, optional
        A function that makes a tensor of one element from the model's output; the training step computes its gradients.
        By default the loss is the sum of all outputs, each multiplied by its own fixed random number, because a plain
        sum and a sum of squares have no gradient after BatchNorm1d.
    scales, precision, trace, linear
        As for `convert`.
    autocast : {torch.bfloat16, torch.float16}, optional
        The forward and the loss run under ``torch.autocast`` with this dtype.
    compile : bool
        Whether torch.compile is measured, too. It takes a minute or more.
    graph : bool
        Whether CUDA graphs are measured, too.
    seconds : float
        How long the variants are timed in turns, in each of the four parts of the table (two on a CPU). At least seven
        rounds are run.

    Returns
    -------
    Comparison
        A variant that fails, such as one that cannot be captured in a CUDA graph, has a row with the reason.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or a value that is not allowed, the tensors are on several devices, other processes
        share the model's batches, or the model does not accept the inputs.

    Notes
    -----
    On a GPU, times are measured between CUDA events. The times as called include the host's time if the GPU waits for
    the host. The peak memory is that of PyTorch's allocator, whose peak statistics are reset. Random numbers, such as
    those of Dropout, are the same in "plain" and "gsbn". torch.compile draws other random numbers, so no difference is
    given for its variants of a model that draws any. A `LinearBatchNorm1d` stays in all variants.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> import gsbn.torch
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    >>> result = gsbn.torch.compare(model, torch.randn(256, 64), compile=False, seconds=0.1)
    >>> print(result.conversion)
    replaced 0 + 1 + 2
    >>> [row.variant for row in result.rows if row.work == "training step" and row.way == "as called"]
    ['plain', 'gsbn']
    """
    device = _checked(model, inputs, autocast)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: expected a function of the model's output, got {shown(loss)}")
    flag("compile", compile)
    flag("graph", graph)
    if real_number("seconds", seconds, "a number of seconds") <= 0:
        raise ValueError(f"seconds: expected more than 0, got {shown(seconds)}")
    setting = Setting(device, loss, autocast, seconds)
    with ExitStack() as stack:
        for context in (torch.inference_mode(False), torch.enable_grad(), setting.same_random_numbers()):
            stack.enter_context(context)
        if setting.on_gpu:
            stack.enter_context(torch.cuda.device(device))
        variants, conversion = [], Conversion((), ())
        for name, (converts, compiles) in _VARIANTS.items():
            if compiles and not compile:
                continue
            module = _copy_of(model)
            if converts:
                conversion = convert(module, scales=scales, precision=precision, trace=trace, linear=linear)
            missing = "nothing was converted" if converts and not conversion.replaced else ""
            variants.append(Variant(name, module, _copies_of(inputs), compiles, setting, missing))
        rows = [row for work in WORKS for row in _measure(work, variants, setting, graph)]
    title = torch.cuda.get_device_name(device) if setting.on_gpu else f"CPU, threads: {torch.get_num_threads()}"
    notes = tuple(_notes(conversion, variants, setting, precision))
    return Comparison(f"{title}, PyTorch {torch.__version__}", conversion, notes, tuple(rows))


def _checked(model: Any, inputs: Any, autocast: Any) -> torch.device:
    """Return the device of the model. Raise an error if one of these arguments is wrong."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type_name(model)}")
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise TypeError("model: expected one that is neither scripted nor compiled: compare compiles a copy itself")
    if not inputs:
        raise TypeError("inputs: expected what the model is called with, got nothing")
    given = {tensor.device for tensor in tensors_in(inputs)}
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or given
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise ValueError(f"model: expected a CPU or one CUDA GPU, got tensors on {_listed(devices)}")
    (device,) = devices
    if given and device not in given:
        raise ValueError(f"inputs: expected tensors on {device}, where the model is, got some on {_listed(given)}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast: expected torch.bfloat16, torch.float16 or None, got {shown(autocast)}")
    if torch.is_autocast_enabled(device.type):
        raise ValueError("autocast: expected a call outside torch.autocast; pass autocast=torch.bfloat16 instead")
    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if ranks > 1 and any(isinstance(module, _SHARING) for module in model.modules()):
        raise ValueError(f"model: expected one of a single process, got one that {ranks} processes share")
    return device


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model that is not converted."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(f"model: expected one that copy.deepcopy copies; {reason(error)}") from error
    revert(copied)
    return copied


def _copies_of(inputs: Any) -> Any:
    """Return a copy of the inputs. Its tensors are leaves of autograd, even if the originals are not."""
    memo = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_in(inputs)}
    return copy.deepcopy(inputs, memo)


def _measure(work: str, variants: list[Variant], setting: Setting, graph: bool) -> Iterator[Measured]:
    """Yield the rows of the table for this kind of work."""
    plain, *others = variants
    for variant in variants:
        variant.start(work)
    wanted = plain.attempt(plain.results)
    if wanted is None and work == WORKS[0]:
        raise ValueError(f"inputs: the model in eval() does not take them; {plain.why}")
    for variant in others:
        found = variant.attempt(variant.results)
        if found and wanted and not (plain.draws and variant.compiles):  # torch.compile draws other numbers
            differences = map(_difference, found, wanted)
            variant.facts |= zip(("outputs", "gradients"), differences, strict=True)
        found = None
    wanted = None
    for variant in variants:
        variant.attempt(variant.prepare)
    yield from _timed(_CALLED, variants, setting)
    if graph and setting.on_gpu:
        for variant in variants:
            variant.attempt(variant.capture)
        yield from _timed(_GRAPH, variants, setting)
    for variant in variants:
        variant.clear()


def _timed(way: str, variants: list[Variant], setting: Setting) -> Iterator[Measured]:
    live = [variant for variant in variants if not variant.why]
    samples = in_turns([variant.trial() for variant in live], setting.seconds)
    times = {variant.name: of_one for variant, of_one in zip(live, samples, strict=True)}
    for variant in variants:
        if variant.why:
            yield Measured(variant.work, way, variant.name, why=variant.why)
            continue
        seconds, facts = times[variant.name], dict(variant.facts)
        if _PLAIN in times:  # ratios within a round: clocks and other programs are the same for both
            speed = median_interval([plain / own for plain, own in zip(times[_PLAIN], seconds, strict=True)])
            facts |= {"speed": speed.median, "speed_low": speed.low, "speed_high": speed.high}
        yield Measured(variant.work, way, variant.name, 1e3 * median_interval(seconds).median, **facts)


def _difference(found: list[Tensor], wanted: list[Tensor]) -> float | None:
    """Return the norm of the difference divided by the norm of `wanted`, over all tensors together."""
    if not wanted:
        return None
    of_difference = math.hypot(*(_norm(a - b) for a, b in zip(found, wanted, strict=True)))
    of_wanted = math.hypot(*map(_norm, wanted))
    return of_difference / of_wanted if of_wanted else math.inf if of_difference else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _notes(conversion: Conversion, variants: list[Variant], setting: Setting, precision: str) -> Iterator[str]:
    if not setting.on_gpu:
        yield "On a CPU a converted model runs PyTorch's own modules: compare on a GPU."
    elif precision == "highest" and getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32":
        yield 'float32 products: TF32 by PyTorch, float32 by gsbn; precision="high" allows gsbn TF32, too.'
    if variants[0].draws and any(variant.compiles for variant in variants):
        yield "The model draws random numbers, and torch.compile others: it has no differences in training."
    if not conversion.replaced:
        why = ":" if conversion.left else ", as the model has no BatchNorm1d and no SyncBatchNorm."
        yield f"Nothing was converted, so gsbn changes nothing here{why}"


def _figures(row: Measured) -> str:
    def cell(value: float | None, spec: str) -> str:
        return "-" if value is None else format(value, spec)

    ms = cell(row.ms, "#.3g" if row.ms is not None and row.ms < 100 else ".0f")
    speed = cell(row.speed, ".2f")
    if row.speed and (row.speed_high or 0) - (row.speed_low or 0) > row.speed / 10:
        speed = f"~{speed}"
    mib = cell(None if row.peak_bytes is None else row.peak_bytes / 2**20, ".1f")
    return f"{ms:>8}{speed:>7}{mib:>9}{cell(row.outputs, '.1e'):>9}{cell(row.gradients, '.1e'):>10}"


def _in_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _listed(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices))) or "no device"
