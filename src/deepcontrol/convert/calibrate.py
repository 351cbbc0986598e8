"""An AGC model with fixed means: plain convolutions, for devices that can do no more."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.agc import _AGC
from ..ops.layout import map_mean
from .fold import fold
from .folded import _FoldedConv, plain
from .layers import control_of
from .tree import swap


def calibrate(model: nn.Module, data: Iterable[Any]) -> nn.Module:
    """A copy of an AGC (automatic gain control) model whose means are constants, taken over data.

    Every AGCConv becomes torch's own convolution with the bias beta - lambda * (the average of the
    means that it met), and its activation as a layer; an AGC layer that no convolution feeds
    becomes a BatchNorm in eval mode. Nothing of AGC is left to compute.

    This is not the same function: it no longer adapts to each image. What that costs depends on
    the model and on how alike the images are, so measure it: evaluate fold(model), which is exact,
    and calibrate(model, data) on the same validation set.

    data: batches of inputs, as the model takes them. A dict is given as keyword arguments, if the
    model has these; of a tuple or list the first element is taken, as
    torch.optim.swa_utils.update_bn has it. Each sample counts once.

    >>> from deepcontrol import AGCConv2d
    >>> calibrate(AGCConv2d(3, 8, 3), [torch.randn(4, 3, 16, 16)])
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): ReLU(inplace=True)
    )
    """
    folded = fold(model)
    averages = {
        module: _Average() for module in folded.modules() if isinstance(module, (_FoldedConv, _AGC))
    }
    hooks = [
        module.register_forward_pre_hook(average.add, with_kwargs=True)
        for module, average in averages.items()
    ]
    batches = 0
    with torch.no_grad():
        for batch in data:
            if isinstance(batch, Mapping) and _has_arguments(folded, batch):
                folded(**batch)
            else:
                folded(batch[0] if isinstance(batch, (tuple, list)) else batch)
            batches += 1
        for hook in hooks:
            hook.remove()
        if not batches:
            raise ValueError("no data to calibrate with: it has no batches")
        fixed: dict[nn.Module, nn.Module] = {}
        for name, module in folded.named_modules():
            if module in averages:
                fixed[module] = _fixed(module, averages[module].value(name)).eval()
    return swap(folded, fixed)


def _has_arguments(model: nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether a model can be called with these as keywords; it may want the dict itself."""
    try:
        inspect.signature(model.forward).bind(**named)
    except TypeError:
        return False
    return True


class _Average:
    """The average over samples of the means that a layer meets, (C,)."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.samples = 0

    def add(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> None:
        x = args[0] if args else kwargs["input"]
        means = module.means(x) if isinstance(module, _FoldedConv) else map_mean(x)
        total = means.double().sum(0)
        self.total = total if self.total is None else self.total + total
        self.samples += len(means)

    def value(self, name: str) -> Tensor:
        if self.total is None or not self.samples:
            raise ValueError(f"the data never reached {name!r}: it has no mean to keep")
        return self.total / self.samples


def _fixed(module: nn.Module, mean: Tensor) -> nn.Module:
    """The layer with that mean (C,) in the place of each sample's own."""
    if isinstance(module, _FoldedConv):
        bias = module.bias - module.mean_scale * mean
        return plain(module, bias.to(module.bias.dtype))
    assert isinstance(module, _AGC)
    control = control_of(module)
    dims = next(d for d in (1, 2, 3) if type(module).__name__ == f"AGC{d}d")
    norm: nn.Module = getattr(nn, f"BatchNorm{dims}d")(module.num_features, eps=0.0)
    norm = norm.to(control.gain)
    norm.running_mean.copy_(control.mean_scale * mean)  # type: ignore[operator]
    norm.weight.copy_(control.gain)  # type: ignore[operator]
    norm.bias.copy_(control.bias)  # type: ignore[operator]
    return norm.requires_grad_(False)
