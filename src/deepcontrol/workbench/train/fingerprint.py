"""Which images a run is trained and evaluated on, so that it goes on with those alone.

By their content, as decoded: where their files lie, and when they were copied there, is free.
"""

import zlib
from pathlib import Path
from typing import Any

from ..data import Batches, Cache
from .config import ConfigChangedError

Fingerprints = dict[str, str]  # of each split


def fingerprints(train: Batches, val: Batches) -> Fingerprints:
    return {"train": fingerprint(train.cache), "val": fingerprint(val.cache)}


def fingerprint(cache: Cache) -> str:
    """How many samples there are, and a checksum of them all."""
    checksum = 0
    for array in (cache.images, cache.labels, cache.segments):
        for sample in array:
            checksum = zlib.crc32(sample.data, checksum)
    return f"{len(cache)} images {checksum:08x}"


def check_same_data(run: Path, now: Fingerprints, derived: dict[str, Any]) -> None:
    """ConfigChangedError unless the run was started on these, or by code that noted none."""
    before = derived.get("fingerprints")
    if not isinstance(before, dict) or before == now:
        return
    differences = [f"{k} {before.get(k)} -> {v}" for k, v in now.items() if before.get(k) != v]
    raise ConfigChangedError(
        f"{run} was started on other data: {', '.join(differences)}. Give it those with "
        "--data-root, or choose another --out."
    )
