"""The paper's claims as experiments: what they need is trained, and each ends in a verdict."""

from .command import run_reproduce
from .settings import Reproduce

__all__ = ["Reproduce", "run_reproduce"]
