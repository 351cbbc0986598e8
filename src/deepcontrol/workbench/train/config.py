"""Checked settings of a training run."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..data import DATASET_NAMES, data_task
from ..folders.storage import MAX_INT
from ..models import CUSTOM, is_agc, is_code, is_external, unet3d
from ..models.unet import TOTAL_STRIDE
from ..optim import HIGHEST_MOMENTUM
from .proposals import parse_background
from .settings import ADDED_LATER, FOLDER_OPTIONS, Settings

MIN_SIDE = 32  # pixels: SegNet halves the image five times

# Networks of this package, as the study names them. --model takes those of other libraries as well.
Model = Literal[
    "segnet", "classnet", "unet", "unet3d", "resnet20", "resnet56", "resnet110", "plain20",
    "plain56", "plain110", "resnet18", "resnet50", "mlp",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Train(Settings):
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

    def __post_init__(self) -> None:
        for name, value in self.recipe_values(self.schedule)._asdict().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the class is frozen
        at_least = dict.fromkeys(("batch_size", "epochs", "save_epochs", "accumulate"), 1)
        at_least |= dict.fromkeys(("seed", "workers", "save_steps"), 0)
        for name in ("train_limit", "val_limit", "eval_batch_size", "channels", "patience"):
            if getattr(self, name) is not None:
                at_least[name] = 1
        for name, least in at_least.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"--{flag_name(name)} must be at least {least}, got {value}")
            if value > MAX_INT:
                raise ValueError(f"--{flag_name(name)} must be at most {MAX_INT}, got {value}")
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
                raise ValueError(
                    f"--{flag_name(name)} must be at least 0, got {getattr(self, name)}"
                )
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"--warmup-epochs must be at most --epochs {self.epochs}, got {self.warmup_epochs}"
            )
        for name in ("lr", "clip_grad_norm", "class_weight_scale", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{flag_name(name)} must be positive, got {value}")
        if self.init == "unit" and not is_agc(self.norm):
            raise ValueError(f"--init unit is for --norm agc, not {self.norm}")
        for name in ("fixed_lambda", "fixed_gamma", "lambda_start"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_agc(self.norm):
                raise ValueError(f"--{flag_name(name)} is for --norm agc, not {self.norm}")
            if not math.isfinite(value):
                raise ValueError(f"--{flag_name(name)} must be a number, got {value}")
        self._check_proposals()
        if not 0 <= self.momentum <= HIGHEST_MOMENTUM:
            raise ValueError(
                f"--momentum must be from 0 to {HIGHEST_MOMENTUM}, got {self.momentum}"
            )

    def _check_options(self) -> None:
        for name, data in FOLDER_OPTIONS.items():
            if self.data not in data and getattr(self, name) != ADDED_LATER[name]:
                shown = ", ".join(own for own in data if own not in DATASET_NAMES)
                raise ValueError(f"--{flag_name(name)} is for --data {shown}, not {self.data}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"--val-fraction must be between 0 and 1, got {self.val_fraction}")
        if self.data in DATASET_NAMES:
            self._check_dataset()
        if self.model == CUSTOM:
            fixed: dict[str, Any] = {"width": 1.0, "init": "he", "pretrained": False}
            fixed["background"] = "mean"
            for name in (*fixed, "fixed_lambda", "fixed_gamma", "lambda_start"):
                if getattr(self, name) != fixed.get(name):
                    raise ValueError(f"{name} is for networks by name, not for your own: omit it")
        if is_external(self.model):
            if self.norm not in ("agc", "bn"):
                raise ValueError(
                    f"--model {self.model} supports --norm agc and bn, not {self.norm}"
                )
            for name, only in (("width", 1.0), ("init", "he")):
                if getattr(self, name) != only:
                    raise ValueError(f"--{flag_name(name)} is not for --model {self.model}")
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
        for name in ("ema", "accumulate", "optimizer", "background", "gems", "lambda_lr"):
            if self.fsdp and getattr(self, name) != ADDED_LATER[name]:
                raise ValueError(
                    f"--{flag_name(name)} does not support --fsdp yet: omit one of them"
                )

    def _check_proposals(self) -> None:
        """Check the options that try the paper's proposals."""
        for name in ("background", "gems", "lambda_lr"):
            if not is_agc(self.norm) and getattr(self, name) != ADDED_LATER[name]:
                raise ValueError(f"--{flag_name(name)} is for --norm agc, not {self.norm}")
        parse_background(self.background)
        if self.noise and not (is_agc(self.norm) or self.norm == "bn"):
            raise ValueError(f"--noise is for --norm agc and bn, not {self.norm}")
        for name, below in (("noise", math.inf), ("dropout", 1)):
            if not 0 <= getattr(self, name) < below:
                limit = "" if below == math.inf else f" and below {below}"
                raise ValueError(f"--{name} must be at least 0{limit}, got {getattr(self, name)}")
        if self.dropout and (self.model == CUSTOM or is_external(self.model)):
            raise ValueError(f"--dropout is for networks of this package, not {self.model}")
        if not 1 <= self.gems_cap < math.inf:
            raise ValueError(f"--gems-cap must be at least 1, got {self.gems_cap}")
        if self.gems_cap != ADDED_LATER["gems_cap"] and self.gems == "off":
            raise ValueError("--gems-cap needs --gems on or control")
        if not 0 < self.lambda_lr < math.inf:
            raise ValueError(f"--lambda-lr must be positive, got {self.lambda_lr}")
        for name in ("lambda_lr", "lambda_start"):
            if self.fixed_lambda is not None and getattr(self, name) != ADDED_LATER[name]:
                raise ValueError(f"--{flag_name(name)} and --fixed-lambda exclude each other")

    def _check_dataset(self) -> None:
        for name in ("augment", "train_limit", "val_limit", "data_root"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is not for torch Datasets: transform or select the samples in the "
                    "dataset"
                )
        if self.init == "unit" or self.model == "classnet":
            setting = "init='unit'" if self.init == "unit" else "model='classnet'"
            raise ValueError(f"{setting} is not for torch Datasets: omit it")

    def _check_segmentation(self) -> None:
        is_own = self.model == CUSTOM or is_code(self.model)
        if min(self.sample_size) < MIN_SIDE and not is_own:
            size = format_value(self.sample_size)
            raise ValueError(f"--size must be at least {MIN_SIDE}x{MIN_SIDE}, got {size}")
        self._check_volumes()
        # UNet pads other sizes, but a file exported from it takes none of them.
        strides = {"unet": TOTAL_STRIDE, "unet3d": unet3d.TOTAL_STRIDE}
        stride = strides.get(self.model, 1)
        if any(side % stride for side in self.sample_size):
            near = tuple(max(2, round(a / stride)) * stride for a in self.sample_size)
            raise ValueError(
                f"--size must be multiples of {stride} for {self.model}, got "
                f"{format_value(self.sample_size)}: try {format_value(near)}"
            )
        if self.augment == "crop+flip":
            raise ValueError(
                "--augment crop+flip is for classification: segmentation always crops images that "
                "are larger than --size; use flip or strong"
            )
        if self.class_weights == "none" and self.class_weight_scale != 1:
            raise ValueError("--class-weight-scale needs --class-weights enet")
        if self.loss != "ce" and self.model == "classnet":
            raise ValueError(f"--model classnet has a loss of its own: omit --loss {self.loss}")

    def _check_volumes(self) -> None:
        """Check that network, data and size are all for volumes, or all for images."""
        is_volume = len(self.sample_size) == 3
        if self.data not in DATASET_NAMES and is_volume != (self.data == "nnunet"):
            raise ValueError(
                f"--data {self.data} needs a --size of {3 if self.data == 'nnunet' else 2} numbers,"
                f" got {format_value(self.sample_size)}"
            )
        if self.model != CUSTOM and is_volume != (self.model == "unet3d"):
            kind = "volumes" if is_volume else "images"
            other = "unet3d" if is_volume else "unet or segnet"
            raise ValueError(
                f"--model {self.model} is not for {kind}, which --data {self.data} has: use {other}"
            )
        if is_volume and self.augmentation == "strong":
            raise ValueError("--augment strong is for images, not for volumes: use flip or none")
        if is_volume and self.init != "he":
            raise ValueError(f"--init {self.init} is for images, not for volumes: use he")

    def _check_classification(self) -> None:
        if self.recipe == "best" and self.task != "segmentation":
            raise ValueError("--recipe best is for segmentation: use recommended")
        if self.init == "unit":
            raise ValueError(f"--init unit is for segmentation, not for --model {self.model}")
        if self.class_weight_scale != 1:
            raise ValueError(
                "--class-weight-scale is for segmentation: classification has no class weights"
            )
        if self.class_weights != "enet":
            raise ValueError(
                "--class-weights is for segmentation: classification has no class weights"
            )
        if self.loss not in ("ce", "focal"):
            raise ValueError(f"--loss {self.loss} is for segmentation: use ce or focal")
        if self.augment == "strong":
            raise ValueError("--augment strong is for segmentation: use crop+flip")


def flag_name(name: str) -> str:
    return name.replace("_", "-")


def format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)
