"""Show the progress of a run: terminal, TensorBoard, pictures of predictions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from torch import Tensor, nn

from ..data import VOID, BatchStream, Task
from ..data.inspect import colored
from ..data.survey import as_rgb
from ..folders.output import replacing
from ..sizes import Size
from .class_sheet import class_sheet
from .evaluate import evaluating, predict

SAMPLES_SHOWN = 4
ERROR_COLOR = (255, 48, 48)


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


# Pictures


def sample_sheet(
    model: nn.Module,
    batches: BatchStream,
    autocast: torch.dtype | None,
    window: Size | None = None,
) -> NDArray[np.uint8]:
    """Draw images, labels, predictions and errors side by side, one row per image.

    The images are spread evenly over the split. In distributed training all processes must call
    this function, and each draws its own images. For classification see `class_sheet`.

    Returns:
        The picture, (H, W, 3).
    """
    if batches.dataset.task == "classification":
        return class_sheet(model, batches, autocast)
    count = len(batches.dataset)
    # Evenly spread, because neighboring images may be frames of one scene.
    wanted = dict.fromkeys(i * count // SAMPLES_SHOWN for i in range(SAMPLES_SHOWN))
    rows: list[NDArray[np.uint8]] = []
    with evaluating(model, batches.device, autocast):
        for number, batch in enumerate(batches.epoch()):
            start = number * batches.batch_size
            offsets = [i - start for i in wanted if 0 <= i - start < batches.batch_size]
            if not offsets:
                continue
            predicted = predict(model, batch.images, window)
            for offset in offsets:
                i = min(offset // batches.world, len(predicted) - 1)
                rows.append(_sample_row(batch.images[i], batch.labels[i], predicted[i], batches))
    return np.vstack(rows)


def save_png(pixels: NDArray[np.uint8], path: Path) -> None:
    """Write a picture into a folder of the run folder."""
    with replacing(path, inside=path.parent.parent) as file:
        Image.fromarray(pixels).save(file, "PNG")


def _sample_row(
    image: Tensor, labels: Tensor, predicted: Tensor, batches: BatchStream
) -> NDArray[np.uint8]:
    if image.dim() == 4:
        depth = _shown_slice(labels)
        image, labels, predicted = image[:, depth], labels[depth], predicted[depth]
    shown = as_rgb(batches.pixels(image))
    truth, guess = labels.cpu().numpy(), predicted.to(torch.uint8).cpu().numpy()
    palette = batches.dataset.palette
    return np.hstack(
        [shown, colored(truth, palette), colored(guess, palette), _errors(truth, guess, shown)]
    )


def _shown_slice(labels: Tensor) -> int:
    """Return the slice of a volume with the most pixels of other classes than the background."""
    return int(((labels > 0) & (labels != VOID)).flatten(1).sum(1).argmax())


def _errors(
    truth: NDArray[np.uint8], guess: NDArray[np.uint8], shown: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Draw wrong pixels in red over the darkened image, and void pixels in black."""
    gray = shown.mean(2, keepdims=True) * 0.5
    picture = np.repeat(gray, 3, axis=2).astype(np.uint8)
    picture[(guess != truth) & (truth != VOID)] = ERROR_COLOR
    picture[truth == VOID] = 0
    return picture
