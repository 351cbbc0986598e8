"""Time AGC with other background estimators against the plain mean.

    python benchmarks/background.py [--rounds 50] [--out benchmarks/results/background-cuda.csv]

Three cases, each at batch 1: "neuron" is forward and backward of AGCConv2d(64, 64, 3) at 256x512,
"layer" that of AGC2d(64) alone, "segnet" a whole training step of SegNet at 256x512. On a GPU in
bf16 and channels_last, each captured in a CUDA graph; on a CPU in fp32 and eagerly, at 64x128 and a
quarter of the width. The contenders of a case are interleaved, so that the machine's noise affects
all of them. `time_vs_mean` is the ratio of the medians; the window mean should stay below 1.5 in
"neuron" and "segnet". `error` is the relative error of the output against fp64 in the reference.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d, Quantile, TrainingStep, TrimmedMean, WindowMean, he_init_
from deepcontrol.nn import saved_bytes
from deepcontrol.ops import reference
from deepcontrol.workbench.bench.measure import Call, captured, milliseconds
from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.hardware import hardware
from deepcontrol.workbench.losses import pixel_cross_entropy
from deepcontrol.workbench.models import SegNet

CLASSES = 19
BACKGROUNDS: dict[str, Any] = {
    "mean": "mean",
    **{f"window {k}x{k}": WindowMean(k) for k in (7, 15, 31, 63)},
    "median": Quantile(0.5),
    "trimmed 0.1": TrimmedMean(0.1),
}
WARM_UP = 5  # the step is captured at the fourth call


def layer_case(layer: nn.Module, x: Tensor, g: Tensor, device: str) -> tuple[Call, dict[str, Any]]:
    """Return forward and backward of a layer, and the columns that need no timing."""
    inputs = [x, *layer.parameters()]

    def step() -> object:
        return torch.autograd.grad(layer(x), inputs, g)

    saved = saved_bytes(layer, x) / 2**20
    return captured(step, device), {"saved_mib": f"{saved:.2f}", "error": error_of(layer, x)}


@torch.no_grad()
def error_of(layer: Any, x: Tensor) -> str:
    """Return the relative error of a layer's output against the formula in fp64."""
    small = x[..., :64, :128]
    exact = small.double()
    z, gamma = exact, layer.weight
    if isinstance(layer, AGCConv2d):
        # The filters as the convolution uses them, so that only AGC's own rounding counts.
        z, gamma = layer._convolved(small).double(), None
    background = layer.background
    b = z.mean((2, 3), keepdim=True) if background == "mean" else background(z)
    gamma = None if gamma is None else gamma.double()
    rest = layer.bias.double(), layer.mean_scale.double(), getattr(layer, "activation", "none")
    wanted = reference.subtract_background(z, b, gamma, *rest)
    return f"{float((layer(small).double() - wanted).norm() / wanted.norm()):.1e}"


def segnet_case(background: Any, size: tuple[int, int], device: str) -> tuple[Call, dict[str, Any]]:
    """Return a training step of SegNet, and the columns that need no timing."""
    torch.manual_seed(0)
    gpu = device == "cuda"
    model = he_init_(SegNet(CLASSES, width=1.0 if gpu else 0.25))
    for layer in model.modules():
        if isinstance(layer, AGCConv2d):
            layer.background = background
    model.to(device)
    x = torch.randn(1, 3, *size, device=device)
    if gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (1, *size), device=device)
    # Learning rate 0 does all the work of an update and keeps the weights finite.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=gpu)
    autocast = torch.bfloat16 if gpu else None
    step = TrainingStep(model, pixel_cross_entropy, optimizer, "graph", autocast)
    for _ in range(WARM_UP if gpu else 1):
        step(x, labels)
    if gpu and step.why_eager is not None:
        raise RuntimeError(f"the step was not captured in a CUDA graph: {step.why_eager}")
    return lambda: step(x, labels), {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50, help="timed calls of each contender")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=[*BACKGROUNDS],
        choices=[*BACKGROUNDS],
        metavar="NAME",
        help="any of: " + "; ".join(BACKGROUNDS),
    )
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")
    if args.contenders[0] != "mean":
        parser.error(f"the first contender must be 'mean', got {args.contenders[0]!r}")
    device = args.device
    out = args.out or Path(f"benchmarks/results/background-{device}.csv")
    gpu = device == "cuda"
    size, channels = ((256, 512), 64) if gpu else ((64, 128), 16)
    dtype = torch.bfloat16 if gpu else torch.float32
    layout = torch.channels_last if gpu else torch.contiguous_format
    print(f"Backgrounds on {hardware(device)}: batch 1, {size[0]}x{size[1]}, {dtype}.")

    torch.manual_seed(0)
    maps = [
        torch.randn(1, channels, *size).to(device, dtype, memory_format=layout) for _ in range(2)
    ]
    x, g = maps[0].requires_grad_(), maps[1]
    makers: dict[str, Callable[[Any], tuple[Call, dict[str, Any]]]] = {
        "neuron": lambda b: layer_case(
            AGCConv2d(channels, channels, 3, padding=1, background=b, device=device)
            .to(dtype)
            .to(memory_format=layout),  # type: ignore[call-overload]
            x, g, device,
        ),
        "layer": lambda b: layer_case(
            AGC2d(channels, background=b, device=device).to(dtype), x, g, device
        ),
        "segnet": lambda b: segnet_case(b, size, device),
    }  # fmt: skip
    rows: list[dict[str, object]] = []
    for case, make in makers.items():
        calls = {name: make(BACKGROUNDS[name]) for name in args.contenders}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for repetition in range(args.rounds + 3):
            for name, (call, _) in calls.items():
                elapsed = milliseconds(call, device)
                if repetition >= 3:  # the first ones warm up
                    times[name].append(elapsed)
        for name, (_, columns) in calls.items():
            p20, p50, p80 = (statistics.quantiles(times[name], n=10)[i] for i in (1, 4, 7))
            ratio = p50 / statistics.median(times["mean"])
            print(f"{case:8s} {name:14s} {p50:9.3f} ms  {ratio:5.2f}x the mean  {columns}")
            rows.append(
                {
                    "case": case,
                    "background": name,
                    "ms_p20": f"{p20:.4f}",
                    "ms_p50": f"{p50:.4f}",
                    "ms_p80": f"{p80:.4f}",
                    "time_vs_mean": f"{ratio:.3f}",
                    "saved_mib": "",
                    "error": "",
                    **columns,
                    "size": f"{size[0]}x{size[1]}",
                    "dtype": str(dtype).removeprefix("torch."),
                }
            )
        del calls
    write_results(out, rows, device)


if __name__ == "__main__":
    main()
