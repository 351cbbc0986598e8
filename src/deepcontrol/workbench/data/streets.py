"""The procedural street scenes as a dataset, with separate seeds for training and validation."""

import hashlib
from dataclasses import dataclass

import numpy as np

from streets import render

from .cityscapes import CLASSES, PALETTE
from .sample import Palette, Sample, Size, Task

VERSION = 1  # increase it when the golden digests of tests/streets change
COUNTS = {"train": 1000, "val": 200}
SEEDS = {"train": 1, "val": 2}
_FIRST_INSTANCE = 1000  # segment ids below are class ids, segment ids above are instances


@dataclass(frozen=True)
class Streets:
    """The first `count` scenes of a seed, in the 19 classes of Cityscapes."""

    split: str
    count: int
    seed: int

    classes: tuple[str, ...] = CLASSES
    palette: Palette = PALETTE

    @property
    def task(self) -> Task:
        return "segmentation"

    @property
    def name(self) -> str:
        return f"streets-{self.split}"

    @property
    def origin(self) -> str:
        return f"seed {self.seed}"

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """Hash the seed, VERSION and two scenes (in case VERSION was not increased)."""
        digest = hashlib.sha256(f"{VERSION} {self.seed}".encode())
        for index in range(2):
            for part in self.read(index, (64, 128)):
                digest.update(part.tobytes())
        return digest.hexdigest()[:16]

    def read(self, index: int, size: Size) -> Sample:
        """Render scene `index`."""
        scene = render(self.seed, index, *size)
        segments = np.where(scene.instances > 0, scene.instances + _FIRST_INSTANCE, scene.labels)
        return Sample(scene.image, scene.labels, segments.astype(np.uint16))


def open_streets(split: str, count: int | None = None) -> Streets:
    """Open the training or validation scenes.

    Args:
        split: "train" or "val".
        count: Number of scenes. Default: 1000 for training, 200 for validation.
    """
    if split not in SEEDS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SEEDS)}")
    return Streets(split, COUNTS[split] if count is None else count, SEEDS[split])
