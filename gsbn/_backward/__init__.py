"""backward, its two halves for autograd, and the gradient of a residual."""

from .activate import before_kept as before_kept
from .backward import BACKWARD as BACKWARD
from .backward import How as How
from .backward import backward as backward
from .backward import backward_of as backward_of
from .backward import backward_within as backward_within
from .backward import run as run
from .backward import run_channels_first as run_channels_first
