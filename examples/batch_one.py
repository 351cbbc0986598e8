"""AGC beside BatchNorm at batch 1, on the CPU, in a minute or two.

Two small networks that differ in nothing but their normalisation learn to label discs, squares
and triangles, pixel by pixel, one image at a time. Every image has its own light, as photographs
have: at batch 1 BatchNorm trains on each image's statistics and is evaluated with an average that
fits none of them, while AGC (automatic gain control) is one function throughout.

    python examples/batch_one.py [--steps 1000] [--seeds 2] [--out out/batch_one]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import matplotlib
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from deepcontrol import AGCConv2d, he_init_

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CLASSES = ("ground", "disc", "square", "triangle")
COLOURS = torch.tensor(
    [[0.16, 0.18, 0.22], [0.90, 0.35, 0.25], [0.25, 0.65, 0.90], [0.95, 0.80, 0.3]]
)
SIZE = 64
VALIDATION = 64


def make_image(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """An image (3, 64, 64) of three shapes in uneven light, and its labels (64, 64)."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=rng)

    y, x = torch.meshgrid(torch.arange(SIZE) + 0.5, torch.arange(SIZE) + 0.5, indexing="ij")
    image = uniform(0.2, 0.8, 3, 1, 1).expand(3, SIZE, SIZE)
    labels = torch.zeros(SIZE, SIZE, dtype=torch.long)
    for _ in range(3):
        kind = int(torch.randint(1, 4, (), generator=rng))
        cx, cy = uniform(8, SIZE - 8, 2)
        r, dx, dy = uniform(7, 12, 1), x - cx, y - cy
        inside = {
            1: dx**2 + dy**2 < r**2,
            2: torch.maximum(dx.abs(), dy.abs()) < 0.85 * r,
            3: (dy < 0.6 * r) & (1.7 * dx.abs() - dy < 1.1 * r),
        }[kind]
        image = torch.where(inside, uniform(0.0, 1.0, 3, 1, 1), image)
        labels = torch.where(inside, kind, labels)
    slope = (x * uniform(-1, 1, 1) + y * uniform(-1, 1, 1)) / SIZE
    light = uniform(0.3, 2.0, 1) * (1 + 0.5 * slope) + uniform(-0.8, 0.8, 3, 1, 1)
    return image * light + 0.05 * torch.randn(3, SIZE, SIZE, generator=rng), labels


def agc_block(a: int, b: int, stride: int) -> nn.Module:
    return AGCConv2d(a, b, 3, stride, padding=1)


def batchnorm_block(a: int, b: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()
    )


def network(block: Callable[[int, int, int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        block(3, 16, 1),
        block(16, 32, 2),
        block(32, 32, 1),
        block(32, 48, 2),
        block(48, 48, 1),
        block(48, 48, 1),
        nn.Upsample(scale_factor=2),
        block(48, 32, 1),
        nn.Upsample(scale_factor=2),
        block(32, 16, 1),
        nn.Conv2d(16, len(CLASSES), 1),
    )


@torch.no_grad()
def pixel_error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of wrongly labelled pixels, in %, in evaluation mode."""
    model.eval()
    wrong = torch.cat([model(a).argmax(1) for a in images.split(16)]) != labels
    model.train()
    return 100 * wrong.float().mean().item()


def train(
    block: Callable[[int, int, int], nn.Module], seed: int, steps: int, tick: Callable[[], None]
) -> tuple[list[tuple[int, float]], nn.Module]:
    """The validation error along one run of the paper's recipe: SGD, momentum 0.9, rate 0.02."""
    rng = torch.Generator().manual_seed(seed)
    model = he_init_(network(block), rng)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    validation = validation_set()
    curve = []
    for step in range(1, steps + 1):
        image, labels = make_image(rng)
        loss = nn.functional.cross_entropy(model(image[None]), labels[None])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % max(1, steps // 12) == 0 or step == steps:
            curve.append((step, pixel_error(model, *validation)))
        tick()
    return curve, model


def validation_set() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1_000_000)
    images, labels = zip(*(make_image(rng) for _ in range(VALIDATION)), strict=True)
    return torch.stack(images), torch.stack(labels)


def draw(
    curves: dict[str, list[list[tuple[int, float]]]], models: dict[str, nn.Module], path: Path
) -> None:
    """Curves over all seeds on the left; images, truth and both predictions on the right."""
    images, labels = validation_set()
    figure = plt.figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15])  # type: ignore[misc]
    axes = left.subplots()
    for (name, runs), colour in zip(curves.items(), ("#1f77b4", "#d62728"), strict=True):
        for i, run in enumerate(runs):
            axes.plot(*zip(*run, strict=True), color=colour, label=None if i else name, alpha=0.85)
    axes.set(xlabel="images seen, one at a time", ylabel="validation error, % of pixels")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    rows = 3
    grid = right.subplots(rows, 2 + len(models))
    for row in range(rows):
        shown = (images[row] - images[row].amin()) / (images[row].amax() - images[row].amin())
        pictures = {"image": shown.movedim(0, -1), "truth": COLOURS[labels[row]]}
        for name, model in models.items():
            model.eval()
            with torch.no_grad():
                pictures[name] = COLOURS[model(images[row : row + 1]).argmax(1)[0]]
        for axis, (title, picture) in zip(grid[row], pictures.items(), strict=True):
            axis.imshow(picture.numpy())
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=1000, help="training images a run")
    parser.add_argument("--seeds", type=positive, default=2, help="runs of each network")
    parser.add_argument(
        "--out", type=Path, default=Path("out/batch_one"), help="folder for the PNG"
    )
    args = parser.parse_args()

    blocks = {"AGC": agc_block, "BatchNorm": batchnorm_block}
    console = Console()
    console.print("Training AGC and BatchNorm at batch 1 on the CPU, one image at a time.")
    curves: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in blocks}
    models, seconds = {}, dict.fromkeys(blocks, 0.0)
    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=len(blocks) * args.seeds * args.steps)
        for seed in range(args.seeds):
            for name, block in blocks.items():
                progress.update(bar, description=f"{name}, seed {seed}")
                start = time.perf_counter()
                curve, models[name] = train(block, seed, args.steps, lambda: progress.advance(bar))
                seconds[name] += time.perf_counter() - start
                curves[name].append(curve)

    table = Table(title=f"Validation error after {args.steps} images, {args.seeds} seeds")
    for column in ("", "mean %", "best %", "worst %", "time"):
        table.add_column(column, justify="left" if not column else "right")
    for name, runs in curves.items():
        final = [run[-1][1] for run in runs]
        numbers = (f"{f(final):.1f}" for f in (mean, min, max))
        table.add_row(name, *numbers, f"{seconds[name]:.0f} s")
    ground = (validation_set()[1] != 0).float().mean().item()
    table.add_section()
    table.add_row("ground everywhere", f"{100 * ground:.1f}", "", "", "")
    console.print(table)
    path = args.out / "batch_one.png"
    draw(curves, models, path)
    console.print(f"Curves and predictions: {path}")


if __name__ == "__main__":
    main()
