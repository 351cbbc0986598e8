"""Show a run's progress: terminal, TensorBoard, and sheets of validation images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from torch import Tensor, nn

from ..data import VOID, BatchStream, DatasetSplit, Source, Task
from ..data.drawing import colored, draw_captions, draw_legend, fit_text
from ..data.folder import FolderSource
from ..data.imagefolder import ImageFolder
from ..data.road_scenes import PairedFiles
from ..data.survey import as_rgb
from ..data.volumes import VolumeSplit
from ..folders.storage import replacing
from ..metrics import ImageError
from ..terminal import Size
from .evaluate import evaluating, predict

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
        f"The network predicts {name!r} for every validation {labeled}: it does not tell the "
        "classes apart. Train for more epochs, or try another --lr; `deepcontrol data check` shows "
        "how often each class occurs."
    )


def validation_note(
    histogram: Sequence[int], images: int, classes: Sequence[str], advice: str = "add images"
) -> str:
    """Return a warning if too few validation images can judge a network, else "".

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
            f"Only {images} validation image{'s' * (images != 1)}: the error of one image decides "
            f"which checkpoint is the best, and a difference of a few percent means nothing. To "
            f"get more, {advice}."
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


# Sheets of validation images. In distributed training all processes must call these functions, and
# all draw the same images.


Pixels = NDArray[np.uint8]  # (H, W, 3)

SAMPLES_SHOWN = 4  # images of a segmentation sheet
WORST_SHOWN = 6
MIN_COLUMN = 160  # pixels; smaller images are enlarged by a whole factor
COLUMN_NAMES = ("image", "label", "prediction", "wrong pixels in red")
ERROR_COLOR = (255, 48, 48)

# Classification
COLUMNS, ROWS = 8, 4
SIDE = 96  # pixels of an image on the sheet, at least
MARGIN, LINE = 6, 15  # pixels around an image, and of a line of text
RIGHT, WRONG = (28, 39, 51), (200, 30, 30)


