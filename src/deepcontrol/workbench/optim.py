"""Learning rates and their schedule, and optimizers that can skip an update."""

import math
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

LR_PER_SAMPLE = 0.02
# Classification: lr = 0.1 * (batch / 128) ** 0.75, between the rules of the square root and of
# proportionality.
CLASSIFICATION_LR, CLASSIFICATION_BATCH, CLASSIFICATION_POWER = 0.1, 128, 0.75
HIGHEST_MOMENTUM = 0.999
LR_FACTOR = "lr_factor"  # key of a parameter group

ADAMW_LR = 1e-3
BEST_WEIGHT_DECAY = 5e-4  # the solver of SegNet's authors
POLY_POWER = 0.9
# One cycle (https://arxiv.org/abs/1708.07120), as in torch: share of the steps in which the
# learning rate rises, and its start relative to the highest.
ONE_CYCLE_RISE, ONE_CYCLE_START = 0.3, 1 / 25

Schedule = Literal["constant", "cosine", "poly", "onecycle"]
OptimizerName = Literal["sgd", "adamw"]
RecipeName = Literal["paper", "recommended", "best"]
ClassWeights = Literal["enet", "none"]


class Recipe(NamedTuple):
    """Settings that go together."""

    schedule: Schedule
    warmup_epochs: float
    weight_decay: float
    augment: Literal["strong"] | None = None  # None: the default of the task
    class_weights: ClassWeights = "enet"
    norm: Literal["agc", "agc+ws"] = "agc"


def recipe(
    name: RecipeName,
    epochs: int,
    optimizer: OptimizerName = "sgd",
    schedule: Schedule | None = None,
    augments: bool = True,
    standardizes: bool = True,
) -> Recipe:
    """Return the settings of a recipe.

    "paper" has a constant learning rate and no weight decay. "recommended" has a warm-up of one
    epoch (at most a tenth of the run), a cosine schedule, weight decay of the filters, and AGC with
    weight standardization. "best", for segmentation, adds strong augmentation, has no class weights
    and a higher weight decay. The learning rate (`default_lr`) and the momentum are the same.

    Args:
        name: "paper", "recommended" or "best".
        epochs: Epochs of the run.
        optimizer: AdamW gets a higher weight decay, which does not depend on the gradients.
        schedule: The schedule, if it is already chosen. onecycle has its own warm-up.
        augments: The data support strong augmentation.
        standardizes: The network supports weight standardization.

    >>> recipe("recommended", epochs=150)
    Recipe(schedule='cosine', warmup_epochs=1.0, weight_decay=0.0001, augment=None, \
class_weights='enet', norm='agc+ws')
    >>> recipe("best", epochs=4, schedule="onecycle")
    Recipe(schedule='onecycle', warmup_epochs=0.0, weight_decay=0.0005, augment='strong', \
class_weights='none', norm='agc+ws')
    """
    if name == "paper":
        return Recipe(schedule or "constant", 0.0, 0.0)
    warmup = 0.0 if schedule == "onecycle" else min(1.0, epochs / 10)
    decay = {"recommended": 1e-4, "best": BEST_WEIGHT_DECAY}[name]
    settings = Recipe(
        schedule or "cosine",
        warmup,
        0.01 if optimizer == "adamw" else decay,
        norm="agc+ws" if standardizes else "agc",
    )
    if name == "recommended":
        return settings
    return settings._replace(augment="strong" if augments else None, class_weights="none")


