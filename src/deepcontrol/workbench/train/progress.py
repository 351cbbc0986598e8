"""Show the progress of a run: terminal and TensorBoard."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..data import Task

FEW_IMAGES = 10  # validation images, below which there is a warning


# Terminal


class Display:
    """Print lines, and show a live progress bar if the console is a terminal.

    Args:
        console: Rich console.
        enabled: False in all processes but the main one.
        prefix: Start of every line.
    """

    def __init__(self, console: Console, enabled: bool = True, prefix: str = "") -> None:
        self.console, self.enabled, self.prefix = console, enabled, prefix
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[status]}"),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not (enabled and console.is_terminal),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def log(self, text: str) -> None:
        """Print a line."""
        if not self.enabled:
            return
        try:
            self.console.print(escape(self.prefix + text), highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich exits on a closed pipe; the run must continue
            self.enabled = False

    def start_bar(self, name: str, total: int) -> None:
        """Replace the progress bar."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, status="")

    def advance(self, done: int, status: str = "") -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, status=status)

    def decoding(self, name: str, done: int, total: int) -> None:
        """Show how many images of a dataset are decoded."""
        if done == 1:
            self.start_bar(f"decoding {name}", total)
        self.advance(done)


def step_status(loss: float, images_per_s: float, mib: float, images_left: int) -> str:
    """Return the text next to an epoch's bar. The time left is for the whole run."""
    left = duration(images_left / images_per_s)
    return f"loss {loss:.4f}  {images_per_s:.1f} images/s  {mib:,.0f} MiB  {left} left"


def one_class_line(name: str, task: Task) -> str:
    """Return the line printed if the trained network predicts one class everywhere."""
    labeled = "pixel" if task == "segmentation" else "image"
    return (
        f"The network predicts {name!r} for every validation {labeled}: it has learned nothing but "
        "the most frequent class. Train for more epochs, or try another --lr; `deepcontrol data "
        "check` shows how often each class occurs."
    )


def validation_note(
    histogram: Sequence[int], images: int, classes: Sequence[str], advice: str = "add images"
) -> str:
    """Return a warning if the validation images are too few to judge a network, else "".

    Args:
        histogram: Pixels or images of each class.
        images: Number of validation images.
        classes: Names of the classes.
        advice: How to get more of them.

    >>> validation_note([40, 2], 4, ("apple", "leaf")).split(":")[0]
    'Only 4 validation images'
    >>> validation_note([40, 0], 20, ("apple", "leaf")).split(",")[0]
    'No validation image has the class leaf'
    """
    if images < FEW_IMAGES:
        return (
            f"Only {images} validation images: the error of one image decides which checkpoint is "
            f"the best, and a difference of a few percent means nothing. To get more, {advice}."
        )
    missing = [name for name, count in zip(classes, histogram, strict=True) if not count]
    if missing:
        listed = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        return f"No validation image has the class {listed}, so its error is unknown: {advice}."
    return ""


def epoch_line(metrics: dict[str, float], epochs: int) -> str:
    """Return the line printed after an epoch, from its record in metrics.jsonl."""
    parts = [f"epoch {metrics['epoch']}/{epochs}"]
    if metrics["train_loss"] is not None:
        parts.append(f"loss {metrics['train_loss']:.4f}")
    parts.append(f"val error {metrics['val_error']:.2%}")
    if "val_mean_iou" in metrics:  # segmentation
        parts.append(f"mean IoU {metrics['val_mean_iou']:.3f}")
    if metrics["images_per_s"] is not None:
        parts.append(f"{metrics['images_per_s']:.1f} images/s")
    parts += [f"{metrics['peak_mib']:,.0f} MiB", duration(metrics["seconds"])]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds as M:SS or H:MM:SS.

    >>> duration(75), duration(3 * 86400 + 3600)
    ('1:15', '73:00:00')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# TensorBoard


class Events:
    """Write TensorBoard events until the first error, such as a full disk."""

    def __init__(self, folder: Path, next_epoch: int, log: Callable[[str], None]) -> None:
        self._log = log
        self._writer: Any = None
        with self._errors_logged():
            from torch.utils.tensorboard import SummaryWriter  # TensorBoard is optional

            self._writer = SummaryWriter(str(folder), purge_step=next_epoch)

    def write(self, values: Mapping[str, float], epoch: int) -> None:
        """Write one scalar per name and flush."""
        with self._errors_logged():
            if self._writer is not None:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, epoch)
                self._writer.flush()

    def close(self) -> None:
        with self._errors_logged():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        try:
            yield
        except (ImportError, UnicodeError) as error:  # TensorBoard's paths must be UTF-8
            self._log(f"no TensorBoard events are written: {error}")
        except OSError as error:
            self._writer = None
            self._log(f"TensorBoard events stopped: {error}")
