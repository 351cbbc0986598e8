"""Time and memory of one training step on a GPU."""

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...step import TrainingStep
from ..losses import pixel_cross_entropy
from .cases import Case
from .contenders import CHANNELS, CLASSES, build
from .record import Row

MIB = 2**20
WARM_UP = 6  # calls before the timed ones: a graph is captured at the fourth


def measure_step(case: Case, steps: int) -> list[Row]:
    """p20, p50 and p80 of a whole step in milliseconds, and its memory."""
    with precision(case.dtype):
        step, batch = training_step(case, "cuda")
        # The third call, which no engine replays yet: so the engines' memory is comparable.
        memory = [step_memory(step, batch) for _ in range(3)][-1]
        warm_up(step, batch)
        times = event_milliseconds(lambda: step(*batch), steps)
    return [{**case.key, **spread("ms", times), **memory}]


def training_step(case: Case, device: str) -> tuple[TrainingStep, tuple[Tensor, Tensor]]:
    """The step that is timed, and a random batch for it."""
    torch.manual_seed(0)
    model = build(case.group, case.contender, case.width).to(device)
    inputs, targets = random_batch(case, device)
    if device == "cuda":
        layout = torch.channels_last if inputs.dim() == 4 else torch.channels_last_3d
        model.to(memory_format=layout)  # type: ignore[call-overload]
        inputs = inputs.contiguous(memory_format=layout)
    # With rate 0 the network stays where it is: all the work, and the same sane numbers for all.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=device == "cuda")
    autocast = torch.bfloat16 if case.dtype == "bf16" else None
    engine: Any = case.engine
    loss = functional.cross_entropy if case.group == "resnet50" else pixel_cross_entropy
    step = TrainingStep(model, loss, optimizer, engine, autocast)
    return step, (inputs, targets)


def random_batch(case: Case, device: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(case.batch, CHANNELS[case.group], *case.size, device=device)
    positions = () if case.group == "resnet50" else case.size
    targets = torch.randint(CLASSES[case.group], (case.batch, *positions), device=device)
    return inputs, targets


def give_memory_back() -> None:
    """All that nobody uses, so that it does not weigh on what is measured next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a broken device is found here, not blamed on the next case
        # A workspace of 32 MiB or more for each stream that cuBLAS has seen, and a captured step
        # has a stream of its own.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def warm_up(step: TrainingStep, batch: tuple[Tensor, Tensor]) -> None:
    """Past autotuning, compilation and capture."""
    for _ in range(WARM_UP):
        step(*batch)
    if step.engine.endswith("graph") and step.why_eager is not None:
        raise RuntimeError(f"no graph: {step.why_eager}")


def step_memory(step: TrainingStep, batch: tuple[Tensor, Tensor]) -> Row:
    """The peak of one step, and what of it is the step's own.

    "Activations" are the peak less what is held between steps. Gradients are not held: a step
    starts by dropping them.
    """
    gradients = sum(p.grad.nbytes for p in step.model.parameters() if p.grad is not None)
    held = torch.cuda.memory_allocated() - gradients
    torch.cuda.reset_peak_memory_stats()
    step(*batch)
    peak = torch.cuda.max_memory_allocated()
    return {
        "peak_mib": f"{peak / MIB:.1f}",
        "activations_mib": f"{(peak - held) / MIB:.1f}",
    }


def event_milliseconds(call: Callable[[], object], count: int) -> list[float]:
    """The device's time from the end of each call to the end of the next."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the ordered values.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([0.0, 10.0], 0.2)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    return below + (above - below) * (at - math.floor(at))


def spread(unit: str, values: Sequence[float]) -> Row:
    """p20, p50 and p80 as columns."""
    return {f"{unit}_p{p}": f"{quantile(values, p / 100):.3f}" for p in (20, 50, 80)}


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 for everything but fp32, and cuDNN's choice by trial; then as before."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype != "fp32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
