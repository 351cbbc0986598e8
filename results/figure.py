"""Draw the README's picture, docs/overview.png, from the committed benchmark and study.

    python results/figure.py          (part of `make readme`; the tests check the numbers)

Four panels: time and activation memory of a training step of SegNet at batch 8, pixel error on
CamVid by batch size, and error of ResNet-20 on CIFAR-10 by batch size. The PNG carries its numbers
as JSON, so that a test can compare them with the files that they come from without comparing
pixels.
"""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from performance import NAMES, ROOT, Step, find, read_steps
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from deepcontrol.workbench.folders.runfolder import read_run
from deepcontrol.workbench.folders.studyfolder import Series, read_study
from deepcontrol.workbench.optim import learning_rate

PICTURE = ROOT / "docs" / "overview.png"
RUNS = ROOT / "results" / "camvid" / "runs"
CIFAR = ROOT / "results" / "cifar-batch"
DATA = "deepcontrol"  # key of the PNG's text that holds the numbers

NORMS = ("agc", "bn", "gn")
COLORS = {"agc": "#0072b2", "bn": "#d55e00", "gn": "#6b7785", "ws+gn": "#b8860b"}
LABELS = NAMES | {"ws+gn": "WS+GN"}
BATCHES = (1, 4, 8)
CIFAR_BATCHES = (1, 2, 4, 8, 32, 128)
CIFAR_NORMS = {"AGC+WS": "agc", "BatchNorm": "bn", "GroupNorm": "gn", "WS+GN": "ws+gn"}
CASE = ("segnet", 8, "bf16")
INK, FAINT = "#1c2733", "#5f6c7b"
STYLE: Any = {
    "font.size": 12.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13.0,
    "axes.titleweight": "bold",
}


@dataclass(frozen=True)
class Errors:
    """Final errors of one norm at one batch size, in percent, one per seed."""

    norm: str
    batch: int
    seeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.seeds)

    @property
    def spread(self) -> float:
        return stdev(self.seeds) if len(self.seeds) > 1 else 0.0


def measured_steps() -> list[Step]:
    """Return the fastest step of each norm that the benchmark has measured."""
    found = [find(read_steps(), CASE, norm) for norm in NORMS]
    return [steps[0] for steps in found if steps]


def measured_errors(runs: Path = RUNS) -> list[Errors]:
    """Return the final errors of SegNet at the paper's learning rate, for every norm with runs.

    The final error of a run is the mean of its validation error over the last tenth of the epochs,
    as in the study. Runs that diverged or are not finished are left out.
    """
    found = []
    for norm in NORMS:
        for batch in BATCHES:
            pattern = f"segnet-{norm}-b{batch}-lr{learning_rate(batch):g}-s*"
            seeds = [final_error(folder) for folder in sorted(runs.glob(pattern))]
            finished = tuple(error for error in seeds if error is not None)
            if finished:
                found.append(Errors(norm, batch, finished))
    return found


def cifar_errors(study: Path = CIFAR) -> list[Errors]:
    """Return the errors of ResNet-20 on CIFAR-10, at each norm's best learning rate."""
    (sweep,) = read_study(study).sweeps

    def errors(norm: str, series: Series) -> list[Errors]:
        points = [(p.x, tuple(e for e in p.error.values if e is not None)) for p in series.points]
        return [Errors(norm, int(batch), seeds) for batch, seeds in points if seeds]

    found = [errors(CIFAR_NORMS[s.label], s) for s in sweep.series if s.label in CIFAR_NORMS]
    return [e for each in found for e in each]


def final_error(folder: Path) -> float | None:
    """Return the final pixel error of a run in percent; None if it has none."""
    run = read_run(folder)
    # Epoch 0 is the evaluation before the first step.
    errors = [error for epoch, error in zip(*run.series("val_error"), strict=True) if epoch > 0]
    if run.diverged is not None or not errors or run.epochs_done != run.epochs_planned:
        return None
    return 100 * fmean(errors[-math.ceil(len(errors) / 10) :])


def numbers(steps: Sequence[Step], errors: Sequence[Errors], cifar: Sequence[Errors]) -> str:
    """Return everything that the picture shows, as JSON."""
    shown: dict[str, Sequence[Any]] = {"steps": steps, "errors": errors, "cifar": cifar}
    return json.dumps({name: [asdict(value) for value in values] for name, values in shown.items()})