def learning_rate(batch_size: int) -> float:
    """Return the learning rate of the paper: 0.02 x batch size.

    The paper's rule is for a loss that is averaged over the batch.

    >>> learning_rate(4)
    0.08
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return LR_PER_SAMPLE * batch_size


def default_lr(
    task: Literal["segmentation", "classification"],
    batch_size: int,
    optimizer: OptimizerName = "sgd",
) -> float:
    """Return the default learning rate of a task and a batch size.

    AdamW has 0.001, whatever the batch size.

    Segmentation has the paper's rule, 0.02 x batch size. Classification has
    0.1 x (batch size / 128)^0.75. Three times that suits small networks (CIFAR's ResNets), but
    networks of the size of ResNet-50 do not learn with it (dev/LOG.md).

    >>> default_lr("segmentation", 4), default_lr("classification", 128)
    (0.08, 0.1)
    >>> round(default_lr("classification", 8), 4), round(default_lr("classification", 1), 4)
    (0.0125, 0.0026)
    """
    of_paper = learning_rate(batch_size)
    if optimizer == "adamw":
        return ADAMW_LR
    if task == "segmentation":
        return of_paper
    return CLASSIFICATION_LR * (batch_size / CLASSIFICATION_BATCH) ** CLASSIFICATION_POWER


def scheduled_lr(
    lr: float, step: int, steps: int, warmup_steps: int = 0, schedule: Schedule = "constant"
) -> float:
    """Return the learning rate of one step, a function only of its arguments.

    It rises linearly over the warm-up, lr at its last step. Then it is constant, or falls to 0 at
    `steps`: as half a cosine, or as the power 0.9 of the steps left (poly). One cycle has no
    warm-up: it rises from lr / 25 over 30% of the steps and falls to 0, both as half a cosine.

    Args:
        lr: Highest learning rate.
        step: Steps done before this one.
        steps: Steps of the whole run.
        warmup_steps: Steps of the warm-up.
        schedule: "constant", "cosine", "poly" or "onecycle".

    >>> [round(scheduled_lr(1.0, step, 6, 2, "cosine"), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    >>> [round(scheduled_lr(1.0, step, 10, schedule="onecycle"), 3) for step in (0, 1, 3, 10)]
    [0.04, 0.28, 1.0, 0.0]
    """
    if schedule == "onecycle":
        rise = ONE_CYCLE_RISE * steps
        if step < rise:
            return lr * (ONE_CYCLE_START + (1 - ONE_CYCLE_START) * (1 - _half_cosine(step / rise)))
        return lr * _half_cosine((step - rise) / (steps - rise))
    if step < warmup_steps:
        return lr * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "poly":
        return lr * max(0.0, 1 - done) ** POLY_POWER
    return lr * 0.5 * (1 + math.cos(math.pi * done))


def _half_cosine(done: float) -> float:
    """Return the fall from 1 to 0 as half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * done))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, times a group's LR_FACTOR.

    A tensor is changed in place, as a graph needs it.
    """
    for group in optimizer.param_groups:
        of_group = lr * group.get(LR_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(of_group)
        else:
            group["lr"] = of_group


def scale_lr(
    groups: Iterable[dict[str, Any]],
    lr: float | Tensor,
    chosen: Collection[nn.Parameter],
    factor: float,
) -> list[dict[str, Any]]:
    """Split parameter groups: some parameters get a learning rate of their own.

    Args:
        groups: Parameter groups.
        lr: Learning rate of the other parameters.
        chosen: The parameters with learning rate factor * lr.
        factor: Factor, which `set_lr` applies as well.

    Returns:
        The groups without the chosen parameters, then groups with only these.

    >>> a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    >>> groups = scale_lr([{"params": [a, b]}], 0.5, [b], 10.0)
    >>> [(len(group["params"]), group.get("lr")) for group in groups]
    [(1, None), (1, 5.0)]
    """
    identities = set(map(id, chosen))
    own, others = [], []
    for group in groups:
        parts: tuple[list[nn.Parameter], ...] = ([], [])
        for parameter in group["params"]:
            parts[id(parameter) in identities].append(parameter)
        # A tensor of its own: set_lr fills each group's.
        scaled = {"lr": factor * lr, LR_FACTOR: factor}
        others.append({**group, "params": parts[0]})
        own.append({**group, "params": parts[1], **scaled})
    return [group for group in (*others, *own) if group["params"]]


def sgd(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float | Tensor,
    momentum: float,
    sharded: bool = False,
) -> torch.optim.SGD:
    """Return SGD that skips the update if its `found_inf` flag is set.

    The flag is a tensor on the device. Set it if a gradient is not finite. Fused SGD reads it on
    the device, without synchronization. Sharded parameters do not support fused SGD; there the host
    reads the flag.

    Args:
        parameters: Parameters or parameter groups. Weight decay is 0 unless a group sets it.
        lr: Learning rate. A captured step follows changes of a tensor on its device.
        momentum: From 0 to HIGHEST_MOMENTUM.
        sharded: The parameters are sharded (FSDP).
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if not 0 <= momentum <= HIGHEST_MOMENTUM:
        raise ValueError(f"momentum must be from 0 to {HIGHEST_MOMENTUM}, got {momentum}")
    if sharded:
        return SynchronizingSGD(parameters, lr=lr, momentum=momentum)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)


def adamw(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float | Tensor, on_gpu: bool
) -> torch.optim.AdamW:
    """Return fused AdamW that skips the update if its `found_inf` flag is set.

    Args:
        parameters: Parameters or parameter groups. Weight decay is 0 unless a group sets it.
        lr: Learning rate. A captured step follows changes of a tensor on its device.
        on_gpu: The parameters are on a GPU, where a step can be captured.
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True, capturable=on_gpu)


class SynchronizingSGD(torch.optim.SGD):
    """SGD that reads `found_inf` on the host before each update."""

    found_inf: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        if self.found_inf is not None and bool(self.found_inf):
            return None
        flag, self.found_inf = self.found_inf, None  # only fused SGD accepts the flag
        try:
            return super().step(closure)
        finally:
            self.found_inf = flag
