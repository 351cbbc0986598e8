"""Measure a small set of cases on a CPU: one neuron in training and inference, a narrow SegNet.

On a CPU most of the noise comes from other programs. The cases of a comparison are therefore
interleaved, so that the noise affects all of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ...nn import AGCConv2d, saved_bytes
from .cases import Bench, Case, selected
from .measure import MIB, percentiles, training_step
from .results import Row

CHANNELS = 64
WARM_UP = 2
COMPARISONS = {  # contenders, batches, size, width
    "neuron": (("agc", "bn", "none"), (1,), (256, 512), 1.0),
    "inference": (("agc", "bn", "bn-folded", "none"), (1,), (256, 512), 1.0),
    "segnet": (("agc", "bn", "none"), (1, 4), (128, 256), 0.25),
}
QUICK_SIZES = {"neuron": (32, 32), "inference": (32, 32), "segnet": (64, 64)}

Call = Callable[[], object]


def cpu_comparisons(settings: Bench) -> list[tuple[Case, ...]]:
    """List the comparisons to measure: tuples of cases that are interleaved."""
    engines = settings.engines or ("eager",)
    for engine in engines:
        if engine.endswith("graph"):
            raise ValueError(
                f"CUDA graphs need a GPU, got --engines {engine}; use eager or compile on a CPU"
            )
    if set(settings.dtypes) - {"fp32"}:
        raise ValueError(f"a CPU measures fp32 only, got --dtypes {' '.join(settings.dtypes)}")
    comparisons = []
    for group in selected(settings.only, COMPARISONS):
        contenders, batches, size, width = COMPARISONS[group]
        for batch in settings.batches or batches:
            shape = (batch, QUICK_SIZES[group] if settings.quick else size, "fp32", width)
            cases = tuple(
                Case(group, contender, engine, *shape)
                for contender in selected(settings.contenders, contenders)
                for engine in engines
            )
            if cases:
                comparisons.append(cases)
    return comparisons


def measure_interleaved(cases: Sequence[Case], steps: int) -> list[Row]:
    """Return time (p20, p50, p80) and memory saved for backward of every case."""
    calls = {case: make_call(case) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for repetition in range(WARM_UP + steps):
        for case, (call, _) in calls.items():
            start = time.perf_counter()
            call()
            if repetition >= WARM_UP:
                times[case].append(1e3 * (time.perf_counter() - start))
    return [{**case.key, **percentiles("ms", times[case]), **calls[case][1]} for case in cases]


def make_call(case: Case) -> tuple[Call, Row]:
    """Return the function to time, and the columns that are known without timing."""
    torch.manual_seed(0)
    if case.group == "segnet":
        step, batch = training_step(case, "cpu")
        return lambda: step(*batch), _saved(step.model, batch[0])
    shape = (case.batch, CHANNELS, *case.size)
    x, g = torch.randn(shape), torch.randn(shape)
    if case.group == "inference":
        model = inference_neuron(case.contender).eval()
        run = _compiled(model, case)
        return torch.no_grad()(lambda: run(x)), {}
    model, x = neuron(case.contender), x.requires_grad_()
    run = _compiled(model, case)

    def train() -> None:
        x.grad = None
        model.zero_grad()
        run(x).backward(g)

    return train, _saved(model, x)


def neuron(contender: str) -> nn.Module:
    """Build a 3x3 convolution with its normalization and ReLU."""
    if contender == "agc":
        return AGCConv2d(CHANNELS, CHANNELS, 3, padding=1)
    norm = [nn.BatchNorm2d(CHANNELS)] if contender == "bn" else []
    convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=not norm)
    return nn.Sequential(convolution, *norm, nn.ReLU(inplace=True))


def inference_neuron(contender: str) -> nn.Module:
    """Build a neuron for inference; bn-folded folds BatchNorm into the convolution."""
    if contender != "bn-folded":
        return neuron(contender)
    layers: Any = neuron("bn").eval()
    return nn.Sequential(fuse_conv_bn_eval(layers[0], layers[1]), layers[2])


def _compiled(model: nn.Module, case: Case) -> Any:
    return torch.compile(model) if case.engine == "compile" else model


def _saved(model: nn.Module, x: torch.Tensor) -> Row:
    return {"saved_mib": f"{saved_bytes(model, x) / MIB:.1f}"}
