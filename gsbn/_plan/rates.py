"""What a GPU takes for what the kernels do: the constants of the cost model, each of which a fit may change."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """In us and MB; a "step" of forward_sm90 is 128 bytes of k. `cost` says how they enter."""

    mma_us: float  # of a step, for each row of x
    step_us: float  # of a step, whatever is in it
    shared_us: float  # 128 bytes in or out of shared memory, in a GEMM alone
    l2_rate: float  # MB/us of all that the CTAs load
    memory_rate: float  # MB/us of what differs among them, where it comes from memory
    memory_us: float  # from asking memory for a step of a ring to its arrival
    l2_us: float  # the same of L2, where all SMs ask;
    crowd: float  # with fewer, times their share of all SMs to the power of this
    sharing_us: float  # more, for each other CTA that must have read a step before the next one takes its place
    engine_rate: dict[bool, float]  # MB/us that a CTA's copy engine loads; whether rows start on 32 bytes
    off_line: float  # times the traffic where rows of x and weight do not start on 128 bytes
    off_line_y: float  # and y's where its rows do not; once more where they do not on 16
    tile_us: dict[str, float]  # beginning and end of a tile, by mode
    row_us: dict[str, float]  # of a tile, beside its mode's tile_us: each of its rows
    y_rate: dict[str, float]  # MB/us, by mode
    exchange_us: float  # where CTAs share k: until all have multiplied, and what is sent has arrived
    exchange_rate: float  # MB/us that a CTA receives meanwhile
    cluster_us: dict[int, float]  # more, where CTAs are launched in clusters, by their CTAs
    early_us: float  # less, where there is room for as many CTAs again: the next launch begins beside this one
    deferred_rate: float  # MB/us of tiles that are finished later
    call_us: dict[str, float]  # by mode
    constants_us: float  # inference: a round of constants, 96 features by three warps
    deferred_us: float  # training: a tile that waits, at least
    again_step_us: dict[str, float]  # where g is made twice: a step of the largest tile, by operand
    alone: float  # times that where a CTA loads all of x's tile, of several blocks of features
    tile_statistics_us: float  # and the statistics of a tile
    held_flops: float  # FLOP/us of 16 bits there, at the power that long launches, one after the other, are held to
    copy_rate: float  # MB/us of what is read and written once, in order
    merge_us: dict[int, float]  # training: merging statistics, by rows of tiles
    trip_us: float  # and of more rows
    limbs_of_w_us: float  # limbs of a step of a weight tile, made in registers
    limb_us: float  # a launch that splits float32 into limbs
    limb_rate: float  # MB/us of what it reads and writes
    cublas_flops: dict[str, float]  # FLOP/us by operand; "limbs" is IEEE float32
    ieee_call_us: float  # more than for a GEMM on tensor cores
    cublas_call_us: dict[str, float]  # of its launches, by the passes over g
    cublas_step_us: tuple[float, float]  # of a step of k: on tensor cores, in IEEE arithmetic
    cublas_host_us: float  # what a call of cuBLAS costs the host; a launch of ours costs it 3.5
    cublas_off_words: dict[int, float]  # times that on tensor cores, where rows start on so many bytes, if measured
    operand_rate: tuple[float, float]  # MB/us of cuBLAS' operands: on tensor cores, in IEEE arithmetic
    skinny_call_us: dict[bool, float]  # of a forward that makes g twice; in training, of its three launches
    skinny_rate: float  # MB/us of x and y there
    skinny_chunk_us: dict[str, float]  # 64 bytes of a million rows by a feature, by operand
    skinny_weight_us: dict[str, float]  # an element of the weight to shared memory, by operand
    skinny_row_us: float  # and a million rows by a feature, however short
    skinny_off_line_us: float  # and a million elements of y that are stored one by one
    tall_call_us: float  # of a product over many rows, of its two launches
    tall_chunk_us: dict[bool, float]  # 32 rows there; the True ones being read by 16 bytes
    parts_rate: float  # MB/us of what its CTAs make
    copy_us: float  # a launch that copies rows
    g_rate: tuple[float, float]  # MB/us of g by scale_stats: from L2, from memory
    y_cublas_rate: tuple[float, float]  # MB/us of g and y by normalize: from L2, from memory
    l2_mb: float  # of operands, and 0.8 times that of g, stay in L2
