"""The NumPy reference: Linear, per-feature scale, BatchNorm1d, residual and activation, written like the formulas.

The tests compare every kernel of gsbn, and its path on the CPU, with this module. It needs only NumPy, computes in
float64 (or in ``np.longdouble``, to test float64) and never writes to its arguments. Import it in your own tests::

    from gsbn import reference
    truth = reference.forward(x, weight, scale, gamma=gamma, beta=beta, training=True)
    y = reference.round_to(truth.y, np.float16)

The symbols are the same in Python and in CUDA: ``x (B, I)`` input, ``w (O, I)`` weight, ``b (O)`` linear bias,
``s (O)`` per-feature scale (one number may serve all features), ``γ, β (O)`` the affine parameters of batch
normalisation, ``h (B, O)`` the residual, 0 by default, ``f`` the activation, the identity by default::

    g = x wᵀ                          (B, O)   the GEMM, without bias and without scale
    z = s · (g + b)
    training:   m = mean_B(g),  v = mean_B((g − m)²)           biased, per feature
                r = 1 / sqrt(s² v + eps)
                u = a (g − m) + β          with a = γ s r
    inference:  r = 1 / sqrt(running_var + eps)
                u = γ r (s g + (s b − running_mean)) + β       the O(O) constants in float64
    both:       y = f(u + h)               `gsbn._activations` has the formulas; relu: max(u, 0), NaN passes
    update:     running_mean ← (1−μ) running_mean + μ s (m + b)
                running_var  ← (1−μ) running_var  + μ s² v · B/(B−1)     unbiased, as PyTorch
                momentum μ weights the new value; momentum=None is the cumulative average, μ = 1/num_batches_tracked
    gradients:  du = dh = f′(u + h) dy     relu: 0 where u + h ≤ 0, and dy elsewhere, also where u + h is NaN
                S = Σ_B du,  D = Σ_B du (g − m),  a = γ s r
    training:   dg = a (du − S/B − (g − m) s² r² D/B)
                dβ = S,  dγ = s r D,  ds = γ eps r³ D,  db = 0
    inference:  dg = a du
                dβ = S,  dγ = r Σ_B du (z − running_mean),  ds = γ r Σ_B du (g + b),  db = a S
    renorm:     u = ρ a (g − m) + γ δ + β,  with σ = sqrt(s² v + eps), σ′ = sqrt(running_var + eps) and the constants
                ρ = clip(σ/σ′, 1/r_max, r_max),  δ = clip((s (m + b) − running_mean)/σ′, −d_max, d_max)
                dg, dγ and ds are ρ times those of training, and dγ has δ S in addition
    groups:     each ghost batch of B/groups rows is as in training; dw and the gradients of vectors are sums over them
    both:       dx = dg w,  dw = dgᵀ x;  if one number is the scale of all features, its gradient is Σ_O ds
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._activations import activation_of
from ._arrays.check import checked_activation
from ._arrays.check import needs as checked_needs
from ._gradients import NEEDS, Gradients
from ._operands import affine_of, count_of, matrix_of, rows_of, statistics_of, vector_of
from ._renorm import Renorm, correction_of
from ._rounding import round_to
from ._typing import Activation, NamedTuple
from ._values import ghost_count, next_count, raised_count

__all__ = ["Forward", "Gradients", "backward", "fold", "forward", "round_to"]

Array = NDArray[Any]


class Forward(NamedTuple):
    """The results of :func:`forward`: new arrays in the ``dtype`` of the computation.

    Attributes
    ----------
    y : (B, O) array
        The output, not rounded to the dtype of the inputs.
    mean, var : (O,) arrays or None
        ``m`` and ``v``: mean and biased variance of ``g = x wᵀ`` over the batch, before bias and scale.
        None in inference and for ``B = 0``; ``(groups, O)`` if `groups` is above 1.
    running_mean, running_var : (O,) arrays or None
        The running statistics after this call; in inference copies of the arguments. None if not given.
    num_batches_tracked : int or None
        The count after this call. None if not given.
    """

    y: Array
    mean: Array | None
    var: Array | None
    running_mean: Array | None
    running_var: Array | None
    num_batches_tracked: int | None


@np.errstate(all="ignore")
def forward(
    x: ArrayLike,
    weight: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    gamma: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    running_mean: ArrayLike | None = None,
    running_var: ArrayLike | None = None,
    num_batches_tracked: ArrayLike | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: Activation | None = None,
    renorm: Renorm | tuple[float, float] | ArrayLike | None = None,
    groups: int = 1,
    residual: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
) -> Forward:
    """``activation(BatchNorm1d(Linear(x) * scale) + residual)``, by the formulas at the head of this module.

    Parameters
    ----------
    x : (B, I) array_like
        The input, of any floating dtype, bfloat16 (``ml_dtypes``) included. ``B = 0`` gives an empty result.
    weight : (O, I) array_like
    scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked : array_like, optional
        As in `gsbn.forward`. The statistics and the count are not written: the result has the updated ones.
    training, momentum, eps, activation, renorm, groups, residual
        As in `gsbn.forward`.
    dtype : dtype
        The dtype of the computation: ``np.float64``, or ``np.longdouble`` to test float64.

    Returns
    -------
    Forward
        ``(y, mean, var, running_mean, running_var, num_batches_tracked)``.

    Raises
    ------
    TypeError, ValueError
        A shape does not match. Only one of the running statistics is given, or none in inference. Training has
        ``momentum=None`` without a count, a single row, or a count that cannot be increased or averaged over. The
        activation is none of those of `gsbn.forward`.

    Notes
    -----
    The variance takes two passes: first the mean, then the squares of the deviations from it. The mean of these
    deviations, left by rounding, is subtracted as well, so that a large mean costs no digits. NaN and infinity stay in
    their feature, without a warning. Allocates one ``(B, O)`` array of ``dtype`` in addition to the converted inputs.

    Source of the formulas: Ioffe and Szegedy 2015, algorithms 1 and 2, with the unbiased running variance of
    ``torch.nn.BatchNorm1d``, applied to ``z = s · (g + b)`` and simplified: in training the bias cancels, and scaling
    by ``s`` scales the deviations by ``s`` and the variance by ``s²``.

    Examples
    --------
    >>> import numpy as np
    >>> from gsbn import reference
    >>> outcome = reference.forward(np.array([[1.0], [3.0]]), np.array([[2.0]]), training=True, eps=0.25)
    >>> outcome.y.round(4).tolist()
    [[-0.9701], [0.9701]]
    """
    f = activation_of(checked_activation(activation))
    ghost_count(groups)
    x = matrix_of("x", x, dtype)
    weight = matrix_of("weight", weight, dtype, columns=x.shape[1])
    rows, features = len(x), len(weight)
    s, b, gamma, beta = affine_of(features, dtype, scale, bias, gamma, beta)
    old_mean, old_var = statistics_of(features, dtype, running_mean, running_var)
    count = None if num_batches_tracked is None else count_of(num_batches_tracked)
    h = None if residual is None else rows_of("residual", residual, dtype, rows, features)

    if not training:
        if old_mean is None or old_var is None:
            raise ValueError("running_mean: expected the running statistics in inference, got None")
        y = x @ weight.T
        y *= s
        y += s * b - old_mean
        y *= gamma / np.sqrt(old_var + eps)
        y += beta
        y += 0 if h is None else h
        return Forward(y if f is None else f.of(y, y), None, None, old_mean, old_var, count)

    if rows == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got x of shape {x.shape}")
    if momentum is None and count is None:
        raise ValueError("momentum: expected a number in training without num_batches_tracked, got None")
    momentum = None if momentum is None else float(momentum)  # 1 - momentum of a float16 would be a float16
    if rows == 0:  # counted, as by PyTorch
        count = None if count is None else raised_count(count, momentum, groups)
        return Forward(np.empty((0, features), dtype), None, None, old_mean, old_var, count)
    if groups != 1:
        options: Any = {"bias": b, "gamma": gamma, "beta": beta, "training": True, "momentum": momentum, "eps": eps}
        options |= {"activation": activation, "dtype": dtype}
        runs = []
        of_runs = [None] * groups if h is None else np.split(h, groups)
        for run, of_run in zip(_ghost_batches(x, groups, renorm), of_runs, strict=True):
            state: Any = {"running_mean": old_mean, "running_var": old_var, "num_batches_tracked": count}
            runs.append(forward(run, weight, s, residual=of_run, **state, **options))
            *_, old_mean, old_var, count = runs[-1]
        y, mean, var = (np.stack([np.asarray(run[i]) for run in runs]) for i in range(3))
        return Forward(y.reshape(rows, features), mean, var, old_mean, old_var, count)

    d = x @ weight.T
    mean = d.mean(axis=0)
    d -= mean
    rest = d.mean(axis=0)  # the part of the mean that rounding left; it matters if the variance is small
    d -= rest
    mean += rest
    var = np.einsum("ij,ij->j", d, d) / rows
    sigma = np.sqrt(s * s * var + eps)
    ratio, shift = correction_of(renorm, count, s * (mean + b), sigma, old_mean, old_var, eps)
    d *= gamma * s / sigma * ratio
    d += beta if renorm is None else gamma * shift + beta
    d += 0 if h is None else h
    if f is not None:
        f.of(d, d)

    if count is not None:
        count = next_count(count, momentum)
        momentum = 1 / count if momentum is None else momentum
    if old_mean is None or old_var is None:
        return Forward(d, mean, var, None, None, count)
    assert momentum is not None  # for the type checker: checked above
    new_mean = (1 - momentum) * old_mean + momentum * (s * (mean + b))
    new_var = (1 - momentum) * old_var + momentum * (s * s * var * rows / (rows - 1))
    return Forward(d, mean, var, new_mean, new_var, count)


@np.errstate(all="ignore")
def backward(
    dy: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    gamma: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    running_mean: ArrayLike | None = None,
    running_var: ArrayLike | None = None,
    num_batches_tracked: ArrayLike | None = None,
    training: bool = False,
    eps: float = 1e-5,
    activation: Activation | None = None,
    renorm: Renorm | tuple[float, float] | ArrayLike | None = None,
    groups: int = 1,
    residual: ArrayLike | None = None,
    needs: Collection[str] = NEEDS,
    dtype: DTypeLike = np.float64,
) -> Gradients[Array]:
    """Compute the gradients of :func:`forward`'s ``y``, by the formulas at the head of this module.

    Parameters
    ----------
    dy : (B, O) array_like
        The gradient with respect to ``y``.
    x, weight, scale, bias, gamma, beta, running_mean, running_var, num_batches_tracked, training, eps, activation
        As in :func:`forward`, with the statistics and the count before it. Training uses these only with `renorm`, and
        only an activation makes ``beta`` matter.
    renorm, groups, residual, dtype
        As in :func:`forward`.
    needs : collection of str
        The gradients to compute; the others are None.

    Returns
    -------
    Gradients
        ``(x, weight, bias, scale, gamma, beta)`` and its attribute ``residual``, in ``dtype``, also for absent
        arguments (with respect to their default value; for the scale that is a vector of ones). The gradient of a scale
        of one element has the shape of that scale, ``()`` for a number. Zeros for ``B = 0``.

    Raises
    ------
    TypeError, ValueError
        As :func:`forward`; also if ``dy`` is not ``(B, O)``, or if `needs` has other names.

    Notes
    -----
    In training ``db`` is exactly zero, because the bias cancels in ``y``. The textbook sum for ``ds`` is
    ``Σ dy ∂y/∂s`` with ``∂y/∂s = γ (g − m)(r − s² v r³)``. Since ``1 − s² v r² = eps r²``, it equals ``γ eps r³ D``,
    which has no cancellation.

    With an activation the forward is computed again, so that the gradient is that of the same ``u`` as its ``y``.
    Without one the gradient of the residual is a copy of ``dy``.

    Examples
    --------
    >>> import numpy as np
    >>> from gsbn import reference
    >>> x, weight = np.array([[1.0], [3.0]]), np.array([[2.0]])
    >>> gradients = reference.backward(np.array([[1.0], [0.0]]), x, weight, training=True, eps=0.25)
    >>> gradients.beta.tolist(), gradients.bias.tolist()
    ([1.0], [0.0])
    """
    needs = checked_needs(needs, NEEDS)
    f = activation_of(checked_activation(activation))
    ghost_count(groups)
    x = matrix_of("x", x, dtype)
    weight = matrix_of("weight", weight, dtype, columns=x.shape[1])
    rows, features = len(x), len(weight)
    dy = rows_of("dy", dy, dtype, rows, features)
    h = np.zeros_like(dy) if residual is None else rows_of("residual", residual, dtype, rows, features)
    s, b, gamma, beta = affine_of(features, dtype, scale, bias, gamma, beta)
    old_mean, old_var = statistics_of(features, dtype, running_mean, running_var)
    if training and rows == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got x of shape {x.shape}")

    if groups != 1 and training and rows:
        options: Any = {"bias": b, "gamma": gamma, "beta": beta, "training": True, "eps": eps}
        options |= {"activation": activation, "dtype": dtype}
        runs = zip(*(_ghost_batches(a, groups, renorm) for a in (dy, x, h)), strict=True)
        found = [backward(of_dy, of_x, weight, scale, residual=of_h, **options) for of_dy, of_x, of_h in runs]
        of_x, *others = zip(*found, strict=True)
        parts = [np.concatenate(of_x), *(np.sum(of_run, axis=0) for of_run in others)]
        parts += [np.concatenate([of_run.residual for of_run in found])]
        return Gradients(*(part if name in needs else None for name, part in zip(NEEDS, parts, strict=True)))
    if f is not None:
        u = forward(
            x, weight, s, bias=b, gamma=gamma, beta=beta, running_mean=old_mean, running_var=old_var,
            num_batches_tracked=num_batches_tracked, training=training, eps=eps, renorm=renorm, residual=h, dtype=dtype,
        ).y  # fmt: skip
        dy = f.gradient(dy, u)
    g = x @ weight.T
    dy_sum = dy.sum(axis=0)
    if training:
        mean = g.mean(axis=0) if rows else np.zeros(features, dtype)
        d = g - mean
        rest = d.mean(axis=0) if rows else 0
        d -= rest
        count = max(rows, 1)
        sigma = np.sqrt(s * s * np.einsum("ij,ij->j", d, d) / count + eps)
        batches = None if num_batches_tracked is None else count_of(num_batches_tracked)
        ratio, shift = correction_of(renorm, batches, s * (mean + rest + b), sigma, old_mean, old_var, eps)
        r = 1 / sigma
        dy_d = ratio * np.einsum("ij,ij->j", dy, d)
        dg = gamma * s * r * (ratio * (dy - dy_sum / count) - d * (s * s * r * r * dy_d / count))
        of_bias, of_scale = np.zeros(features, dtype), gamma * eps * r**3 * dy_d
        of_gamma = s * r * dy_d if renorm is None else s * r * dy_d + shift * dy_sum
    else:
        if old_mean is None or old_var is None:
            raise ValueError("running_mean: expected the running statistics in inference, got None")
        r = 1 / np.sqrt(old_var + eps)
        dg = gamma * s * r * dy
        of_bias = gamma * s * r * dy_sum
        of_scale = gamma * r * np.einsum("ij,ij->j", dy, g + b)
        of_gamma = r * np.einsum("ij,ij->j", dy, s * (g + b) - old_mean)
    if scale is not None and np.shape(scale) != (features,):  # one element for all features
        of_scale = of_scale.sum(keepdims=True).reshape(np.shape(scale))
    return Gradients(
        dg @ weight if "x" in needs else None,
        dg.T @ x if "weight" in needs else None,
        of_bias if "bias" in needs else None,
        of_scale if "scale" in needs else None,
        of_gamma if "gamma" in needs else None,
        dy_sum if "beta" in needs else None,
        dy.copy() if "residual" in needs else None,
    )


@np.errstate(all="ignore")
def fold(
    weight: ArrayLike,
    scale: ArrayLike | None,
    running_mean: ArrayLike,
    running_var: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    gamma: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    eps: float = 1e-5,
    dtype: DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """Fold the inference forward, without activation, into one linear layer: ``forward(x, …) = x wᵀ + b``.

    Parameters
    ----------
    weight : (O, I) array_like
    scale, running_mean, running_var, bias, gamma, beta, eps
        As in `gsbn.fold`; the vectors may be any array_like.
    dtype : dtype
        The dtype of the computation.

    Returns
    -------
    w : (O, I) array of ``dtype``
        ``γ r s · weight``, with ``r = 1 / sqrt(running_var + eps)``.
    b : (O,) array of ``dtype``
        ``γ r (s b − running_mean) + β``.

    Raises
    ------
    ValueError
        A shape does not match.

    Notes
    -----
    This is the formula for ``inference`` at the head of this module, multiplied out.

    Examples
    --------
    >>> import numpy as np
    >>> from gsbn import reference
    >>> weight, b = reference.fold(np.array([[2.0]]), None, np.array([1.0]), np.array([3.0]), eps=1.0)
    >>> weight.tolist(), b.tolist()
    ([[1.0]], [-0.5])
    """
    weight = matrix_of("weight", weight, dtype)
    features = len(weight)
    s, b, gamma, beta = affine_of(features, dtype, scale, bias, gamma, beta)
    mean = vector_of("running_mean", running_mean, dtype, features)
    var = vector_of("running_var", running_var, dtype, features)
    gamma_r = gamma / np.sqrt(var + eps)
    return weight * (gamma_r * s)[:, None], gamma_r * (s * b - mean) + beta


def _ghost_batches(a: Array, groups: int, renorm: Any) -> list[Array]:
    """The rows of each ghost batch."""
    if renorm is not None:
        raise ValueError(f"groups: expected 1 with renorm, got {groups}")
    ghost_count(groups, len(a))
    if len(a) == groups:
        raise ValueError(f"groups: expected at least 2 rows in each ghost batch, got {groups} of {groups} rows")
    return np.split(a, groups)
