"""The planner decides what a call runs: the GEMM, its tiles, how the work is divided, and where data lies in memory.

It is pure and needs no GPU. `problem` describes what a plan depends on, and `variants` lists the kernels. `cost` is the
model that predicts the time of a path; its constants are in `rates` and `h200`. `gemm` plans one product, `forward` and
`backward` plan a whole call. `copies`, `limbs`, `skinny` and `split_k` each plan one family of kernels for them.
"""

from .activate import place_of_u as place_of_u
from .activate import plan_activate_backward as plan_activate_backward
from .activate import plan_residual as plan_residual
from .activate import plan_transpose as plan_transpose
from .activate import then_activate as then_activate
from .backward import plan_backward as plan_backward
from .channels_first import LEAST_LENGTH as LEAST_LENGTH
from .channels_first import MOST_ROWS as MOST_ROWS
from .channels_first import channels_first_obstacle as channels_first_obstacle
from .channels_first import plan_backward_channels_first as plan_backward_channels_first
from .channels_first import plan_forward_channels_first as plan_forward_channels_first
from .copies import in_rows as in_rows
from .forward import plan_forward as plan_forward
from .forward_path import chooses_remat as chooses_remat
from .forward_path import gemm_for as gemm_for
from .gemm import OneLaunch as OneLaunch
from .gemm import limbs_of_rows as limbs_of_rows
from .gemm import one_launch as one_launch
from .gemm import takes_limbs as takes_limbs
from .ghosts import plan_ghosts as plan_ghosts
from .problem import C_TYPE as C_TYPE
from .problem import FEW_ROWS as FEW_ROWS
from .problem import INT32_MAX as INT32_MAX
from .problem import ITEMSIZE as ITEMSIZE
from .problem import REMAT_ROWS as REMAT_ROWS
from .problem import RENORM_ROWS as RENORM_ROWS
from .problem import SAVED_ROWS as SAVED_ROWS
from .problem import SAVED_SHIFT as SAVED_SHIFT
from .problem import Device as Device
from .problem import Limits as Limits
from .problem import Matmul as Matmul
from .problem import Matrix as Matrix
from .problem import deviations_dtype as deviations_dtype
from .problem import ghost_pitch as ghost_pitch
from .sm90_variants import SM90_BLOCK_N as SM90_BLOCK_N
from .sm90_variants import SM90_THREADS as SM90_THREADS
from .sm90_variants import element_for as element_for
from .sm90_variants import forward_sm90 as forward_sm90
from .sm90_variants import precision_for as precision_for
from .sources import Kernel as Kernel
from .variants import every_kernel as every_kernel
from .variants import fill_sm as fill_sm
from .variants import fold as fold
