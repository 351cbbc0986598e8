"""Build a run's network, data and loss from its configuration."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn import AGCConv2d, he_init_, identity_init_
from ...nn.init import scale_to_unit_
from ..data import Augment, Batch, Batches, Cache, Source, open_source, prepare
from ..data.batches import normalized
from ..losses import class_weights, classes_and_contour_loss, contour_loss, pixel_cross_entropy
from ..models import ClassNet, SegNet
from .config import ConfigChangedError, Train
from .distributed import Group

UNIT_INIT_IMAGES = 4
Loss = Callable[..., Tensor]  # loss(outputs, *targets)


# Network


def build_network(config: Train, num_classes: int) -> nn.Module:
    """Return the network with torch's default initialization."""
    network = {"segnet": SegNet, "classnet": ClassNet}[config.model]
    return network(num_classes, config.width, config.norm)


def build_model(config: Train, num_classes: int) -> nn.Module:
    """Return the initialized network. `--init unit` also needs `scale_to_images_`."""
    init = {"he": he_init_, "identity": identity_init_, "unit": he_init_}[config.init]
    model = build_network(config, num_classes)
    init(model, torch.Generator().manual_seed(config.seed))
    fixed = {"mean_scale": config.fixed_lambda, "gain": config.fixed_gamma}
    for neuron in model.modules():
        if isinstance(neuron, AGCConv2d):
            for name, value in fixed.items():
                if value is not None:
                    nn.init.constant_(neuron.get_parameter(name), value).requires_grad_(False)
    return model


def scale_to_images_(model: nn.Module, config: Train, cache: Cache) -> None:
    """Complete `--init unit`: scale the filters on the first training images.

    Call it before the model moves to a GPU, so that every device starts with the same weights.
    """
    if config.init == "unit":
        images = normalized(torch.from_numpy(cache.images[:UNIT_INIT_IMAGES]))
        ends = [getattr(model, name) for name in ("classify", "outline") if hasattr(model, name)]
        scale_to_unit_(model, images, ends)


# Loss


class Objective:
    """The loss of a network, with class weights: loss(outputs, *targets(batch)).

    In distributed training `loss` takes `Group.loss_scales` after the targets. It then returns
    this process's part of the loss over the whole batch.

    Args:
        model: Name of the network. classnet adds the contour loss.
        weights: One weight per class.
    """

    def __init__(self, model: str, weights: Tensor) -> None:
        self.weights = weights
        self._has_contours = model == "classnet"
        self.loss: Loss = self._classnet_loss if self._has_contours else self._segnet_loss

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the tensors that the loss needs. A captured step copies them all."""
        return (batch.labels, batch.segments) if self._has_contours else (batch.labels,)

    def _segnet_loss(self, logits: Tensor, labels: Tensor, scales: Tensor | None = None) -> Tensor:
        loss = pixel_cross_entropy(logits, labels, self.weights)
        return loss if scales is None else scales[0].to(loss.dtype) * loss

    def _classnet_loss(
        self, outputs: Any, labels: Tensor, segments: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        classes, contour = outputs
        if scales is None:
            return classes_and_contour_loss(classes, contour, labels, segments, self.weights)
        class_loss = pixel_cross_entropy(classes, labels, self.weights)
        pixel_scale, sample_scale = scales.to(class_loss.dtype)
        return pixel_scale * class_loss + sample_scale * contour_loss(contour, segments, labels)


def build_objective(config: Train, cache: Cache, device: torch.device) -> Objective:
    """Return the loss with ENet's class weights, computed from the training labels."""
    weights = config.class_weight_scale * class_weights(torch.from_numpy(cache.histogram))
    return Objective(config.model, weights.to(device))


def class_logits(outputs: Any) -> Tensor:
    """Return the class logits (N, classes, H, W) from the outputs of any network."""
    return outputs if isinstance(outputs, Tensor) else outputs.classes


# Data


class Sources(NamedTuple):
    train: Source
    val: Source


class Data(NamedTuple):
    train: Batches
    val: Batches


def open_sources(config: Train) -> Sources:
    """Open the training and validation sets without reading any image."""
    return Sources(
        open_source(config.data, "train", config.data_root, config.train_limit),
        open_source(config.data, "val", config.data_root, config.val_limit),
    )


def build_data(
    config: Train,
    sources: Sources,
    group: Group,
    progress: Callable[[str, int, int], None],
    folder: Path | None = None,
) -> Data:
    """Return the batches of both splits. Images are decoded once and cached on disk.

    Args:
        config: Configuration of the run.
        sources: Result of `open_sources`.
        group: Each process receives its own images of every batch.
        progress: Called with a source's name, the number of decoded images, and the total.
        folder: Cache folder. By default the user's cache.
    """
    caches = [
        prepare(
            source,
            config.size,
            folder,
            lambda done, total, name=source.name: progress(name, done, total),  # type: ignore[misc]
        )
        for source in sources
    ]
    place = {"device": group.device, "rank": group.rank, "world": group.world_size}
    train = Batches(
        caches[0],
        config.batch_size,
        size=config.size,
        augment=Augment(),
        seed=config.seed,
        workers=config.workers,
        **place,  # type: ignore[arg-type]
    )
    val = Batches(caches[1], config.val_batch_size, workers=config.workers, **place)  # type: ignore[arg-type]
    return Data(train, val)


Fingerprints = dict[str, str]  # by split


def fingerprints(train: Batches, val: Batches) -> Fingerprints:
    """Identify the data by its decoded content, so that its files may move."""
    return {"train": _fingerprint(train.cache), "val": _fingerprint(val.cache)}


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


def _fingerprint(cache: Cache) -> str:
    checksum = 0
    for array in (cache.images, cache.labels, cache.segments):
        for sample in array:
            checksum = zlib.crc32(sample.data, checksum)
    return f"{len(cache)} images {checksum:08x}"
