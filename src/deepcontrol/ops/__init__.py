"""Eq. 1 as arithmetic. reference.py is the specification; the other files are its fast forms."""

from .agc import agc
from .center import center_bias_act
from .gain_conv import gain_conv

__all__ = ["agc", "center_bias_act", "gain_conv"]
