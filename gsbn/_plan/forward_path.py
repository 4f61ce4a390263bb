"""Chooses the path that serves a forward, and says why. Of the paths that can serve, it takes the cheapest."""

from __future__ import annotations

from typing import Literal

from .copies import in_rows
from .cost import copies_us, cublas_us, passes_us, spared_us
from .gemm import LEAST_TERMS, cublas_obstacle, for_cublas, for_sm90, for_tiled, sm90_obstacle
from .h100 import rates_on
from .h200 import H200
from .problem import ITEMSIZE, Matmul
from .skinny import rematerializes, serves_skinny, skinny_forward
from .sm90_tiles import OfCall, cheapest_tile
from .sm90_variants import element_for
from .variants import FEW_FEATURES

ONE_PASS_ROWS = 1024  # up to this many rows a CTA of normalize_fused has all of them, and computes their statistics


def one_pass_serves(p: Matmul, training: bool, reads_count: bool, ranks: str | None) -> bool:
    """Return whether normalize_fused serves, in which each CTA has all rows of its columns and makes their statistics.

    It does not serve if CTAs would read the count of batches, which one of them raises.
    """
    return training and ranks is None and not reads_count and p.m <= ONE_PASS_ROWS and p.limits.fused is not False


def after_product(p: Matmul, training: bool, reads_count: bool = False, ranks: str | None = None) -> str:
    """Return what follows a product of cuBLAS: "inference", "one_pass", or "statistics" before normalize."""
    if not training:
        return "inference"
    return "one_pass" if one_pass_serves(p, training, reads_count, ranks) else "statistics"


def gemm_for(
    p: Matmul,
    *,
    precision: str,
    gemm: str,
    training: bool = True,
    prepared: bool = False,
    saved: bool = False,
    reads_count: bool = False,
    separate: str | None = None,
    ranks: Literal["inside", "between"] | None = None,
    groups: int = 1,
    renorm: bool = False,
) -> tuple[str, str, float]:
    """Return the path that serves a call, why, and its time in us, or 0 if no times were compared.

    Raises ValueError if `gemm` names a path that cannot serve. `separate`: why the product is a launch of its own.
    `groups`: how many ghost batches there are. `renorm`: the call renormalises the batch.
    """
    if ranks == "between":
        separate = "the statistics of other ranks"
    if groups > 1:
        separate, p = "the statistics of ghost batches", p._replace(limits=p.limits._replace(skinny=False))
    # a bare GEMM makes all limbs
    call = OfCall(prepared and separate is None, saved, reads_count, ranks == "inside", renorm)
    sm90 = sm90_obstacle(p, precision, training, call)
    obstacles = {"sm90": sm90, "cublas": cublas_obstacle(p), "tiled": None}
    if gemm != "auto":
        obstacle = obstacles[gemm]
        if obstacle is not None:
            raise ValueError(f"gemm: expected a choice that can serve this call, got {gemm!r}: {obstacle}")
        return gemm, "asked for", 0.0
    after = after_product(p._replace(m=p.m // groups), training, reads_count and groups == 1, ranks)
    chosen, why, us = _fastest(p, precision, call, training, after, separate, obstacles)
    if p.limits.skinny is not False and serves_skinny(p, precision, training, saved):
        of_skinny = skinny_forward(p, precision, training=training, saves=saved).us
        if p.limits.skinny or of_skinny < us:
            return "tiled", "g is made twice in less time than it is written and read", of_skinny
    return chosen, why, us


def _fastest(
    p: Matmul, precision: str, call: OfCall, training: bool, after: str, separate: str | None,
    obstacles: dict[str, str | None],
) -> tuple[str, str, float]:  # fmt: skip
    """Return the fastest path other than the skinny kernels, why, and its time in us, or 0 if no times were compared.

    `after`: what follows a product of cuBLAS. `separate`: why the product is a launch of its own.
    """
    if obstacles["sm90"] is obstacles["cublas"] is None:
        element = element_for(p.dtype, precision)
        theirs = for_cublas(p, element)
        rates = H200 if training or ITEMSIZE[p.dtype] > 2 else rates_on(p.device, "inference")  # as cheapest_tile's
        by_cublas = cublas_us(theirs, element, after, saves=call.saves, rates=rates) + copies_us(theirs)
        if separate and element != "limbs":
            return "cublas", f"{separate} come between two launches, which leaves a bare GEMM", by_cublas
        if element == "limbs" and p.k < LEAST_TERMS:
            return "cublas", "more accurate for few features", by_cublas
        if element == "limbs" and min(p.m, p.n) == 1:
            return "cublas", "a matrix-vector product, which it adds up in a tree", by_cublas
        taken = for_sm90(p, element)
        if separate:
            ours = cheapest_tile(taken, "gemm", element, call).us + passes_us(p, after, saves=call.saves)
        else:
            ours = cheapest_tile(taken, mode_of(training), element, call).us
        ours += copies_us(taken)
        if by_cublas < ours:
            return "cublas", "its GEMM cuts this shape better than tiles of one launch", by_cublas
        return "sm90", "fastest of those that serve", ours
    if p.dtype == "float64" and 1 < p.n <= FEW_FEATURES:
        return "tiled", "more accurate for few features", 0.0
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)
    better = [obstacle for obstacle in obstacles.values() if obstacle is not None]
    return chosen, better[-1] if better and chosen == "tiled" else "fastest of those that serve", 0.0


def stores_vectors_alone(p: Matmul, precision: str, of_call: OfCall, us: float) -> bool:
    """Return whether to save no deviations, because the backward computes g again.

    y must then be that of mode "recompute", which computes g again, too. `us` is the time of the best forward that
    saves deviations, or 0 if it is not known.
    """
    limits = p.limits
    if not rematerializes(p) or sm90_obstacle(p, precision, True, of_call._replace(saves=True)) is not None:
        return False
    if limits.recompute is False or limits.cluster_batch:
        return False
    taken = for_sm90(p, p.dtype)
    tile = cheapest_tile(taken._replace(limits=limits._replace(recompute=True)), "training", p.dtype, of_call)
    if tile.mode != "recompute":
        return False
    copies = copies_us(taken)
    us = us or cheapest_tile(taken, "training", p.dtype, of_call._replace(saves=True)).us + copies
    return bool(limits.remat) or tile.us + copies <= us + spared_us(p)


def chooses_remat(p: Matmul, *, reads_count: bool) -> bool:
    """Return whether `plan_forward` lets the backward of a training call on p compute g again. p has 16 bits."""
    p = p._replace(m=max(p.m, 1))  # as there
    _, _, us = gemm_for(p, precision="highest", gemm="auto", saved=True, reads_count=reads_count)
    return stores_vectors_alone(p, "highest", OfCall(reads_count=reads_count), us)


def taken_by(p: Matmul, gemm: str, element: str, fused: bool) -> Matmul:
    """Return the call with the layouts that its path takes. All paths except the one launch take any layout of y."""
    if gemm == "cublas":
        return for_cublas(p, element)
    if gemm == "tiled":
        return for_tiled(p)
    if element == "limbs" and not fused:  # limbs can be made of MN-major operands, too
        x, w = (at if 1 in at.strides else in_rows(p.k, ITEMSIZE[p.dtype]) for at in (p.x, p.w))
        return p._replace(x=x, w=w)
    taken = for_sm90(p, element)
    return taken if fused else taken._replace(y=p.y)


def mode_of(training: bool) -> str:
    return "training" if training else "inference"
