"""Lists the constants of the cost model: what a GPU takes for the work of the kernels. A fit may change all of them."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Names end in the unit: `_us` (microseconds), `_rate` (MB/us), `_flops` (FLOP/us), `_mb` (MB). Others are factors.

    A "step" of forward_sm90 is 128 bytes of k. Dicts by mode or operand have the names of `sm90_variants` as keys.
    `cost` has the formulas.
    """

    # ---- forward_sm90: a step of the mainloop takes about the longest of these
    mma_us: float  # the tensor cores, per step and row of x
    step_us: float  # a fixed cost per step, however small the tile
    shared_us: float  # mode "gemm" without limbs: per 128 bytes that are written to or read from shared memory
    l2_rate: float  # the loads of all CTAs from L2
    memory_rate: float  # operands that do not fit in L2: the loads of a wave's CTAs from memory; a byte counts once
    memory_us: float  # latency of a pipeline stage from memory
    l2_us: float  # latency of a pipeline stage from L2, if every SM has a CTA
    crowd: float  # if fewer SMs have a CTA, the latency is l2_us times (their share of all SMs) ** crowd
    sharing_us: float  # latency added per other CTA of the cluster: all must have read a stage before it is refilled
    tma_rate: dict[bool, float]  # the loads of one CTA's TMA; True: rows of x and weight start on 32 bytes
    off_line: float  # factor on the time of loads from L2 and memory, if rows of x or weight do not start on 128 bytes
    off_line_y: float  # factor on the time to store y, if its rows do not start on 128 bytes; squared, if not on 16
    # ---- forward_sm90: a tile, and a call
    tile_us: dict[str, float]  # by mode: per tile, before and after its mainloop
    row_us: dict[str, float]  # by mode: added to tile_us, per row of the tile and byte of an element of y
    y_rate: dict[str, float]  # by mode: the stores of y by all CTAs
    narrow: float  # the part of an epilogue's time that is the same however few features a tile has
    exchange_us: float  # split-k: until all CTAs of the cluster have multiplied and the first sums have arrived
    exchange_rate: float  # split-k: the sums that one CTA receives
    cluster_us: dict[int, float]  # by CTAs of a cluster, if more than one: added per call
    early_us: float  # subtracted per call, if the CTAs of the next launch fit on the GPU together with this one's
    deferred_rate: float  # training: the y of tiles with a deferred epilogue
    call_us: dict[str, float]  # by mode: per call
    constants_us: float  # inference: per round of constants; in a round three warps make those of 96 features
    deferred_us: float  # training: the least time of a tile with a deferred epilogue
    again_step_us: dict[str, float]  # mode "recompute", by operand: per step of the largest tile (limbs: 256 bytes)
    # By mode: factor on the largest tiles if several blocks of features each load the whole tile of x. "training": 16
    # bits alone.
    alone: dict[str, float]
    short_passes: float  # if a CTA has several tiles: factor on those of 96, 160 or 192 rows, stored 32 rows at a time
    tile_statistics_us: float  # mode "recompute": per tile, its statistics
    held_flops: float  # mode "recompute", 16 bits: the rate to which the power limit holds long launches back to back
    copy_rate: float  # data that is read and written once, in order
    merge_us: dict[int, float]  # training, by rows of tiles: merging the statistics
    trip_us: float  # training: the same for more rows of tiles than merge_us lists
    limbs_of_w_us: float  # limbs_rs: per step, the limbs of a weight tile in registers
    limb_us: float  # per launch that splits float32 into limbs
    limb_rate: float  # the bytes that this launch reads and writes
    # ---- cuBLAS; pairs are (on tensor cores, in IEEE float32)
    cublas_flops: dict[str, float]  # by operand, on 132 SMs; "limbs" stands for IEEE float32
    ieee_call_us: float  # added per product in IEEE float32
    ieee_split_us: float  # the same for a sum over many rows, of which cuBLAS adds up parts
    cublas_call_us: dict[str, float]  # per forward, by what follows the product (`after_product`)
    cublas_step_us: float  # per 128 bytes of k, on tensor cores
    cublas_host_us: float  # the host's time for a call of cuBLAS; its time for a launch of gsbn is 3.5 us
    cublas_off_words: dict[int, float]  # by the bytes on which rows start and end: factor on tensor cores; 1 for 16
    cublas_off_words_us: float  # the most that is added per such product
    operand_rate: tuple[float, float]  # the operands that are read
    # ---- the skinny kernels
    skinny_call_us: dict[bool, float]  # per forward; True: in training, with three launches
    skinny_rate: float  # x and y, which are read and written
    skinny_chunk_us: dict[str, float]  # by operand: per 64 bytes of a row of x, million rows and feature
    skinny_weight_us: dict[str, float]  # by operand: per element of the weight, to bring it to shared memory
    skinny_row_us: float  # per million rows and feature, however short the rows are
    skinny_off_words_us: float  # per million elements of y, if its rows do not start on 16 bytes
    remat_us: float  # a backward that computes g again: subtracted per call
    # ---- tall_product
    tall_call_us: float  # per product: its two launches
    tall_chunk_us: dict[bool, float]  # per 32 rows of a CTA; True: both operands are read 16 bytes at a time
    partials_rate: float  # the partial products of its CTAs
    # ---- other launches; pairs are (from L2, from memory)
    copy_us: float  # per launch that copies rows
    g_rate: tuple[float, float]  # the g that scale_stats reads
    y_cublas_rate: tuple[float, float]  # the g that normalize reads, and the y that it writes
    l2_mb: float  # operands up to this size stay in L2, and g up to 0.8 times this
