"""PyTorch's samples for modules: those of BatchNorm1d and Linear in `module_db`, and `common_nn` with its tests."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.torch.suites import NO_BATCH, AsBatchNorm1d, AsLinear, Left, judge, seed, torch  # skips without PyTorch

# isort: split
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_nn import NewModuleTest, NNTestCase, get_new_module_tests, module_tests
from torch.testing._internal.common_utils import freeze_rng_state

import gsbn.torch

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")

INFOS = {info.module_cls: info for info in module_db}
NO_BIAS = "bias" in inspect.signature(nn.BatchNorm1d).parameters  # one more sample since 2.13


def step(model: nn.Module, x: Any) -> list[Any]:
    """y, all gradients, and the statistics."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    (y * torch.arange(y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape).cos()).sum().backward()
    return [y, leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def as_layer(norm: Any) -> nn.Module:
    """The layer; its weight, the identity, needs no gradient."""
    made = AsBatchNorm1d(norm.num_features, device=norm.device, dtype=norm.dtype)
    made.norm = norm.module
    made.linear.weight.requires_grad_(False)
    return made


def as_converted(norm: Any) -> nn.Module:
    made = nn.Sequential(as_layer(norm).linear, norm.module)
    assert gsbn.torch.convert(made).replaced
    return made


class Sample:
    """The BatchNorm1d of a sample, without parameters of 0 or 1."""

    def __init__(self, given: Any, device: str, dtype: Any, training: bool) -> None:
        made = nn.BatchNorm1d(*given.args, **given.kwargs, device=device, dtype=dtype).train(training)
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.5, 1.5)
        self.module, self.num_features, self.device, self.dtype = made, made.num_features, device, dtype


