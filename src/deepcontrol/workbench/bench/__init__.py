"""The benchmark `deepcontrol bench`: AGC (automatic gain control) against its peers."""

from .cases import Bench
from .run import run_bench

__all__ = ["Bench", "run_bench"]
