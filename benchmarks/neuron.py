"""Time one training step of one neuron: AGC against other norms.

    python benchmarks/neuron.py [--rounds 20] [--out benchmarks/results/neuron-cpu.csv]

AGC is automatic gain control. Forward and backward of a 3x3 convolution of 64 to 64 channels at
256x512 with its normalization and ReLU. The contenders are interleaved in one run, so that the
machine's noise affects all of them. On a GPU: batch 8, bf16, channels_last. On a CPU: batch 1,
fp32.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.nn import saved_bytes
from deepcontrol.workbench.bench.measure import milliseconds
from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.hardware import hardware

CHANNELS, HEIGHT, WIDTH = 64, 256, 512


def conv_norm_relu(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=not layers), *layers, nn.ReLU()
    )


CONTENDERS: dict[str, Callable[[], nn.Module]] = {
    "no normalization": conv_norm_relu,
    "AGC neuron": lambda: AGCConv2d(CHANNELS, CHANNELS, 3, padding=1),
    "AGC layer": lambda: conv_norm_relu(AGC2d(CHANNELS)),
    "BatchNorm": lambda: conv_norm_relu(nn.BatchNorm2d(CHANNELS)),
    "GroupNorm(32)": lambda: conv_norm_relu(nn.GroupNorm(32, CHANNELS)),
    "InstanceNorm": lambda: conv_norm_relu(nn.InstanceNorm2d(CHANNELS, affine=True)),
}


def step(model: nn.Module, x: Tensor, g: Tensor) -> None:
    model(x).backward(g)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = Path(f"benchmarks/results/neuron-{device}.csv")
    parser.add_argument(
        "--rounds", type=int, default=20, help="timed steps per contender, at least 2"
    )
    parser.add_argument("--out", type=Path, default=out, help="CSV file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")

    gpu = device == "cuda"
    batch, dtype = (8, torch.bfloat16) if gpu else (1, torch.float32)
    layout = torch.channels_last if gpu else torch.contiguous_format
    print(f"One neuron on {hardware(device)}: batch {batch}, {dtype}, {args.rounds} rounds.")

    def maps() -> Tensor:
        return torch.randn(batch, CHANNELS, HEIGHT, WIDTH).to(device, dtype, memory_format=layout)

    x, g = maps().requires_grad_(), maps()
    models = {name: make().to(device, dtype) for name, make in CONTENDERS.items()}
    for model in models.values():
        model.to(memory_format=layout)  # type: ignore[call-overload]
    saved = {name: saved_bytes(model, x) / 2**20 for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for repetition in range(args.rounds + 3):
        for name, model in models.items():
            elapsed = milliseconds(partial(step, model, x, g), x.device.type)
            if repetition >= 3:  # the first ones warm up
                times[name].append(elapsed)

    rows: list[dict[str, object]] = []
    peer = statistics.median(times["BatchNorm"])
    for name in models:
        p20, p50, p80 = (statistics.quantiles(times[name], n=10)[i] for i in (1, 4, 7))
        rows.append(
            {
                "contender": name,
                "ms_p20": f"{p20:.3f}",
                "ms_p50": f"{p50:.3f}",
                "ms_p80": f"{p80:.3f}",
                "time_vs_batchnorm": f"{p50 / peer:.3f}",
                "saved_mib": f"{saved[name]:.1f}",
                "saved_vs_batchnorm": f"{saved[name] / saved['BatchNorm']:.3f}",
                "batch": batch,
                "dtype": str(dtype).removeprefix("torch."),
            }
        )
        print(
            f"{name:18s} {p50:9.2f} ms ({p20:.2f} to {p80:.2f})  {p50 / peer:5.2f}x BatchNorm"
            f"  {saved[name]:8.1f} MiB saved for backward"
        )
    write_results(args.out, rows, device)


if __name__ == "__main__":
    main()
