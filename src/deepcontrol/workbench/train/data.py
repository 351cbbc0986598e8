"""The data of a run: open its splits, decode or scan them, and make batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..data import (
    Augment,
    Batches,
    BatchStream,
    Cache,
    ClassificationBatches,
    CropFlip,
    DatasetBatches,
    DatasetSplit,
    Source,
    open_source,
    prepare,
)
from ..data.nnunet import read_layout
from ..data.volumes import open_nnunet
from .config import Train
from .config_file import ConfigChangedError
from .distributed import Group

STRONG_SCALE, STRONG_COLOR = (0.7, 1.4), 0.3  # --augment strong


class Sources(NamedTuple):
    train: Source | DatasetSplit
    val: Source | DatasetSplit


class Data(NamedTuple):
    train: BatchStream
    val: BatchStream


def open_sources(config: Train) -> Sources:
    """Open the training and validation sets without reading any image."""
    return Sources(
        open_samples(config, "train", config.train_limit),
        open_samples(config, "val", config.val_limit),
    )


def open_samples(config: Train, split: str, limit: int | None) -> Source | DatasetSplit:
    """Open one split of the run's dataset, of images or volumes."""
    if config.data == "nnunet":
        flip = config.augmentation == "flip"
        return open_nnunet(
            data_root(config),
            split,
            config.sample_size,
            config.val_fraction,
            limit,
            flip,
            config.resample,
        )
    return open_split(config, split, limit)


def open_split(config: Train, split: str, limit: int | None) -> Source:
    """Open one split of the run's images."""
    return open_source(config.data, split, config.data_root, limit, config.folder_options)


def data_root(config: Train) -> Path:
    """Return the folder of the dataset; raise ValueError if none is given."""
    if config.data_root is None:
        raise ValueError(f"--data {config.data} needs --data-root, the folder of the dataset")
    return config.data_root


def with_channels(config: Train) -> Train:
    """Return the settings with the channels that the dataset's own file lists."""
    if config.data != "nnunet" or config.channels is not None:
        return config
    return replace(config, channels=len(read_layout(data_root(config)).channels))


def build_data(
    config: Train,
    sources: Sources,
    group: Group,
    progress: Callable[[str, int, int], None],
) -> Data:
    """Return the batches of both splits.

    Images of files are decoded once and cached on disk. A torch Dataset is read once to count its
    labels, and again in every epoch.

    Args:
        config: Configuration of the run.
        sources: Result of `open_sources`.
        group: Each process receives its own images of every batch.
        progress: Called with a source's name, the number of decoded images, and the total.
    """
    place = {"device": group.device, "rank": group.rank, "world": group.world_size}
    loaded = [load(config, source, progress) for source in sources]
    val = evaluation_batches(config, loaded[1], config.val_batch_size, config.workers, **place)
    if isinstance(loaded[0], DatasetSplit):
        own = DatasetBatches(
            loaded[0],
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            workers=config.workers,
            **place,  # type: ignore[arg-type]
        )
        return Data(own, val)
    if config.task == "classification":
        train: Batches = ClassificationBatches(
            loaded[0],
            config.batch_size,
            crop_flip=build_augmentation(config),
            seed=config.seed,
            workers=config.workers,
            **place,  # type: ignore[arg-type]
        )
    else:
        train = Batches(
            loaded[0],
            config.batch_size,
            size=config.image_size,
            augment=segmentation_augmentation(config),
            seed=config.seed,
            workers=config.workers,
            **place,  # type: ignore[arg-type]
        )
    return Data(train, val)


def load(
    config: Train,
    source: Source | DatasetSplit,
    progress: Callable[[str, int, int], None],
) -> Cache | DatasetSplit:
    """Read all samples: decode files into a cache, or scan a torch Dataset."""

    def report(done: int, total: int) -> None:
        progress(source.name, done, total)

    if isinstance(source, DatasetSplit):
        source.scan(config.workers, report)
        return source
    return prepare(source, config.image_size, progress=report)


def segmentation_augmentation(config: Train) -> Augment:
    """Return a segmentation run's augmentation; color jitter is for RGB images only."""
    if config.augmentation == "strong":
        return Augment(scale=STRONG_SCALE, color=STRONG_COLOR if config.in_channels == 3 else 0.0)
    return Augment(flip=config.augmentation == "flip")


def build_augmentation(config: Train) -> CropFlip:
    """Return the augmentation of a classification run."""
    if config.augmentation == "crop+flip":
        return CropFlip.of_size(config.image_size)
    return CropFlip(flip=config.augmentation == "flip")


def evaluation_batches(
    config: Train,
    samples: Cache | DatasetSplit,
    batch_size: int,
    workers: int = 0,
    **place: Any,
) -> BatchStream:
    """Return batches without augmentation, in order.

    Args:
        config: Configuration of the run.
        samples: The images.
        batch_size: Images per batch.
        workers: Threads that prepare batches.
        place: device, rank and world.
    """
    if isinstance(samples, DatasetSplit):
        return DatasetBatches(samples, batch_size, workers=workers, **place)
    if config.task == "classification":
        return ClassificationBatches(samples, batch_size, workers=workers, **place)
    return Batches(samples, batch_size, workers=workers, **place)


Fingerprints = dict[str, str]  # by split


def fingerprints(train: BatchStream, val: BatchStream) -> Fingerprints:
    """Identify the data by its decoded content, so that its files may move."""
    return {"train": train.dataset.fingerprint(), "val": val.dataset.fingerprint()}


def check_same_data(run: Path, now: Fingerprints, derived: dict[str, Any]) -> None:
    """Raise ConfigChangedError if the run was started on other data.

    Args:
        run: Run folder.
        now: Fingerprints of the current data.
        derived: Derived values of the run's config.json. Old runs have no fingerprints.
    """
    before = derived.get("fingerprints")
    if not isinstance(before, dict) or before == now:
        return
    differences = [f"{k} {before.get(k)} -> {v}" for k, v in now.items() if before.get(k) != v]
    raise ConfigChangedError(
        f"{run} was started on other data: {', '.join(differences)}. Pass the original data with "
        "--data-root, or choose another --out."
    )
