"""Profile a SegNet step: GPU time per kind of kernel, and AGC's time against its bandwidth floor.

The floor of AGC with ReLU is five passes over all feature maps: one read and one write in the
forward, two reads and one write in the backward. The time of a pass follows from the bandwidth of a
copy, measured in the same run.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from ...nn import AGCConv2d
from .cases import Case
from .contenders import precision
from .measure import training_step, warm_up
from .ops import copy_bytes_per_second
from .results import Row

STEPS = 3
PASSES = 5
KERNEL_KINDS = (  # the first pattern that matches a kernel's name decides
    ("AGC", r"^(agc|window_mean)_"),
    ("gain in the weights", r"^_scale(_backward)?$"),
    ("pooling", r"^(pool|pick|place)_kernel|max_?pool|max_?unpool"),
    ("BatchNorm", r"batch_?norm|(^|[^a-z])bn_"),
    ("loss", r"soft_?max|nll_?loss"),
    ("optimizer", r"multi_tensor_apply|fused_?sgd"),
    ("convolutions", r"conv|cudnn|xmma|cutlass|gemm|wgrad|dgrad|fprop|nhwc|nchw|sm\d\d_"),
)
OTHER = "other"


def measure_profile(case: Case, steps: int) -> list[Row]:
    """Return one row per kind of kernel, with its GPU milliseconds per step."""
    del steps  # a profile of STEPS steps is enough
    with precision(case.dtype):
        step, batch = training_step(replace(case, group="segnet"), "cuda")
        warm_up(step, batch)
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(STEPS):
                step(*batch)
            torch.cuda.synchronize()
    times = {
        event.key: event.self_device_time_total / 1e3 / STEPS
        for event in profiler.key_averages()
        if event.device_type.name == "CUDA"
    }
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
