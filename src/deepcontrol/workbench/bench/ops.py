"""Time each op alone and compare it with its bandwidth floor.

The floor is the time that a copy kernel needs to move the fewest bytes that the op can move. Calls
are replayed from a CUDA graph, which leaves out launch overhead. Together their buffers are several
times as large as the L2 cache, so no call finds its input there.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops import max_pool2x2, max_unpool2x2
from ...ops.agc import backward as layer_backward
from ...ops.agc import forward as layer_forward
from ...ops.neuron import backward as center_backward
from ...ops.neuron import forward_function, saved_map
from .cases import Bench, Case, selected
from .measure import MIB, event_milliseconds, percentiles, quantile
from .results import Row

MAPS = ((64, 256, 512), (128, 128, 256), (256, 64, 128), (512, 32, 64), (512, 16, 32))
FILTERS = ((64, 64, 3, 3), (128, 128, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3))
BATCHES = (8, 1)
REPLAY_BYTES = 256 * MIB  # lower bound of the bytes moved per replay: four times an H200's L2
MIN_CALLS, MAX_CALLS = 4, 512  # per replay

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
    return lambda: layer_forward(z, *parameters), 2 * z.nbytes


def layer_backward_call(batch: int, *size: int) -> Call:
    g, z, parameters = (
        feature_maps(batch, *size),
        feature_maps(batch, *size),
        agc_parameters(size[0]),
    )
    mean = torch.zeros(batch, size[0], device="cuda")
    return lambda: layer_backward(g, z, *parameters, mean), 3 * g.nbytes


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
    if not selected(settings.only, ("ops",)):
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
