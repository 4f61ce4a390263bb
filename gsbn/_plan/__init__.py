"""What runs for a shape: which GEMM, which tiles, how the work is cut, where things lie. Pure: it needs no GPU.

`problem` is what a plan depends on, `variants` are the kernels. `cost` is the model that predicts a path's time, with
its constants in `rates` and `h200`. `gemm` plans one product, `forward` and `backward` a whole call.
"""

from .backward import BackwardPlan, Product, backward_plan
from .forward import SAVED_ROWS, Keep, Plan, gemm_for, plan
from .gemm import Limbs, OneLaunch, copy_grid, limbs, one_launch, takes_limbs
from .limbs import AT_ONCE, Operand, Place, Split, Splits, maxima_grid, split_grid, tiles_grid
from .problem import C_TYPE, FEW_ROWS, INT32_MAX, ITEMSIZE, Device, Limits, Matmul, Matrix, kept_dtype
from .variants import (
    COLUMN,
    SM90_BLOCK_N,
    SM90_THREADS,
    THREADS,
    Kernel,
    copy_matrix,
    element_for,
    every_kernel,
    fill_sm,
    fold,
    forward_sm90,
    split_limbs,
    tile_kernels,
)

__all__ = [
    "AT_ONCE",
    "COLUMN",
    "C_TYPE",
    "FEW_ROWS",
    "INT32_MAX",
    "ITEMSIZE",
    "SAVED_ROWS",
    "SM90_BLOCK_N",
    "SM90_THREADS",
    "THREADS",
    "BackwardPlan",
    "Device",
    "Keep",
    "Kernel",
    "Limbs",
    "Limits",
    "Matmul",
    "Matrix",
    "OneLaunch",
    "Operand",
    "Place",
    "Plan",
    "Product",
    "Split",
    "Splits",
    "backward_plan",
    "copy_grid",
    "copy_matrix",
    "element_for",
    "every_kernel",
    "fill_sm",
    "fold",
    "forward_sm90",
    "gemm_for",
    "kept_dtype",
    "limbs",
    "maxima_grid",
    "one_launch",
    "plan",
    "split_grid",
    "split_limbs",
    "takes_limbs",
    "tile_kernels",
    "tiles_grid",
]
