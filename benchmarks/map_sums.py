"""Time converted networks with and without the hand-over of map sums.

    python benchmarks/map_sums.py [--rounds 40] [--out benchmarks/results/map-sums-cuda.csv]

If a 3x3 neuron consumes the output of another neuron, to_agc lets the first one store its map sums,
and the 3x3 neuron derives its mean from them (deepcontrol/ops/gain_conv.py). Each network is
converted once and trained in two captured steps, one with these hints and one without, in turn:
bf16 autocast, channels_last, learning rate 0. A network without hints (the blocks of
torchvision's ResNets call one ReLU three times, so it stays between their neurons) shows the noise.
Networks of libraries that are not installed are skipped. Takes about two minutes on an H200.
"""

import argparse
import copy
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import TrainingStep, to_agc
from deepcontrol.nn import AGCConv2d
from deepcontrol.workbench.bench.measure import milliseconds, percentiles
from deepcontrol.workbench.bench.results import source_hash, write_results
from deepcontrol.workbench.hardware import hardware
from deepcontrol.workbench.losses import pixel_cross_entropy
from deepcontrol.workbench.models import UNet

Row = dict[str, object]

CLASSES = 19
WARM_UP = 6  # steps; a graph is captured at the fourth


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, num_classes=CLASSES)
    return model


def smp_unet() -> nn.Module:
    smp = importlib.import_module("segmentation_models_pytorch")
    model: nn.Module = smp.Unet("resnet34", encoder_weights=None, classes=CLASSES)
    return model


class PlainUNet(nn.Module):
    """U-Net (Ronneberger et al.) with BatchNorm: two 3x3 convolutions per resolution."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.encoder = nn.ModuleList(double_conv(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs[:0:-1])
        self.decoder = nn.ModuleList(double_conv(2 * a, a) for a, _ in pairs[:0:-1])
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, encode in enumerate(self.encoder):
            x = encode(functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for up, decode in zip(self.up, self.decoder, strict=True):
            x = decode(torch.cat([skips.pop(), up(x)], 1))
        y: Tensor = self.head(x)
        return y


def double_conv(a: int, b: int) -> nn.Sequential:
    def layers(c: int) -> list[nn.Module]:
        return [nn.Conv2d(c, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]

    return nn.Sequential(*layers(a), *layers(b))


class Network(NamedTuple):
    """A network, its library, and the shape of its batch."""

    build: Callable[[], nn.Module]
    library: str
    batch: int
    size: tuple[int, int]
    is_segmentation: bool


NETWORKS = {
    "vgg16_bn": Network(
        lambda: torchvision_model("vgg16_bn"), "torchvision", 64, (224, 224), False
    ),
    "resnet50": Network(
        lambda: torchvision_model("resnet50"), "torchvision", 64, (224, 224), False
    ),
    "plain-unet": Network(PlainUNet, "deepcontrol", 8, (256, 512), True),
    "residual-unet": Network(lambda: UNet(CLASSES, norm="bn"), "deepcontrol", 8, (256, 512), True),
    "smp-unet-resnet34": Network(smp_unet, "segmentation_models_pytorch", 8, (256, 512), True),
}


def training_steps(network: Network, device: str) -> dict[str, TrainingStep]:
    """Return the captured step of a converted network, with hints and without."""
    torch.manual_seed(0)
    example = torch.randn(1, 3, 64, 64)
    model = to_agc(network.build(), example=example).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    without = copy.deepcopy(model)
    for module in without.modules():
        if isinstance(module, AGCConv2d):
            module.consumer_ratio = 0.0
    loss: Any = pixel_cross_entropy if network.is_segmentation else functional.cross_entropy
    gpu = device == "cuda"
    return {
        name: TrainingStep(
            each.train(),
            loss,
            torch.optim.SGD(each.parameters(), lr=0.0, momentum=0.9, fused=gpu),
            autocast=torch.bfloat16 if gpu else None,
        )
        for name, each in (("on", model), ("off", without))
    }


def measure(name: str, rounds: int, device: str, batch: int, size: tuple[int, int]) -> Row:
    """Return the row of a network."""
    network = NETWORKS[name]
    steps = training_steps(network, device)
    inputs = torch.randn(batch, 3, *size, device=device)
    inputs = inputs.to(memory_format=torch.channels_last)
    labels = (batch, *size) if network.is_segmentation else (batch,)
    targets = torch.randint(CLASSES, labels, device=device)
    times: dict[str, list[float]] = {key: [] for key in steps}
    for repetition in range(WARM_UP + rounds):
        for key, step in steps.items():
            elapsed = milliseconds(partial(step, inputs, targets), device)
            if device == "cuda" and repetition >= WARM_UP and step.why_eager is not None:
                raise RuntimeError(f"{name} was not captured in a CUDA graph: {step.why_eager}")
            if repetition >= WARM_UP:
                times[key].append(elapsed)
    ratios = [a / b for a, b in zip(times["on"], times["off"], strict=True)]
    neurons = [m for m in steps["on"].model.modules() if isinstance(m, AGCConv2d)]
    row: Row = {
        "network": name,
        "batch": batch,
        "size": "x".join(map(str, size)),
        "neurons": len(neurons),
        "hints": sum(neuron.consumer_ratio > 0 for neuron in neurons),
        **percentiles("on_ms", times["on"]),
        **percentiles("off_ms", times["off"]),
        **percentiles("on_vs_off", ratios),
        "rounds": rounds,
        "source": source_hash(),
    }
    print(
        f"{name:18s} {row['hints']:>3} hints  on {row['on_ms_p50']} ms, off {row['off_ms_p50']} ms,"
        f" ratio {row['on_vs_off_p50']} ({row['on_vs_off_p20']} to {row['on_vs_off_p80']})",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each, at least 2")
    parser.add_argument("--batch", type=int, help="batch size of all networks")
    parser.add_argument("--size", type=int, nargs=2, help="height and width of all networks")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")
    print(f"Map sums on {hardware(args.device)}, {args.rounds} rounds.")
    rows: list[Row] = []
    for name in args.networks:
        network = NETWORKS[name]
        if importlib.util.find_spec(network.library) is None:
            print(f"{name:18s} skipped: {network.library} is not installed")
            continue
        size = tuple(args.size) if args.size else network.size
        rows.append(measure(name, args.rounds, args.device, args.batch or network.batch, size))
        if args.device == "cuda":
            torch.cuda.empty_cache()
    write_results(
        args.out or Path(f"benchmarks/results/map-sums-{args.device}.csv"), rows, args.device
    )


if __name__ == "__main__":
    main()
