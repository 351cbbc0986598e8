"""Load the trained network of a run."""

from pathlib import Path

import torch
from torch import nn

from ..train.build import build_model
from ..train.checkpoint import load_of_run
from ..train.config import Train
from ..train.faults import check_weights
from ..train.snapshot import load_weights


def load_model(
    run: Path, checkpoint: str, config: Train, classes: int, device: torch.device
) -> nn.Module:
    """Build the network of a run with the weights of a checkpoint, in eval mode.

    Args:
        run: Run folder.
        checkpoint: "best" or "last".
        config: Settings of the run.
        classes: Number of classes.
        device: Where the network runs.

    Raises:
        ValueError: There is no such checkpoint.
        CheckpointError: It is damaged, or does not match the settings.
        NotFiniteError: Weights are infinite or NaN.
    """
    model = build_model(config, classes)
    load_weights(model, load_of_run(run, checkpoint).model)
    check_weights(model, run / checkpoint)
    return model.eval().to(device)
