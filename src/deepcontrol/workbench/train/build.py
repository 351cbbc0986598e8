"""From a configuration to what it names: the network, its data, its objective."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...nn import AGCConv2d, he_init_, identity_init_
from ...nn.init import scale_to_unit_
from ..data import Augment, Batches, Cache, Source, open_source, prepare
from ..data.batches import normalized
from ..losses import class_weights
from ..models import ClassNet, SegNet
from .config import Train
from .distributed import Group
from .objective import Objective

EXAMPLES = 4  # images that --init unit looks at


class Sources(NamedTuple):
    train: Source
    val: Source


class Data(NamedTuple):
    train: Batches
    val: Batches


def build_network(config: Train, num_classes: int) -> nn.Module:
    """The network, its parameters not started yet."""
    network = {"segnet": SegNet, "classnet": ClassNet}[config.model]
    return network(num_classes, config.width, config.norm)


def build_model(config: Train, num_classes: int) -> nn.Module:
    """The network as a run starts with it, but for what `fit_to_images_` does."""
    start = {"he": he_init_, "identity": identity_init_, "unit": he_init_}[config.init]
    model = build_network(config, num_classes)
    start(model, torch.Generator().manual_seed(config.seed))
    fixed = {"mean_scale": config.fixed_lambda, "gain": config.fixed_gamma}
    for neuron in model.modules():
        if isinstance(neuron, AGCConv2d):
            for name, value in fixed.items():
                if value is not None:
                    nn.init.constant_(neuron.get_parameter(name), value).requires_grad_(False)
    return model


def fit_to_images_(model: nn.Module, config: Train, cache: Cache) -> None:
    """The rest of --init unit: a function of the configuration and of the first training images.

    On the CPU, wherever the run computes, so that it starts alike everywhere.
    """
    if config.init == "unit":
        images = normalized(torch.from_numpy(cache.images[:EXAMPLES]))
        ends = [getattr(model, name) for name in ("classify", "outline") if hasattr(model, name)]
        scale_to_unit_(model, images, ends)


def build_objective(config: Train, cache: Cache, device: torch.device) -> Objective:
    """The loss with ENet's weights from the training images' labels."""
    weights = config.class_weight_scale * class_weights(torch.from_numpy(cache.histogram))
    return Objective(config.model, weights.to(device))


def open_sources(config: Train) -> Sources:
    """What there is to train and evaluate on; nothing is read yet."""
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
    """Batches of both splits, decoded into the user's cache if they are not there yet."""
    caches = [
        prepare(
            source,
            config.size,
            folder,
            lambda done, total, name=source.name: progress(name, done, total),  # type: ignore[misc]
        )
        for source in sources
    ]
    place = {"device": group.device, "rank": group.rank, "world": group.world}
    train = Batches(
        caches[0],
        config.batch_size,
        size=config.size,
        augment=Augment(),
        seed=config.seed,
        workers=config.workers,
        **place,  # type: ignore[arg-type]
    )
    val = Batches(caches[1], config.evaluated_at_once, workers=config.workers, **place)  # type: ignore[arg-type]
    return Data(train, val)
