"""Convert models from BatchNorm to AGC (automatic gain control), and fold them for inference."""

from .calibrate import calibrate
from .fold import fold
from .report import Change, Report
from .statistics import reestimate_statistics
from .to_agc import to_agc

__all__ = ["Change", "Report", "calibrate", "fold", "reestimate_statistics", "to_agc"]
