"""Statistics over data: constant means for an AGC model, new ones for BatchNorms."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.agc import _AGC
from ..ops.layout import map_mean
from .dry_run import accepts_keywords
from .fold import _FoldedConv, fold, is_plain_agc, plain_conv
from .replace import parameters_of, replace_modules


def calibrate(model: nn.Module, data: Iterable[Any]) -> nn.Module:
    """Return a copy of an AGC (automatic gain control) model with constant means.

        y = act( conv(x, gamma W) + beta - lambda * E[mean] )        E: average over the samples

    Every AGCConv becomes torch's own convolution and activation. An AGC layer that no convolution
    feeds becomes a BatchNorm in eval mode. Only torch's own layers remain, for devices that support
    nothing else.

    The copy is a different function: it no longer adapts to each image. The loss of accuracy
    depends on the model and on how similar the images are, so measure it: evaluate fold(model),
    which is exact, and calibrate(model, data) on the same validation set.

    Args:
        model: A model with AGC layers. It is not changed.
        data: Batches of inputs. A dict is passed as keyword arguments if the model's forward
            accepts them. Of a tuple or list only the first element is used, as in
            torch.optim.swa_utils.update_bn. Each sample has the same weight in the average.

    Returns:
        The calibrated copy, in eval mode.

    Raises:
        ValueError: If data has no batches, or reaches no AGC layer of the model.

    Warns:
        UserWarning: If the data does not reach a layer. It stays as fold leaves it.

    >>> from deepcontrol import AGCConv2d
    >>> calibrate(AGCConv2d(3, 8, 3), [torch.randn(4, 3, 16, 16)])
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): ReLU(inplace=True)
    )
    """
    folded = fold(model)
    averages = {
        module: _Average()
        for module in folded.modules()
        if isinstance(module, _FoldedConv) or is_plain_agc(module)
    }
    hooks = [
        module.register_forward_pre_hook(average.add, with_kwargs=True)
        for module, average in averages.items()
    ]
    with torch.no_grad():
        batches = run_batches(folded, data)
        for hook in hooks:
            hook.remove()
        if not batches:
            raise ValueError(
                "no data to calibrate with: `data` has no batches. Expected at least one; "
                "a generator can be iterated only once"
            )
        constant: dict[nn.Module, nn.Module] = {}
        missed = []
        for name, module in folded.named_modules():
            if module in averages:
                mean = averages[module].value()
                if mean is None:
                    missed.append(name)
                else:
                    dtype = averages[module].dtype
                    constant[module] = _with_constant_mean(module, mean, dtype).eval()
    if missed and not constant:
        raise ValueError(
            f"the data never reached {missed[0]!r} or any other AGC layer, so no mean is known: "
            "add samples for which the model calls them"
        )
    if missed:
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        warnings.warn(
            f"the data never reached {missed[0]!r}{more}, which stay folded, with the mean of each "
            "sample. Add samples for which the model calls them to make them constant",
            stacklevel=2,
        )
    return replace_modules(folded, constant)


def run_batches(model: nn.Module, data: Iterable[Any]) -> int:
    """Run a model on all batches and return their number.

    A dict is passed as keyword arguments if forward accepts them. Of a tuple or list only the first
    element is used.
    """
    if isinstance(data, Tensor):  # its rows would be read as batches
        raise TypeError(
            f"data is a tensor of shape {tuple(data.shape)}, expected an iterable of batches such "
            "as a DataLoader: for a single batch, pass [images]"
        )
    batches = 0
    for batch in data:
        if isinstance(batch, Mapping) and accepts_keywords(model, batch):
            model(**batch)
        else:
            model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        batches += 1
    return batches


class _Average:
    """Average over samples of the means of one layer, (C,)."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.dtype = torch.float32  # of the means
        self.samples = 0

    def add(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if isinstance(module, _FoldedConv):
            means = module.means(*args, **kwargs)
        else:
            means = map_mean(args[0] if args else kwargs["input"])
        self.dtype = means.dtype
        total = means.double().sum(0)
        self.total = total if self.total is None else self.total + total
        self.samples += len(means)

    def value(self) -> Tensor | None:
        """Return the average, or None without samples."""
        return self.total / self.samples if self.total is not None and self.samples else None


def _with_constant_mean(module: nn.Module, mean: Tensor, dtype: torch.dtype) -> nn.Module:
    """Return torch's own layer for a folded convolution or AGC, given its mean (C,).

    Args:
        module: The layer.
        mean: The average of its means, in fp64.
        dtype: Of the means.
    """
    if isinstance(module, _FoldedConv):
        bias = module.bias - module.mean_scale * mean
        return plain_conv(module, bias.to(module.bias.dtype))
    assert isinstance(module, _AGC)
    parameters = parameters_of(module, mean.to(dtype))
    dims = max(module._dims) - 2
    norm: nn.Module = getattr(nn, f"BatchNorm{dims}d")(module.num_features, eps=0.0)
    norm = norm.to(parameters.gain)
    norm.running_mean.copy_(parameters.mean_scale * mean)  # type: ignore[operator]
    norm.weight.copy_(parameters.gain)  # type: ignore[operator]
    norm.bias.copy_(parameters.bias)  # type: ignore[operator]
    return norm.requires_grad_(False)


@torch.no_grad()
def reestimate_statistics(model: nn.Module, data: Iterable[Any]) -> nn.Module:
    """Replace all BatchNorms' running statistics by averages over data, in place.

    Use it before to_agc(model, init="bn") if the new images differ from those that the model was
    trained on; to_agc(model, init="bn", data=data) does both. Weights do not change. Each batch has
    the same weight in the average (BatchNorm's momentum=None). BatchNorms normalize with the
    statistics of the batch meanwhile, so use batches of about the size that the model was trained
    with, 8 samples or more; 20 batches are enough. All other layers are in eval mode.

    Args:
        model: A model with BatchNorms.
        data: Batches of inputs: tensors, tuples or lists with the input first, or dicts of keyword
            arguments, as in calibrate.

    Returns:
        The same model. BatchNorms that the data does not reach keep their statistics.

    Raises:
        ValueError: If data has no batches. The model is then unchanged.

    >>> model = nn.Sequential(nn.BatchNorm2d(3))
    >>> model = reestimate_statistics(model, [torch.randn(8, 3, 9, 9) + 5 for _ in range(2)])
    >>> model[0].running_mean.round().tolist()
    [5.0, 5.0, 5.0]
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    training = {module: module.training for module in model.modules()}
    momentum = [norm.momentum for norm in norms]
    before = [{name: a.clone() for name, a in norm.named_buffers(recurse=False)} for norm in norms]
    done = False
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.training = True
        if not run_batches(model, data):
            raise ValueError(
                "no data to estimate statistics from: `data` has no batches. Expected at least "
                "one; a generator can be iterated only once"
            )
        done = True
    finally:
        for module, mode in training.items():
            module.training = mode
        for norm, own, buffers in zip(norms, momentum, before, strict=True):
            norm.momentum = own
            if not done or not norm.num_batches_tracked:
                for name, a in buffers.items():
                    norm.get_buffer(name).copy_(a)
    return model
