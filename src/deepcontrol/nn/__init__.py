"""AGC layers, their initialization, parameter groups and memory measurement."""

from ..ops.background import Quantile, TrimmedMean, WindowMean
from .agc import AGC1d, AGC2d, AGC3d, norm_act
from .conv import AGCConv1d, AGCConv2d, AGCConv3d, AGCConvPool2d
from .conv_transpose import AGCConvTranspose1d, AGCConvTranspose2d, AGCConvTranspose3d
from .gems import GEMS
from .init import branch_gain, he_init_, identity_init_, unit_init_
from .linear import AGCLinear
from .memory import saved_bytes
from .noise import DeepNoise, set_noise_
from .param_groups import param_groups
from .recurrent import AGCConvGRU2d, AGCConvGRUCell2d
from .shared_means import SharedMeans

__all__ = [
    "GEMS",
    "AGC1d",
    "AGC2d",
    "AGC3d",
    "AGCConv1d",
    "AGCConv2d",
    "AGCConv3d",
    "AGCConvGRU2d",
    "AGCConvGRUCell2d",
    "AGCConvPool2d",
    "AGCConvTranspose1d",
    "AGCConvTranspose2d",
    "AGCConvTranspose3d",
    "AGCLinear",
    "DeepNoise",
    "Quantile",
    "SharedMeans",
    "TrimmedMean",
    "WindowMean",
    "branch_gain",
    "he_init_",
    "identity_init_",
    "norm_act",
    "param_groups",
    "saved_bytes",
    "set_noise_",
    "unit_init_",
]
