"""`deepcontrol predict`: label images with the network of a run, in tiles if they are large."""

from .command import Network, Predict, load_network, run_predict

__all__ = ["Network", "Predict", "load_network", "run_predict"]
