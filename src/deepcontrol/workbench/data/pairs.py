"""A split whose images and labels are pairs of files: what CamVid and Cityscapes share."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import fingerprint, native_size, read_ids, read_image
from .sample import VOID, DataError, Palette, Sample, Size, covering

_UNKNOWN = 254  # in a table of ids: no such class


@dataclass(frozen=True)
class Pair:
    image: Path
    labels: Path
    instances: Path | None = None

    @property
    def maps(self) -> tuple[Path, ...]:
        return (self.labels,) if self.instances is None else (self.labels, self.instances)


@dataclass(frozen=True)
class PairedFiles:
    """Images beside label maps, whose ids a table turns into class ids."""

    name: str
    classes: tuple[str, ...]
    palette: Palette
    pairs: tuple[Pair, ...]
    class_of: tuple[tuple[int, int], ...]  # (id in the file, class id or VOID)
    native: Size  # of every image

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def origin(self) -> str:
        return str(self.pairs[0].image.parent.resolve()) if self.pairs else ""

    def fingerprint(self) -> str:
        files = [path for pair in self.pairs for path in (pair.image, *pair.maps)]
        return fingerprint(files, salt=repr(self.class_of))

    def read(self, index: int, size: Size) -> Sample:
        pair = self.pairs[index]
        own = native_size(pair.image, *pair.maps)
        if own != self.native:
            (h, w), (own_h, own_w) = self.native, own
            raise DataError(pair.image, f"{own_h}x{own_w}, where another image is {h}x{w}")
        size = covering(own, size)
        image = read_image(pair.image, size)
        labels = self._classes(pair.labels, read_ids(pair.labels, size))
        if pair.instances is None:
            return Sample(image, labels, labels.astype(np.uint16))
        ids = read_ids(pair.instances, size)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(np.uint16).max:
            raise DataError(pair.instances, f"instance ids from {low} to {high}, not 16 bits")
        return Sample(image, labels, ids.astype(np.uint16))

    def _classes(self, path: Path, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        table = np.full(256, _UNKNOWN, np.uint8)
        for file_id, class_id in self.class_of:
            table[file_id] = class_id
        labels = table[ids.clip(0, 255)]
        bad = (labels == _UNKNOWN) | (ids < 0) | (ids > 255)
        if bad.any():
            known = sorted(i for i, _ in self.class_of if i != VOID)
            worst = ids[bad].max()
            raise DataError(
                path,
                f"class id {worst} in {(ids == worst).sum()} pixels, "
                f"expected {known[0]} to {known[-1]}, or {VOID} for void",
            )
        return labels
