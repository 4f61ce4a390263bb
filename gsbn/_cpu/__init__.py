"""The path of NumPy arrays and CPU tensors."""

from .ghosts import backward as backward
from .ghosts import forward as forward
from .passes import activate as activate
from .passes import without_norm as without_norm
