"""Labels for images, with the network of a run; by tiles where an image is too large."""

from .run import Predict, run_predict

__all__ = ["Predict", "run_predict"]
