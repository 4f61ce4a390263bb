"""Let gsbn run the layers that a `forward` calls under torch.compile, by options for Inductor or by a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from .._arrays.check import PRECISIONS
from .._typing import Precision
from .._values import choice, shown
from ._graph import replace


@dataclass(frozen=True)
class _Pass:
    """A pass for Inductor that runs after the user's. Passes with equal fields are equal, so nothing compiles twice."""

    before: tuple[Callable[[Graph], None], ...]
    precision: Precision
    cpu: bool

    def __call__(self, graph: Graph) -> None:
        for other in self.before:
            other(graph)
        replace(graph, self.precision, self.cpu)

    def uuid(self) -> Any:
        """Return the key of this pass in Inductor's caches, or None if a pass of the user has no key.

        None means that Inductor does not use its caches.
        """
        from torch._inductor.custom_graph_pass import get_hash_for_files

        others = [getattr(other, "uuid", lambda: None)() for other in self.before]
        files = tuple(str(file) for file in sorted(Path(__file__).parent.glob("*.py")))
        return None if None in others else (get_hash_for_files(files), *others, self.precision, self.cpu)


@dataclass(frozen=True)
class _Backend:
    """A backend of torch.compile that replaces calls, and leaves the rest to another backend."""

    other: str | Callable[..., Any]
    precision: Precision
    cpu: bool

    def __call__(self, module: GraphModule, inputs: Any, **given: Any) -> Any:
        if self.other == "inductor":
            options = inductor_options(**given, precision=self.precision, cpu=self.cpu)
            return torch._inductor.compile(module, inputs, options)
        for part in module.modules():
            if isinstance(part, GraphModule) and replace(part.graph, self.precision, self.cpu):
                part.recompile()
        return torch._dynamo.lookup_backend(self.other)(module, inputs, **given)


def inductor_options(
    options: dict[str, Any] | None = None,
    *,
    mode: str | None = None,
    precision: Precision = "highest",
    cpu: bool = False,
) -> dict[str, Any]:
    """Return options for ``torch.compile`` that let gsbn run the layers that any ``forward`` calls.

    In each graph, one call of gsbn replaces the calls of linear, an optional multiplication by a scale, batch_norm and
    an optional activation; or those of a 1x1 convolution, batch_norm and an optional activation. Modules or functions
    may make these calls. Parameters and running statistics are used as they are. `docs/guide/pytorch.md` says which
    calls are left as they are. The logger ``gsbn.torch`` says at level INFO how many calls were replaced.

    Parameters
    ----------
    options : dict, optional
        Your own options, which the result contains. If they have a ``pre_grad_custom_pass``, it runs before gsbn's
        pass.
    mode : str, optional
        A mode of ``torch.compile``, which takes either a mode or options. The result contains the options of this mode.
    precision : {"highest", "high"}
        As in `gsbn.forward`, for float32: "high" allows TF32.
    cpu : bool
        Whether calls on CPU tensors are replaced, too. PyTorch's own operators are faster there; this is for tests.

    Returns
    -------
    dict
        A new dict for ``torch.compile(model, options=...)``.

    Raises
    ------
    TypeError, ValueError
        `options` is not a dict, or `precision` is unknown.
    RuntimeError
        PyTorch does not know the mode.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> import gsbn.torch
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    >>> compiled = torch.compile(model, options=gsbn.torch.inductor_options(mode="reduce-overhead"))
    """
    from torch._inductor import list_mode_options
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options: expected a dict or None, got {shown(options)}")
    choice("precision", precision, PRECISIONS)
    CustomGraphPass.register(_Pass)  # registered here, because importing Inductor takes a second
    made = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    before = made.get("pre_grad_custom_pass") or ()
    before = tuple(before) if isinstance(before, (list, tuple)) else (before,)
    return {**made, "pre_grad_custom_pass": _Pass(before, precision, bool(cpu))}


def backend(
    other: str | Callable[..., Any] = "inductor", *, precision: Precision = "highest", cpu: bool = False
) -> Callable[..., Any]:
    """Return a backend for ``torch.compile`` that replaces calls as `inductor_options` does.

    Another backend then compiles the graph.

    Parameters
    ----------
    other : str or callable
        The other backend: a name that ``torch.compile`` knows, or a function of a ``torch.fx.GraphModule`` and a list
        of tensors.
    precision, cpu
        As for `inductor_options`.

    Returns
    -------
    callable
        The backend. It takes ``mode=`` and ``options=`` of ``torch.compile`` if the other backend does.

    Raises
    ------
    TypeError, ValueError
        `other` is neither a name nor callable, or `precision` is unknown.
    torch._dynamo.exc.InvalidBackend
        PyTorch does not know the name.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> import gsbn.torch
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    >>> compiled = torch.compile(model, backend=gsbn.torch.backend("aot_eager"))
    >>> compiled(torch.randn(256, 64)).shape
    torch.Size([256, 32])
    """
    if not (isinstance(other, str) or callable(other)):
        raise TypeError(f"other: expected the name of a backend or a callable, got {shown(other)}")
    choice("precision", precision, PRECISIONS)
    torch._dynamo.lookup_backend(other)
    return _Backend(other, precision, bool(cpu))
