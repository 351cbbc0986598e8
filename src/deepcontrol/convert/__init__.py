"""Convert models from BatchNorm to AGC (automatic gain control), check and fold them."""

from .calibrate import calibrate
from .fold import fold
from .signal_flags import SignalFlag
from .signal_report import LayerSignal, SignalReport, signal_report
from .to_agc import Change, Report, to_agc

__all__ = [
    "Change",
    "LayerSignal",
    "Report",
    "SignalFlag",
    "SignalReport",
    "calibrate",
    "fold",
    "signal_report",
    "to_agc",
]
