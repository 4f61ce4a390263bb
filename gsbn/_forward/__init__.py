"""forward, describe and linear: three ways to ask for one operation; and the sum with a residual alone."""

from .forward import describe as describe
from .forward import forward as forward
from .forward import forward_of as forward_of
from .forward import forward_within as forward_within
from .linear import linear as linear
from .residual import add_and_activate as add_and_activate
from .transpose import transposed as transposed
