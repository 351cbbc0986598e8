"""The benchmark: AGC (automatic gain control) beside its peers, on the machine at hand.

It is `deepcontrol bench`; run.py tells the order of things.
"""

from .run import run_bench
from .settings import Bench

__all__ = ["Bench", "run_bench"]
