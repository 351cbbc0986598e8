"""Automatic gain control (AGC) for convolutional networks, instead of BatchNorm."""

from . import _startup  # noqa: F401 (before everything that imports torch)
from .convert import calibrate, fold, reestimate_statistics, signal_report, to_agc
from .graphed_model import graphed
from .nn import (
    GEMS,
    AGC1d,
    AGC2d,
    AGC3d,
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    AGCConvGRU2d,
    AGCConvGRUCell2d,
    AGCConvTranspose1d,
    AGCConvTranspose2d,
    AGCConvTranspose3d,
    AGCLinear,
    DeepNoise,
    Quantile,
    TrimmedMean,
    WindowMean,
    branch_gain,
    he_init_,
    identity_init_,
    param_groups,
    set_noise_,
    unit_init_,
)
from .ops import agc
from .step import TrainingStep

__version__ = "0.1.0"

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
    "AGCConvTranspose1d",
    "AGCConvTranspose2d",
    "AGCConvTranspose3d",
    "AGCLinear",
    "DeepNoise",
    "Quantile",
    "TrainingStep",
    "TrimmedMean",
    "WindowMean",
    "agc",
    "branch_gain",
    "calibrate",
    "fold",
    "graphed",
    "he_init_",
    "identity_init_",
    "param_groups",
    "reestimate_statistics",
    "set_noise_",
    "signal_report",
    "to_agc",
    "unit_init_",
]
