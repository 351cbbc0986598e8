"""Re-estimate the running statistics of BatchNorms on new data."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .calibrate import run_batches


@torch.no_grad()
def reestimate_statistics(model: nn.Module, data: Iterable[Any]) -> nn.Module:
    """Replace the running statistics of all BatchNorms by averages over data, in place.

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
