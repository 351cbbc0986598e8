"""Eq. 1 as arithmetic, and the pooling beside it.

reference.py is Eq. 1's specification; the other files are its fast forms.
"""

from .agc import agc
from .center import center_bias_act
from .center_pool import center_bias_act_pool
from .gain_conv import gain_conv
from .pool import max_pool2x2, max_unpool2x2

__all__ = [
    "agc",
    "center_bias_act",
    "center_bias_act_pool",
    "gain_conv",
    "max_pool2x2",
    "max_unpool2x2",
]
