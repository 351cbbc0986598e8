"""Settings of a training run: options of `deepcontrol train`, defaults, checks."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...step import Engine
from ..data import (
    DATASET_NAMES,
    DEFAULT_SIZES,
    DataName,
    DatasetName,
    Fit,
    FolderOptions,
    Task,
    channels_of,
    data_task,
)
from ..folders.storage import MAX_INT
from ..losses import LossName
from ..models import CUSTOM, Norm, UNet, external_task, is_agc, is_code, is_external, task_of
from ..models.unet3d import TOTAL_STRIDE
from ..optim import (
    HIGHEST_MOMENTUM,
    ClassWeights,
    OptimizerName,
    Recipe,
    RecipeName,
    Schedule,
    default_lr,
    recipe,
)
from ..terminal import Size, TrainingSize

EVAL_PIXELS = 2**18  # pixels per evaluation batch in classification: 256 images of 32x32

Augmentation = Literal["none", "flip", "crop+flip", "strong"]
GEMS_CAP = 16.0

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
    "resample": False,
    "pretrained": False,
    "optimizer": "sgd",
    "loss": "ce",
    "accumulate": 1,
    "ema": None,
    "patience": None,
    "minutes": None,
    "recipe": "paper",
    "class_weights": "enet",
    "background": "mean",
    "noise": 0.0,
    "dropout": 0.0,
    "gems": "off",
    "gems_cap": GEMS_CAP,
    "lambda_lr": 1.0,
    "lambda_start": None,
}
# Options of some datasets only.
FOLDER_OPTIONS = {
    "channels": ("folder", "coco", "nnunet", *DATASET_NAMES),
    "fit": ("folder", "coco"),
    "val_fraction": ("folder", "coco", "nnunet", "imagefolder"),
    "resample": ("nnunet",),
}
MIN_SIDE = 32  # pixels: SegNet halves the image five times
# Networks of this package, as the study names them. --model takes those of other libraries as well.
Model = Literal[
    "segnet", "classnet", "unet", "unet3d", "resnet20", "resnet56", "resnet110", "plain20",
    "plain56", "plain110", "resnet18", "resnet50", "mlp",
]  # fmt: skip


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
    from the dataset's instance labels. To label volumes: unet3d. To classify images: resnet18,
    resnet50, resnet20, resnet56, resnet110, mlp, or plain20, plain56, plain110 (without shortcuts).
    From other libraries: timm:NAME, smp:Unet/resnet34, torchvision:deeplabv3_resnet50. Your own:
    module:function, called with classes and in_channels. Networks of other libraries and your own
    are converted with --norm agc and left unchanged with --norm bn."""
    pretrained: bool = False
    """Start from the pretrained weights of timm, smp or torchvision."""
    norm: Norm = None  # type: ignore[assignment]  # the recipe's, filled in by `__post_init__`
    """Normalization: agc (automatic gain control), agc+wn (AGC with weight normalization), agc+ws
    (AGC with weight standardization), bn (BatchNorm), gn (GroupNorm), in (InstanceNorm), ln
    (LayerNorm), frn (Filter Response Normalization), evonorm-s0, ws+bn and ws+gn (weight
    standardization with BatchNorm and with GroupNorm), or none. None: the recipe's."""
    data: Literal[DataName, DatasetName] = "streets"
    """Dataset. folder holds your own images/ and masks/ (see `deepcontrol data init`), coco images
    with COCO's JSON, and nnunet volumes in nnU-Net's raw layout. cityscapes14 is Cityscapes with
    ClassNet's 14 classes. cifar10, cifar100, fashion-mnist and imagefolder are for classification;
    imagefolder is a folder with one subfolder of images per class."""
    data_root: Path | None = None
    """Dataset folder. Not needed for streets."""
    size: TrainingSize | None = None
    """Training size. Images of --data folder or coco are resized or cut into tiles (--fit), those
    of classification are resized and cropped, and others are cropped if they are larger.
    Evaluation of segmentation uses windows of this size. None: 256x512 for segmentation, 256x256
    for folder and coco, 96x96x96 for nnunet, 32x32 for CIFAR, 28x28 for Fashion-MNIST, 224x224 for
    imagefolder."""
    fit: Fit = "resize"
    """How to bring images of --data folder or coco to --size. resize: scale with the aspect ratio,
    and pad with border pixels without a label. tile: cut into tiles at full resolution."""
    channels: int | None = None
    """Channels of the images of --data folder or coco. None: 3; gray images are repeated, opacity
    is dropped. Volumes have those of dataset.json."""
    val_fraction: float = 0.2
    """Fraction of the images for validation, for --data folder, coco, nnunet (of its cases), and
    imagefolder without val/. A hash of the file name decides, so that new images do not change the
    split."""
    resample: bool = False
    """Resample the volumes of --data nnunet to the median voxel size of the training cases.
    `deepcontrol predict` writes labels at the resolution of its input."""
    width: float = 1.0
    """Multiplier for the number of filters in every layer."""
    batch_size: int = 4
    """Images per step, over all processes."""
    accumulate: int = 1
    """Split each batch into N parts and add up their gradients, to save memory. With AGC the update
    is the same up to rounding; BatchNorm normalizes each part by itself."""
    recipe: RecipeName = "paper"
    """Defaults of --norm, --schedule, --warmup-epochs, --weight-decay, --augment and
    --class-weights; explicit options take precedence. paper has agc, a constant learning rate and
    no weight decay. recommended has agc+ws (agc for mlp; to_agc standardizes networks of other
    libraries and your own, unless --pretrained), a warm-up of 1 epoch (at most a tenth of
    --epochs), a cosine schedule, and a weight decay of 0.0001 (0.01 for adamw). best is for
    segmentation: recommended with a weight decay of 0.0005, --augment strong and --class-weights
    none. Learning rate and momentum are the same in all."""
    optimizer: OptimizerName = "sgd"
    """sgd (with momentum) or adamw."""
    lr: float | None = None
    """Learning rate. None: 0.02 x batch size for segmentation, 0.1 x (batch size / 128)^0.75 for
    classification, 0.001 for adamw."""
    # None stands for the recipe's value, which `__post_init__` fills in.
    schedule: Schedule = None  # type: ignore[assignment]
    """Learning-rate schedule: constant, cosine, poly (power 0.9), or onecycle, which rises from
    lr / 25 over the first 30% of the steps. cosine, poly and onecycle fall to 0 by the last epoch,
    so --epochs cannot be changed later. None: the recipe's."""
    warmup_epochs: float = None  # type: ignore[assignment]
    """Epochs of linear warm-up of the learning rate from 0, such as 0.5. None: the recipe's."""
    weight_decay: float = None  # type: ignore[assignment]
    """Weight decay of the filters. Norms, AGC parameters and biases have none. None: the
    recipe's."""
    momentum: float = 0.9
    """Momentum of SGD, at most 0.999."""
    clip_grad_norm: float | None = None
    """Clip the gradient's norm to this value. Try 1 if AGC diverges at a high learning rate."""
    loss: LossName = "ce"
    """Loss: ce (cross-entropy), dice, ce+dice (their sum), or focal (gamma 2). Classification has
    ce and focal."""
    ema: float | None = None
    """Evaluate and save an exponential moving average of the weights with this decay, such as
    0.999. The decay is lower in the first steps."""
    epochs: int = 150
    """Number of epochs. A finished run can be resumed with more."""
    patience: int | None = None
    """Stop after N epochs without a lower validation error."""
    minutes: float | None = None
    """Time limit. Training stops before an epoch that would exceed it; the same command resumes the
    run."""
    seed: int = 0
    """Seed for initialization, shuffling, augmentation, noise and dropout."""
    init: Literal["he", "identity", "unit"] = "he"
    """Initialization: he (fan-in), identity (the paper's variant), unit (AGC: unit variance)."""
    fixed_lambda: float | None = None
    """Fix AGC's lambda (fraction of the mean that is subtracted) instead of learning it."""
    fixed_gamma: float | None = None
    """Fix AGC's gamma (gain) instead of learning it, at this multiple of its initial value. That
    value is 1; in residual and plain networks 1.21, and less at the end of a branch."""
    background: str = "mean"
    """Level of each map that AGC subtracts: mean, median, window:15 (mean over a window of 15x15),
    quantile:0.3, or trimmed:0.1 (mean without the lowest and the highest 10%)."""
    lambda_start: float | None = None
    """Initial value of AGC's lambda. None: 1, or 0.5 with --norm agc+ws."""
    lambda_lr: float = 1.0
    """Learning rate of AGC's lambda, relative to --lr."""
    noise: float = 0.0
    """Add noise to every feature map in training, after AGC or BatchNorm, relative to the standard
    deviation of the map: 0.1 is 10%."""
    dropout: float = 0.0
    """Set this fraction of the classifier's input maps to 0 in training."""
    gems: Literal["off", "on", "control"] = "off"
    """Gated effective minibatch size: divide each filter's gradient by the fraction of positions
    where its ReLU is active. control scales the whole gradient to the same norm instead. For
    --norm agc."""
    gems_cap: float = GEMS_CAP
    """Largest factor by which --gems multiplies a gradient."""
    class_weights: ClassWeights = None  # type: ignore[assignment]
    """Class weights in the loss of segmentation: enet (rare classes count more) or none. None:
    enet, or none with --recipe best."""
    class_weight_scale: float = 1.0
    """Mean of the class weights in the loss. Classification has no class weights."""
    augment: Augmentation | None = None
    """Random augmentation. crop+flip is for classification: images are padded by an eighth of
    their side (4 pixels for CIFAR), cropped and flipped. strong is for segmentation: flip, zoom by
    0.7 to 1.4, and brightness, contrast and saturation by 0.7 to 1.3. None: the recipe's, or flip
    for segmentation and crop+flip for classification."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. auto uses a GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 uses autocast with fp32 parameters. auto is bf16 on a GPU and fp32 on a CPU."""
    engine: Engine = "graph"
    """Execution of a training step: eager, torch.compile, a CUDA graph, or both. On a CPU, graph
    runs eagerly."""
    deterministic: bool = False
    """Bit-identical results on a GPU, at some cost in speed. Runs on a CPU are deterministic."""
    fsdp: bool = False
    """Shard parameters, gradients and momentum over the processes (FSDP2)."""
    train_limit: int | None = None
    """Use only the first N training images."""
    val_limit: int | None = None
    """Use only the first N validation images."""
    workers: int = 0
    """Threads that prepare batches. The batches do not depend on this number."""
    eval_batch_size: int | None = None
    """Images per evaluation batch, over all processes. None: --batch-size; in classification at
    least 256 for images of 32x32."""
    eval_whole: bool = False
    """Evaluate images larger than --size as a whole, not in windows. Usually worse for AGC."""
    save_epochs: int = 1
    """Save a checkpoint every N epochs and after the last one. best/ has the lowest
    error, and of equal errors the lowest loss."""
    save_steps: int = 0
    """Also save a checkpoint every N steps. 0 saves only at the end of epochs."""
    sample_epochs: tuple[int, ...] = (1, 10, 50, 100, 150)
    """Epochs after which to draw validation images with their predictions."""

    @property
    def task(self) -> Task:
        """The task of the network, or of its data if the network has none of its own."""
        if self.model == CUSTOM:
            return data_task(self.data)
        if is_external(self.model):
            return external_task(self.model) or data_task(self.data)
        return task_of(self.model)

    def recipe_values(self, schedule: Schedule | None = None) -> Recipe:
        """Return the settings of the recipe, for the schedule that is chosen already."""
        # Users' own datasets and volumes do not support strong augmentation.
        augments = self.data not in DATASET_NAMES and len(self.sample_size) == 2
        # to_agc standardizes the filters of networks from elsewhere by itself.
        standardizes = self.model not in ("mlp", CUSTOM) and not is_external(self.model)
        return recipe(self.recipe, self.epochs, self.optimizer, schedule, augments, standardizes)

    @property
    def has_own_images(self) -> bool:
        """Whether `fit` and `channels` say how to read images of any size and kind."""
        return self.data in FOLDER_OPTIONS["fit"]

    @property
    def folder_options(self) -> FolderOptions:
        """How to read a folder of images and masks."""
        tile = self.image_size if self.fit == "tile" else None
        return FolderOptions(self.val_fraction, self.in_channels, tile)

    @property
    def sample_size(self) -> tuple[int, ...]:
        """`size`, or the default of the dataset: H, W, or D, H, W for volumes."""
        return DEFAULT_SIZES[self.data] if self.size is None else self.size

    @property
    def image_size(self) -> Size:
        """Height and width of the images, or of a volume's slices."""
        return self.sample_size[-2], self.sample_size[-1]

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
        if self.eval_whole or self.task == "classification" or len(self.sample_size) == 3:
            return None
        return self.image_size

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
        return max(self.batch_size, EVAL_PIXELS // math.prod(self.sample_size))

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
                    raise ValueError(
                        f"--{flag_name(name)} has no effect on --model {self.model}: omit it"
                    )
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
            raise ValueError("--schedule onecycle includes a warm-up: omit --warmup-epochs")
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
        if self.noise and not (is_agc(self.norm) or self.norm in ("bn", "ws+bn")):
            raise ValueError(f"--noise is for --norm agc, bn and ws+bn, not {self.norm}")
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
        strides = {"unet": UNet.total_stride, "unet3d": TOTAL_STRIDE}
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


def parse_background(text: str) -> tuple[str, float]:
    """Return the name and the parameter of --background; 0 if it has no parameter.

    >>> parse_background("median"), parse_background("window:15")
    (('median', 0.0), ('window', 15.0))

    Raises:
        ValueError: The text has another form, or the parameter is out of range.
    """
    name, separator, parameter = text.partition(":")
    try:
        value = float(parameter) if separator else 0.0
    except ValueError:
        value = math.nan
    is_valid = {
        "mean": not separator,
        "median": not separator,
        "window": value >= 1 and value % 1 == 0,
        "quantile": bool(separator) and 0 <= value <= 1,
        "trimmed": bool(separator) and 0 <= value < 0.5,
    }
    if not is_valid.get(name):
        raise ValueError(
            "--background must be mean, median, window:N with N of at least 1, quantile:Q with Q "
            f"from 0 to 1, or trimmed:F with F below 0.5; got {text}"
        )
    return name, value


def flag_name(name: str) -> str:
    return name.replace("_", "-")


def format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)
