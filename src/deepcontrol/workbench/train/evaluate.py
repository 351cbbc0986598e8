"""Evaluate: error, IoU, layer statistics, and a moving average of the weights.

AGC subtracts the mean over the image. The mean over a whole image differs from the means over the
crops that a network was trained on, which raises the error (dev/LOG.md, benchmarks/crops.py).
Images larger than the training size are therefore evaluated in windows of that size.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConv3d, AGCConvPool2d, AGCLinear
from ...nn.padding import padded
from ...ops import center_bias_act, gain_conv
from ...ops.background import subtract_background
from ..data import Batch, BatchStream
from ..data.sample import Windows, windows
from ..metrics import ConfusionMatrix, sum_over_processes_
from ..models.norms import FilterResponseNorm2d
from ..terminal import Size
from .checkpoint import CheckpointError
from .distributed import Group, unshard
from .faults import NotFiniteError
from .objective import class_logits
from .snapshot import load_weights, mismatch


def evaluate(
    model: nn.Module,
    batches: BatchStream,
    autocast: torch.dtype | None = None,
    after_batch: Callable[[Batch, Any], None] = lambda batch, outputs: None,
    window: Size | None = None,
) -> ConfusionMatrix:
    """Return the confusion matrix over all images.

    The model runs in evaluation mode and returns to its former mode. In distributed training each
    process evaluates its own images, and all processes return the sum.

    Args:
        model: The network.
        batches: The images and labels.
        autocast: Dtype for autocast, or None.
        after_batch: Called with each batch and the model's outputs. It may raise.
        window: Evaluate larger images in windows of this size.

    Raises:
        NotFiniteError: A logit of any process was not finite. argmax would count NaN as a class.
    """
    matrix = ConfusionMatrix(len(batches.dataset.classes), batches.device, batches.ignored_label)
    bad_batches = torch.zeros((), dtype=torch.int64, device=batches.device)
    with evaluating(model, batches.device, autocast):
        for batch in batches.epoch():
            outputs = forward_in_windows(model, batch.images, window)
            logits = class_logits(outputs)
            bad_batches += ~torch.isfinite(logits).all()
            matrix.update(logits.argmax(1), batch.labels)
            after_batch(batch, outputs)
    matrix.reduce()
    sum_over_processes_(bad_batches)
    if bad_batches:
        raise NotFiniteError("the network's outputs on the validation images are not finite")
    return matrix


def predict(model: nn.Module, images: Tensor, window: Size | None = None) -> Tensor:
    """Return the most likely class of each pixel (N, H, W), or of each image (N,)."""
    return class_logits(forward_in_windows(model, images, window)).argmax(1)


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> Iterator[None]:
    """Switch to evaluation mode, no_grad and autocast while the block runs."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        model.train(was_training)


def forward_in_windows(model: Callable[[Tensor], Any], images: Tensor, size: Size | None) -> Any:
    """Return the model's outputs for whole images, stitched from windows.

    Each pixel comes from the window with the nearest center.

    Args:
        model: Returns a map or a named tuple of maps, of the images' size.
        images: (N, C, H, W).
        size: Window size. Images that are not larger, or all if None, take one forward pass.
    """
    crops = split_windows(images, size)
    if size is None or len(crops) == 1:
        return model(images)
    rows, columns = _windows_of(images, size)
    # All windows form one batch: samples are independent, and a larger batch fills a GPU better.
    outputs = model(torch.cat(crops).contiguous(memory_format=torch.channels_last))
    if isinstance(outputs, Tensor):
        return _stitch(outputs, rows, columns)
    return type(outputs)(*(_stitch(output, rows, columns) for output in outputs))


def split_windows(images: Tensor, size: Size | None) -> list[Tensor]:
    """Return the windows of images (N, C, H, W) as views, row by row."""
    if size is None:
        return [images]
    rows, columns = _windows_of(images, size)
    return [
        images[:, :, top : top + size[0], left : left + size[1]]
        for top, _ in rows
        for left, _ in columns
    ]


