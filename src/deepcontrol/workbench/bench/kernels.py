"""Measure kernel times against bandwidth floors: each op alone and a SegNet step.

The floor is the time that a copy kernel needs to move the fewest bytes that the kernels can move.

An op is replayed from a CUDA graph, which leaves out launch overhead. Together its buffers are
several times as large as the L2 cache, so no call finds its input there.

A profile of a SegNet step gives the GPU time per kind of kernel. The floor of AGC with ReLU is five
passes over all feature maps: one read and one write in the forward, two reads and one write in the
backward.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ...nn import AGCConv2d
from ...ops import max_pool2x2, max_unpool2x2
from ...ops.agc import agc_backward, agc_forward, center_backward, forward_function, saved_map
from ...step import TrainingStep
from .cases import Bench, Case, selected
from .contenders import precision
from .measure import (
    MIB,
    event_milliseconds,
    percentiles,
    quantile,
    training_step,
    warm_up,
)
from .results import Row

MAPS = ((64, 256, 512), (128, 128, 256), (256, 64, 128), (512, 32, 64), (512, 16, 32))
FILTERS = ((64, 64, 3, 3), (128, 128, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3))
BATCHES = (8, 1)
REPLAY_BYTES = 256 * MIB  # lower bound of the bytes moved per replay: four times an H200's L2
MIN_CALLS, MAX_CALLS = 4, 512  # per replay

PROFILED_STEPS = 3
PASSES = 5
KERNEL_KINDS = (  # the first pattern that matches a kernel's name decides
    ("AGC", r"^(agc|window_mean)_"),
    ("gain in the weights", r"^_scale(_backward)?(_\d+)?$"),  # torch.compile appends a number
    ("pooling", r"^(pool|pick|place)_kernel|max_?pool|max_?unpool"),
    ("BatchNorm", r"batch_?norm|(^|[^a-z])bn_"),
    ("loss", r"soft_?max|nll_?loss"),
    ("optimizer", r"multi_tensor_apply|fused_?sgd"),
    ("convolutions", r"conv|cudnn|xmma|cutlass|gemm|wgrad|dgrad|fprop|nhwc|nchw|sm\d\d_"),
)
OTHER = "other"

Call = tuple[Callable[[], Any], int]  # an op on its own buffers, and the fewest bytes it can move


def center_forward_call(batch: int, *size: int) -> Call:
    v, (_, beta, lam) = feature_maps(batch, *size), agc_parameters(size[0])
    # In place, and with the tensors saved for backward, as in a training step.
    forward = forward_function(v)
    return lambda: forward(v, beta, lam, "relu", v, training=True), 2 * v.nbytes


def center_backward_call(batch: int, *size: int) -> Call:
    g, v, (_, beta, lam) = (
        feature_maps(batch, *size),
        feature_maps(batch, *size),
        agc_parameters(size[0]),
    )
    y, mean, mask, _ = forward_function(v)(v, beta, lam, "relu", v, training=True)
    saved = saved_map("relu", v, y, mask)
    return lambda: center_backward(g, saved, beta, lam, mean, "relu"), 3 * g.nbytes


def layer_forward_call(batch: int, *size: int) -> Call:
    z, parameters = feature_maps(batch, *size), agc_parameters(size[0])
    return lambda: agc_forward(z, *parameters), 2 * z.nbytes


def layer_backward_call(batch: int, *size: int) -> Call:
    g, z, parameters = (
        feature_maps(batch, *size),
        feature_maps(batch, *size),
        agc_parameters(size[0]),
    )
    mean = torch.zeros(batch, size[0], device="cuda")
    return lambda: agc_backward(g, z, *parameters, mean), 3 * g.nbytes


def pool_call(batch: int, *size: int) -> Call:
    x = feature_maps(batch, *size)
    return lambda: max_pool2x2(x), x.nbytes + x.nbytes // 4 + x.numel() // 4


def unpool_call(batch: int, *size: int) -> Call:
    x = feature_maps(batch, *size)
    pooled, index = max_pool2x2(x)
    floor = pooled.nbytes + index.nbytes + x.nbytes
    return lambda: max_unpool2x2(pooled, index, size[1:]), floor


def gain_call(batch: int, *size: int) -> Call:
    from ...ops.triton import gain as kernels

    weight, gain = torch.randn(size, device="cuda"), torch.ones(size[0], device="cuda")
    return lambda: kernels.scale(weight, gain, torch.bfloat16), 6 * weight.numel()


def gain_backward_call(batch: int, *size: int) -> Call:
    from ...ops.triton import gain as kernels

    weight, gain = torch.randn(size, device="cuda"), torch.ones(size[0], device="cuda")
    dscaled = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    return lambda: kernels.scale_backward(weight, gain, dscaled), 10 * weight.numel()


MAP_OPS: dict[str, Callable[..., Call]] = {
    "center_bias_act forward": center_forward_call,
    "center_bias_act backward": center_backward_call,
    "agc layer forward": layer_forward_call,
    "agc layer backward": layer_backward_call,
    "max_pool2x2": pool_call,
    "max_unpool2x2": unpool_call,
}
WEIGHT_OPS: dict[str, Callable[..., Call]] = {
    "gain in the weights": gain_call,
    "gain in the weights backward": gain_backward_call,
}


def op_cases(settings: Bench) -> list[Case]:
    """List every op on SegNet's shapes."""
    if settings.main or not selected(settings.only, ("ops",)):
        return []
    shapes, filters = (MAPS[-1:], FILTERS[:1]) if settings.quick else (MAPS, FILTERS)
    cases = [
        Case("ops", name, "graph", batch, size, "bf16")
        for batch in settings.batches or BATCHES
        for name in MAP_OPS
        for size in shapes
    ]
    # The weights do not depend on the batch size.
    return cases + [
        Case("ops", n, "graph", 1, size, "bf16") for n in WEIGHT_OPS for size in filters
    ]


