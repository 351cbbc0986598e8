"""Train your own network on torch Datasets from Python.

A run has the same folder and records as with `deepcontrol train`.
"""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ...nn import AGCLinear
from ...nn.agc import _AGC
from ...nn.conv import _AGCConv
from ..data import DatasetSplit, LabeledImages, Source
from ..folders import runfolder, storage
from ..metrics import ConfusionMatrix
from ..models import CUSTOM, ExternalNetwork, Norm
from ..terminal import SafeConsole
from .build import build_model, move_
from .checkpoint import load_of_run
from .config import Train
from .data import Sources, evaluation_batches, load, open_sources, with_channels
from .distributed import choose_autocast, choose_device
from .evaluate import evaluate, evaluating
from .loop import train as train_run
from .snapshot import load_weights

CheckpointName = Literal["best", "last", "previous"]
AGC_LAYERS = (_AGC, _AGCConv, AGCLinear)


class Trainer:
    """Train a network on torch Datasets, in a run folder like `deepcontrol train`'s.

    The run folder can be resumed, and `deepcontrol report` draws it. A dataset returns pairs
    (image, label): see `deepcontrol.workbench.data.dataset`. The settings determine loss, optimizer
    and everything else.

    Args:
        config: Settings. `Train(out="runs/x")` has the paper's settings.
        model: The network, which is trained in place. It returns logits (N, classes) or
            (N, classes, H, W), or a dict or tuple of them as the networks of torchvision do. By
            default it is built by the settings.
        train: Training samples. By default those that the settings name.
        val: Validation samples, read in order and without randomness between epochs.
        classes: Names of the classes. By default `train.classes`; without it, the network's
            outputs are numbered.

    Raises:
        ValueError: The settings do not fit the data, or a sample or an output has another form.

    Example:
        >>> import torch
        >>> from deepcontrol.workbench.train import Train, Trainer
        >>> images, labels = torch.randn(4, 1, 16, 16), torch.tensor([0, 1, 0, 1])
        >>> data = torch.utils.data.TensorDataset(images, labels)
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 2))
        >>> trainer = Trainer(Train(out="runs/x", epochs=2, lr=0.01), model, data, data)
        >>> trainer.config.task, trainer.classes
        ('classification', ('class 0', 'class 1'))
    """

    def __init__(
        self,
        config: Train,
        model: nn.Module | None = None,
        train: LabeledImages | None = None,
        val: LabeledImages | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        if (train is None) != (val is None):
            given, missing = ("train", "val") if val is None else ("val", "train")
            raise ValueError(f"got a {given} dataset without {missing}: pass both or none")
        config = replace(config, out=Path(config.out))
        if train is not None and val is not None:
            names = _class_names(model, train, classes)
            sources = Sources(DatasetSplit(train, "train", names), DatasetSplit(val, "val", names))
            _check_alike(sources.train, sources.val)
            config = _with_data(config, sources.train, model)
        else:
            if classes is not None:
                raise ValueError("classes are for your own datasets: pass train and val as well")
            if model is not None:
                config = replace(config, model=CUSTOM, norm=norm_of(model))
            config = with_channels(config)
            sources = open_sources(config)
        if model is not None:
            model = _returning_logits(model, config, len(sources.train.classes))
        self.config, self.sources, self.model = config, sources, model

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.sources.train.classes

    def fit(self, console: Console | None = None) -> list[dict[str, Any]]:
        """Train until the last epoch, or resume the run in the folder.

        SIGINT (Ctrl-C) and SIGTERM save a checkpoint after the current step.

        Args:
            console: Console for progress. Default: the terminal.

        Returns:
            The records of metrics.jsonl, one per epoch. Epoch 0 is before training.

        Raises:
            ConfigChangedError: The folder holds a run with other settings or other data.
            FaultError: Training diverged, or ran out of memory.
            KeyboardInterrupt, SystemExit: After SIGINT or SIGTERM.
        """
        console = SafeConsole() if console is None else console
        code = train_run(self.config, console, self.sources, self.model)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code:
            raise SystemExit(code)
        return storage.read_records(self.config.out / runfolder.METRICS)

    def evaluate(
        self, checkpoint: CheckpointName = "best", console: Console | None = None
    ) -> ConfusionMatrix:
        """Load the weights of a checkpoint and evaluate them on the validation samples.

        The network keeps these weights: a `model` that was passed, or else `self.model`.

        Returns:
            Counts by true and predicted class, with `pixel_error`, `mean_iou` and more.
        """
        if self.model is None:
            self.model = build_model(self.config, len(self.classes))
        return evaluate_checkpoint(
            self.config,
            self.model,
            self.sources.val,
            checkpoint,
            choose_device(self.config.device),
            SafeConsole() if console is None else console,
        )


def evaluate_checkpoint(
    config: Train,
    model: nn.Module,
    source: Source | DatasetSplit,
    checkpoint: CheckpointName,
    device: torch.device,
    console: Console,
    batch_size: int | None = None,
) -> ConfusionMatrix:
    """Load a checkpoint's weights into a network, and evaluate it on a source.

    Args:
        config: Settings of the run, with its folder.
        model: The network of the run.
        source: Samples to evaluate.
        checkpoint: Name of the checkpoint.
        device: Device to evaluate on. The network stays there.
        console: Console for progress.
        batch_size: Samples per batch. By default the evaluation batch size of the run.
    """
    load_weights(model, load_of_run(config.out, checkpoint).model)
    move_(model, device)
    batch_size = config.val_batch_size if batch_size is None else batch_size
    autocast = choose_autocast(config.precision, device)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("decoding", total=None)
        samples = load(
            config, source, lambda _, done, total: progress.update(bar, completed=done, total=total)
        )
        batches = evaluation_batches(config, samples, batch_size, device=device)
        progress.reset(bar, description="evaluating", total=len(batches))
        return evaluate(
            model, batches, autocast, lambda *_: progress.advance(bar), window=config.window
        )


def norm_of(model: nn.Module) -> Norm:
    """Return the norm of a network by its layers, for records and reports.

    >>> norm_of(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
    'bn'
    """
    kinds: dict[Norm, tuple[type[nn.Module], ...]] = {
        "agc": AGC_LAYERS,
        "bn": (_BatchNorm,),
        "gn": (nn.GroupNorm,),
        "in": (_InstanceNorm,),
        "ln": (nn.LayerNorm,),
    }
    for norm, layers in kinds.items():
        if any(isinstance(module, layers) for module in model.modules()):
            return norm
    return "none"


def _with_data(config: Train, train: Source | DatasetSplit, model: nn.Module | None) -> Train:
    """Return the settings with the form of the samples, and with the network's norm."""
    assert isinstance(train, DatasetSplit)
    changes: dict[str, Any] = {
        "data": f"torch-{train.task}",
        "size": train.size,
        "channels": train.channels,
    }
    if config.augment == config.recipe_values().augment:
        changes["augment"] = None  # a recipe does not augment the samples of torch Datasets
    if model is not None:
        changes |= {"model": CUSTOM, "norm": norm_of(model)}
    return replace(config, **changes)


def _class_names(
    model: nn.Module | None, train: LabeledImages, classes: Sequence[str] | None
) -> Sequence[str] | None:
    """Return the class names, or numbers if only the network knows how many."""
    if classes is not None or model is None or getattr(train, "classes", None) is not None:
        return classes
    probe = DatasetSplit(train, "train", [""] * 255)  # any label is valid
    logits = _outputs(ExternalNetwork(model, probe.task, probe.channels), probe)
    return [f"class {i}" for i in range(logits.shape[1])]


def _returning_logits(model: nn.Module, config: Train, classes: int) -> nn.Module:
    """Return the network, wrapped if its outputs are not logits of the images' size.

    Raises:
        ValueError: The logits have another shape.
    """
    shape = (1, config.in_channels, *config.sample_size)
    expected = (1, classes, *(config.sample_size if config.task == "segmentation" else ()))
    found: object = None
    wrapped = ExternalNetwork(model, config.task, config.in_channels)
    for network in (model, wrapped) if len(config.sample_size) == 2 else (model,):
        logits = _run(network, torch.zeros(shape))
        if isinstance(logits, Tensor) and tuple(logits.shape) == expected:
            return network
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    raise ValueError(
        f"the network returns {found} for an image of shape {shape}, expected logits of shape "
        f"{expected} for {classes} classes: change its last layer, or pass other classes"
    )


def _outputs(model: nn.Module, split: DatasetSplit) -> Tensor:
    logits = _run(model, split.read(0, epoch=0, seed=0)[0][None])
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise ValueError(
            f"the network returns {type(logits).__name__}, expected logits (N, classes, ...)"
        )
    return logits


def _run(model: nn.Module, images: Tensor) -> Any:
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    with evaluating(model, device, None):
        return model(images.to(device))


def _check_alike(train: Source | DatasetSplit, val: Source | DatasetSplit) -> None:
    assert isinstance(train, DatasetSplit)
    assert isinstance(val, DatasetSplit)
    forms = [(s.task, s.channels, s.classes, len(s.size)) for s in (train, val)]
    if forms[0] != forms[1]:
        shown = [f"{t} of {c}-channel {d}-d images, {len(n)} classes" for t, c, n, d in forms]
        raise ValueError(
            f"the training samples are {shown[0]}, but the validation samples are {shown[1]}: "
            "expected the same"
        )
