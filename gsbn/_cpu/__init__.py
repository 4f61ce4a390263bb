"""The path of NumPy arrays and CPU tensors."""

from .elementwise import activate as activate
from .elementwise import add as add
from .elementwise import before as before
from .ghosts import backward as backward
from .ghosts import forward as forward
from .passes import without_norm as without_norm