def samples(type_: Any, device: str, make: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every sample of a module, with its name, in every dtype and both modes."""
    info = INFOS[type_]
    for dtype in info.supported_dtypes(device):
        for training in (True, False) if info.train_and_eval_differ else (True,):
            seed()
            given = {"device": device, "dtype": dtype, "requires_grad": False, "training": training}
            for sample in info.module_inputs_func(info, **given):
                mode = "train" if training else "eval"
                yield f"{sample.desc} {mode} {str(dtype)[6:]}", lambda sample=sample, given=given: make(sample, given)


# Three samples with three dimensions, and those with two; each in two dtypes and two modes
BATCH_NORM: dict[str, tuple[Callable[[Any], nn.Module], dict[str, Left], int]] = {
    "layer": (as_layer, {}, (7 + NO_BIAS) * 4),
    "converted": (
        as_converted,
        {
            name: Left("the features are the last of three dimensions for Linear, the second for BatchNorm1d", error)
            for name, error in {
                "3d_input*": "mat1 and mat2 shapes cannot be multiplied",
                "zero_batch*": "mat1 and mat2 shapes cannot be multiplied",
            }.items()
        },
        (4 + NO_BIAS) * 4,
    ),
}


@pytest.mark.parametrize("way", BATCH_NORM)
def test_batch_norm(device: str, way: str) -> None:
    """y, gradients and statistics agree with PyTorch's, within the tolerance of PyTorch's own tests for each dtype."""
    build, left, runs = BATCH_NORM[way]

    def case(sample: Any, given: Any) -> None:
        norm = Sample(sample.constructor_input, device, given["dtype"], given["training"])
        plain = copy.deepcopy(norm.module)
        x = sample.forward_input.args[0]
        found, wanted = step(build(norm), x), step(plain, x)
        assert_close([a for a in found if a is not None], wanted)

    judge(samples(nn.BatchNorm1d, device, case), left, runs)


def test_linear(device: str) -> None:
    """Agree with the reference of the sample, and with PyTorch's own module."""

    def case(sample: Any, given: Any) -> None:
        constructor, forward = sample.constructor_input, sample.forward_input
        plain = nn.Linear(*constructor.args, **constructor.kwargs, device=device, dtype=given["dtype"])
        ours = AsLinear(*constructor.args, **constructor.kwargs, device=device, dtype=given["dtype"])
        ours.linear.load_state_dict(plain.state_dict())
        (x,) = (*forward.args, *forward.kwargs.values())
        found, wanted = step(ours, x), step(plain, x)
        assert_close(found[: len(wanted)], wanted)
        assert_close(found[0], sample.reference_fn(ours, x))

    judge(samples(nn.Linear, device, case), {"no_batch_dim*": NO_BATCH}, 2 * 2)


@pytest.mark.parametrize("way", BATCH_NORM)
def test_error_inputs(device: str, way: str) -> None:
    """Each error of PyTorch is one of gsbn, of the same type, and names the argument."""
    info, found = INFOS[nn.BatchNorm1d], []
    for dtype in info.supported_dtypes(device):
        for training in (True, False):
            given = {"device": device, "dtype": dtype, "requires_grad": False, "training": training}
            for error in info.module_error_inputs_func(info, **given):
                sample = error.module_error_input
                norm = Sample(sample.constructor_input, device, dtype, training)
                model, x = BATCH_NORM[way][0](norm), sample.forward_input.args[0]
                assert error.error_regex == "eps must be positive"
                if norm.module.eps == 0 and not training:  # inference allows eps = 0
                    assert_close(model(x), norm.module.weight * (x - norm.module.running_mean)
                                 / norm.module.running_var.sqrt() + norm.module.bias)  # fmt: skip
                    continue
                with pytest.raises(error.error_type, match=r"^eps: expected >=? 0"):
                    model(x)
                found.append((training, norm.module.eps))
    assert sorted(found) == [(False, -1.0)] * 2 + [(True, -1.0)] * 2 + [(True, 0.0)] * 2


# ---- common_nn


class Case(NNTestCase):
    """The part of test_nn.py that is needed here; test_nn.py is not in the wheel."""

    __test__ = False  # not a test of pytest

    def runTest(self) -> None: ...

    def assertEqual(self, x: Any, y: Any, *arguments: Any, **more: Any) -> None:
        """Allow different dtypes: the test of devices compares float32 with float64."""
        super().assertEqual(x, y, *arguments, **{"exact_dtype": False, **more})  # noqa: PT009

    def _forward(self, module: Any, input: Any) -> Any:
        with freeze_rng_state():
            return module(*input) if isinstance(input, tuple) else module(input)

    def _backward(self, module: Any, input: Any, output: Any, grad_output: Any) -> Any:
        output.backward(grad_output, retain_graph=True)
        return tuple(i.grad.data for i in input) if isinstance(input, tuple) else input.grad.data

    def _get_parameters(self, module: Any) -> Any:
        wanted = [p for p in module.parameters() if p.requires_grad]
        for p in wanted:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return wanted, [p.grad for p in wanted]

    def _zero_grad_parameters(self, module: Any) -> None:
        for p in module.parameters():
            p.grad = None if p.grad is None else p.grad.detach().zero_()

    def _zero_grad_input(self, input: Any) -> None:
        for i in input if isinstance(input, tuple) else (input,):
            if i.requires_grad and i.grad is not None:
                i.grad = i.grad.detach().zero_()


class InARow(gsbn.torch.Sequential):
    """A converted model with the arguments of BatchNorm1d."""

    def __init__(self, *arguments: Any) -> None:
        layer = AsBatchNorm1d(*arguments)
        super().__init__(layer.linear, layer.norm)


def frozen(type_: Any) -> Any:
    """The same module with frozen statistics."""

    def make(*arguments: Any) -> nn.Module:
        made = type_(*arguments).eval()
        var = made.get_submodule("norm" if type_ is AsBatchNorm1d else "1").running_var
        var.copy_(torch.linspace(0.5, 1.5, len(var)))  # all instances are equal
        return made

    make.__name__ = type_.__name__
    return make


def own() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The tests of BatchNorm1d in `common_nn` before they moved to module_db."""
    of_two = {"affine": (10,), "simple_average": (10, 1e-3, None), "not_affine": (10, 1e-3, 0.3, False),
              "not_tracking_stats": (10, 1e-3, 0.3, True, False)}  # fmt: skip
    of_three = {"3d_input": (5,), "3d_input_not_affine": (5, 1e-3, 0.3, False)}
    for desc, arguments in (of_two | of_three).items():
        size = (4, 10) if desc in of_two else (4, 5, 3)
        common = {"constructor_args": arguments, "input_size": size, "desc": desc, "default_dtype": torch.double}
        yield f"layer {desc}", AsBatchNorm1d, common
        if desc in of_two:
            yield f"converted {desc}", InARow, common
        if desc != "not_tracking_stats":
            yield f"frozen layer {desc}", frozen(AsBatchNorm1d), common
            if desc in of_two:
                yield f"frozen converted {desc}", frozen(InARow), common


def new_module_tests() -> Iterator[tuple[str, Any]]:
    for given in (*module_tests, *get_new_module_tests()):
        if given.get("module_name") == "Linear":
            keys = {"constructor_args", "input_size", "input_fn", "reference_fn", "desc", "default_dtype"}
            yield f"linear {given.get('desc')}", NewModuleTest(AsLinear, **{k: given[k] for k in keys & given.keys()})
    for name, constructor, given in own():
        yield name, NewModuleTest(constructor, **given)


NEW_MODULE_LEFT = {"linear no_batch_dim": NO_BATCH}


def test_new_module_tests() -> None:
    """References, memory with gaps, pickling, first and second derivatives, also in batches, dtypes, and on a GPU all
    devices."""
    seed()
    cases = [(name, lambda test=test: test(Case())) for name, test in new_module_tests()]
    judge(cases, NEW_MODULE_LEFT, 2 + 6 + 4 + 5 + 3)


@pytest.mark.gpu
def test_new_module_tests_compare_devices() -> None:
    """float32 on a GPU agrees with float64 on the CPU, including both derivatives."""
    seed()
    cases = [(name, lambda test=test: test.test_cuda(Case())) for name, test in new_module_tests()]
    judge(cases, NEW_MODULE_LEFT, 2 + 6 + 4 + 5 + 3)
