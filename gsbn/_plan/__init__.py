"""What runs for a shape: which GEMM, which tiles, how the work is cut, where things lie. Pure: it needs no GPU.

`problem` is what a plan depends on, `variants` are the kernels. `cost` is the model that predicts a path's time, with
its constants in `rates` and `h200`. `gemm` plans one product, `forward` and `backward` a whole call. What these take of
one family of kernels each is in `copies`, `limbs`, `narrow`, `tall` and `parts`.
"""

from .backward import BackwardPlan, Product, backward_plan
from .copies import COPIES_AT_ONCE, adjacent, clear_grid, copy_grid, in_rows, rows_grid, whole_words
from .forward import SAVED_ROWS, Keep, Plan, gemm_for, plan
from .gemm import LimbsOfRows, OneLaunch, limbs_of_rows, one_launch, takes_limbs
from .kernel import Kernel
from .limbs import AT_ONCE, Operand, Place, Split, Splits, maxima_grid, split_grid, tiles_grid
from .narrow import serves_narrow_backward
from .parts import Parts
from .problem import C_TYPE, FEW_ROWS, INT32_MAX, ITEMSIZE, Device, Limits, Matmul, Matrix, kept_dtype
from .sm90_variants import COLUMN, SM90_BLOCK_N, SM90_THREADS, element_for, forward_sm90, precision_for
from .variants import (
    TALL_THREADS,
    THREADS,
    clear,
    copy_matrix,
    copy_rows,
    every_kernel,
    fill_sm,
    fold,
    split_limbs,
    tile_kernels,
)

__all__ = [
    "AT_ONCE",
    "COLUMN",
    "COPIES_AT_ONCE",
    "C_TYPE",
    "FEW_ROWS",
    "INT32_MAX",
    "ITEMSIZE",
    "SAVED_ROWS",
    "SM90_BLOCK_N",
    "SM90_THREADS",
    "TALL_THREADS",
    "THREADS",
    "BackwardPlan",
    "Device",
    "Keep",
    "Kernel",
    "LimbsOfRows",
    "Limits",
    "Matmul",
    "Matrix",
    "OneLaunch",
    "Operand",
    "Parts",
    "Place",
    "Plan",
    "Product",
    "Split",
    "Splits",
    "adjacent",
    "backward_plan",
    "clear",
    "clear_grid",
    "copy_grid",
    "copy_matrix",
    "copy_rows",
    "element_for",
    "every_kernel",
    "fill_sm",
    "fold",
    "forward_sm90",
    "gemm_for",
    "in_rows",
    "kept_dtype",
    "limbs_of_rows",
    "maxima_grid",
    "one_launch",
    "plan",
    "precision_for",
    "rows_grid",
    "serves_narrow_backward",
    "split_grid",
    "split_limbs",
    "takes_limbs",
    "tile_kernels",
    "tiles_grid",
    "whole_words",
]
