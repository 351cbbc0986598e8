"""Configuration of a training run: flags, validation, JSON."""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ...step import Engine
from ..data import DEFAULT_SIZES, DataName, Fit, FolderOptions, Task, channels_of, data_task
from ..folders.json_files import MAX_INT, write_json
from ..folders.runfolder import CONFIG, read_config
from ..losses import LossName
from ..models import Norm, external_task, is_agc, is_code, is_external, task_of
from ..models.unet import TOTAL_STRIDE
from ..optim import HIGHEST_MOMENTUM, OptimizerName, Schedule, default_lr
from ..sizes import Size

FORMAT = 1  # format version of config.json
MIN_SIDE = 32  # pixels: SegNet halves the image five times
EVAL_PIXELS = 2**18  # of an evaluation batch in classification: 256 images of 32x32

# Networks of this package, as the study names them. --model takes those of other libraries as well.
Model = Literal[
    "segnet", "classnet", "unet", "resnet20", "resnet56", "resnet110", "plain20", "plain56",
    "plain110", "resnet18", "resnet50", "mlp",
]  # fmt: skip
Augmentation = Literal["none", "flip", "crop+flip", "strong"]

# Fields that may change when a run is resumed, because no result depends on them. A run with more
# epochs is the same run for longer if its learning rate is constant; a schedule fixes them.
# The dataset may have moved: a run identifies it by its content.
CHANGEABLE = (
    "epochs", "workers", "save_steps", "sample_epochs", "out", "data_root", "patience", "minutes",
)  # fmt: skip
# Fields that are newer than format 1, with the values that older runs were trained with.
ADDED_LATER = {
    "clip_grad_norm": None,
    "eval_whole": True,
    "schedule": "constant",
    "warmup_epochs": 0.0,
    "weight_decay": 0.0,
    "augment": None,
    "channels": None,
    "fit": "resize",
    "val_fraction": 0.2,
    "pretrained": False,
    "optimizer": "sgd",
    "loss": "ce",
    "accumulate": 1,
    "ema": None,
    "patience": None,
    "minutes": None,
}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a network or resume a run. The defaults are the paper's settings.

    The run folder receives the configuration, one line of metrics per epoch, TensorBoard events,
    sample pictures and checkpoints. Running the command again with the same --out resumes the run
    from its last checkpoint with its own configuration. Flags that would change its results are
    refused.

    Exit codes: 0 after the last epoch, 1 after an error, 2 for an invalid flag, 130 after SIGINT
    and 143 after SIGTERM. Both signals finish the current step and save a checkpoint; a second
    SIGINT exits at once.

    On several GPUs: torchrun --nproc-per-node 8 -m deepcontrol train ...
    """

    out: Path
    """Run folder. An existing run is resumed."""
    model: str = "segnet"
    """Network. To label pixels: segnet, unet (residual), or classnet, which also predicts contours
    from the dataset's instance labels. To classify images: resnet18, resnet50, resnet20, resnet56,
    resnet110, mlp, or plain20, plain56, plain110 (without shortcuts). From other libraries:
    timm:NAME, smp:Unet/resnet34, torchvision:deeplabv3_resnet50. Your own: module:function, called
    with classes and in_channels. The last four are converted with --norm agc and left as they are
    with --norm bn."""
    pretrained: bool = False
    """Start from the weights that timm, smp or torchvision has for the network."""
    norm: Norm = "agc"
    """agc (automatic gain control), agc+wn (AGC with weight normalization), bn (BatchNorm), gn
    (GroupNorm), in (InstanceNorm), ln (LayerNorm), frn (Filter Response Normalization), evonorm-s0,
    ws+gn (weight standardization and GroupNorm), or none."""
    data: DataName = "streets"
    """Dataset. folder holds your own images/ and masks/ (see `deepcontrol data init`). cityscapes14
    is Cityscapes with ClassNet's 14 classes. The last four are for classification; imagefolder is a
    folder with one subfolder of images per class."""
    data_root: Path | None = None
    """Dataset folder. Not needed for streets."""
    size: Size | None = None
    """Training size. Images of --data folder are resized or cut into tiles (--fit), those of
    classification are resized and cropped, and others are cropped if they are larger. Evaluation
    of segmentation uses windows of this size. None: 256x512 for segmentation, 256x256 for folder,
    32x32 for CIFAR, 28x28 for Fashion-MNIST, 224x224 for imagefolder."""
    fit: Fit = "resize"
    """How images of --data folder, of any size, become images of --size. resize: scaled to fit,
    with their aspect ratio; the rest is padded with border pixels that have no label. tile: cut
    into tiles of this size at their own resolution."""
    channels: int | None = None
    """Channels of the images of --data folder. None: 3; gray images are repeated, opacity is
    dropped."""
    val_fraction: float = 0.2
    """Share of the images of --data folder for validation, if it has no val/. A hash of the file
    name selects them, so that new images do not change the split."""
    width: float = 1.0
    """Multiplier for the number of filters in every layer."""
    batch_size: int = 4
    """Images per step, over all processes."""
    accumulate: int = 1
    """Split each batch into this many parts that are computed one after the other, to save memory.
    With AGC the update is the same (up to rounding); BatchNorm sees the parts."""
    optimizer: OptimizerName = "sgd"
    """sgd (with momentum) or adamw."""
    lr: float | None = None
    """Learning rate. None: 0.02 x batch size for segmentation, 0.1 x (batch size / 128)^0.75 for
    classification, 0.001 for adamw."""
    schedule: Schedule = "constant"
    """constant, or a learning rate that falls to 0 over all epochs, which are then fixed: cosine,
    poly (power 0.9), or onecycle, which rises from lr / 25 in the first 30% of the steps."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises linearly from 0. May be a fraction."""
    weight_decay: float = 0.0
    """Weight decay of the filters. Norms, AGC parameters and biases have none."""
    momentum: float = 0.9
    """Momentum of SGD, at most 0.999."""
    clip_grad_norm: float | None = None
    """Clip the gradient's norm to this value. Try 1 if AGC diverges at a high learning rate."""
    loss: LossName = "ce"
    """Loss: ce (cross-entropy), dice, ce+dice (their sum), or focal (gamma 2). Classification has
    ce and focal."""
    ema: float | None = None
    """Evaluate and save an exponential moving average of the weights with this decay, such as
    0.999. The average is shorter in the first steps."""
    epochs: int = 150
    """Number of epochs. A finished run can be resumed with more."""
    patience: int | None = None
    """Stop when the lowest validation error is this many epochs old."""
    minutes: float | None = None
    """Stop before an epoch that would not end within this many minutes. The same command resumes
    the run."""
    seed: int = 0
    """Seed for initialization, shuffling and augmentation."""
    init: Literal["he", "identity", "unit"] = "he"
    """Initialization: he (fan-in), identity (the paper's variant), unit (AGC: unit variance)."""
    fixed_lambda: float | None = None
    """Fix AGC's lambda (share of the mean that is subtracted) instead of learning it."""
    fixed_gamma: float | None = None
    """Fix AGC's gamma (gain) instead of learning it, at this multiple of its initial value: 1, or
    in residual and plain networks 1.21 and less at the end of a branch."""
    class_weight_scale: float = 1.0
    """Mean of the class weights in the loss. Classification has no class weights."""
    augment: Augmentation | None = None
    """Random augmentation. crop+flip is for classification: images are padded by an eighth of
    their side (4 pixels for CIFAR), cropped and flipped. strong is for segmentation: flip, zoom by
    0.7 to 1.4, and brightness, contrast and saturation by 0.7 to 1.3. None: flip for segmentation,
    crop+flip for classification."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. auto uses a GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 uses autocast with fp32 parameters. auto is bf16 on a GPU and fp32 on a CPU."""
    engine: Engine = "graph"
    """How a step is executed. On a CPU, graph means eager."""
    deterministic: bool = False
    """Bit-identical results on a GPU, at some cost in speed. Runs on a CPU always are."""
    fsdp: bool = False
    """Shard parameters, gradients and momentum over the processes (FSDP2)."""
    train_limit: int | None = None
    """Use only the first N training images."""
    val_limit: int | None = None
    """Use only the first N validation images."""
    workers: int = 0
    """Threads that prepare batches. The batches do not depend on this number."""
    eval_batch_size: int | None = None
    """Images per evaluation batch, over all processes. None: --batch-size; classification takes
    more if it is small, 256 for images of 32x32."""
    eval_whole: bool = False
    """Evaluate images larger than --size whole, not in windows. Usually worse for AGC."""
    save_epochs: int = 1
    """Save a checkpoint every N epochs and after the last one. best/ has the lowest error."""
    save_steps: int = 0
    """Also save a checkpoint every N steps. 0 saves only at the end of epochs."""
    sample_epochs: tuple[int, ...] = (1, 10, 50, 100, 150)
    """Epochs after which to draw validation images with their predictions."""

    def __post_init__(self) -> None:
        at_least = dict.fromkeys(("batch_size", "epochs", "save_epochs", "accumulate"), 1)
        at_least |= dict.fromkeys(("seed", "workers", "save_steps"), 0)
        for name in ("train_limit", "val_limit", "eval_batch_size", "channels", "patience"):
            if getattr(self, name) is not None:
                at_least[name] = 1
        for name, least in at_least.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"--{_flag(name)} must be at least {least}, got {value}")
            if value > MAX_INT:
                raise ValueError(f"--{_flag(name)} must be at most {MAX_INT}, got {value}")
        if self.task != data_task(self.data):
            raise ValueError(
                f"--model {self.model} is for {self.task}, but --data {self.data} is for "
                f"{data_task(self.data)}: choose another network or other data"
            )
        self._check_options()
        if self.task == "segmentation":
            self._check_segmentation()
        else:
            self._check_classification()
        if not 0 < self.width <= 16:
            raise ValueError(f"--width must be above 0 and at most 16, got {self.width}")
        for name in ("warmup_epochs", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{_flag(name)} must be at least 0, got {getattr(self, name)}")
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"--warmup-epochs must be at most --epochs {self.epochs}, got {self.warmup_epochs}"
            )
        for name in ("lr", "clip_grad_norm", "class_weight_scale", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{_flag(name)} must be positive, got {value}")
        if self.init == "unit" and not is_agc(self.norm):
            raise ValueError(f"--init unit is for --norm agc, not {self.norm}")
        for name in ("fixed_lambda", "fixed_gamma"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_agc(self.norm):
                raise ValueError(f"--{_flag(name)} is for --norm agc, not {self.norm}")
            if not math.isfinite(value):
                raise ValueError(f"--{_flag(name)} must be a number, got {value}")
        if not 0 <= self.momentum <= HIGHEST_MOMENTUM:
            raise ValueError(
                f"--momentum must be from 0 to {HIGHEST_MOMENTUM}, got {self.momentum}"
            )

    def _check_options(self) -> None:
        if self.data != "folder":
            for name in ("channels", "fit", "val_fraction"):
                if getattr(self, name) != ADDED_LATER[name]:
                    raise ValueError(f"--{_flag(name)} is for --data folder, not {self.data}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"--val-fraction must be between 0 and 1, got {self.val_fraction}")
        if is_external(self.model):
            if self.norm not in ("agc", "bn"):
                raise ValueError(
                    f"--model {self.model} supports --norm agc and bn, not {self.norm}"
                )
            for name, only in (("width", 1.0), ("init", "he")):
                if getattr(self, name) != only:
                    raise ValueError(f"--{_flag(name)} is not for --model {self.model}")
        elif self.pretrained:
            raise ValueError(f"--pretrained is for timm:, smp: and torchvision:, not {self.model}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"--ema must be between 0 and 1, such as 0.999; got {self.ema}")
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"--accumulate must be at most --batch-size {self.batch_size}, the images of an "
                f"update; got {self.accumulate}"
            )
        if self.schedule == "onecycle" and self.warmup_epochs:
            raise ValueError("--schedule onecycle has a rise of its own: omit --warmup-epochs")
        for name in ("ema", "accumulate", "optimizer"):
            if self.fsdp and getattr(self, name) != ADDED_LATER[name]:
                raise ValueError(f"--{_flag(name)} does not support --fsdp yet: omit one of them")

    def _check_segmentation(self) -> None:
        if min(self.image_size) < MIN_SIDE:
            size = _format(self.image_size)
            raise ValueError(f"--size must be at least {MIN_SIDE}x{MIN_SIDE}, got {size}")
        # UNet pads other sizes, but a file exported from it takes none of them.
        if self.model == "unet" and any(side % TOTAL_STRIDE for side in self.image_size):
            near = tuple(max(1, round(a / TOTAL_STRIDE)) * TOTAL_STRIDE for a in self.image_size)
            raise ValueError(
                f"--size must be multiples of {TOTAL_STRIDE} for unet, got "
                f"{_format(self.image_size)}: try {_format(near)}"
            )
        if self.augment == "crop+flip":
            raise ValueError(
                "--augment crop+flip is for classification: segmentation always crops images that "
                "are larger than --size; use flip or strong"
            )
        if self.loss != "ce" and self.model == "classnet":
            raise ValueError(f"--model classnet has a loss of its own: omit --loss {self.loss}")

    def _check_classification(self) -> None:
        if self.init == "unit":
            raise ValueError(f"--init unit is for segmentation, not for --model {self.model}")
        if self.class_weight_scale != 1:
            raise ValueError(
                "--class-weight-scale is for segmentation: classification has no class weights"
            )
        if self.loss not in ("ce", "focal"):
            raise ValueError(f"--loss {self.loss} is for segmentation: use ce or focal")
        if self.augment == "strong":
            raise ValueError("--augment strong is for segmentation: use crop+flip")

    @property
    def task(self) -> Task:
        """The task of the network, or of its data if the network has none of its own."""
        if is_external(self.model):
            return external_task(self.model) or data_task(self.data)
        return task_of(self.model)

    @property
    def folder_options(self) -> FolderOptions:
        """How to read a folder of images and masks."""
        tile = self.image_size if self.fit == "tile" else None
        return FolderOptions(self.val_fraction, self.in_channels, tile)

    @property
    def image_size(self) -> tuple[int, int]:
        """`size`, or the default of the dataset."""
        return DEFAULT_SIZES[self.data] if self.size is None else self.size

    @property
    def in_channels(self) -> int:
        """Channels of the images."""
        return channels_of(self.data) if self.channels is None else self.channels

    @property
    def learning_rate(self) -> float:
        """`lr`, or the rule for the task and the batch size. A schedule scales it."""
        if self.lr is not None:
            return self.lr
        return default_lr(self.task, self.batch_size, self.optimizer)

    @property
    def augmentation(self) -> Augmentation:
        """`augment`, or the default of the task."""
        if self.augment is not None:
            return self.augment
        return "flip" if self.task == "segmentation" else "crop+flip"

    @property
    def window(self) -> Size | None:
        """Size of the windows for evaluation, or None to evaluate whole images."""
        return None if self.eval_whole or self.task == "classification" else self.image_size

    @property
    def val_batch_size(self) -> int:
        """`eval_batch_size`, or the batch size of training.

        Classification evaluates more images at a time: one by one, the evaluation of thousands of
        small images would take longer than an epoch.
        """
        if self.eval_batch_size is not None:
            return self.eval_batch_size
        if self.task == "segmentation":
            return self.batch_size
        return max(self.batch_size, EVAL_PIXELS // math.prod(self.image_size))


class ConfigChangedError(ValueError):
    """A run cannot be resumed with another configuration or other data."""


def check_code(config: Train, run: Path, confirmed: str | None) -> None:
    """Refuse to build a network of a run folder that is a function of any module.

    Building it imports the module and calls the function. A run folder may come from others, so
    the user has to name the function.

    Args:
        config: The configuration of the run folder.
        run: The run folder.
        confirmed: The --model that the user has given, or None.

    Raises:
        ValueError: The user has not named it.
    """
    if is_code(config.model) and confirmed != config.model:
        raise ValueError(
            f"the network of {run} is {config.model}: this command would import that module and "
            f"call the function. Pass --model {config.model} if you trust it"
        )


def load_config(run: Path) -> tuple[Train, dict[str, Any]]:
    """Read the configuration of a run and the values derived from it.

    The configuration's `out` is always `run`: a folder from another machine must not make this
    process write to a path that config.json names.

    Returns:
        The configuration, and the derived values: learning rate, classes, counts.

    Raises:
        ValueError: There is no valid config.json.
    """
    path = run / CONFIG
    content = read_config(run)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, got {content.get('format')!r}")
    config, derived = content.get("config"), content.get("derived")
    if not isinstance(config, dict) or not isinstance(derived, dict):
        raise ValueError(f"{path}: 'config' and 'derived' must be objects")
    try:
        return from_json({**config, "out": str(run)}), derived
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_config(config: Train, derived: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write config.json. `about` holds versions, commit and machine.

    A run writes it before its data are decoded, with empty `derived` and `about`, and again with
    both before its first step.
    """
    content = {"format": FORMAT, "config": to_json(config), "derived": derived, **about}
    write_json(config.out / CONFIG, content, indent=2)


def check_unchanged(config: Train, before: Train) -> None:
    """Raise ConfigChangedError unless a run of `before` can resume with `config`."""
    found = differences(config, before)
    if found:
        why = ""
        if before.schedule != "constant" and config.epochs != before.epochs:
            why = f"The learning rates of a {before.schedule} schedule depend on --epochs. "
        raise ConfigChangedError(
            f"{config.out} was started with other settings: {'; '.join(found)}. {why}"
            "Omit these flags to resume it, or choose another --out."
        )


def differences(config: Train, before: Train) -> list[str]:
    """List the settings that make `config` another run: "--lr was 0.5, now 0.25"."""
    may_change = changeable({"config": {"schedule": before.schedule}})
    # A default that depends on another setting, as the learning rate on the batch size, changes
    # with it and is not named in addition.
    names = [
        f.name
        for f in fields(Train)
        if f.name not in may_change and getattr(config, f.name) != getattr(before, f.name)
    ]
    pairs = {name: (_effective(before, name), _effective(config, name)) for name in names}
    return [
        f"--{_flag(k)} was {_format(a)}, now {_format(b)}" for k, (a, b) in pairs.items() if a != b
    ]


def spelled_as(before: Train, config: Train) -> Train:
    """Return the configuration of a resumed run, with its own spelling of equal settings.

    A default may be spelled out, as --lr 0.08 in place of no --lr. The checkpoints of the run hold
    a copy of its settings, which config.json must keep to match.
    """
    may_change = changeable({"config": {"schedule": before.schedule}})
    names = [f.name for f in fields(Train) if f.name not in may_change]
    return replace(config, **{name: getattr(before, name) for name in names})


def changeable(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that may change when the run of a config.json is resumed."""
    config = content.get("config")
    schedule = config.get("schedule", "constant") if isinstance(config, dict) else "constant"
    return tuple(name for name in CHANGEABLE if name != "epochs" or schedule == "constant")


def changed_settings(config: Train) -> dict[str, Any]:
    """Return the settings with other values than the defaults, and `out`."""
    values = {f.name: (getattr(config, f.name), f.default) for f in fields(Train)}
    values["size"] = (config.image_size, DEFAULT_SIZES[config.data])
    return {k: value for k, (value, default) in values.items() if value != default}


def _effective(config: Train, name: str) -> Any:
    """Return the value of a setting; the resolved one where None stands for a default."""
    resolved = {
        "size": "image_size",
        "augment": "augmentation",
        "channels": "in_channels",
        "lr": "learning_rate",
        "eval_batch_size": "val_batch_size",
    }
    return getattr(config, resolved.get(name, name))


def to_json(config: Train) -> dict[str, Any]:
    """Return all fields as JSON values: paths as strings, tuples as lists."""
    values = {f.name: getattr(config, f.name) for f in fields(Train)}
    values["size"] = config.image_size  # readers need not know the defaults
    return {
        name: str(value) if isinstance(value, Path) else list(value) if type(value) is tuple
        else value
        for name, value in values.items()
    }  # fmt: skip


def from_json(values: Mapping[str, Any]) -> Train:
    """Return the configuration; raise ValueError for invalid or missing fields."""
    hints = typing.get_type_hints(Train)
    values = {**ADDED_LATER, **values}
    unknown, missing = set(values) - set(hints), set(hints) - set(values)
    if unknown or missing:
        problems = [f"unknown {name}" for name in sorted(unknown)]
        problems += [f"no {name}" for name in sorted(missing)]
        raise ValueError(", ".join(problems))
    return Train(**{name: _typed(name, values[name], hint) for name, hint in hints.items()})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Convert a JSON value to the type of its field."""
    kind = typing.get_origin(hint)
    if kind in (types.UnionType, typing.Union):
        optional = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _typed(name, value, optional[0])
    if kind is Literal and value in typing.get_args(hint):
        return value
    if kind is tuple and isinstance(value, list) and all(type(v) is int for v in value):
        if name != "size" or (len(value) == 2 and min(value) > 0):
            return tuple(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{name} cannot be {value!r}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _format(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)
