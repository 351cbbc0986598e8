"""Compare initializations and settings of AGC with BatchNorm in CIFAR ResNets.

    python benchmarks/residual.py --data-root CIFAR10 --out benchmarks/results/residual-cuda.csv

Trains a ResNet with one change at a time: the gains of the residual branches, the scale of the
filters, weight normalization or standardization, gradient clipping, weight decay, the start of
lambda, learning rates of the gains and of lambda. All runs have SGD with momentum 0.9, weight decay
5e-4 on the filters, half an epoch of warm-up and a cosine schedule. Each row of the CSV is one
training. Trainings that the CSV already contains are skipped. Processes with different treatments
or seeds can share the file. A ResNet-20 takes about ten seconds on an H200.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrize

from deepcontrol import AGCConv2d, he_init_
from deepcontrol.nn.init import branch_gain
from deepcontrol.step import TrainingStep
from deepcontrol.workbench.bench.results import append_row, has_row, provenance
from deepcontrol.workbench.data import Cache, open_source, prepare
from deepcontrol.workbench.data.batches import ClassificationBatches, CropFlip
from deepcontrol.workbench.losses import class_cross_entropy
from deepcontrol.workbench.models import CifarResNet, Norm
from deepcontrol.workbench.models.classifiers import CifarBlock
from deepcontrol.workbench.optim import scheduled_lr, sgd
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.faults import NotFiniteError

MOMENTUM, WARM_UP, EVAL_BATCH = 0.9, 0.5, 1000


@dataclass(frozen=True)
class Treatment:
    """A change of the training of a ResNet with AGC."""

    norm: Norm = "agc"
    filters: Literal["he", "centered", "unit"] = "he"  # scale of the filters, see start_filters_
    branch: float | None = None  # last gain of each branch; None: 1 / sqrt(number of blocks)
    branch_factor: float = 1.0
    standardize: bool = False  # weight standardization
    max_norm: float = math.inf  # of the gradient over all parameters
    unit_clip: float = math.inf  # of each filter's gradient, relative to the filter's norm
    decay: float = 5e-4  # weight decay of the filters
    gain_decay: float = 0.0
    gain_lr: float = 1.0  # factor of the learning rate
    lambda_lr: float = 1.0
    start_lambda: float = 1.0
    last_lambda: float | None = None  # start in the last stage; None: start_lambda
    zero_classifier: bool = False
    fixed_lambda: float | None = None
    fixed_gain: bool = False


TREATMENTS = {
    "agc": Treatment(),
    "agc+wn": Treatment("agc+wn"),
    "bn": Treatment("bn"),
    "gn": Treatment("gn"),
    "branch gain 0": Treatment(branch=0.0),
    "branch gain 1": Treatment(branch=1.0),
    "branch gain halved": Treatment(branch_factor=0.5),
    "branch gain doubled": Treatment(branch_factor=2.0),
    "filters for centering": Treatment(filters="centered"),
    "filters to unit variance": Treatment(filters="unit"),
    "clip norm 1": Treatment(max_norm=1.0),
    "clip filters 0.04": Treatment(unit_clip=0.04),
    "clip filters 0.01": Treatment(unit_clip=0.01),
    "weight decay 1e-3": Treatment(decay=1e-3),
    "weight decay 2e-4": Treatment(decay=2e-4),
    "gain decay": Treatment(gain_decay=5e-4),
    "gain lr x 0.1": Treatment(gain_lr=0.1),
    "lambda lr x 0.1": Treatment(lambda_lr=0.1),
    "lambda = 1": Treatment(fixed_lambda=1.0),
    "lambda = 0": Treatment(fixed_lambda=0.0),
    "gain fixed": Treatment(fixed_gain=True),
    "weight standardization": Treatment(standardize=True),
    "agc+wn, gain decay": Treatment("agc+wn", gain_decay=5e-4),
    "agc+wn, clip norm 1": Treatment("agc+wn", max_norm=1.0),
    "agc+wn, branch gain doubled": Treatment("agc+wn", branch_factor=2.0),
    "agc+wn, lambda starts at 0.5": Treatment("agc+wn", start_lambda=0.5),
    "agc+wn, last lambda starts at 0": Treatment("agc+wn", last_lambda=0.0),
    "agc+wn, lambda lr x 10": Treatment("agc+wn", lambda_lr=10.0),
    "agc+wn, gain lr x 3": Treatment("agc+wn", gain_lr=3.0),
    "agc+wn, classifier 0": Treatment("agc+wn", zero_classifier=True),
    "ws, lambda starts at 0": Treatment(standardize=True, start_lambda=0.0),
    "ws, lambda starts at 0.5": Treatment(standardize=True, start_lambda=0.5),
    "ws, lambda starts at 0.25": Treatment(standardize=True, start_lambda=0.25),
    "ws, lambda starts at 0.75": Treatment(standardize=True, start_lambda=0.75),
    "ws, lambda 0.5, branch gain doubled": Treatment(
        standardize=True, start_lambda=0.5, branch_factor=2.0
    ),
    "ws, lambda = 0": Treatment(standardize=True, fixed_lambda=0.0),
    "ws, branch gain doubled": Treatment(standardize=True, branch_factor=2.0),
    "ws, lambda 0, branch gain doubled": Treatment(
        standardize=True, start_lambda=0.0, branch_factor=2.0
    ),
    "ws, lambda lr x 10": Treatment(standardize=True, lambda_lr=10.0),
    "ws, last lambda starts at 0": Treatment(standardize=True, last_lambda=0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("out/residual.csv"), help="CSV file")
    parser.add_argument(
        "--treatments",
        nargs="+",
        default=[*TREATMENTS],
        choices=[*TREATMENTS],
        metavar="NAME",
        help="any of: " + "; ".join(TREATMENTS),
    )
    parser.add_argument("--depth", type=int, default=56, help="layers: 20, 56 or 110")
    parser.add_argument("--lr", type=float, default=0.3, help="highest learning rate")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--width", type=float, default=1.0, help="factor for the channels")
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    here = provenance(flags.device)
    train, val = (
        prepare(open_source("cifar10", split, flags.data_root), (32, 32), Path("out/cache"))
        for split in ("train", "val")
    )
    for seed in flags.seeds:
        for name in flags.treatments:
            key = {
                "treatment": name,
                "depth": flags.depth,
                "batch": flags.batch_size,
                "lr": flags.lr,
                "epochs": flags.epochs,
                "seed": seed,
                "width": flags.width,
                "device": flags.device,
            }
            if not has_row(flags.out, key):
                row = key | train_network(TREATMENTS[name], seed, train, val, flags) | here
                append_row(flags.out, row)
                print(*row.values(), sep=", ", flush=True)


def train_network(
    treatment: Treatment, seed: int, train: Cache, val: Cache, flags: argparse.Namespace
) -> dict[str, Any]:
    """Train until the end or until the loss is not finite; return columns of the CSV."""
    device = torch.device(flags.device)
    on_gpu = device.type == "cuda"
    batches = ClassificationBatches(
        train, flags.batch_size, crop_flip=CropFlip.of_size((32, 32)), seed=seed, device=device
    )
    model = CifarResNet(flags.depth, norm=treatment.norm, width=flags.width)
    he_init_(model, torch.Generator().manual_seed(seed))
    start_(model, treatment, next(iter(batches.epoch())).images.cpu())
    model.to(device)
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    factors, groups = parameter_groups(model, treatment)
    for group in groups:  # one tensor each, so that a captured step follows the schedule
        group["lr"] = torch.tensor(flags.lr, device=device) if on_gpu else flags.lr
    optimizer = sgd(groups, flags.lr, MOMENTUM)
    filters = [p for p in model.parameters() if p.dim() == 4]

    def clip(loss: Tensor) -> Tensor:
        if math.isfinite(treatment.max_norm):
            clip_grad_norm_(model.parameters(), treatment.max_norm)
        if math.isfinite(treatment.unit_clip):
            clip_filters_(filters, treatment.unit_clip)
        return loss

    autocast = torch.bfloat16 if on_gpu else None
    step = TrainingStep(
        model, class_cross_entropy, optimizer, autocast=autocast, before_update=clip
    )
    steps, loss = flags.epochs * len(batches), math.nan
    row: dict[str, Any] = {"diverged_in_epoch": "", "last_loss": "", "val_error": ""}
    for epoch in range(1, flags.epochs + 1):
        total = torch.zeros((), device=device)
        for i, batch in enumerate(batches.epoch(epoch)):
            done = (epoch - 1) * len(batches) + i
            lr = scheduled_lr(flags.lr, done, steps, round(WARM_UP * len(batches)), "cosine")
            for factor, group in zip(factors, optimizer.param_groups, strict=True):
                if on_gpu:
                    group["lr"].fill_(factor * lr)
                else:
                    group["lr"] = factor * lr
            total += step(batch.images, batch.labels)
        loss = float(total) / len(batches)
        if not math.isfinite(loss):
            return row | {"diverged_in_epoch": epoch}
    validation = ClassificationBatches(val, EVAL_BATCH, device=device)
    try:
        error = evaluate(model, validation, autocast).pixel_error
    except NotFiniteError:  # the last update diverged
        return row | {"diverged_in_epoch": flags.epochs}
    return row | {"last_loss": f"{loss:.4f}", "val_error": f"{error:.4f}"}


@torch.no_grad()
def start_(model: CifarResNet, treatment: Treatment, images: Tensor) -> None:
    """Set the branch gains, lambda and the scale of the filters, and fix parameters."""
    blocks = [block for block in model.stages if isinstance(block, CifarBlock)]
    neurons = [m for m in model.modules() if isinstance(m, AGCConv2d)]
    for neuron in neurons:
        neuron.gain.fill_(1.0)
        neuron.mean_scale.fill_(treatment.start_lambda)
    if treatment.last_lambda is not None:
        for neuron in neurons[-2 * len(blocks) // 3 :]:  # two layers per block, three stages
            neuron.mean_scale.fill_(treatment.last_lambda)
    if treatment.zero_classifier:
        model.classify.weight.zero_()
    gain = branch_gain(len(blocks)) if treatment.branch is None else treatment.branch
    for block in blocks:
        if isinstance(block.branch[-1], AGCConv2d):
            block.branch[-1].gain.fill_(min(1.0, treatment.branch_factor * gain))
    start_filters_(model, neurons, treatment.filters, images)
    for neuron in neurons:
        if treatment.standardize:
            parametrize.register_parametrization(neuron, "weight", Standardized(neuron.weight))
        if treatment.fixed_lambda is not None:
            neuron.mean_scale.fill_(treatment.fixed_lambda)
            neuron.mean_scale.requires_grad_(False)
        neuron.gain.requires_grad_(not treatment.fixed_gain)


def start_filters_(
    model: CifarResNet, neurons: list[AGCConv2d], scale: str, images: Tensor
) -> None:
    """Scale the filters of He initialization.

    "centered" makes up for the mean, which after a ReLU carries 1/pi of the signal's power. "unit"
    scales each layer's centered map to variance 1 on a batch of images, layer after layer.
    """
    if scale == "centered":
        for neuron in neurons[1:]:  # the first one reads images
            neuron.weight.mul_(1 / math.sqrt(1 - 1 / math.pi))
    if scale != "unit":
        return

    def to_unit(neuron: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        gain = neuron.gain.clone()
        neuron.gain.fill_(1.0)
        neuron.activation, activation = "none", neuron.activation
        neuron.weight.div_(neuron.forward(*inputs).std())
        neuron.activation = activation
        neuron.gain.copy_(gain)
        return neuron.forward(*inputs)

    hooks = [neuron.register_forward_hook(to_unit) for neuron in neurons]
    model(images)
    for hook in hooks:
        hook.remove()


class Standardized(nn.Module):
    """Filters of mean 0 and constant norm (weight standardization)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.norm = float(weight.flatten(1).norm(dim=1).mean())

    def forward(self, weight: Tensor) -> Tensor:
        centered = weight - weight.mean((1, 2, 3), keepdim=True)
        return centered * (self.norm / centered.flatten(1).norm(dim=1)[:, None, None, None])


