"""Measure time and memory of a training step, and its largest batch.

A GPU is measured case by case. On a CPU most of the noise comes from other programs. The cases of a
comparison (a neuron in training or inference, or a narrow SegNet) are therefore interleaved, so
that the noise affects all of them.
"""

import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ...graphed_model import graphed
from ...nn import AGCConv2d, saved_bytes
from ...step import TrainingStep
from ..losses import pixel_cross_entropy
from .cases import Case
from .contenders import build, layers_source, precision, random_batch, use_layout
from .results import Row

MIB = 2**20
WARM_UP = 6  # calls before the timed ones; the graph engines capture at the fourth
MEMORY_LIMIT_GIB = 12  # the paper's GPU, on which BatchNorm trained with batch 8
MAX_BATCH = 4096

CPU_WARM_UP = 2
CHANNELS = 64  # channels of the neuron measured on a CPU

Call = Callable[[], object]


def measure_step(case: Case, steps: int) -> list[Row]:
    """Return time (p20, p50, p80, in milliseconds) and memory of a step."""
    with precision(case.dtype):
        step, batch = training_step(case, "cuda")
        # The third call, before any engine replays a graph: comparable between engines.
        memory = [step_memory(step, batch) for _ in range(3)][-1]
        if case.engine == "reduce-overhead":
            memory = {}  # torch has captured the model by then
        call = own_loop(case, step, batch) if case.engine == "graphed" else lambda: step(*batch)
        warm_up(step, call)
        times = event_milliseconds(call, steps)
    source = {"norm_from": layers_source(case.contender, case.engine)}
    return [{**case.key, **percentiles("ms", times), **memory, **source}]


def training_step(case: Case, device: str) -> tuple[TrainingStep, tuple[Tensor, Tensor]]:
    """Build the training step of a case, and a random batch for it."""
    torch.manual_seed(0)
    model = build(case.group, case.contender, case.width).to(device)
    inputs, targets = random_batch(case, device)
    if device == "cuda":
        inputs = use_layout(model, inputs, case.layout)
    # Learning rate 0 does all the work of an update and keeps the weights finite.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=device == "cuda")
    autocast = torch.bfloat16 if case.dtype == "bf16" else None
    engine: Any = case.engine
    if engine in ("graphed", "reduce-overhead"):  # an ordinary loop
        engine = "eager"
    if case.engine == "reduce-overhead":
        model = torch.compile(model, mode="reduce-overhead")  # type: ignore[assignment]
    step = TrainingStep(model, loss_of(case), optimizer, engine, autocast)
    return step, (inputs, targets)


def loss_of(case: Case) -> Callable[..., Tensor]:
    return functional.cross_entropy if case.group == "resnet50" else pixel_cross_entropy


def own_loop(case: Case, step: TrainingStep, batch: tuple[Tensor, Tensor]) -> Call:
    """Return a step of an ordinary training loop that calls a graphed model."""
    inputs, targets = batch
    model, optimizer, loss = step.model, step.optimizer, loss_of(case)
    fast = graphed(model, inputs, autocast=step.autocast)

    def train() -> None:
        optimizer.zero_grad()
        device = inputs.device.type
        with torch.autocast(device, step.autocast, enabled=step.autocast is not None):
            value = loss(fast(inputs), targets)
        value.backward()
        optimizer.step()
        if fast.why_eager is not None:
            raise RuntimeError(f"the model was not replayed: {fast.why_eager}")

    return train


def warm_up(step: TrainingStep, call: Call) -> None:
    """Run the calls in which autotuning, compilation and graph capture happen."""
    for _ in range(WARM_UP):
        call()
    if step.engine.endswith("graph") and step.why_eager is not None:
        raise RuntimeError(f"the step was not captured in a CUDA graph: {step.why_eager}")


def step_memory(step: TrainingStep, batch: tuple[Tensor, Tensor]) -> Row:
    """Return the peak memory of one step, and the part that the step allocates.

    "Activations" is the peak minus the memory allocated between steps. Gradients count as
    activations, because a step frees them at its start.
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


def free_memory() -> None:
    """Free everything unreferenced, so that the next case starts clean."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # an asynchronous error belongs to this case, not to the next
        # cuBLAS keeps a workspace of 32 MiB or more per stream, and a captured step has its own
        # stream.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def event_milliseconds(call: Callable[[], object], count: int) -> list[float]:
    """Time calls on the device, from the end of one to the end of the next."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def milliseconds(call: Call, device: str) -> float:
    """Time one call: on a GPU from event to event, on a CPU by the clock."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def captured(call: Call, device: str) -> Call:
    """Return a replay of the call from a CUDA graph, or the call itself on a CPU."""
    if device == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between the sorted values.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([0.0, 10.0], 0.2)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    return below + (above - below) * (at - math.floor(at))


def percentiles(unit: str, values: Sequence[float]) -> Row:
    """Return p20, p50 and p80 as columns."""
    return {f"{unit}_p{p}": f"{quantile(values, p / 100):.3f}" for p in (20, 50, 80)}


def measure_max_batch(case: Case, steps: int) -> list[Row]:
    """Find the largest batch of SegNet in 12 GiB, in eager mode and bf16.

    The limit applies to PyTorch's allocator, fragmentation included. The CUDA context is not part
    of it.
    """
    del steps  # nothing is timed
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    limit = MEMORY_LIMIT_GIB * 1024 * MIB
    if total < limit:
        raise RuntimeError(
            f"the GPU has {total / MIB / 1024:.1f} GiB of memory; this case needs "
            f"{MEMORY_LIMIT_GIB} GiB"
        )
    free_memory()  # memory still allocated counts against the limit
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        largest = search_largest(lambda batch: fits(replace(case, group="segnet", batch=batch)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return [{**case.key, "largest_batch": str(largest), "limit_gib": str(MEMORY_LIMIT_GIB)}]


def fits(case: Case) -> bool:
    """Return whether a case trains within the memory limit, and free its memory."""
    try:
        train_two_steps(case)
    except RuntimeError as error:  # cuDNN and cuBLAS have their own out-of-memory messages
        if not re.search(r"out of memory|alloc_failed|not_initialized", str(error), re.IGNORECASE):
            raise
        fitted = False
    else:
        fitted = True
    free_memory()
    return fitted


def train_two_steps(case: Case) -> None:
    """Train two steps: from the second on, the optimizer holds all its state."""
    with precision(case.dtype):
        # cuDNN's autotuning would allocate memory that training does not need.
        torch.backends.cudnn.benchmark = False
        step, batch = training_step(case, "cuda")
        step(*batch)
        step(*batch)
        torch.cuda.synchronize()


def search_largest(works: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to MAX_BATCH that works, or 0, by bisection.

    >>> search_largest(lambda n: n <= 37)
    37
    """
    good, bad = 0, 1
    while works(bad):
        good, bad = bad, 2 * bad
        if bad > MAX_BATCH:
            return good
    while bad - good > 1:
        middle = (good + bad) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good


def measure_interleaved(cases: Sequence[Case], steps: int) -> list[Row]:
    """Return time (p20, p50, p80) and memory saved for backward of every case."""
    calls = {case: make_call(case) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for repetition in range(CPU_WARM_UP + steps):
        for case, (call, _) in calls.items():
            start = time.perf_counter()
            call()
            if repetition >= CPU_WARM_UP:
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


def _saved(model: nn.Module, x: Tensor) -> Row:
    return {"saved_mib": f"{saved_bytes(model, x) / MIB:.1f}"}
