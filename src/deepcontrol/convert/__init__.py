"""Convert models from BatchNorm to AGC (automatic gain control), and fold them for inference."""

from .calibrate import calibrate
from .fold import fold
from .to_agc import Change, Report, to_agc

__all__ = ["Change", "Report", "calibrate", "fold", "to_agc"]
