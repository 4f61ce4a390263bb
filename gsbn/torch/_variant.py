"""Run and measure one variant of a model for `compare`, on its own copies of the model and the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _timing as timing
from .._values import shown

INFERENCE, STEP = WORKS = ("inference", "training step")
_TRIAL, _LEAST_CALL = 0.02, 1e-4  # seconds: of a trial of several calls, and the least that a call counts


@dataclass(frozen=True)
class Setting:
    """The settings that all variants of a comparison share."""

    device: torch.device
    loss: Callable[[Any], Tensor] | None
    autocast: torch.dtype | None
    seconds: float

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def same_random_numbers(self) -> Any:
        """Return a context that restores the generators at its end: each such context draws the same numbers."""
        return torch.random.fork_rng([self.device] if self.on_gpu else [])

    def random_state(self) -> Tensor:
        """Return the state of the generators that a model on this device draws from."""
        on_host = torch.get_rng_state()
        return torch.cat([on_host, torch.cuda.get_rng_state(self.device)]) if self.on_gpu else on_host

    def time(self, call: Callable[[], Any], calls: int) -> float:
        """Return the seconds per call, measured over `calls` calls one after another."""
        if self.on_gpu:
            return timing.between_events(torch, call, calls)
        return timing.wall_clock(call, calls, lambda: None)


class Variant:
    """A named variant with copies of the model and of the inputs. `missing` says why it is never run, if so."""

    def __init__(
        self, name: str, module: nn.Module, inputs: Any, compiles: bool, setting: Setting, missing: str
    ) -> None:
        self.name, self.module, self.inputs, self.compiles, self.setting = name, module, inputs, compiles, setting
        self.missing = missing
        self.modes = [each.training for each in module.modules()]
        self.leaves = [tensor for tensor in (*module.parameters(), *tensors_in(inputs)) if tensor.requires_grad]
        self.model: Any = None  # the module, or what torch.compile makes of it
        self.weights: list[Tensor] = []  # factors of the outputs in the sum that serves as the loss
        self.clear()

    def start(self, work: str) -> None:
        """Begin a new kind of work, and forget the results of the last one."""
        self.work, self.why = work, self.missing
        self.call: Callable[[], Any] = self.infer if work == INFERENCE else self.step
        self.draws = False  # whether the first call drew random numbers
        self.facts: dict[str, Any] = {}  # fields of `Measured`
        self.module.train(work == STEP)
        if work == STEP and self.modes[0]:  # modules that are frozen in a model in training stay so
            for module, training in zip(self.module.modules(), self.modes, strict=True):
                module.training = training

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return the result of `action`, or None if it or an earlier action failed; `why` then has the reason."""
        if self.why:
            return None
        try:
            return action()
        except Exception as error:  # of any kind: it must not stop the other variants
            self.why = reason(error)
            with suppress(Exception):
                if self.setting.on_gpu:
                    torch.cuda.synchronize()  # a broken capture may have left an error
            return None

    def infer(self) -> Any:
        """Run the model without gradients, and return its output."""
        with torch.no_grad(), self._autocast():
            return self.model(*self.inputs)

    def step(self) -> Any:
        """Run a forward and a backward, and return the output of the forward."""
        self.clear()
        loss = self.setting.loss
        with self._autocast():
            output = self.model(*self.inputs)
            end = None if loss is None else loss(output)
        if loss is None:
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            torch.autograd.backward(outputs, self._weights_of(outputs))
        elif isinstance(end, Tensor) and end.numel() == 1:
            end.backward()
        else:
            raise TypeError(f"loss: expected a tensor of one element, got {shown(end)}")
        return output

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def results(self) -> tuple[list[Tensor], list[Tensor]]:
        """Make a first call. Return its outputs and, for a training step, the gradients."""
        if self.model is None:
            self.model = torch.compile(self.module, dynamic=False) if self.compiles else self.module
        with self.setting.same_random_numbers():
            before = self.setting.random_state()
            output = self.call()
            self.draws = not torch.equal(before, self.setting.random_state())
        outputs = [tensor.detach() for tensor in tensors_in(output) if tensor.is_floating_point()]
        leaves = self.leaves if self.work == STEP else []
        return outputs, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense() for leaf in leaves]

    def prepare(self) -> None:
        """Warm up, and measure the memory."""
        for _ in range(3):
            self.call()
        if self.setting.on_gpu:
            self.clear()
            self.facts["peak_bytes"] = timing.peak_bytes(torch, self.call)

    def capture(self) -> None:
        """Capture the call in a CUDA graph; a replay of the graph then takes the place of the call."""
        call, graphs = self.call, []
        timing.warm_up(torch, call, torch.cuda.Stream())
        self.clear()
        self.facts["peak_bytes"] = timing.peak_bytes(torch, lambda: graphs.append(timing.torch_graph(torch, call)))
        self.call = graphs[0]
        self.call()

    def trial(self) -> Callable[[], float]:
        """Return a function that makes as many calls as fill a trial, and returns the seconds per call."""
        calls = max(1, round(_TRIAL / max(self.setting.time(self.call, 1), _LEAST_CALL)))
        return lambda: self.setting.time(self.call, calls)

    def _autocast(self) -> Any:
        dtype = self.setting.autocast
        return torch.autocast(self.setting.device.type, dtype, enabled=dtype is not None)

    def _weights_of(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return a random number for each element of the outputs; the numbers are the same for all variants."""
        if not outputs:
            raise ValueError("no output of the model requires grad")
        if not self.weights:
            device = self.setting.device
            generator = torch.Generator(device).manual_seed(0)
            made = [torch.randn(y.shape, generator=generator, device=device) for y in outputs]
            self.weights = [numbers.to(y.dtype) for numbers, y in zip(made, outputs, strict=True)]
        return self.weights


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def reason(error: BaseException) -> str:
    """Return an error as part of a sentence: its type, and the first line of its message that says something."""
    if "previous error" in str(error) and error.__context__:  # this error ends a capture that failed
        error = error.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if not line.endswith(":")), "")
    return f"it raised {type(error).__name__}{f': {said:.200}' if said else ''}"