def parameter_groups(
    model: nn.Module, treatment: Treatment
) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the factors of the learning rate, and the groups of the optimizer."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gains = [p for name, p in trained if name.endswith(".gain")]
    lambdas = [p for name, p in trained if name.endswith(".mean_scale")]
    filters = [p for _, p in trained if p.dim() > 1]
    special = {id(p) for p in (*gains, *lambdas, *filters)}
    others = [p for _, p in trained if id(p) not in special]
    groups = (
        (1.0, filters, treatment.decay),
        (1.0, others, 0.0),
        (treatment.gain_lr, gains, treatment.gain_decay),
        (treatment.lambda_lr, lambdas, 0.0),
    )
    kept = [(f, {"params": p, "weight_decay": d}) for f, p, d in groups if p]
    return [factor for factor, _ in kept], [group for _, group in kept]


def clip_filters_(filters: list[nn.Parameter], limit: float) -> None:
    """Clip each filter's gradient to `limit` times the norm of the filter.

    Adaptive gradient clipping of NFNets: https://arxiv.org/abs/2102.06171
    """
    for p in filters:
        assert p.grad is not None
        norm = p.detach().flatten(1).norm(dim=1).clamp_min(1e-3)
        of_gradient = p.grad.flatten(1).norm(dim=1).clamp_min(1e-6)
        p.grad.mul_((limit * norm / of_gradient).clamp_max(1.0)[:, None, None, None])


if __name__ == "__main__":
    main()
