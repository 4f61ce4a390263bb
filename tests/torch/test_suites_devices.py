"""PyTorch's tests of its modules on every device, in every dtype and both modes, for the layer and a converted model.

These are the tests of PyTorch's test_modules.py, which is not in the wheel; ModuleInfo, `@modules` and
instantiate_device_type_tests are. test_check_inplace and test_memory_format are left out, because nothing works in
place and no input has four dimensions.
"""
# ruff: noqa: PT009, PT027  its assertEqual compares tensors, and its device-specific classes are unittest's

from __future__ import annotations

import copy
import io
import itertools
import pickle
from functools import partial
from typing import Any

import pytest

from tests.torch.suites import AsBatchNorm1d, AsLinear, counted, torch  # skips without PyTorch

# isort: split
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing import make_tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_modules import (
    FunctionInput,
    ModuleErrorEnum,
    ModuleInfo,
    ModuleInput,
    TrainEvalMode,
    module_db,
    modules,
)
from torch.testing._internal.common_utils import TestCase, freeze_rng_state, gradcheck, gradgradcheck

import gsbn.torch
from gsbn.torch import LinearBatchNorm1d
from tests.torch.layers import Plain

pytestmark = pytest.mark.usefixtures("fused_on_a_cpu")


class Converted(nn.Module):
    """A converted model."""

    def __init__(
        self, inputs: int, outputs: int, *modules: type[nn.Module], device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.row = nn.Sequential(nn.Linear(inputs, 6, **made), nn.BatchNorm1d(6, **made), *(m() for m in modules))
        self.head = nn.Linear(6, outputs, **made)
        assert gsbn.torch.convert(self).replaced

    def forward(self, x: Any) -> Any:
        return self.head(self.row(x))


# ---- the ModuleInfos


def of_module_db(type_: Any) -> Any:
    """The samples of a module, without those of Linear that have no batch: BatchNorm1d does not take them either."""
    (info,) = [info for info in module_db if info.module_cls is type_]

    def make(_: Any, *arguments: Any, **more: Any) -> list[Any]:
        return [sample for sample in info.module_inputs_func(info, *arguments, **more) if sample.desc != "no_batch_dim"]

    return make, info.module_error_inputs_func and partial(info.module_error_inputs_func, info)


def of_the_layer(_: Any, device: Any, dtype: Any, requires_grad: Any, training: Any, **more: Any) -> list[Any]:
    made = []
    for options in (
        {"activation": "relu", "bias": True, "scale": True},
        {"affine": False, "scale": True, "momentum": None},
        {"track_running_stats": False, "bias": True},
    ):
        for shape in ((8, 7), (2, 7, 3)):
            x = make_tensor(shape, device=device, dtype=dtype, requires_grad=requires_grad)
            made.append(ModuleInput(FunctionInput(7, 5, **options), FunctionInput(x)))
    return made


def of_a_model(_: Any, device: Any, dtype: Any, requires_grad: Any, training: Any, **more: Any) -> list[Any]:
    x = partial(make_tensor, (8, 7), device=device, dtype=dtype, requires_grad=requires_grad)
    return [ModuleInput(FunctionInput(7, 5, *after), FunctionInput(x())) for after in ((), (nn.ReLU,))]


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NORMS, NORM_ERRORS = of_module_db(nn.BatchNorm1d)
INFOS = [
    ModuleInfo(AsBatchNorm1d, module_inputs_func=NORMS, module_error_inputs_func=NORM_ERRORS,
               train_and_eval_differ=True, dtypes=FLOATS),
    ModuleInfo(AsLinear, module_inputs_func=of_module_db(nn.Linear)[0], dtypes=FLOATS),
    ModuleInfo(LinearBatchNorm1d, module_inputs_func=of_the_layer, train_and_eval_differ=True, dtypes=FLOATS),
    ModuleInfo(Converted, module_inputs_func=of_a_model, train_and_eval_differ=True, dtypes=FLOATS),
]  # fmt: skip


def theirs(module: Any) -> Any:
    """The same model by PyTorch's own modules."""
    made = copy.deepcopy(module)
    if isinstance(made, LinearBatchNorm1d):
        return Plain(made).train(made.training) if not isinstance(made, AsLinear) else made.linear
    gsbn.torch.revert(made)
    return made


def pairs(info: Any, device: Any, dtype: Any, training: bool, gradients: bool = False) -> Any:
    """The module and the input of each sample."""
    made = {"device": device, "dtype": dtype}
    for sample in info.module_inputs_func(info, device, dtype, gradients, training):
        given, forward = sample.constructor_input, sample.forward_input
        module = info.module_cls(*given.args, **{**given.kwargs, **made})
        for parameter in module.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        (x,) = (*forward.args, *forward.kwargs.values())
        yield module.train(training), x


def outcome(module: Any, x: Any) -> list[Any]:
    """y, the gradients and the statistics."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_() if x.is_contiguous() else x.detach()
    leaf = leaf.requires_grad_()
    y = module(leaf)
    dy = torch.arange(y.numel(), device=y.device, dtype=torch.float64).reshape(y.shape).cos().to(y.dtype)
    found = torch.autograd.grad(y, [leaf, *(p for p in module.parameters())], dy, allow_unused=True)
    return [y.detach(), *(a for a in found if a is not None), *(b.clone() for b in module.buffers())]


def gaps(x: Any) -> Any:
    """The same values in memory with gaps; features are not adjacent."""
    return torch.stack([torch.full_like(x, torch.nan), x], -1)[..., 1].detach()


class TestLayer(TestCase):
    @modules(INFOS)
    def test_forward(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        """Agree with PyTorch's modules in float64, within 16 units in the last place of the largest element."""
        for module, x in pairs(module_info, device, dtype, training):
            wanted = theirs(module).double()(x.double())
            with counted() as calls:
                y = module(x)
            self.assertEqual(len(calls), 1)
            self.assertEqual((y.shape, y.dtype), (wanted.shape, dtype))
            most = 16 * torch.finfo(dtype).eps * max([1.0, *wanted.abs().flatten().tolist()])
            self.assertEqual(y.double(), wanted, atol=most, rtol=0)

    @modules(INFOS, allowed_dtypes=[torch.float64])
    def test_outcome(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        """The same for gradients and statistics."""
        for module, x in pairs(module_info, device, dtype, training):
            plain = theirs(module)
            found, wanted = outcome(module, x), outcome(plain, x)
            self.assertEqual(found[: len(wanted)] if module_info.module_cls is AsLinear else found, wanted)

    @modules(INFOS, allowed_dtypes=[torch.float64])
    def test_grad(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        self._derivatives(gradcheck, device, dtype, module_info, training)

    @modules(INFOS, allowed_dtypes=[torch.float64])
    def test_gradgrad(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        self._derivatives(gradgradcheck, device, dtype, module_info, training)

    def _derivatives(self, check: Any, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        for module, x in pairs(module_info, device, dtype, training, gradients=True):
            state = copy.deepcopy(module.state_dict())

            def run(*given: Any, module: Any = module, state: Any = state) -> Any:
                with freeze_rng_state(), torch.no_grad():
                    for name, buffer in module.named_buffers():
                        buffer.copy_(state[name])
                return module(given[0])

            if x.numel():
                self.assertTrue(check(run, (x, *module.parameters()), check_batched_grad=True, nondet_tol=1e-12))

    @modules(INFOS, allowed_dtypes=[torch.float32, torch.float64])
    def test_non_contiguous_tensors(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        """The strides of the input and of the parameters do not matter, also not for the layout of y."""
        for module, x in pairs(module_info, device, dtype, training):
            wanted = outcome(copy.deepcopy(module), x)
            for of_x, of_parameters in itertools.product((False, True), repeat=2):
                other = copy.deepcopy(module)
                for parameter in other.parameters() if of_parameters else ():
                    parameter.data = gaps(parameter.data)
                found = outcome(other, gaps(x) if of_x else x)
                self.assertEqual(found, wanted)
                self.assertEqual(found[0].stride(), wanted[0].stride())

    @modules(INFOS)
    def test_pickle(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        for module, x in pairs(module_info, device, dtype, training):
            with torch.no_grad():
                module(x)  # a model that has run holds more
                memory = io.BytesIO()
                torch.save(module, memory)
                saved = torch.load(io.BytesIO(memory.getvalue()), weights_only=False)
                copies = [saved, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)]
                y = module(x)
                for other in copies:
                    self.assertEqual(other(x), y, rtol=0, atol=0)
                    self.assertEqual(other.state_dict(), module.state_dict())

    @modules(INFOS)
    def test_factory_kwargs(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        for module, _ in pairs(module_info, device, dtype, training):
            for tensor in (*module.parameters(), *module.buffers()):
                self.assertEqual(tensor.device.type, torch.device(device).type)
                self.assertEqual(tensor.dtype, dtype if tensor.is_floating_point() else torch.int64)

    @modules(INFOS, allowed_dtypes=[torch.float32])
    def test_device_ctx_init(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        for sample in module_info.module_inputs_func(module_info, device, dtype, False, training):
            with torch.device(device):
                module = module_info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            for tensor in (*module.parameters(), *module.buffers()):
                self.assertEqual(tensor.device.type, torch.device(device).type)

    @modules(INFOS, allowed_dtypes=[torch.float32])
    def test_repr(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        for module, _ in pairs(module_info, device, dtype, training):
            self.assertIn(module_info.module_cls.__name__, repr(module))
            self.assertEqual(repr(module), str(module))

    @modules(INFOS, allowed_dtypes=[torch.float32], train_eval_mode=TrainEvalMode.train_only)
    def test_if_train_and_eval_modes_differ(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        differ = []
        for module, x in pairs(module_info, device, dtype, True):
            y, again = module(x), copy.deepcopy(module).eval()(x)
            differ.append(y.numel() > 0 and not torch.equal(y, again))
        self.assertEqual(any(differ), module_info.train_and_eval_differ)

    @modules(INFOS)
    def test_to(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        """To float64 and back, to the CPU and back: it computes the same there and after."""
        for module, x in pairs(module_info, device, dtype, training):
            with torch.no_grad():
                y = copy.deepcopy(module)(x)
                there = copy.deepcopy(module).to("cpu", torch.float64)
                self.assertEqual(there(x.to("cpu", torch.float64)).dtype, torch.float64)
                back = copy.deepcopy(module).to("cpu", torch.float64).to(device, dtype)
                self.assertEqual(back(x), y, rtol=0, atol=0)

    @modules(INFOS)
    def test_meta(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        """On meta, where nothing is computed, y has its shape, dtype and strides; to_empty moves the model back."""
        for module, x in pairs(module_info, device, dtype, training):
            y = copy.deepcopy(module)(x)
            without = copy.deepcopy(module).to("meta")
            if training and module_info.module_cls is not AsLinear and "momentum=None" in repr(module):
                with self.assertRaisesRegex(RuntimeError, "cannot be called on meta tensors"):  # as PyTorch's own
                    theirs(without)(x.to("meta"))
                continue
            of_meta = without(x.to("meta"))
            self.assertEqual((of_meta.shape, of_meta.dtype, of_meta.device.type), (y.shape, y.dtype, "meta"))
            made = without.to_empty(device=device)
            made.load_state_dict(module.state_dict())
            self.assertEqual(made.train(training)(x), y, rtol=0, atol=0)

    @modules(INFOS)
    def test_fake_tensors(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        """Forward and backward of modules and inputs without memory."""
        made = pairs(module_info, device, dtype, training)
        wanted = [outcome(module, x) for module, x in made]
        with FakeTensorMode(allow_non_fake_inputs=False):
            made = pairs(module_info, device, dtype, training)
            found = [outcome(module, x) for module, x in made]
        for fake, real in zip(found, wanted, strict=True):
            layout = [(a.shape, a.dtype, a.device, a.stride()) for a in real]
            self.assertEqual([(a.shape, a.dtype, a.device, a.stride()) for a in fake], layout)

    @modules([INFOS[0]], allowed_dtypes=[torch.float32, torch.float64])
    def test_errors(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        found = 0
        for error in module_info.module_error_inputs_func(device, dtype, False, training):
            given = error.module_error_input
            module = AsBatchNorm1d(*given.constructor_input.args, **given.constructor_input.kwargs,
                                   device=device, dtype=dtype).train(training)  # fmt: skip
            assert error.error_on == ModuleErrorEnum.FORWARD_ERROR
            if module.norm.eps < 0 or training:  # inference allows eps = 0
                with self.assertRaisesRegex(error.error_type, "^eps: expected >"):
                    module(*given.forward_input.args)
                found += 1
        self.assertEqual(found, 2 if training else 1)

    @onlyCUDA
    @modules(INFOS, allowed_dtypes=[torch.float32, torch.float64])
    def test_cpu_gpu_parity(self, device: Any, dtype: Any, module_info: Any, training: Any) -> None:
        for module, x in pairs(module_info, device, dtype, training):
            there = copy.deepcopy(module).cpu()
            found, wanted = outcome(module, x), outcome(there, x.cpu())
            self.assertEqual(found, wanted, exact_device=False)


instantiate_device_type_tests(TestLayer, globals(), only_for=("cpu", "cuda"))
if "TestLayerCUDA" in globals():
    TestLayerCUDA = pytest.mark.gpu(globals()["TestLayerCUDA"])


def test_how_many_there_are() -> None:
    """Seven pairs of module and mode: six tests in four dtypes, two in two, five in one. Also one test of four modules,
    and one of BatchNorm1d's errors."""
    names = [name for name in dir(globals()["TestLayerCPU"]) if name.startswith("test_") and "_cpu_" in name]
    assert len(names) == 7 * (4 * 6 + 2 * 2 + 5) + 4 + 2 * 2
