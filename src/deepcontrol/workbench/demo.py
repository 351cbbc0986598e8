"""`deepcontrol demo`: compare AGC and BatchNorm, trained at batch size 1.

The demo draws pictures of apples and leaves, trains a small U-Net on them with each norm and some
seeds, and measures error, step time and memory. All figures are from the machine that runs it.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from ..nn import saved_bytes
from ..step import TrainingStep
from .data.batches import normalized
from .data.classfile import YAML
from .data.drawing import colored, draw_captions, draw_legend
from .folders.runfolder import read_run
from .folders.storage import replacing, write_atomic
from .losses import pixel_cross_entropy
from .predict import Network, load_network
from .report.comparison import Comparison, Side, comparison_lines, write_comparison_page
from .train.config import Train
from .train.config_file import load_config
from .train.data import open_split
from .train.evaluate import evaluating, predict

NORMS = {"agc": "AGC", "bn": "BatchNorm"}
SEEDS = (0, 1)
IMAGES, EPOCHS, SIZE, WIDTH = 60, 8, (96, 128), 0.25
SHOWN = 4  # validation images in the picture
LINE = 4  # pixels between images
COLUMN = 240  # pixels of an image in the picture, at least
TIMED_STEPS = 30
CLASSES = """\
classes:
  - {name: table, id: 0, color: "#464646"}
  - {name: apple, id: 1, color: "#e63c32"}
  - {name: leaf, id: 2, color: "#3caa50"}
"""


@dataclass(frozen=True)
class Demo:
    """Compare AGC and BatchNorm at batch size 1 in error, time and memory.

    Draws 60 pictures with masks, trains a small U-Net on them four times on the CPU (two norms,
    two seeds), and writes a page with the figures and the predictions. Takes under 3 minutes on
    two cores. The same command continues an interrupted demo.
    """

    out: Path = Path("out/demo")
    """Folder for the pictures, the runs and the page."""


def run_demo(command: Demo, console: Console) -> int:
    """Run `deepcontrol demo` and return the exit code."""
    started = time.perf_counter()
    data = command.out / "data"
    draw_data(data)
    runs = {norm: [command.out / "runs" / f"{norm}-s{seed}" for seed in SEEDS] for norm in NORMS}
    console.print(
        f"Training a U-Net with AGC and with BatchNorm on {IMAGES} drawn pictures, batch size 1, "
        f"{len(SEEDS)} seeds each.",
        highlight=False,
        soft_wrap=True,
    )
    train_all([train_command(run, data, norm, seed) for norm, of in runs.items()
               for seed, run in zip(SEEDS, of, strict=True)], console)  # fmt: skip
    networks = {norm: load_network(of[0], "last", torch.device("cpu")) for norm, of in runs.items()}
    picture = draw_predictions(networks, runs["agc"][0])
    with replacing(command.out / "predictions.png", inside=command.out) as file:
        picture.save(file, "PNG")
    milliseconds = step_times(networks)
    comparison = Comparison(
        sides=tuple(
            Side(
                name=NORMS[norm],
                errors=tuple(read_run(run).series("val_error")[1][-1] for run in of),
                milliseconds=milliseconds[norm],
                saved_mib=saved_bytes(networks[norm].model, torch.zeros(1, 3, *SIZE)) / 2**20,
            )
            for norm, of in runs.items()
        ),
        seeds=SEEDS,
        images=IMAGES,
        epochs=EPOCHS,
        size=SIZE,
        machine=str(read_run(runs["agc"][0]).about.get("machine")),
        seconds=time.perf_counter() - started,
    )
    page = write_comparison_page(comparison, command.out / "predictions.png", command.out)
    _print(comparison, page, console)
    return 0


# Data


def draw_data(folder: Path) -> None:
    """Draw the pictures and masks, unless the folder has them."""
    if (folder / YAML).exists():
        return
    rng = random.Random(0)
    for i in range(IMAGES):
        picture, mask = _draw(rng, 2 * SIZE[1], 2 * SIZE[0])
        for name, image in (("images", picture), ("masks", mask)):
            with replacing(folder / name / f"{i:02}.png", inside=folder) as file:
                image.save(file, "PNG")
    write_atomic(folder / YAML, CLASSES, inside=folder)  # last: the folder is complete


def _draw(rng: random.Random, width: int, height: int) -> tuple[Image.Image, Image.Image]:
    """Draw apples and leaves on a table; return the picture and its mask."""
    table = tuple(rng.choices(range(120, 200), k=3))
    picture = Image.new("RGB", (width, height), table)
    mask = Image.new("L", (width, height))
    for _ in range(rng.randint(2, 6)):
        r = rng.randint(min(width, height) // 14, min(width, height) // 5)
        x, y = rng.randint(r, width - r), rng.randint(r, height - r)
        if rng.random() < 0.5:
            color = (rng.randint(150, 230), rng.randint(10, 70), rng.randint(10, 60))
            for image, value in ((picture, color), (mask, 1)):
                ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), value)
        else:
            color = (rng.randint(20, 90), rng.randint(110, 190), rng.randint(20, 80))
            corners = [(x - r, y), (x, y - r // 2), (x + r, y), (x, y + r // 2)]
            for image, value in ((picture, color), (mask, 2)):
                ImageDraw.Draw(image).polygon(corners, value)
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, 12, (height, width, 3))
    noisy = (np.asarray(picture.filter(ImageFilter.GaussianBlur(1))) + noise).clip(0, 255)
    return Image.fromarray(noisy.astype(np.uint8)), mask


# Training


def train_command(run: Path, data: Path, norm: str, seed: int) -> list[str]:
    """Return the command that trains one run."""
    height, width = SIZE
    return [
        *(sys.executable, "-m", "deepcontrol", "train", "--out", str(run), "--norm", norm),
        *("--data", "folder", "--data-root", str(data), "--model", "unet", "--device", "cpu"),
        *("--width", str(WIDTH), "--size", f"{height}x{width}", "--batch-size", "1"),
        *("--epochs", str(EPOCHS), "--schedule", "cosine", "--seed", str(seed)),
    ]


def train_all(commands: Sequence[list[str]], console: Console) -> None:
    """Run training commands, as many at a time as there are cores, one thread each.

    Raises:
        ValueError: A training failed. The message is its own.
    """
    waiting, slots = list(commands), max(1, min(len(commands), len(os.sched_getaffinity(0))))
    running: list[subprocess.Popen[bytes]] = []
    with Progress(console=console, transient=True) as progress, _stopping(running):
        bar = progress.add_task("training", total=len(commands) * (EPOCHS + 1))
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(_start(waiting.pop(0)))
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                running.remove(process)
                errors = process.communicate()[1].decode(errors="replace").strip().splitlines()
                if process.returncode:
                    reason = errors[-1] if errors else f"exit code {process.returncode}"
                    raise ValueError(f"a training failed: {reason}")
            progress.update(bar, completed=sum(map(_epochs_done, commands)))


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # One thread each: the runs share the cores, and the results do not depend on their number.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


@contextmanager
def _stopping(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Stop the processes when the block ends early. They save a checkpoint."""
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.communicate()  # waits, and closes its pipe


