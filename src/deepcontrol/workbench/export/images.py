"""Images of the dataset of a run, for calibration and for validation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..data import Batches, open_source, prepare
from ..sizes import Size
from ..train.config import Train
from ..train.evaluate import split_windows

CALIBRATION_IMAGES = 64  # at most


class RunImages:
    """Images of a run's dataset as the network sees them, one at a time, without augmentation."""

    def __init__(self, config: Train, data_root: Path | None = None) -> None:
        self._config = config if data_root is None else replace(config, data_root=data_root)

    def calibration(self) -> Iterator[Tensor]:
        """Iterate over training images (1, 3, H, W), in windows if the run evaluates in windows.

        Validation images are not used, so that they can measure the result.
        """
        config = self._config
        source = open_source(config.data, "train", config.data_root, config.train_limit)
        limit = min(CALIBRATION_IMAGES, len(source))
        source = open_source(config.data, "train", config.data_root, limit)
        for batch in Batches(prepare(source, config.size), 1).epoch():
            yield from split_windows(batch.images, config.window)

    @property
    def window(self) -> Size | None:
        """Window size for larger images; None to use whole images."""
        return self._config.window

    def validation(self) -> Batches:
        """Return the validation set with batch size 1."""
        config = self._config
        source = open_source(config.data, "val", config.data_root, config.val_limit)
        return Batches(prepare(source, config.size), 1)
