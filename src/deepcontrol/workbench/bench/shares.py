"""Where the GPU's time goes in a SegNet step, kernel by kernel, and AGC's share against its floor.

The floor of AGC with ReLU is five passes over all maps: read and write forward; read two, write one
backward. What a pass costs follows from the bandwidth of a copy, measured in the same run.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from ...nn import AGCConv2d
from .cases import Case
from .measure import precision, training_step, warm_up
from .ops import copy_bytes_per_second
from .record import Row

STEPS = 3
PASSES = 5
KINDS = (  # the first whose pattern is found in a kernel's name
    ("AGC", r"^(agc|window_mean)_"),
    ("gain in the weights", r"^_scale(_backward)?$"),
    ("pooling", r"^(pool|pick|place)_kernel|max_?pool|max_?unpool"),
    ("BatchNorm", r"batch_?norm|(^|[^a-z])bn_"),
    ("loss", r"soft_?max|nll_?loss"),
    ("optimiser", r"multi_tensor_apply|fused_?sgd"),
    ("convolutions", r"conv|cudnn|xmma|cutlass|gemm|wgrad|dgrad|fprop|nhwc|nchw|sm\d\d_"),
)
OTHER = "other"


def measure_shares(case: Case, steps: int) -> list[Row]:
    """Milliseconds a step by kind of kernel: a row each."""
    del steps
    with precision(case.dtype):
        step, batch = training_step(replace(case, group="segnet"), "cuda")
        warm_up(step, batch)
        torch.cuda.synchronize()
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=both, acc_events=True) as profiler:
            for _ in range(STEPS):
                step(*batch)
            torch.cuda.synchronize()
    times = {
        event.key: event.self_device_time_total / 1e3 / STEPS
        for event in profiler.key_averages()
        if event.device_type.name == "CUDA"
    }
    rows = []
    for kind, names in by_kind(times).items():
        row = {**case.key, "part": kind, "gpu_ms": f"{sum(names.values()):.4f}"}
        if kind == OTHER:
            row["note"] = "; ".join(f"{ms:.3f} {name[:60]}" for name, ms in top(names, 4))
        elif kind == "AGC" and case.contender == "agc":
            seconds = PASSES * map_bytes(step.model, case) / copy_bytes_per_second()
            row["floor_ms"] = f"{1e3 * seconds:.4f}"
        rows.append(row)
    if case.contender == "agc" and not any(row["part"] == "AGC" for row in rows):
        raise RuntimeError(f"no AGC kernel among {', '.join(sorted(times)[:8])}")
    return rows


def by_kind(times: dict[str, float]) -> dict[str, dict[str, float]]:
    """Each kernel with its time under the kind that it is of.

    >>> by_kind({"agc_forward_kernel": 1.0, "cudnn_infer": 2.0, "copy": 0.5})
    {'AGC': {'agc_forward_kernel': 1.0},
     'convolutions': {'cudnn_infer': 2.0}, 'other': {'copy': 0.5}}
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, ms in times.items():
        if ms > 0:
            matching = (kind for kind, pattern in KINDS if re.search(pattern, name.lower()))
            found[next(matching, OTHER)][name] = ms
    order = [kind for kind, _ in KINDS] + [OTHER]
    return {kind: found[kind] for kind in order if kind in found}


def top(names: dict[str, float], count: int) -> Iterable[tuple[str, float]]:
    return sorted(names.items(), key=lambda item: -item[1])[:count]


def map_bytes(model: torch.nn.Module, case: Case) -> int:
    """Bytes of one pass over the maps of all neurons, those that are pooled at once included."""
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
    with torch.no_grad():  # one image is enough: every map is per sample
        model(torch.zeros(1, 3, *case.size, device=device))
    for hook in hooks:
        hook.remove()
    return elements * case.batch * (2 if case.dtype == "bf16" else 4)
