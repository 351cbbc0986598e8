"""AGC layers, their initialization, parameter groups and memory measurement."""

from .agc import AGC1d, AGC2d, AGC3d, norm_act
from .conv import AGCConv1d, AGCConv2d, AGCConv3d, AGCConvPool2d
from .conv_transpose import AGCConvTranspose1d, AGCConvTranspose2d, AGCConvTranspose3d
from .init import branch_gain, he_init_, identity_init_, unit_init_
from .linear import AGCLinear
from .memory import saved_bytes
from .param_groups import param_groups
from .shared_means import SharedMeans

__all__ = [
    "AGC1d",
    "AGC2d",
    "AGC3d",
    "AGCConv1d",
    "AGCConv2d",
    "AGCConv3d",
    "AGCConvPool2d",
    "AGCConvTranspose1d",
    "AGCConvTranspose2d",
    "AGCConvTranspose3d",
    "AGCLinear",
    "SharedMeans",
    "branch_gain",
    "he_init_",
    "identity_init_",
    "norm_act",
    "param_groups",
    "saved_bytes",
    "unit_init_",
]
