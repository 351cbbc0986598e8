r"""Measure signal and gradient over the depth of ResNets; draw docs/signal.png.

    python benchmarks/signal_depth.py --out benchmarks/results/signal-depth.csv \
        --picture docs/signal.png

ResNets for CIFAR (He et al. 2015, section 4.2) at initialization, on random images: with BatchNorm;
converted to AGC with all gains at 1; and with the last gain of each residual branch at
1/sqrt(number of branches). Each row of the CSV is the sum at the end of a block, or the logits.
With --draw the picture is drawn from the existing CSV. Takes a minute on a CPU.
"""

import argparse
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from deepcontrol import AGCConv2d, he_init_, signal_report, to_agc
from deepcontrol.workbench.bench.results import Row, read_rows, write_results

BATCHNORM, PLAIN, SCALED = "BatchNorm", "AGC, all gains 1", "AGC, last gains 1/sqrt(blocks)"
STARTS = (BATCHNORM, PLAIN, SCALED)
COLORS = {BATCHNORM: "#d55e00", PLAIN: "#6b7785", SCALED: "#0072b2"}
LINES = ("-", "--", ":")  # of the depths, deepest first
INK, FAINT = "#1c2733", "#aab4be"
DIGEST = "csv-sha256"  # key of the PNG's text that tells which CSV it was drawn from
STYLE: Any = {
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
}


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(branch + self.shortcut(x))


def resnet(depth: int, width: int = 16) -> nn.Sequential:
    """Build a (6n + 2)-layer ResNet with BatchNorm for 32x32 images and ten classes."""
    if depth % 6 != 2:
        raise ValueError(f"depth must be 6n + 2, got {depth}: choose 20, 32, 44, 56 or 110")
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    blocks, channels = [], width
    for stage in range(3):
        for i in range(depth // 6):
            blocks.append(Block(channels, width * 2**stage, 2 if stage and not i else 1))
            channels = width * 2**stage
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
    return nn.Sequential(*stem, *blocks, *head)


def build(depth: int, start: str) -> nn.Module:
    """Build a network with one of STARTS."""
    model: nn.Module = he_init_(resnet(depth))
    if start == BATCHNORM:
        return model
    model = to_agc(model, init="paper")
    branches = [module.conv2 for module in model.modules() if isinstance(module, Block)]
    for neuron in branches if start == SCALED else []:
        assert isinstance(neuron, AGCConv2d)
        nn.init.constant_(neuron.gain, 1 / math.sqrt(len(branches)))
    return model


def measure(depth: int, start: str, seed: int, batch: int, device: str) -> list[dict[str, Any]]:
    """Return a row for the sum of each block, and one for the logits."""
    torch.manual_seed(seed)
    model = build(depth, start).to(device)
    report = signal_report(model, torch.randn(batch, 3, 32, 32).to(device))
    sums = [layer for layer in report if layer.kind == "add"]
    flags = ", ".join(flag.kind for flag in report.flags) or "none"
    print(f"ResNet-{depth}, {start}: logits' variance {report[-1].variance:.3g}, flags: {flags}")
    return [
        {
            "depth": depth,
            "start": start,
            "seed": seed,
            "batch": batch,
            "block": "logits" if layer is report[-1] else i,
            "variance": f"{layer.variance:.3e}",
            "gradient_variance": f"{layer.gradient_variance:.3e}",
            "flags": flags,
        }
        for i, layer in enumerate([*sums, report[-1]], 1)
    ]


def draw(rows: Sequence[Row], path: Path, digest: str) -> None:
    """Draw variance and gradient over the blocks."""
    depths = sorted({int(row["depth"]) for row in rows}, reverse=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_panel(left, rows, depths, "variance", "Variance of the signal")
        draw_panel(right, rows, depths, "gradient_variance", "Variance of its gradient")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={DIGEST: digest})


def draw_panel(
    axes: Axes, rows: Sequence[Row], depths: Sequence[int], column: str, title: str
) -> None:
    for start in STARTS:
        for depth, line in zip(depths, LINES, strict=False):
            found = [
                (int(row["block"]), float(row[column]))
                for row in rows
                if (row["start"], row["depth"]) == (start, str(depth)) and row["block"] != "logits"
            ]
            blocks, values = zip(*found, strict=True)
            label = f"{start}, ResNet-{depth}"
            axes.plot(blocks, values, line, color=COLORS[start], linewidth=1.8, label=label)
    axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel("residual block")
    axes.grid(axis="y", color=FAINT, alpha=0.4, linewidth=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/signal-depth.csv"), help="CSV file")
    parser.add_argument("--picture", type=Path, default=Path("out/signal.png"), help="PNG file")
    parser.add_argument("--draw", action="store_true", help="draw an existing CSV")
    parser.add_argument("--depths", type=int, nargs="+", default=[56, 110])
    parser.add_argument("--batch", type=int, default=32, help="batch size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    if not flags.draw:
        rows = [
            row
            for depth in flags.depths
            for start in STARTS
            for row in measure(depth, start, flags.seed, flags.batch, flags.device)
        ]
        write_results(flags.out, rows, flags.device)
    digest = hashlib.sha256(flags.out.read_bytes()).hexdigest()
    draw(read_rows(flags.out), flags.picture, digest)
    print(f"Wrote {flags.picture}")


if __name__ == "__main__":
    main()
