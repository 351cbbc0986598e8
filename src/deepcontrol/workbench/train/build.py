"""Build a run's network, data and loss from its configuration, and add its noise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ...nn import (
    AGCConv2d,
    AGCConv3d,
    AGCLinear,
    DeepNoise,
    Quantile,
    TrimmedMean,
    WindowMean,
    he_init_,
    identity_init_,
    set_noise_,
)
from ...nn.init import scale_to_unit_
from ..data import (
    NO_CLASS,
    VOID,
    Augment,
    Batch,
    Batches,
    BatchStream,
    Cache,
    ClassificationBatches,
    CropFlip,
    DatasetBatches,
    DatasetSplit,
    LabeledSamples,
    Source,
    Task,
    open_source,
    prepare,
)
from ..data.volumes import open_nnunet, read_layout
from ..losses import (
    LossName,
    class_cross_entropy,
    class_weights,
    classes_and_contour_loss,
    contour_loss,
    dice_loss,
    focal_loss,
    pixel_cross_entropy,
)
from ..models import CUSTOM, build, build_external, is_external, task_of
from .config import Train, parse_background
from .config_file import ConfigChangedError
from .distributed import Group

UNIT_INIT_IMAGES = 4
STRONG_SCALE, STRONG_COLOR = (0.7, 1.4), 0.3  # --augment strong
Loss = Callable[..., Tensor]  # loss(outputs, *targets)


# Network


def build_network(config: Train, num_classes: int) -> nn.Module:
    """Return the network with torch's default initialization.

    A network of another library has its own, or that of to_agc.

    Raises:
        ValueError: The name is unknown, or the network was passed to `Trainer`.
    """
    if config.model == CUSTOM:
        raise ValueError(
            f"the network of {config.out} was passed to deepcontrol.workbench.train.Trainer, so "
            "its code is unknown here: pass --model module:function, a function that builds it"
        )
    model = _build_by_name(config, num_classes)
    set_background_(model, config.background)
    return model


def _build_by_name(config: Train, num_classes: int) -> nn.Module:
    if is_external(config.model):
        return build_external(
            config.model,
            config.task,
            num_classes,
            config.norm,
            config.in_channels,
            config.image_size,
            config.pretrained,
            config.seed,
        )
    return build(
        config.model,
        num_classes,
        config.norm,
        config.width,
        in_channels=config.in_channels,
        size=config.image_size,
    )


def build_model(config: Train, num_classes: int) -> nn.Module:
    """Return the initialized network. `--init unit` also needs `scale_to_images_`."""
    init = {"he": he_init_, "identity": identity_init_, "unit": he_init_}[config.init]
    model = build_network(config, num_classes)
    if not is_external(config.model):
        init(model, torch.Generator().manual_seed(config.seed))
    if hasattr(model, "start_gains_"):
        model.start_gains_()  # type: ignore[operator]
    for neuron in model.modules():
        if isinstance(neuron, (AGCConv2d, AGCConv3d, AGCLinear)):
            fix_parameters_(neuron, config)
    if config.lambda_start is not None:
        for mean_scale in lambdas(model):
            nn.init.constant_(mean_scale, config.lambda_start)
    return model


def move_(model: nn.Module, device: torch.device) -> None:
    """Move a network to a device, on a GPU with its filters in channels_last."""
    model.to(device)
    dims = {p.dim() for p in model.parameters() if p.dim() in (4, 5)}
    if device.type == "cuda" and len(dims) == 1:
        layout = torch.channels_last if dims == {4} else torch.channels_last_3d
        model.to(memory_format=layout)  # type: ignore[call-overload]


@torch.no_grad()
def fix_parameters_(neuron: AGCConv2d | AGCConv3d | AGCLinear, config: Train) -> None:
    """Fix lambda and gamma of a neuron as the configuration says.

    The last gain of a residual branch starts below 1, which keeps the signal bounded. It is fixed
    at a multiple of that value.
    """
    if config.fixed_lambda is not None:
        neuron.mean_scale.fill_(config.fixed_lambda)
        neuron.mean_scale.requires_grad_(False)
    if config.fixed_gamma is not None:
        neuron.gain.mul_(config.fixed_gamma)
        neuron.gain.requires_grad_(False)


def scale_to_images_(model: nn.Module, config: Train, train: BatchStream) -> None:
    """Complete `--init unit`: scale the filters on the first training images.

    Call it before the model moves to a GPU, so that every device starts with the same weights.
    """
    if config.init == "unit":
        count = min(UNIT_INIT_IMAGES, len(train.dataset))
        images = train.samples(range(count)).images.cpu()
        ends = [getattr(model, name) for name in ("classify", "outline") if hasattr(model, name)]
        scale_to_unit_(model, images, ends)


# Loss


class Objective:
    """The loss of a network: loss(outputs, *targets(batch)).

    In distributed training, and for parts of a batch, `loss` takes the factors of
    `Group.loss_scales` after the targets. It then returns the part's share of the loss over the
    whole batch.

    Args:
        model: Name of the network. classnet adds the contour loss.
        weights: One weight per class, for segmentation.
        loss: Name of the loss.
        task: Task of a network of another library; others have their own.
    """

    def __init__(
        self,
        model: str,
        weights: Tensor | None = None,
        loss: LossName = "ce",
        task: Task | None = None,
    ) -> None:
        self.weights, self.name = weights, loss
        task = task or task_of(model)
        self.ignored_label = VOID if task == "segmentation" else NO_CLASS
        self._has_contours = model == "classnet"
        self.loss: Loss = self._segmentation_loss
        if self._has_contours:
            self.loss = self._classnet_loss
        elif task == "classification":
            self.loss = self._classification_loss

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the tensors that the loss needs. A captured step copies them all."""
        return (batch.labels, batch.segments) if self._has_contours else (batch.labels,)

    def _segmentation_loss(
        self, logits: Tensor, labels: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        parts: list[Tensor] = []  # a mean over pixels, and a mean over samples
        if self.name == "focal":
            parts.append(_scaled(focal_loss(logits, labels, self.weights), scales, 0))
        elif self.name != "dice":
            parts.append(_scaled(pixel_cross_entropy(logits, labels, self.weights), scales, 0))
        if "dice" in self.name:
            parts.append(_scaled(dice_loss(logits, labels), scales, 1))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _classification_loss(
        self, logits: Tensor, labels: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        if self.name == "focal":
            loss = focal_loss(logits, labels, ignored_label=NO_CLASS)
        else:
            loss = class_cross_entropy(logits, labels)
        return _scaled(loss, scales, 0)

    def _classnet_loss(
        self, outputs: Any, labels: Tensor, segments: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        classes, contour = outputs
        if scales is None:
            return classes_and_contour_loss(classes, contour, labels, segments, self.weights)
        class_loss = pixel_cross_entropy(classes, labels, self.weights)
        outline_loss = contour_loss(contour, segments, labels)
        return _scaled(class_loss, scales, 0) + _scaled(outline_loss, scales, 1)


def _scaled(loss: Tensor, scales: Tensor | None, index: int) -> Tensor:
    """Scale a mean over pixels (index 0) or samples (index 1) to the whole batch."""
    return loss if scales is None else scales.flatten()[index].to(loss.dtype) * loss


def build_objective(config: Train, data: LabeledSamples, device: torch.device) -> Objective:
    """Return the loss of the run.

    Segmentation has ENet's class weights, computed from the training labels, or none.
    """
    if config.task == "classification" or config.class_weights == "none":
        return Objective(config.model, None, config.loss, config.task)
    weights = config.class_weight_scale * class_weights(torch.from_numpy(data.histogram))
    return Objective(config.model, weights.to(device), config.loss, config.task)


def class_logits(outputs: Any) -> Tensor:
    """Return the class logits (N, classes, *) from the outputs of any network."""
    return outputs if isinstance(outputs, Tensor) else outputs.classes


# Data


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
    folder: Path | None = None,
) -> Data:
    """Return the batches of both splits.

    Images of files are decoded once and cached on disk. A torch Dataset is read once to count its
    labels, and again in every epoch.

    Args:
        config: Configuration of the run.
        sources: Result of `open_sources`.
        group: Each process receives its own images of every batch.
        progress: Called with a source's name, the number of decoded images, and the total.
        folder: Cache folder. By default the user's cache.
    """
    place = {"device": group.device, "rank": group.rank, "world": group.world_size}
    loaded = [load(config, source, progress, folder) for source in sources]
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
    folder: Path | None = None,
) -> Cache | DatasetSplit:
    """Read all samples: decode files into a cache, or scan a torch Dataset."""

    def report(done: int, total: int) -> None:
        progress(source.name, done, total)

    if isinstance(source, DatasetSplit):
        source.scan(config.workers, report)
        return source
    return prepare(source, config.image_size, folder, report)


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


# Proposals of the paper that it does not show. `deepcontrol reproduce --preset proposals` judges
# them. GEMS is a hook of the optimizer; see `start.open_run`.
#
# Noise and dropout are random numbers of torch's default generators. A checkpoint holds the state
# of these, and a captured step draws from them, so that a resumed run continues bit for bit.


PROCESSES = 2**16  # each process of a run has random numbers of its own


def set_background_(model: nn.Module, text: str) -> None:
    """Set the background of all AGC layers of a network."""
    name, value = parse_background(text)
    if name == "mean":
        return
    background = {
        "median": lambda: Quantile(0.5),
        "window": lambda: WindowMean(int(value)),
        "quantile": lambda: Quantile(value),
        "trimmed": lambda: TrimmedMean(value),
    }[name]()
    layers = [layer for layer in model.modules() if hasattr(layer, "background")]
    if not layers:
        raise ValueError(f"--background {text}: the network has no AGC layer with feature maps")
    for layer in layers:
        layer.background = background  # type: ignore[assignment]


def lambdas(model: nn.Module) -> list[nn.Parameter]:
    """Return lambda of every AGC layer."""
    return [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "mean_scale"]


def add_noise_(
    model: nn.Module, noise: float, dropout: float, seed: int, rank: int
) -> Callable[[], None]:
    """Add --noise and --dropout to a network; return a function that removes them.

    Noise is added by each AGC layer, or behind each BatchNorm. Dropout sets whole maps of the
    classifier's input to 0. Neither has parameters or acts in evaluation.

    Args:
        model: The network, changed in place.
        noise: Standard deviation, relative to that of each map; 0 for none.
        dropout: Probability; 0 for none. The network must have a layer `classify`.
        seed: Seed of the run.
        rank: Rank of this process.
    """
    if not noise and not dropout:
        return lambda: None
    torch.manual_seed((seed * PROCESSES + rank) % 2**63)
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    has_own_noise = bool(noise) and (not norms or bool(lambdas(model)))
    hooks = []
    if has_own_noise:
        set_noise_(model, noise)  # raises if there is no layer that adds noise
    if noise:
        hooks += [norm.register_forward_hook(_NoiseHook(noise)) for norm in norms]
    if dropout:
        classify: Any = model.classify
        hooks.append(classify.register_forward_pre_hook(_DropoutHook(dropout)))

    def remove() -> None:
        if has_own_noise:
            set_noise_(model, 0.0)
        for hook in hooks:
            hook.remove()

    return remove


class _NoiseHook:
    """A forward hook that adds noise while its layer trains."""

    def __init__(self, relative: float) -> None:
        self.noise = DeepNoise(relative)

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        noisy: Tensor = self.noise(output) if layer.training else output
        return noisy


class _DropoutHook:
    """A forward pre-hook that drops maps of a layer's input while the layer trains."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        if not layer.training:
            return inputs[0]
        if inputs[0].dim() == 2:  # vectors, as in classification
            return functional.dropout(inputs[0], self.probability)
        return torch.feature_dropout(inputs[0], self.probability, train=True)