def draw(steps: Sequence[Step], errors: Sequence[Errors], cifar: Sequence[Errors]) -> Figure:
    """Draw the four panels."""
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        figure = Figure(figsize=(15.5, 3.9), layout=layout, facecolor="white")
        time, memory, error, classes = figure.subplots(1, 4, width_ratios=(1, 1, 1.1, 1.5))
        time.set_title("Training step, ms")
        draw_bars(time, steps, [s.ms for s in steps], "{:.1f}")
        memory.set_title("Activations, MiB")
        draw_bars(memory, steps, [s.activations_mib for s in steps], "{:.0f}")
        error.set_title("Error on CamVid, %")
        draw_errors(error, errors, BATCHES)
        classes.set_title("Error on CIFAR-10, %")
        draw_errors(classes, cifar, CIFAR_BATCHES)
        figure.supxlabel(footnote(steps), x=0.012, ha="left", fontsize=10, color=FAINT)
    return figure


def footnote(steps: Sequence[Step]) -> str:
    """Describe the measurements, and mark steps from another run of the benchmark."""
    first = "Time and memory: SegNet, 256x512, batch 8, bf16, one H200, fastest engine measured"
    for step in steps:
        if step.run != steps[0].run:
            compiled = "" if "compile" in step.engine else ", not compiled"
            first += f" (* in an earlier run{compiled})"
    second = (
        "CamVid: SegNet, wrong pixels after 150 epochs, learning rate 0.02 x batch. Small dots are "
        "seeds, bars show the standard deviation."
    )
    third = (
        "CIFAR-10: ResNet-20 after 3 epochs, best of three learning rates, AGC with weight "
        "standardization."
    )
    return f"{first}.\n{second}\n{third}"


def draw_bars(axes: Axes, steps: Sequence[Step], values: Sequence[float], label: str) -> None:
    names = [NAMES[s.contender] + "*" * (s.run != steps[0].run) for s in steps]
    bars = axes.barh(names, values, height=0.68, color=[COLORS[s.contender] for s in steps])
    axes.bar_label(bars, [label.format(v) for v in values], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def draw_errors(axes: Axes, errors: Sequence[Errors], batches: Sequence[int]) -> None:
    """Draw one line per norm over the batch sizes; dots are seeds, bars standard deviations."""
    norms = list(dict.fromkeys(e.norm for e in errors))
    for i, norm in enumerate(norms):
        mine = [e for e in errors if e.norm == norm]
        shift = 0.06 * (i - (len(norms) - 1) / 2)
        at = [batches.index(e.batch) + shift for e in mine]
        means = [e.mean for e in mine]
        color = COLORS[norm]
        axes.plot(at, means, "o-", color=color, linewidth=2, markersize=6)
        axes.errorbar(at, means, [e.spread for e in mine], fmt="none", color=color, capsize=4)
        for x, e in zip(at, mine, strict=True):
            axes.plot([x + 0.05] * len(e.seeds), e.seeds, ".", color=color, alpha=0.4, markersize=5)
    last = len(batches) - 1
    for label in end_labels(errors):
        axes.text(last + 0.18, label.y, LABELS[label.norm], color=COLORS[label.norm], va="center")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_xlim(-0.3, last + 0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


@dataclass(frozen=True)
class Label:
    norm: str
    y: float


def end_labels(errors: Sequence[Errors]) -> list[Label]:
    """Place the names to the right of the last points, without overlap."""
    span = max(max(e.seeds) for e in errors) - min(min(e.seeds) for e in errors)
    last = {e.norm: e.mean for e in errors}  # errors are ordered by batch size
    labels: list[Label] = []
    for norm in sorted(last, key=lambda norm: last[norm]):
        lowest = labels[-1].y + 0.09 * span if labels else -math.inf
        labels.append(Label(norm, max(last[norm], lowest)))
    return labels


def save(figure: Figure, path: Path, text: str) -> None:
    """Write a PNG of 256 colors that carries `text`."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="png", dpi=120)
    picture = Image.open(file).convert("RGB")
    picture = picture.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    info = PngInfo()
    info.add_text(DATA, text)
    picture.save(path, optimize=True, pnginfo=info)


def main() -> None:
    measured = measured_steps(), measured_errors(), cifar_errors()
    save(draw(*measured), PICTURE, numbers(*measured))


if __name__ == "__main__":
    main()
