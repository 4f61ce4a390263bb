"""Run PyTorch's own test suites, which are in its wheel, with gsbn in place of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from tests import conftest  # noqa: F401  has the profile that is loaded again below

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's test suites import it: pip install expecttest")
from torch import nn  # noqa: E402
from torch.testing._internal import common_utils  # noqa: E402

import gsbn.torch  # noqa: E402
from gsbn.torch import _function, _nodes, _operators  # noqa: E402

# What importing them changes for other tests in this process
settings.load_profile("gsbn")
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

EPS = 2.0**-10  # 1 - EPS and 1 are exact


class Left(NamedTuple):
    """Why samples are left out, and the error that they raise."""

    reason: str
    error: str


@contextmanager
def counted() -> Iterator[list[Any]]:
    """Count the forwards of gsbn, from autograd or in a recorded program."""
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (_function, _nodes, _operators):
            patch.setattr(module, "forward_of", lambda *a, run=module.forward_of: calls.append(1) or run(*a))
        yield calls


def judge(cases: Iterable[tuple[str, Callable[[], Any]]], left: dict[str, Left], runs: int) -> None:
    """Run each case. It must call gsbn or, if its name matches a pattern in `left`, raise the error named there.

    It is an error if a pattern matches no case, or if the number of cases that ran is not `runs`.
    """
    met, ran = set(), 0
    for name, case in cases:
        pattern = next((pattern for pattern in left if fnmatchcase(name, pattern)), None)
        if pattern is None:
            try:
                with counted() as calls:
                    case()
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
            assert calls, f"{name}: gsbn was not called"
            ran += 1
        else:
            met.add(pattern)
            with pytest.raises((TypeError, ValueError, RuntimeError), match=left[pattern].error):
                case()
    assert met == set(left), f"left out for a reason, but not there: {sorted(set(left) - met)}"
    assert ran == runs, f"{ran} cases ran, {runs} were expected"


# The error for a single row without a batch dimension
NO_BATCH = Left(
    "BatchNorm1d takes no input of one dimension either", r"^x: expected 2 dimensions \(B, I\), got shape \(\d,\)"
)


def seed() -> None:
    """Seed the global generators, from which the suites draw."""
    common_utils.set_rng_seed(0)


class AsBatchNorm1d(gsbn.torch.LinearBatchNorm1d):
    """The layer with the identity as weight, with the arguments of nn.BatchNorm1d."""

    def __init__(self, num_features: int, *arguments: Any, device: Any = None, dtype: Any = None, **more: Any) -> None:
        super().__init__(num_features, num_features, device=device, dtype=dtype)
        nn.init.eye_(self.linear.weight)
        self.norm = nn.BatchNorm1d(num_features, *arguments, device=device, dtype=dtype, **more)


class AsLinear(gsbn.torch.LinearBatchNorm1d):
    """The layer with frozen statistics of mean 0 and variance 1, with the arguments of nn.Linear."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        super().__init__(inputs, outputs, bias=bias, affine=False, eps=EPS, device=device, dtype=dtype)
        nn.init.constant_(self.norm.running_var, 1 - EPS)
        self.train()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """nn.functional.linear by gsbn, for two or more dimensions, as `AsLinear`."""
    features = len(weight)
    wide = torch.promote_types(x.dtype, torch.float32)  # bfloat16 cannot represent 1 - EPS
    mean, var = x.new_zeros(features, dtype=wide), x.new_full((features,), 1 - EPS, dtype=wide)
    rows = x.flatten(0, -2) if x.dim() > 3 else x.transpose(1, 2) if x.dim() == 3 else x
    y = gsbn.torch.linear_batch_norm(rows, weight, bias=bias, running_mean=mean, running_var=var, eps=EPS)
    return y.unflatten(0, x.shape[:-1]) if x.dim() > 3 else y.transpose(1, 2) if x.dim() == 3 else y


def batch_norm(
    x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """nn.functional.batch_norm by gsbn; (N, C, H, W) as (N, C, H W)."""
    eye = torch.eye(x.shape[1] if x.dim() > 1 else len(x), dtype=x.dtype, device=x.device)
    y = gsbn.torch.linear_batch_norm(
        x.flatten(2) if x.dim() > 3 else x, eye, gamma=weight, beta=bias, running_mean=running_mean,
        running_var=running_var, training=training, momentum=momentum, eps=eps,
    )  # fmt: skip
    return y.unflatten(2, x.shape[2:]) if x.dim() > 3 else y
