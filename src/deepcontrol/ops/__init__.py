"""Eq. 1 and 2x2 pooling as differentiable ops.

reference.py is the specification, in plain PyTorch. The other modules compute the same faster, and
triton/ holds their GPU kernels.
"""

from .agc import agc, center_bias_act
from .gain_conv import gain_conv, gain_conv_transpose
from .pool import center_bias_act_pool, max_pool2x2, max_unpool2x2

__all__ = [
    "agc",
    "center_bias_act",
    "center_bias_act_pool",
    "gain_conv",
    "gain_conv_transpose",
    "max_pool2x2",
    "max_unpool2x2",
]