def _windows_of(images: Tensor, size: Size) -> tuple[Windows, Windows]:
    height, width = images.shape[2:]
    return windows(height, size[0]), windows(width, size[1])


def _stitch(output: Tensor, rows: Windows, columns: Windows) -> Tensor:
    """Join the outputs of all windows (windows x N, C, h, w) into one map."""
    parts = iter(output.chunk(len(rows) * len(columns)))

    def cut(part: Tensor, top: int, height: slice, left: int, width: slice) -> Tensor:
        return part[
            :, :, height.start - top : height.stop - top, width.start - left : width.stop - left
        ]

    lines = [
        torch.cat([cut(next(parts), top, height, left, width) for left, width in columns], 3)
        for top, height in rows
    ]
    return torch.cat(lines, 2)


# Statistics of each layer


QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


class LayerStats:
    """Statistics of a model's AGC neurons or blocks of filters, norm and activation.

    The paper asks how lambda changes in training. layers.jsonl records, for each layer, the
    distribution of gain (gamma), mean_scale (lambda) and bias (beta) over its filters, and the
    fraction of positions where its nonlinearity is active ("open"), over one fixed validation
    batch. For the end of a residual branch, which has no nonlinearity, this is the fraction of
    positive outputs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = {n: m for n, m in model.named_modules() if is_neuron(m) or is_block(m)}

    def compute(self, images: Tensor, group: Group, counted: bool = True) -> dict[str, Any]:
        """Return the statistics of each layer, in the order of the forward pass.

        Args:
            images: This process's images. All processes return the same result.
            group: The processes of the run.
            counted: False if this process only has a padding image.
        """
        return {
            name: {**parameter_statistics(self.layers[name]), "open": fraction}
            for name, fraction in self._active_fractions(images, group, counted).items()
        }

    def _active_fractions(self, images: Tensor, group: Group, counted: bool) -> dict[str, float]:
        counts: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def count(module: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
                active = active_mask(module, inputs[0], output)
                total = torch.full((), active.numel(), device=active.device)
                counts[name] = torch.stack([active.sum(), total])

            return count

        handles = [layer.register_forward_hook(hook(n)) for n, layer in self.layers.items()]
        try:
            self.model(images)
        finally:
            for handle in handles:
                handle.remove()
        if not counts:  # a network of another library, without such layers
            return {}
        sums = group.sum_(int(counted) * torch.stack(list(counts.values())))
        # tolist() on the stacked tensor waits for the device only once.
        return {name: a / b for name, (a, b) in zip(counts, sums.tolist(), strict=True)}


def is_neuron(module: nn.Module) -> bool:
    return isinstance(module, (AGCConv2d, AGCConv3d, AGCLinear))


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a block of filter layer, norm and activation."""
    first = module[0] if isinstance(module, nn.Sequential) and len(module) > 1 else None
    return isinstance(first, (nn.Conv2d, nn.Conv3d, nn.Linear)) and not is_neuron(first)


def active_mask(module: nn.Module, input: Tensor, output: Any) -> Tensor:
    """Return where a layer's nonlinearity is active, before pooling (bool)."""
    if isinstance(module, AGCConvPool2d):
        output = unpooled(module, input)
    last = module[-1] if isinstance(module, nn.Sequential) else module
    if isinstance(last, FilterResponseNorm2d) and last.threshold is not None:
        # max(x, threshold) in place of ReLU
        return output > unshard(last.threshold)[:, None, None]
    return output > 0


