"""Settings of a training run: the options of `deepcontrol train` and their defaults."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from ..losses import LossName
from ..models import CUSTOM, Norm, external_task, is_external, task_of
from ..optim import (
    ClassWeights,
    OptimizerName,
    Recipe,
    RecipeName,
    Schedule,
    default_lr,
    recipe,
)
from ..terminal import Size, TrainingSize

EVAL_PIXELS = 2**18  # of an evaluation batch in classification: 256 images of 32x32

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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, and the values that follow from them. `Train` checks them."""

    out: Path
    """Run folder. An existing run is resumed."""
    model: str = "segnet"
    """Network. To label pixels: segnet, unet (residual), or classnet, which also predicts contours
    from the dataset's instance labels. To label volumes: unet3d. To classify images: resnet18,
    resnet50, resnet20, resnet56, resnet110, mlp, or plain20, plain56, plain110 (without shortcuts).
    From other libraries: timm:NAME, smp:Unet/resnet34, torchvision:deeplabv3_resnet50. Your own:
    module:function, called with classes and in_channels. The last four are converted with --norm
    agc and left as they are with --norm bn."""
    pretrained: bool = False
    """Start from the pretrained weights of timm, smp or torchvision."""
    norm: Norm = None  # type: ignore[assignment]  # the recipe's, filled in by `__post_init__`
    """Normalization: agc (automatic gain control), agc+wn (AGC with weight normalization), agc+ws
    (AGC with weight standardization), bn (BatchNorm), gn (GroupNorm), in (InstanceNorm), ln
    (LayerNorm), frn (Filter Response Normalization), evonorm-s0, ws+gn (weight standardization and
    GroupNorm), or none. None: the recipe's."""
    data: Literal[DataName, DatasetName] = "streets"
    """Dataset. folder holds your own images/ and masks/ (see `deepcontrol data init`), coco images
    with COCO's JSON, and nnunet volumes in nnU-Net's raw layout. cityscapes14 is Cityscapes with
    ClassNet's 14 classes. The last four are for classification; imagefolder is a folder with one
    subfolder of images per class."""
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
    """Fraction of the images for validation: of --data folder, coco and imagefolder without val/,
    and of the cases of nnunet. A hash of the file name decides, so that new images do not change
    the split."""
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
    no weight decay. recommended has agc+ws, a warm-up of 1 epoch (at most a tenth of --epochs), a
    cosine schedule, and a weight decay of 0.0001 (0.01 for adamw). best is for segmentation:
    recommended with a weight decay of 0.0005, --augment strong and --class-weights none. Learning
    rate and momentum are the same in all."""
    optimizer: OptimizerName = "sgd"
    """sgd (with momentum) or adamw."""
    lr: float | None = None
    """Learning rate. None: 0.02 x batch size for segmentation, 0.1 x (batch size / 128)^0.75 for
    classification, 0.001 for adamw."""
    # None stands for the recipe's value, which `__post_init__` fills in.
    schedule: Schedule = None  # type: ignore[assignment]
    """Learning-rate schedule: constant, cosine, poly (power 0.9), or onecycle, which rises from
    lr / 25 over the first 30% of the steps. The last three fall to 0 at the last epoch, so that
    --epochs cannot change later. None: the recipe's."""
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
    """Fix AGC's gamma (gain) instead of learning it, at this multiple of its initial value: 1, or
    in residual and plain networks 1.21 and less at the end of a branch."""
    background: str = "mean"
    """Level of each map that AGC subtracts: mean, median, window:15 (mean over a window of 15x15),
    quantile:0.3, or trimmed:0.1 (mean without the lowest and the highest 10%)."""
    lambda_start: float | None = None
    """Initial value of AGC's lambda. None: 1."""
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
    """Largest factor of --gems on a gradient."""
    class_weights: ClassWeights = None  # type: ignore[assignment]
    """Class weights in the loss of segmentation: enet (rare classes count more) or none. None: the
    recipe's, enet except for best."""
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
    """Execution of a training step: eager, torch.compile, a CUDA graph, or both. On a CPU, graph is
    eager."""
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
    """Save a checkpoint every N epochs and after the last one. best/ has the lowest error."""
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
        # Datasets of one's own and volumes do not support strong augmentation.
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
