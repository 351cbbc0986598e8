"""Convert models from BatchNorm to AGC (automatic gain control), and fold them for inference."""

from .calibrate import calibrate
from .fold import fold
from .report import Change, Report
from .to_agc import to_agc

__all__ = ["Change", "Report", "calibrate", "fold", "to_agc"]