@torch.no_grad()
def measure_op(case: Case, steps: int) -> list[Row]:
    """Return the microseconds of one call, and of a copy that moves as many bytes."""
    make = {**MAP_OPS, **WEIGHT_OPS}[case.contender]
    call, floor = make(case.batch, *case.size)
    count = min(max(math.ceil(REPLAY_BYTES / floor), MIN_CALLS), MAX_CALLS)
    calls = [call, *(make(case.batch, *case.size)[0] for _ in range(count - 1))]
    for run in calls[:3]:  # compile the kernel
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for run in calls]  # kept alive, so that each call has its own memory
    for _ in range(3):
        graph.replay()
    times = [1e3 * ms / count for ms in event_milliseconds(graph.replay, steps)]
    del results
    speed = copy_bytes_per_second()
    return [
        {
            **case.key,
            **percentiles("us", times),
            "floor_us": f"{1e6 * floor / speed:.3f}",
            "copy_gb_s": f"{speed / 1e9:.0f}",
        }
    ]


@functools.cache
def copy_bytes_per_second() -> float:
    """Measure the bytes per second, read and written, in a copy of 1 GiB."""
    a = torch.ones(2**28, device="cuda")
    b = torch.empty_like(a)
    for _ in range(3):
        torch.mul(a, 2, out=b)
    times = event_milliseconds(lambda: torch.mul(a, 2, out=b), 20)
    return 1e3 * (a.nbytes + b.nbytes) / quantile(times, 0.5)


def feature_maps(batch: int, *size: int) -> Tensor:
    x = torch.randn(batch, *size, device="cuda", dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


def agc_parameters(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gamma, beta and lambda that keep a map finite when applied repeatedly."""
    shape = (channels,)
    return tuple(torch.full(shape, v, device="cuda") for v in (1.0, 0.1, 0.5))  # type: ignore[return-value]


class KernelTime(NamedTuple):
    """How often a kernel runs in a step, and its milliseconds in all."""

    calls: float
    ms: float


def profile_kernels(
    step: TrainingStep, batch: tuple[Tensor, ...], steps: int = PROFILED_STEPS
) -> dict[str, KernelTime]:
    """Return the time of each kernel of a step by name; on a CPU, of each operator.

    The kernels of a captured step may run in parallel, so their sum may exceed the step's time.
    """
    on_gpu = batch[0].is_cuda
    if on_gpu:
        torch.cuda.synchronize()  # earlier steps are not part of the profile
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step(*batch)
        if on_gpu:
            torch.cuda.synchronize()
    return {
        event.key: KernelTime(
            event.count / steps,
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps,
        )
        for event in profiler.key_averages()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU")
    }


def measure_profile(case: Case, steps: int) -> list[Row]:
    """Return one row per kind of kernel, with its GPU milliseconds per step."""
    del steps  # a profile of PROFILED_STEPS steps is enough
    with precision(case.dtype):
        step, batch = training_step(replace(case, group="segnet"), "cuda")
        warm_up(step, lambda: step(*batch))
        times = {name: kernel.ms for name, kernel in profile_kernels(step, batch).items()}
    rows = []
    for kind, names in group_by_kind(times).items():
        row = {**case.key, "part": kind, "gpu_ms": f"{sum(names.values()):.4f}"}
        if kind == OTHER:
            row["note"] = "; ".join(f"{ms:.3f} {name[:60]}" for name, ms in slowest(names, 4))
        elif kind == "AGC" and case.contender == "agc":
            seconds = PASSES * map_bytes(step.model, case) / copy_bytes_per_second()
            row["floor_ms"] = f"{1e3 * seconds:.4f}"
        rows.append(row)
    if case.contender == "agc" and not any(row["part"] == "AGC" for row in rows):
        raise RuntimeError(
            f"the profile has no AGC kernel; its kernels include {', '.join(sorted(times)[:8])}"
        )
    return rows


def group_by_kind(times: dict[str, float]) -> dict[str, dict[str, float]]:
    """Group kernel times by kind of kernel.

    >>> group_by_kind({"agc_forward_kernel": 1.0, "cudnn_infer": 2.0, "copy": 0.5})
    {'AGC': {'agc_forward_kernel': 1.0},
     'convolutions': {'cudnn_infer': 2.0}, 'other': {'copy': 0.5}}
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, ms in times.items():
        if ms > 0:
            matching = (kind for kind, pattern in KERNEL_KINDS if re.search(pattern, name.lower()))
            found[next(matching, OTHER)][name] = ms
    order = [kind for kind, _ in KERNEL_KINDS] + [OTHER]
    return {kind: found[kind] for kind in order if kind in found}


def slowest(names: dict[str, float], count: int) -> Iterable[tuple[str, float]]:
    return sorted(names.items(), key=lambda item: -item[1])[:count]


def map_bytes(model: torch.nn.Module, case: Case) -> int:
    """Count the bytes of one pass over the feature maps of all AGC neurons.

    A neuron with fused pooling counts with its map before pooling.
    """
    elements = 0

    def count(_: object, __: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        nonlocal elements
        elements += output.numel() if isinstance(output, torch.Tensor) else 4 * output[0].numel()

    hooks = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, AGCConv2d)
    ]
    device = next(model.parameters()).device
    with torch.no_grad():  # one image is enough: maps grow with the batch
        model(torch.zeros(1, 3, *case.size, device=device))
    for hook in hooks:
        hook.remove()
    return elements * case.batch * (2 if case.dtype == "bf16" else 4)
