"""The networks that the paper trained."""

from .blocks import NORMS, Norm
from .classnet import ClassNet
from .segnet import SegNet

__all__ = ["NORMS", "ClassNet", "Norm", "SegNet"]
