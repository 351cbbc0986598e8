"""The small set for a machine without a GPU: one neuron, trained and not, and a narrow SegNet.

On a CPU other programs are the noise, so the contenders of a set take turns: whatever happens hits
all of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ...nn import AGCConv2d, saved_bytes
from .cases import Case, wanted
from .measure import MIB, spread, training_step
from .record import Row
from .settings import Bench

CHANNELS = 64
WARM_UP = 2
SETS = {  # contenders, batches, size, width
    "neuron": (("agc", "bn", "none"), (1,), (256, 512), 1.0),
    "inference": (("agc", "bn", "bn-folded", "none"), (1,), (256, 512), 1.0),
    "segnet": (("agc", "bn", "none"), (1, 4), (128, 256), 0.25),
}
QUICK_SIZES = {"neuron": (32, 32), "inference": (32, 32), "segnet": (64, 64)}

Call = Callable[[], object]


def cpu_sets(settings: Bench) -> list[tuple[Case, ...]]:
    """The cases that take turns, set by set."""
    engines = settings.engines or ("eager",)
    for engine in engines:
        if engine.endswith("graph"):
            raise ValueError(f"CUDA graphs need a GPU: there is no engine {engine!r} here")
    if set(settings.dtypes) - {"fp32"}:
        raise ValueError(f"on a CPU there is fp32 alone, not {', '.join(settings.dtypes)}")
    sets = []
    for group in wanted(settings.only, SETS):
        contenders, batches, size, width = SETS[group]
        for batch in settings.batches or batches:
            shape = (batch, QUICK_SIZES[group] if settings.quick else size, "fp32", width)
            cases = tuple(
                Case(group, contender, engine, *shape)
                for contender in wanted(settings.contenders, contenders)
                for engine in engines
            )
            if cases:
                sets.append(cases)
    return sets


def measure_set(cases: Sequence[Case], steps: int) -> list[Row]:
    """p20, p50 and p80 in milliseconds of every case, and what it keeps for its backward."""
    made = {case: make_call(case) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(WARM_UP + steps):
        for case, (call, _) in made.items():
            start = time.perf_counter()
            call()
            if turn >= WARM_UP:
                times[case].append(1e3 * (time.perf_counter() - start))
    return [{**case.key, **spread("ms", times[case]), **made[case][1]} for case in cases]


def make_call(case: Case) -> tuple[Call, Row]:
    """What is timed, and what is known of it beforehand."""
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
    """A 3x3 convolution with its normalization and ReLU."""
    if contender == "agc":
        return AGCConv2d(CHANNELS, CHANNELS, 3, padding=1)
    norm = [nn.BatchNorm2d(CHANNELS)] if contender == "bn" else []
    convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=not norm)
    return nn.Sequential(convolution, *norm, nn.ReLU(inplace=True))


def inference_neuron(contender: str) -> nn.Module:
    """The same; a folded BatchNorm is a part of its convolution, as deployed networks have it."""
    if contender != "bn-folded":
        return neuron(contender)
    layers: Any = neuron("bn").eval()
    return nn.Sequential(fuse_conv_bn_eval(layers[0], layers[1]), layers[2])


def _compiled(model: nn.Module, case: Case) -> Any:
    return torch.compile(model) if case.engine == "compile" else model


def _saved(model: nn.Module, x: torch.Tensor) -> Row:
    return {"saved_mib": f"{saved_bytes(model, x) / MIB:.1f}"}
