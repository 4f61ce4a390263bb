"""What runs for a shape: which GEMM, which tiles, how the work is cut, where things lie. Pure: it needs no GPU.

`problem` is what a plan depends on, `variants` are the kernels. `cost` is the model that predicts a path's time, with
its constants in `rates` and `h200`. `gemm` plans one product, `forward` and `backward` a whole call.
"""

from .backward import BackwardPlan, Product, backward_plan
from .forward import SAVED_ROWS, Keep, Plan, gemm_for, plan
from .gemm import LimbGemm, Limbs, OneLaunch, column_grids, copy_grid, limbs, one_launch, split_grid, takes_limbs
from .problem import C_TYPE, FEW_ROWS, INT32_MAX, ITEMSIZE, Device, Limits, Matmul, Matrix, kept_dtype
from .variants import (
    COLUMN,
    SM90_BLOCK_N,
    SM90_THREADS,
    THREADS,
    Kernel,
    column_kernels,
    copy_matrix,
    element_for,
    every_kernel,
    fill_sm,
    fold,
    forward_sm90,
)

__all__ = [
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
    "LimbGemm",
    "Limbs",
    "Limits",
    "Matmul",
    "Matrix",
    "OneLaunch",
    "Plan",
    "Product",
    "backward_plan",
    "column_grids",
    "column_kernels",
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
    "one_launch",
    "plan",
    "split_grid",
    "takes_limbs",
]
