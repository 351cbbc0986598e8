"""Images of a run's data: for ranges and means some of training, for errors those of validation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..data import Batches, open_source, prepare
from ..sizes import Size
from ..train.config import Train
from ..train.windows import views

CALIBRATION = 64  # images of training, or all of them if they are fewer


class RunImages:
    """One at a time and as the network sees them, none of them augmented."""

    def __init__(self, config: Train, data_root: Path | None = None) -> None:
        self._config = config if data_root is None else replace(config, data_root=data_root)

    def calibration(self) -> Iterator[Tensor]:
        """Images (1, 3, H, W) of training, or windows of them if it saw crops of such a size.

        Validation images stay unseen until they measure.
        """
        config = self._config
        source = open_source(config.data, "train", config.data_root, config.train_limit)
        limit = min(CALIBRATION, len(source))
        source = open_source(config.data, "train", config.data_root, limit)
        for batch in Batches(prepare(source, config.size), 1).epoch():
            yield from views(batch.images, config.window)

    @property
    def window(self) -> Size | None:
        """In which validation images are to be seen, if they are larger."""
        return self._config.window

    def validation(self) -> Batches:
        config = self._config
        source = open_source(config.data, "val", config.data_root, config.val_limit)
        return Batches(prepare(source, config.size), 1)
