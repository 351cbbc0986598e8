"""Training: `deepcontrol train` and `deepcontrol eval`, and `Trainer` for Python."""

from .config import Train
from .trainer import Trainer

__all__ = ["Train", "Trainer"]
