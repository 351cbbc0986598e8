"""Convert BatchNorm models to AGC (automatic gain control), check and fold them."""

from .calibrate import calibrate, reestimate_statistics
from .fold import fold
from .plan import Change, Report
from .signal_flags import SignalFlag
from .signal_report import LayerSignal, SignalReport, signal_report
from .to_agc import to_agc

__all__ = [
    "Change",
    "LayerSignal",
    "Report",
    "SignalFlag",
    "SignalReport",
    "calibrate",
    "fold",
    "reestimate_statistics",
    "signal_report",
    "to_agc",
]