def sample_sheet(
    model: nn.Module,
    batches: BatchStream,
    autocast: torch.dtype | None,
    window: Size | None = None,
) -> Pixels:
    """Draw images that are spread evenly over the split.

    Segmentation has a row per image: image, label, prediction, errors. Classification has a grid
    of images with their classes; wrong predictions are red.
    """
    classifies = batches.dataset.task == "classification"
    count = min(COLUMNS * ROWS if classifies else SAMPLES_SHOWN, len(batches.dataset))
    # Evenly spread, because neighboring images may be frames of one scene.
    indices = [i * len(batches.dataset) // count for i in range(count)]
    if classifies:
        return _class_sheet(model, batches, indices, autocast)
    return _segmentation_sheet(model, batches, indices, autocast, window)


def worst_sheet(
    model: nn.Module,
    batches: BatchStream,
    worst: Sequence[ImageError],
    names: Sequence[str],
    autocast: torch.dtype | None,
    window: Size | None = None,
) -> Pixels:
    """Draw the images with the highest errors, the worst first.

    Args:
        model: The network.
        batches: The validation images.
        worst: Images by falling error; the first ones are drawn.
        names: Name of each of them.
        autocast: Dtype for autocast, or None.
        window: Predict larger images in windows of this size.
    """
    if batches.dataset.task == "classification":
        indices = [image.sample for image in worst[: COLUMNS * ROWS]]
        return _class_sheet(model, batches, indices, autocast)
    shown = list(zip(worst, names, strict=True))[:WORST_SHOWN]
    captions = [f"{name}: {image.error:.1%} wrong" for image, name in shown]
    indices = [image.sample for image, _ in shown]
    return _segmentation_sheet(model, batches, indices, autocast, window, captions)


def sample_name(source: Source | DatasetSplit, index: int) -> str:
    """Return a sample's file name, a volume's case, or its number if it has no file."""
    match source:
        case PairedFiles():
            return source.pairs[index].image.name
        case FolderSource():
            place = source.places[index]
            tile = f" ({place.left}, {place.top})" if source.options.tile is not None else ""
            return f"{source.files[place.file].image.name}{tile}"
        case ImageFolder():
            return str(source.images[index].path.relative_to(source.root))
        case VolumeSplit():
            return source.dataset.name_of(index)
    return f"image {index}"


def save_png(pixels: Pixels, path: Path) -> None:
    """Write a picture into a folder of the run folder."""
    with replacing(path, inside=path.parent.parent) as file:
        Image.fromarray(pixels).save(file, "PNG")


# Segmentation


def _segmentation_sheet(
    model: nn.Module,
    batches: BatchStream,
    indices: Sequence[int],
    autocast: torch.dtype | None,
    window: Size | None,
    captions: Sequence[str] = (),
) -> Pixels:
    classes, palette = batches.dataset.classes, batches.dataset.palette
    rows: list[Pixels] = []
    with evaluating(model, batches.device, autocast):
        for index in indices:
            batch = batches.samples([index])
            guess = predict(model, batch.images, window)[0]
            rows.append(_row(batch.images[0], batch.labels[0], guess, batches))
    factor = max(1, -(-MIN_COLUMN // (rows[0].shape[1] // 4)))
    width = factor * rows[0].shape[1]
    parts = [draw_captions(COLUMN_NAMES, width // 4)]
    for number, row in enumerate(rows):
        if captions:
            parts.append(draw_captions([captions[number]], width))
        parts.append(row.repeat(factor, 0).repeat(factor, 1))
    legend = [*zip(classes, palette, strict=True), ("no label", (0, 0, 0))]
    return np.vstack([*parts, draw_legend(legend, width)])


def _row(image: Tensor, labels: Tensor, predicted: Tensor, batches: BatchStream) -> Pixels:
    """Draw image, label, prediction and errors; of a volume, its most labeled slice."""
    if image.dim() == 4:
        depth = int(((labels > 0) & (labels != VOID)).flatten(1).sum(1).argmax())
        image, labels, predicted = image[:, depth], labels[depth], predicted[depth]
    shown, palette = as_rgb(batches.pixels(image)), batches.dataset.palette
    truth, guess = (a.to(torch.uint8).cpu().numpy() for a in (labels, predicted))
    return np.hstack(
        [shown, colored(truth, palette), colored(guess, palette), _errors(truth, guess, shown)]
    )


def _errors(truth: NDArray[np.uint8], guess: NDArray[np.uint8], shown: Pixels) -> Pixels:
    """Draw wrong pixels in red over the darkened image, and void pixels in black."""
    gray = shown.mean(2, keepdims=True) * 0.5
    picture = np.repeat(gray, 3, axis=2).astype(np.uint8)
    picture[(guess != truth) & (truth != VOID)] = ERROR_COLOR
    picture[truth == VOID] = 0
    return picture


# Classification


def _class_sheet(
    model: nn.Module,
    batches: BatchStream,
    indices: list[int],
    autocast: torch.dtype | None,
) -> Pixels:
    batch = batches.samples(indices)
    with evaluating(model, batches.device, autocast):
        predicted = predict(model, batch.images).tolist()
    pictures = [_picture(as_rgb(batches.pixels(image))) for image in batch.images]
    return draw_sheet(pictures, batch.labels.tolist(), predicted, batches.dataset.classes)


def draw_sheet(
    pictures: list[Image.Image], labels: list[int], predicted: list[int], classes: tuple[str, ...]
) -> Pixels:
    """Draw pictures of one size in rows of COLUMNS, with their classes.

    Under each image are its class and, after an arrow, a wrong prediction.

    Args:
        pictures: The images.
        labels: True class of each image; negative if it has none.
        predicted: Predicted class of each image.
        classes: Names of the classes.
    """
    width, height = pictures[0].size
    cell = (width + 2 * MARGIN, height + 2 * MARGIN + 2 * LINE)
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (cell[0] * min(COLUMNS, len(pictures)), cell[1] * rows), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for i, (picture, label, guess) in enumerate(zip(pictures, labels, predicted, strict=True)):
        left, top = cell[0] * (i % COLUMNS) + MARGIN, cell[1] * (i // COLUMNS) + MARGIN
        is_wrong = label >= 0 and guess != label
        if is_wrong:
            frame = (left - 3, top - 3, left + width + 2, top + height + 2)
            draw.rectangle(frame, outline=WRONG, width=3)
        sheet.paste(picture, (left, top))
        lines = [classes[label] if label >= 0 else "no class"]
        if guess != label:
            lines.append(f"-> {classes[guess]}")
        for number, text in enumerate(lines):
            place = (left, top + height + 2 + LINE * number)
            draw.text(place, fit_text(text, font, width), WRONG if is_wrong else RIGHT, font)
    return np.asarray(sheet)


def _picture(pixels: Pixels) -> Image.Image:
    """Return pixels as a picture, enlarged by a whole factor."""
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    factor = max(1, -(-SIDE // min(picture.size)))
    return picture.resize(
        (factor * picture.width, factor * picture.height), Image.Resampling.NEAREST
    )