def _epochs_done(command: list[str]) -> int:
    try:
        return len(read_run(Path(command[command.index("--out") + 1])).metrics)
    except ValueError:  # not started yet
        return 0


# Measurements


def step_times(networks: dict[str, Network]) -> dict[str, float]:
    """Return the median milliseconds of a training step at batch size 1.

    The networks take turns, so that other programs slow all of them down, on one thread: two
    threads wait for each other if the cores are busy.
    """
    torch.set_num_threads(1)
    steps = {norm: _training_step(network.model) for norm, network in networks.items()}
    images, labels = torch.randn(1, 3, *SIZE), torch.randint(3, (1, *SIZE)).to(torch.uint8)
    times: dict[str, list[float]] = {norm: [] for norm in steps}
    for number in range(TIMED_STEPS + 3):
        for norm, step in steps.items():
            started = time.perf_counter()
            step(images, labels)
            if number >= 3:  # the first steps allocate memory
                times[norm].append(1e3 * (time.perf_counter() - started))
    return {norm: median(of) for norm, of in times.items()}


def _training_step(model: nn.Module) -> TrainingStep:
    # Learning rate 0 does all the work of an update and keeps the weights.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    return TrainingStep(model.train(), pixel_cross_entropy, optimizer)


def draw_predictions(networks: dict[str, Network], run: Path) -> Image.Image:
    """Draw validation images with their labels and the prediction of each network."""
    config: Train = load_config(run)[0]
    source = open_split(config, "val", None)
    factor = -(-COLUMN // SIZE[1])
    names = ("image", "label", *(NORMS[norm] for norm in networks))
    parts = [draw_captions(names, factor * SIZE[1])]
    for index in range(min(SHOWN, len(source))):
        sample = source.read(index, SIZE)
        images = normalized(torch.from_numpy(sample.image).unsqueeze(0))
        columns = [sample.image, colored(sample.labels.astype(np.uint8), source.palette)]
        for network in networks.values():
            columns.append(colored(_predict(network.model, images), source.palette))
        row = np.hstack(columns).repeat(factor, 0).repeat(factor, 1)
        row[-LINE:] = 255  # white lines between images
        for left in range(factor * SIZE[1], row.shape[1], factor * SIZE[1]):
            row[:, left - LINE : left] = 255
        parts.append(row)
    legend = list(zip(source.classes, source.palette, strict=True))
    return Image.fromarray(np.vstack([*parts, draw_legend(legend, parts[0].shape[1])]))


def _predict(model: nn.Module, images: Tensor) -> np.ndarray:
    with evaluating(model, torch.device("cpu"), None):
        return predict(model, images)[0].to(torch.uint8).numpy()


def _print(comparison: Comparison, page: Path, console: Console) -> None:
    table = Table("batch size 1", *(side.name for side in comparison.sides))
    for name, values in comparison_lines(comparison).items():
        table.add_row(name, *values)
    console.print(table)
    console.print(escape(f"Open {page.resolve().as_uri()}"), highlight=False, soft_wrap=True)
