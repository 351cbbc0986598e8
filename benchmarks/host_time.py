"""Measure a layer's host time in eager mode: CPU time to queue its GPU kernels.

    python benchmarks/host_time.py [--rounds 40] [--out benchmarks/results/host-time-cuda.csv]

A chain of 20 layers on maps so small that the GPU waits for the host: 3x3 convolutions of 32 to 32
channels with normalization and ReLU, 8x8 maps, batch 2, bf16 autocast, channels_last. The clock
stops when the call returns, without waiting for the GPU. Every round times all contenders, so the
machine's noise affects all of them. The CSV has microseconds per layer.

AGC layers are measured in Python and, if it is built (python -m deepcontrol.ops.native), with the
compiled helper for eager mode: column "path".
"""

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.ops import native
from deepcontrol.workbench.bench.measure import percentiles
from deepcontrol.workbench.bench.results import source_hash, write_results
from deepcontrol.workbench.hardware import hardware

LAYERS, CHANNELS, SIZE, BATCH = 20, 32, 8, 2
WARMUP_ROUNDS = 10
PEER = "conv+BN+ReLU"


def conv_norm_relu(*norms: nn.Module) -> nn.Module:
    conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=not norms)
    return nn.Sequential(conv, *norms, nn.ReLU(inplace=True))


CONTENDERS: dict[str, Callable[[], nn.Module]] = {
    "conv+ReLU": conv_norm_relu,
    PEER: lambda: conv_norm_relu(nn.BatchNorm2d(CHANNELS)),
    "conv+GN+ReLU": lambda: conv_norm_relu(nn.GroupNorm(32, CHANNELS)),
    "AGCConv2d": lambda: AGCConv2d(CHANNELS, CHANNELS, 3, padding=1),
    "conv+AGC2d+ReLU": lambda: conv_norm_relu(AGC2d(CHANNELS)),
}


def paths(name: str) -> list[str]:
    """Return the implementations of a contender in eager mode."""
    if "AGC" not in name:
        return ["torch"]
    return ["python"] if native.why_python() else ["python", "native"]


def host_microseconds(model: nn.Module, x: Tensor, g: Tensor) -> tuple[float, float]:
    """Time the calls of forward and backward, per layer."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    wait_for(x.device)
    with torch.autocast(x.device.type, torch.bfloat16):
        start = time.perf_counter()
        y = model(x)
        forward = time.perf_counter() - start
    g = g.to(y.dtype)  # autocast runs GroupNorm in fp32
    wait_for(x.device)
    start = time.perf_counter()
    y.backward(g)
    backward = time.perf_counter() - start
    wait_for(x.device)
    return 1e6 * forward / LAYERS, 1e6 * backward / LAYERS


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="timed steps per contender, at least 2"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default=device,
        help="on a CPU the times include the arithmetic",
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")
    print(f"{LAYERS} layers on {hardware(args.device)}, {args.rounds} rounds.")
    if (reason := native.why_python()) is not None:
        print(f"AGC runs in Python only: {reason}.")

    torch.manual_seed(0)
    layout = torch.channels_last
    shape = (BATCH, CHANNELS, SIZE, SIZE)
    x, g = (
        torch.randn(shape, device=args.device).contiguous(memory_format=layout) for _ in range(2)
    )
    x.requires_grad_()  # the first layer also has a gradient to hand on
    models = {
        (name, path): nn.Sequential(*(make() for _ in range(LAYERS))).to(
            args.device,
            memory_format=layout,  # type: ignore[call-overload]
        )
        for name, make in CONTENDERS.items()
        for path in paths(name)
    }
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in models}
    gc.disable()  # a collection takes longer than a layer
    try:
        for repetition in range(WARMUP_ROUNDS + args.rounds):
            for (name, path), model in models.items():
                with native.disabled() if path == "python" else nullcontext():
                    measured = host_microseconds(model, x, g)
                if repetition >= WARMUP_ROUNDS:
                    times[name, path].append(measured)
            gc.collect()
    finally:
        gc.enable()

    peer = [sum(pair) for pair in times[PEER, "torch"]]
    rows: list[dict[str, object]] = []
    for (name, path), pairs in times.items():
        totals = [sum(pair) for pair in pairs]
        ratios = [total / other for total, other in zip(totals, peer, strict=True)]
        row: dict[str, object] = {"contender": name, "path": path}
        parts = zip(*pairs, strict=True)
        for part, values in zip(("forward", "backward", "total"), (*parts, totals), strict=True):
            row |= percentiles(f"{part}_us", values)
        row |= percentiles("total_vs_batchnorm", ratios)
        rows.append({**row, "layers": LAYERS, "rounds": args.rounds, "source": source_hash()})
        print(
            f"{name:16s} {path:7s} {row['forward_us_p50']:>8} + {row['backward_us_p50']:>8} us "
            f"per layer, {row['total_vs_batchnorm_p50']}x {PEER}"
        )
    out = args.out or Path(f"benchmarks/results/host-time-{args.device}.csv")
    write_results(out, rows, args.device)


if __name__ == "__main__":
    main()
