"""What hypothesis draws: a small, printable recipe for the arguments of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gsbn import reference
from tests.support.families import FAMILIES, spoil
from tests.support.harness import DTYPES, LAYOUTS

OPTIONAL = ("bias", "gamma", "beta", "running", "num_batches_tracked", "out")
VECTORS = ("scale", "bias", "gamma", "beta", "running")
SCALES = {"vector": None, "none": None, "()": (), "(1,)": (1,), "(1, 1)": (1, 1)}  # its forms, and their shapes
ACTIVATIONS = (None, "relu")
# wide and narrow limits, those of batch normalisation, and a warm-up that some counts of a Case have behind them
RENORMS = (None, (3.0, 5.0), (1.1, 0.25), (1.0, 0.0), (2.0, 1.0, 50))
OTHERS = (  # activations that round, and whose gradient y does not always tell
    "leaky_relu", ("leaky_relu", -0.25), "silu", "gelu", "gelu_tanh", "elu", ("elu", 1.5),
)  # fmt: skip
EVERY = (*ACTIVATIONS, *OTHERS)


@dataclass(frozen=True)
class Case:
    """A recipe. ``arrays()`` always returns the same bytes for it."""

    shape: tuple[int, int, int]  # B, I, O
    dtype: str
    training: bool
    seed: int = 0
    offset: float = 0.0  # the mean of x
    spread: float = 1.0  # its standard deviation
    momentum: float | None = 0.1
    eps: float = 1e-5
    given: tuple[str, ...] = OPTIONAL
    narrow: tuple[str, ...] = ()  # vectors in x's dtype; the others are in float32
    layouts: tuple[tuple[str, str], ...] = ()
    scale: str = "vector"  # one of SCALES
    activation: Any = None
    family: str = "normal"  # of families.py, for x, the weight and the scale
    renorm: tuple[float, ...] | None = None  # as gsbn.forward takes it
    groups: int = 1

    @property
    def options(self) -> dict[str, Any]:
        options = {"training": self.training, "momentum": self.momentum, "eps": self.eps}
        options |= {} if self.renorm is None else {"renorm": self.renorm}
        options |= {} if self.groups == 1 else {"groups": self.groups}
        return options | ({} if self.activation is None else {"activation": self.activation})

    def arrays(self) -> dict[str, np.ndarray]:
        """The arguments as NumPy arrays; ``out`` is poisoned. A residual is there if `given` names it.

        Some features are constant (a row of zeros in the weight), and some have a zero or a tiny scale.
        """
        B, I, O = self.shape
        dtype = DTYPES[self.dtype]
        rng = np.random.default_rng(self.seed)
        x = self.offset + self.spread * rng.standard_normal((B, I))
        weight = rng.standard_normal((O, I)) / np.sqrt(I)
        weight[3::8] = 0
        scale = rng.choice([1.0, -1.0, 0.5, 3.0, 0.0, 1e-6], O) * rng.uniform(0.5, 1.5, O)
        spoil(self.family, x, weight, scale, self.dtype, self.seed)
        vectors = {
            "scale": scale,
            "bias": rng.standard_normal(O),
            "gamma": rng.uniform(-2, 2, O),
            "beta": rng.standard_normal(O),
            "running_mean": rng.standard_normal(O),
            "running_var": rng.uniform(0.5, 2, O),
        }
        arrays = {"x": reference.round_to(x, dtype), "weight": reference.round_to(weight, dtype)}
        for name, vector in vectors.items():
            base = name.partition("_")[0]
            if base == "scale" or base in self.given:
                wide = DTYPES["float64" if self.dtype == "float64" else "float32"]
                arrays[name] = reference.round_to(vector, dtype if base in self.narrow else wide)
        shape = SCALES[self.scale]
        if self.scale == "none":
            del arrays["scale"]
        elif shape is not None:
            arrays["scale"] = arrays["scale"][:1].reshape(shape)
        if "num_batches_tracked" in self.given:
            arrays["num_batches_tracked"] = np.array(rng.integers(0, 100), np.int64)
        if "residual" in self.given:
            arrays["residual"] = reference.round_to(rng.standard_normal((B, O)), dtype)
        if "out" in self.given:
            arrays["out"] = np.full((B, O), np.nan, dtype)
        return arrays


def sides(limit: int) -> st.SearchStrategy[int]:
    """Lengths, often at the edges of tiles or one off."""
    edges = [n + d for n in (1, 4, 8, 16, 32, 64, 128, 256, 512) for d in (-1, 0, 1) if 1 <= n + d <= limit]
    primes = [n for n in (3, 5, 7, 13, 29, 61, 97, 131, 251, 383) if n <= limit]
    return st.sampled_from(sorted({*edges, *primes})) | st.integers(1, limit)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    limit: int = 64,
    max_bytes: int = 1 << 20,
    training: bool | None = None,
    scales: tuple[str, ...] = ("vector",),
    activations: tuple[Any, ...] = (None,),
    renorms: tuple[tuple[float, ...] | None, ...] = (None,),
) -> Case:
    """Cases with sides up to ``limit``, whose largest matrix has at most ``max_bytes`` in float64."""
    dtype = draw(st.sampled_from(dtypes))
    in_training = draw(st.booleans()) if training is None else training
    cap = max_bytes // 8
    B = draw(sides(limit))
    B += in_training and B == 1
    I = draw(sides(min(limit, cap // B)))
    O = draw(sides(min(limit, cap // max(B, I))))

    given_ = draw(st.sets(st.sampled_from(OPTIONAL)))
    if not in_training:
        given_.add("running")
    if "running" not in given_:
        given_.discard("num_batches_tracked")
    family = draw(st.sampled_from(["normal", *FAMILIES]))
    usual = family == "normal"
    momenta = [0.1, 0.0, 1.0, 0.75] + [None] * ("num_batches_tracked" in given_)
    renorm = draw(st.sampled_from(renorms)) if in_training and "running" in given_ else None
    if renorm is not None and len(renorm) == 3 and "num_batches_tracked" not in given_:
        renorm = renorm[:2]
    names = ("x", "weight", "scale", "bias", "gamma", "beta", "running_mean", "running_var", "out")
    return Case(
        shape=(B, I, O),
        dtype=dtype,
        training=in_training,
        seed=draw(st.integers(0, 99)),
        offset=draw(st.sampled_from([0.0, 1.0, -10.0, 100.0] + [1e4] * (dtype != "float16"))) if usual else 0.0,
        spread=draw(st.sampled_from([1.0, 1e-3, 30.0])) if usual else 1.0,
        momentum=draw(st.sampled_from(momenta)),
        eps=draw(st.sampled_from([1e-5, 1e-3, 1.0])),
        given=tuple(name for name in OPTIONAL if name in given_),
        narrow=tuple(sorted(draw(st.sets(st.sampled_from(VECTORS))))),
        layouts=tuple((name, layout) for name in names if (layout := draw(st.sampled_from(LAYOUTS))) != "C"),
        scale=draw(st.sampled_from(scales)),
        activation=draw(st.sampled_from(activations)),
        family=family,
        renorm=renorm,
    )
