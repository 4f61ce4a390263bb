"""Programs as the tests see them: what a call does, read from the steps that the host runs."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from gsbn._plan import Kernel, Matmul, Matrix, OneLaunch, plan_backward, plan_forward
from gsbn._plan.backward import Asked, gradient_of
from gsbn._plan.limbs import Splits
from gsbn._plan.problem import Ranks
from gsbn._plan.program import Array, Gemm, Launch, Program, place_of
from gsbn._plan.sm90_variants import MODES
from gsbn._plan.split_k import Tall

NO_SPLITS = Splits((), 0, 0, 0)
RANKS = {None: None, "inside": Ranks(), "between": Ranks(waits=False, size=2)}


def plan(
    p: Matmul, *, saved: bool = False, cumulative: bool = False, ranks: str | None = None, **options: Any
) -> Forward:
    momentum = None if cumulative else 0.1
    return Forward(plan_forward(p, saves=saved, momentum=momentum, ranks=RANKS[ranks], **options))


def backward_plan(p: Matmul, **options: Any) -> Backward:
    return Backward(plan_backward(p, Asked(**options)))


class Seen:
    def __init__(self, program: Program) -> None:
        self.program, self.why = program, program.why
        self.workspace = program.workspace

    @cached_property
    def limbs(self) -> Splits:
        made = (launch.made_of for launch in self.program.launches())
        return next((choice for choice in made if isinstance(choice, Splits)), NO_SPLITS)

    def array(self, name: str) -> Array | None:
        at = self.program.made(name)
        return None if at is None else self.program.arrays[at]

    def sm90(self, *, gemm: bool) -> tuple[OneLaunch, Matmul] | None:
        """The choice behind a launch of forward_sm90, either of a bare GEMM or of a whole forward."""
        for launch in self.program.launches("forward_sm90"):
            if (dict(launch.kernel.defines)["MODE"] == MODES["gemm"]) == gemm:
                return launch.made_of  # type: ignore[no-any-return]
        return None


class Forward(Seen):
    """A forward. The launches after a GEMM are `stats` (None if `normalize` computes them), `merge`, `normalize`."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.gemm = program.path
        found = self.sm90(gemm=False)
        self.one = None if found is None else found[0]
        product = self.sm90(gemm=True)
        self.product = None if product is None else product[0]
        by_cublas = next((step.p for step in program.steps if isinstance(step, Gemm)), None)
        # the call as its GEMM takes it, with copies of operands
        self.taken = next((of[1] for of in (found, product) if of is not None), by_cublas)
        self.skinny = program.launch("skinny_normalize") is not None
        self.stats = program.launch("skinny_stats") or program.launch("scale_stats")
        self.merge = program.launch("merge_statistics")
        self.one_pass = program.launch("normalize_fused") is not None
        self.normalize = next((step for step in program.launches() if "normalize" in step.kernel.name), None)
        self.gemm_tiled = program.launch("gemm_tiled")
        self.deviations = self.array("deviations")

    @property
    def g(self) -> str | None:
        """The memory of g, if it is in memory."""
        return None if self.normalize is None else self.normalize.passed.get("g")


class Made(NamedTuple):
    """A product of the backward, and how it is computed."""

    gemm: str
    p: Matmul
    one: OneLaunch | None
    tall: Tall | None
    launch: Launch | None
    rows: int = 0  # of a CTA of skinny_product
    of_limbs: bool = False

    @property
    def kernel(self) -> Kernel | None:
        return None if self.launch is None or self.one is not None or self.tall is not None else self.launch.kernel

    @property
    def grid(self) -> int:
        return 0 if self.launch is None else self.launch.grid


class Backward(Seen):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        told = dict(part.split(" by ") for part in program.why.split(", ") if part)
        self.x, self.weight = (self._product(name, told.get(f"d{name}")) for name in ("x", "weight"))
        by_skinny = program.launch("skinny_backward")
        self.skinny = None if by_skinny is None else by_skinny.made_of
        self.dual = program.launch("dual_gemm")
        self.fused_launch = program.launch("backward_fused")
        self.sums_launch = program.launch("backward_sums") or self.fused_launch
        self.dg_launch = program.launch("backward_dg") or self.fused_launch or by_skinny
        self.fused, self.sums = self.fused_launch is not None, self.sums_launch is not None
        self.dg = by_skinny is not None or (self.dg_launch is not None and self.dg_launch.passed["dg"] != "absent")
        fields = self.fields = next((step.fields for step in program.launches() if "lddg" in step.fields), {})
        self.row_threads, self.pitch, self.ld_transposed = (
            fields.get(name, 0) for name in ("row_threads", "lddg", "ld_transposed")
        )
        self.splits = fields.get("splits", 0) if self.sums else 0
        self.dy = Matrix((self.fields.get("dy_row", 0), self.fields.get("dy_col", 0)), True)

    @property
    def weight_first(self) -> bool:
        """Whether dw is computed before any limbs are made."""
        steps = list(self.program.steps)
        limbs = [i for i, step in enumerate(steps) if isinstance(step, Launch) and isinstance(step.made_of, Splits)]
        made = [i for i, step in enumerate(steps) if _writes(step, gradient_of("weight"))]
        return bool(made and limbs) and made[0] < limbs[0]

    def _product(self, name: str, gemm: str | None) -> Made | None:
        if gemm is None:
            return None
        to = gradient_of(name)
        for step in self.program.steps:
            if not (_writes(step, to) or _writes(step, f"padded {to}")):
                continue
            if isinstance(step, Gemm):
                return Made(gemm, step.p, None, None, None)
            if isinstance(step, Launch):
                if step.kernel.name == "forward_sm90":
                    one, p = step.made_of
                    return Made(gemm, p, one, None, step, of_limbs=one.element in ("limbs", "limbs_rs"))
                if step.kernel.name == "reduce_split_k":
                    tall = self.program.launch("tall_product")
                    assert tall is not None
                    return Made(gemm, tall.made_of.p, None, tall.made_of.tall, tall)
                return Made(gemm, step.made_of.p, None, None, step, step.made_of.rows)
        raise AssertionError(f"no step writes d{name}")

    def place(self, name: str) -> int | None:
        """The offset of an argument of the launch that computes dg."""
        at = None if self.dg_launch is None else self.dg_launch.passed.get(name)
        return None if at is None else offset_of(at)


def offset_of(name: str) -> int | None:
    """The offset of a place in the workspace; None for the name of anything else."""
    memory, offset = place_of(name) or (name, None)
    return offset if memory == "workspace" else None


def _writes(step: Any, memory: str) -> bool:
    if isinstance(step, Gemm):
        return step.operands[-1] == memory
    return isinstance(step, Launch) and memory in (step.passed.get(at) for at in ("y", "g", "c"))


def assert_steps_fit(program: Program, arguments: set[str], known: set[Any], largest_grid: int) -> None:
    """What is true of any program: its kernels are known, its grids fit, and its memory exists."""
    arrays = {array.name for array in program.arrays}
    assert len(arrays) == len(program.arrays) and program.workspace % 256 == 0
    for step in program.steps:
        passed = list(step.operands) if not isinstance(step, Launch) else [*step.passed.values()]
        if isinstance(step, Launch):
            assert step.kernel in known, step.kernel
            assert 1 <= step.grid <= largest_grid and step.kernel.shared <= 227 << 10
            passed += [name for name, _ in step.maps]
        for name in passed:
            if (offset := offset_of(name)) is not None:
                assert offset % 16 == 0 and 0 <= offset <= program.workspace
            else:
                assert name in arrays | arguments | {"absent", "ranks"}, name