def unpooled(neuron: AGCConvPool2d, input: Tensor) -> Tensor:
    """Return the output of a pooling neuron before its pooling."""
    # Computed from the parameters, because FSDP gathers them only inside the neuron's forward.
    weight, gain, bias, lam = (
        unshard(p) for p in (neuron.weight, neuron.gain, neuron.bias, neuron.mean_scale)
    )
    x, padding = padded(neuron, input)
    geometry = (neuron.stride, padding, neuron.dilation, neuron.groups)
    if not isinstance(neuron.background, str):
        z = gain_conv(x, weight, torch.ones_like(gain), *geometry, neuron.filter_norm)
        return subtract_background(z, neuron.background, gain, bias, lam, neuron.activation)
    v = gain_conv(x, weight, gain, *geometry, neuron.filter_norm)
    return center_bias_act(v, bias, lam, neuron.activation, overwrite=True)


def parameter_statistics(layer: nn.Module) -> dict[str, dict[str, float]]:
    """Summarize gain, mean_scale and bias over a layer's filters, if it has them."""
    if isinstance(layer, nn.Sequential):
        norm = layer[1] if len(list(layer[1].parameters())) else None
        names = {"gain": (norm, "weight"), "bias": (layer[0] if norm is None else norm, "bias")}
    else:
        names = {n: (layer, n) for n in ("gain", "mean_scale", "bias")}
    found = {name: getattr(module, own, None) for name, (module, own) in names.items()}
    return {name: statistics(unshard(a)) for name, a in found.items() if isinstance(a, Tensor)}


def statistics(values: Tensor) -> dict[str, float]:
    """Return mean, minimum, maximum and quantiles.

    >>> statistics(torch.tensor([1.0, 2.0, 3.0]))["q50"]
    2.0
    """
    values = values.detach().double().cpu()
    quantiles = torch.quantile(values, torch.tensor(list(QUANTILES.values()), dtype=values.dtype))
    summary = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {k: float(v) for k, v in summary.items()} | dict(
        zip(QUANTILES, quantiles.tolist(), strict=True)
    )


# Moving average of the weights


WARMUP = 10  # the first averages are over about a tenth of the steps so far


class MovingAverage:
    """A copy of a model whose parameters follow those of the model.

        average = average + w * (weights - average)        w = max(1 - decay, 9 / (10 + steps))

    The larger w of the first steps forgets the initialization. Buffers (BatchNorm's statistics) are
    copied, not averaged. The update runs after each step of the optimizer and inside a captured
    step.

    Args:
        model: The model that is trained.
        optimizer: Optimizer of the model.
        decay: Decay per step, such as 0.999.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.trained, self.decay = model, decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        device = next(model.parameters()).device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)
        self._pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights."""
        self.steps.add_(1)
        weight = ((WARMUP - 1) / (WARMUP + self.steps)).clamp(min=1 - self.decay)
        for average, trained in self._pairs:
            average.lerp_(trained, weight.to(average.dtype))

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Copy the model's buffers, which are not averaged."""
        for own, trained in zip(self.model.buffers(), self.trained.buffers(), strict=True):
            own.copy_(trained)

    def state(self) -> dict[str, Any]:
        """Return the trained weights and the steps.

        A checkpoint's weights are the average.
        """
        return {"weights": self.trained.state_dict(), "steps": self.steps}

    def restore(self, state: object) -> None:
        """Set the trained weights and the steps of a checkpoint.

        Raises:
            CheckpointError: The state is missing or does not match the model.
        """
        weights = state.get("weights") if isinstance(state, dict) else None
        steps = state.get("steps") if isinstance(state, dict) else None
        if not isinstance(weights, dict) or not _is_count(steps):
            raise CheckpointError(
                "the checkpoint has no valid moving average: expected the trained weights and "
                "their steps"
            )
        load_weights(self.trained, weights)
        self.steps.copy_(steps)


def _is_count(value: object) -> TypeGuard[Tensor]:
    if mismatch(value, torch.zeros((), dtype=torch.float64)):
        return False
    return 0 <= float(value) < math.inf  # type: ignore[arg-type]


def evaluated_model(model: nn.Module, average: MovingAverage | None) -> nn.Module:
    """Return the model to evaluate and save: the average, if there is one."""
    return model if average is None else average.model
