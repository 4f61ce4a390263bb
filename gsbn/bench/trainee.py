"""One candidate of ``gsbn.bench.models``: a model with its optimiser, and what is measured of its training step."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from .._timing import peak_bytes, torch_graph, wall_clock, warm_up
from . import libraries
from .turns import line_of

RATE, MOMENTUM = 1e-4, 0.9  # of SGD: so slow that a thousand steps leave the numbers what they are


class Trainee:
    """A copy of the plain model, converted or compiled as its name says. Its first step is not timed, but judged."""

    def __init__(self, name: str, kind: str, plain: Any, inputs: tuple[Any, ...], dys: list[Any]) -> None:
        self.torch: Any = libraries.load(["pytorch"])["torch"]
        torch = self.torch
        self.kind: str = kind
        self.inputs: tuple[Any, ...] = inputs
        self.dys: list[Any] = dys
        self.y: list[Any] = []  # the outputs
        self.model: Any = copy.deepcopy(plain)
        layers = torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d
        self.layers: int = sum(isinstance(module, layers) for module in plain.modules())
        stack, options = isinstance(plain, torch.nn.Sequential), {}
        if name.startswith("gsbn"):
            from .. import torch as of_torch

            if name == "gsbn-compile" and not stack:
                options = of_torch.inductor_options()
            else:
                replaced = of_torch.convert(self.model, trace=not stack).replaced
                if not replaced or (stack and sum(map(len, replaced)) != len(plain)):
                    raise RuntimeError(f"not all of the model was converted, but {replaced or 'nothing'}")
        compiled = name in ("compile", "gsbn-compile")
        self.forward: Any = self.model
        if compiled:
            self.forward = torch.compile(self.model, dynamic=False, options=options or None)
        self.optimiser: Any = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM, foreach=True)

    def steps(self) -> Iterator[str]:
        """One step, which stops where a part of it ends."""
        self.optimiser.zero_grad(set_to_none=True)
        device, bfloat16 = self.inputs[0].device.type, self.kind == "bfloat16"
        with self.torch.autocast(device, dtype=self.torch.bfloat16, enabled=bfloat16):
            self.y = outputs_of(self.forward(*self.inputs))
        yield "forward"
        pairs = zip(self.dys, self.y, strict=True)
        self.torch.autograd.backward(self.y, [dy if dy.dtype == y.dtype else dy.to(y.dtype) for dy, y in pairs])
        yield "backward"
        self.optimiser.step()
        yield "optimiser"
        self.y = []  # and with it autograd's nodes, which remember the stream that they were made on

    def step(self) -> None:
        for _ in self.steps():
            pass

    def first_step(self, truth: list[Any]) -> tuple[float, float]:
        """The errors of y and of the gradients; those of the parameters count alike, whatever their sizes."""
        steps = self.steps()
        next(steps), next(steps)
        pairs = list(zip(self.outcome(), truth, strict=True))
        largest = max(float(b.norm()) for _, b in pairs[1:])  # that of a bias before a norm is 0, and rounding
        y, *gradients = (_relative(a, b) for a, b in pairs if b is truth[0] or float(b.norm()) > 1e-9 * largest)
        errors = y, statistics.fmean(e * e for e in gradients) ** 0.5
        if not max(errors) < 1:
            raise RuntimeError(f"wrong result: an error of {max(errors):.2g} of the truth")
        next(steps)
        # As a model's next layer would give them: in y's dtype and layout.
        self.dys = [self.torch.empty_like(y).copy_(dy) for dy, y in zip(self.dys, self.y, strict=True)]
        self.y = []
        return errors

    def outcome(self) -> list[Any]:
        return _outcome(self.torch, self.y, self.model)

    def wall(self, calls: int) -> float:
        """Seconds a step, of so many that are called one after another."""
        return wall_clock(self.step, calls, self.synchronize)

    def synchronize(self) -> None:
        if self.inputs[0].device.type == "cuda":
            self.torch.cuda.synchronize()

    def memory(self) -> int:
        """Bytes: the peak of one warm step, over what was there before it without any gradients."""
        self.optimiser.zero_grad(set_to_none=True)
        self.y = []
        return peak_bytes(self.torch, self.step)

    def host(self, once: float) -> float:
        """Seconds that a forward and a backward cost the host: a busy device lets it run ahead.

        ``once`` is the time of a step as called.
        """
        found = []
        for _ in range(5):
            self.synchronize()
            self.torch.cuda._sleep(int(4e9 * once))  # about twice a step as called
            steps, start = self.steps(), time.perf_counter()
            next(steps), next(steps)
            found.append(time.perf_counter() - start)
            next(steps)
            next(steps, None)
            self.synchronize()
        return statistics.median(found)

    def capture(self) -> tuple[Callable[[], None] | None, str]:
        """A replay of a step as a graph, or the reason why it cannot be one."""
        try:
            warm_up(self.torch, self.step, self.torch.cuda.Stream())
            self.optimiser.zero_grad(set_to_none=True)
            replay = torch_graph(self.torch, self.step)
            replay()
            self.synchronize()
        except Exception as error:
            with contextlib.suppress(Exception):
                self.synchronize()
            return None, line_of(error)
        return replay, ""


def outputs_of(found: Any) -> list[Any]:
    """The outputs of a model through which gradients flow."""
    return [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]


def truth_of(plain: Any, inputs: tuple[Any, ...], dys: list[Any]) -> list[Any]:
    """y and the gradients of the first step in float64."""
    torch: Any = libraries.load(["pytorch"])["torch"]
    wide = copy.deepcopy(plain).double()
    y = outputs_of(wide(*(each.double() if each.is_floating_point() else each for each in inputs)))
    torch.autograd.backward(y, [dy.double() for dy in dys])
    return _outcome(torch, y, wide)


def _outcome(torch: Any, y: list[Any], model: Any) -> list[Any]:
    """All outputs in one row, then the gradients of the parameters that have one."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [torch.cat([each.detach().flatten() for each in y]), *gradients]


def _relative(got: Any, want: Any) -> float:
    return float((got.double() - want).norm() / want.norm())
