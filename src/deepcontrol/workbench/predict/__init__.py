"""`deepcontrol predict`: label images with the network of a run, in tiles if they are large."""

from .command import Predict, run_predict

__all__ = ["Predict", "run_predict"]
