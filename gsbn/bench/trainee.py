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

    def __init__(self, name: str, kind: str, plain: Any, x: Any, dy: Any) -> None:
        self.torch: Any = libraries.load(["pytorch"])["torch"]
        torch = self.torch
        self.kind: str = kind
        self.x: Any = x
        self.dy: Any = dy
        self.y: Any = None
        self.model: Any = copy.deepcopy(plain)
        if name.startswith("gsbn"):
            from .. import torch as of_torch

            replaced = of_torch.convert(self.model).replaced
            if sum(map(len, replaced)) != len(plain):
                raise RuntimeError(f"not all of the model was converted, but {replaced or 'nothing'}")
        compiled = name in ("compile", "gsbn-compile")
        self.forward: Any = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.optimiser: Any = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM, foreach=True)

    def steps(self) -> Iterator[str]:
        """One step, which stops where a part of it ends."""
        self.optimiser.zero_grad(set_to_none=True)
        device, bfloat16 = self.x.device.type, self.kind == "bfloat16"
        with self.torch.autocast(device, dtype=self.torch.bfloat16, enabled=bfloat16):
            self.y = self.forward(self.x)
        yield "forward"
        self.y.backward(self.dy if self.dy.dtype == self.y.dtype else self.dy.to(self.y.dtype))
        yield "backward"
        self.optimiser.step()
        yield "optimiser"
        self.y = None  # and with it autograd's nodes, which remember the stream that they were made on

    def step(self) -> None:
        for _ in self.steps():
            pass

    def first_step(self, truth: list[Any]) -> tuple[float, float]:
        """The errors of y and of the gradients; those of the parameters count alike, whatever their sizes."""
        steps = self.steps()
        next(steps), next(steps)
        y, *gradients = (_relative(a, b) for a, b in zip(self.outcome(), truth, strict=True))
        errors = y, statistics.fmean(e * e for e in gradients) ** 0.5
        if not max(errors) < 1:
            raise RuntimeError(f"wrong result: an error of {max(errors):.2g} of the truth")
        next(steps)
        self.dy, self.y = self.dy.to(self.y.dtype), None
        return errors

    def outcome(self) -> list[Any]:
        return [self.y.detach(), *(parameter.grad for parameter in self.model.parameters())]

    def wall(self, calls: int) -> float:
        """Seconds a step, of so many that are called one after another."""
        return wall_clock(self.step, calls, self.synchronize)

    def synchronize(self) -> None:
        if self.x.device.type == "cuda":
            self.torch.cuda.synchronize()

    def memory(self) -> int:
        """Bytes: the peak of one warm step, over what was there before it without any gradients."""
        self.optimiser.zero_grad(set_to_none=True)
        self.y = None
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


def truth_of(plain: Any, x: Any, dy: Any) -> list[Any]:
    """y and the gradients of the first step in float64."""
    wide = copy.deepcopy(plain).double()
    y = wide(x.double())
    y.backward(dy.double())
    return [y.detach(), *(parameter.grad for parameter in wide.parameters())]


def _relative(got: Any, want: Any) -> float:
    return float((got.double() - want).norm() / want.norm())
