"""The commands `deepcontrol data init`, `data check` and `data sheet`."""

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .data import DataName, data_task, nnunet, open_source, volumes
from .data.classfile import YAML, ClassFile, format_yaml, read_class_file
from .data.coco import open_coco
from .data.drawing import contact_sheet
from .data.folder import IMAGES, FolderOptions
from .data.inspect import Report, check, layout_of
from .data.pixels import size_of
from .data.sample import SPLITS, DataError, Size, starter_colors
from .data.survey import (
    CONTACT_SHEET,
    Survey,
    describe_value,
    describe_values,
    draw_sheet,
    folder_samples,
    has_class_file,
    propose_classes,
    smooth_ids_note,
    some_samples,
    suggest_size,
    survey,
)
from .folders.storage import replacing, write_atomic, write_json
from .terminal import Size as SizeOption
from .terminal import format_size

FAULTS_SHOWN = 20

T = TypeVar("T")


@dataclass(frozen=True)
class Init:
    """Inspect your own data: write classes.yaml and a contact sheet, list all faults.

    The folder holds images/ and masks/, or train/images/, train/masks/, val/images/ and val/masks/.
    Masks are PNG, TIFF or .npy files of class ids (index, palette or gray images) or of colors
    (RGB), with the names of the images.

    Writes classes.yaml with the values or colors of the masks, for you to name, and
    contact-sheet.png with images beside their masks. Lists every faulty file. The exit code is 1 if
    there is one.

    Other data name their classes themselves: COCO (annotations/*.json), nnU-Net's volumes in
    imagesTr/ and labelsTr/, and images in one folder per class. For these it draws the contact
    sheet and lists the faults; for volumes without a dataset.json it also proposes one.
    """

    folder: tyro.conf.Positional[Path]
    """Dataset folder."""
    overwrite: bool = False
    """Replace an existing classes.yaml."""
    val_fraction: float = 0.2
    """Share of the images for validation, if there is no val/."""


@dataclass(frozen=True)
class Check:
    """Read a whole dataset and list all its faults.

    Recognizes CamVid (train/, trainannot/, ...), Cityscapes (leftImg8bit/, gtFine/), images with
    masks (images/, masks/), COCO (annotations/), nnU-Net's volumes (imagesTr/, labelsTr/),
    CIFAR (data_batch_1.bin, ...), Fashion-MNIST (train-images-idx3-ubyte.gz, ...) and
    image folders (train/CLASS/, val/CLASS/, or CLASS/), and reads all splits. The exit code is 1
    if there is a fault.
    """

    folder: tyro.conf.Positional[Path]
    """Dataset folder."""


@dataclass(frozen=True)
class Sheet:
    """Draw a contact sheet of images and their labels."""

    data: DataName = "streets"
    """Dataset. cityscapes14 is Cityscapes with ClassNet's 14 classes."""
    data_root: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Dataset folder. Not needed for streets."""
    split: Literal["train", "val", "test"] = "train"
    """Split to draw. For CIFAR and Fashion-MNIST, val is the test set."""
    count: int = 24
    """Number of images."""
    size: SizeOption = (128, 256)
    """Image size. The aspect ratio of the dataset is kept; classification images are squares of
    this height."""
    out: Path = Path("out/sheet.png")
    """PNG file to write."""


@dataclass(frozen=True)
class Data:
    """Set up, check or draw a dataset."""


# The settings of each command, and its line in `deepcontrol data --help`.
ACTIONS: dict[str, tuple[type[Any], str]] = {
    "init": (Init, "Inspect your own data, and propose its classes."),
    "check": (Check, "Read a whole dataset and list all its faults."),
    "sheet": (Sheet, "Draw a contact sheet of images and their labels."),
}


def run_init(command: Init, console: Console) -> int:
    """Inspect a folder, write its class file and a contact sheet, list its faults."""
    layout = layout_of(command.folder)
    parts = (command.folder, *(command.folder / split for split in SPLITS))
    # A folder with images/ but without masks/ is incomplete; it has no class "images".
    is_incomplete = layout == "imagefolder" and any((part / IMAGES).is_dir() for part in parts)
    if layout is None or layout == "folder" or is_incomplete:
        return _init_folder(command, console)
    return _init_other(command.folder, layout, console)


def _init_folder(command: Init, console: Console) -> int:
    """Propose the classes of images and masks."""
    root = command.folder
    found = _with_progress(console, lambda advance: survey(root, command.val_fraction, advance))
    faults = list(found.faults)
    classes: ClassFile | None = None
    if found.pixels:
        try:
            classes, more = _classes(command, found, console)
            faults += more
        except DataError as error:
            faults.append(error)
    if classes is not None:
        _print_findings(found, classes, console)
        samples = folder_samples(root, found, classes)
        _write_sheet(root, draw_sheet(samples, classes.names, classes.colors), console)
    options = (
        ["--model unet", f"--size {format_size(suggest_size(found.sizes))}"] if found.sizes else []
    )
    if found.most_channels != FolderOptions().channels:
        options.append(f"--channels {found.most_channels}")
    return _conclude(root, "folder", options, faults, console)


def _init_other(root: Path, layout: str, console: Console) -> int:
    """Check a dataset that lists its own classes, and draw a contact sheet."""
    path = root / nnunet.DATASET_FILE
    if layout == "nnunet" and not path.is_file():
        content = _with_progress(console, lambda advance: nnunet.propose_layout(root, advance))
        write_json(path, content, indent=2)
        console.print(
            f"wrote {escape(str(path))}: name its labels and channels (CT for computed tomography)",
            soft_wrap=True,
        )
    report = _with_progress(console, lambda advance: check(root, advance))
    print_report(root, report, console)
    options: list[str] = []
    if report.splits.get("train"):
        try:
            sheet, options = _sheet_and_options(root, layout)
            _write_sheet(root, sheet, console)
        except DataError as fault:
            if not report.faults:
                report.faults.append(fault)
    return _conclude(root, layout, [*options, *report.options], report.faults, console)


def _sheet_and_options(root: Path, layout: str) -> tuple[Image.Image | None, list[str]]:
    """Draw the contact sheet of a dataset, and return options to train on it with."""
    if layout == "nnunet":
        about = nnunet.read_layout(root)
        cases = nnunet.find_cases(root, about)
        samples = some_samples(
            len(cases), lambda i: volumes.shown_slice(volumes.load_case(cases[i], about))
        )
        sheet = draw_sheet(samples, about.classes, starter_colors(range(len(about.classes))))
        size = format_size(volumes.suggest_crop(cases, None))
        return sheet, ["--model unet3d", f"--size {size}", "--batch-size 2"]
    if layout == "coco":
        source = open_coco(root, "train")
        sheet = draw_sheet(
            some_samples(len(source.files), source.read_file), source.classes, source.palette
        )
        sizes: Counter[Size] = Counter(size_of(files.image) for files in source.files)
        return sheet, ["--model unet", f"--size {format_size(suggest_size(sizes))}"]
    images = open_source(layout, "train", root)
    is_segmentation = data_task(layout) == "segmentation"
    sheet = contact_sheet(images, 24, (96, 192) if is_segmentation else (96, 96))
    return sheet, [f"--model {'segnet' if is_segmentation else 'resnet18'}"]


def _with_progress(console: Console, work: Callable[[Callable[[int, int], None]], T]) -> T:
    """Show a bar while `work`, called with a function of (done, total), reads files."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        return work(lambda done, total: progress.update(bar, completed=done, total=total))


def _write_sheet(root: Path, sheet: Image.Image | None, console: Console) -> None:
    if sheet is None:
        return
    with replacing(root / CONTACT_SHEET) as file:
        sheet.save(file, "PNG")
    console.print(f"wrote {escape(str(root / CONTACT_SHEET))}: look at it", soft_wrap=True)


def _conclude(
    root: Path, data: str, options: list[str], faults: list[DataError], console: Console
) -> int:
    """List the faults, or print the command that trains. Returns the exit code."""
    for fault in faults[:FAULTS_SHOWN]:
        console.print(f"[bold red]fault:[/] {escape(str(fault))}", highlight=False, soft_wrap=True)
    if len(faults) > FAULTS_SHOWN:
        console.print(f"... and {len(faults) - FAULTS_SHOWN} more faults")
    if faults:
        count = len(faults)
        console.print(f"{count} fault{'s' * (count > 1)}.", style="bold")
        return 1
    command = ["deepcontrol train --data", data, "--data-root", shlex.quote(str(root)), *options]
    line = f"No faults. Next:\n  {' '.join([*command, '--out runs/mine'])}"
    console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def _classes(command: Init, found: Survey, console: Console) -> tuple[ClassFile, list[DataError]]:
    """Write the proposed classes, or read those that the folder has already."""
    root = command.folder
    if has_class_file(root) and not command.overwrite:
        console.print(
            f"{escape(str(root))} has a class file, which is kept: --overwrite replaces it",
            soft_wrap=True,
        )
        classes = read_class_file(root)
        if found.value_range is not None and classes.value_range is None:
            classes = replace(classes, value_range=found.value_range)
        return classes, _unknown_values(root, found, classes)
    classes, faults = propose_classes(found)
    text = format_yaml(classes, describe_values(found, classes))
    write_atomic(root / YAML, text)
    console.print(f"wrote {escape(str(root / YAML))}: give its classes their names", soft_wrap=True)
    return classes, faults


def _unknown_values(root: Path, found: Survey, classes: ClassFile) -> list[DataError]:
    """List mask values that an existing class file does not have."""
    if classes.has_ids == found.has_colors:
        kinds = ("colors", "ids") if found.has_colors else ("ids", "colors")
        return [DataError(root, f"the masks hold {kinds[0]}, but the class file lists {kinds[1]}")]
    if found.has_colors:
        return []
    known = {*classes.ids, *classes.ignored_ids}
    unknown = sorted(value for value in found.pixels if value not in known)
    return [
        DataError(root, f"value {value} is in {found.masks[value]} masks but not in the class file")
        for value in unknown
    ]


def _print_findings(found: Survey, classes: ClassFile, console: Console) -> None:
    sizes = [f"{h}x{w}" for (h, w), _ in found.sizes.most_common(3)]
    more = f" and {len(found.sizes) - 3} other sizes" if len(found.sizes) > 3 else ""
    splits = ", ".join(f"{len(part)} for {split}" for split, part in found.files.items())
    depth = "more than 8 bits" if found.value_range else "8 bits"
    channels = ", ".join(map(str, sorted(found.channels)))
    console.print(
        f"{splits}; {', '.join(sizes)}{more}; channels: {channels}; {depth}; masks of "
        f"{'colors' if found.has_colors else 'ids'}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("class", "value", "share and masks")
    notes = describe_values(found, classes)
    for number, name in enumerate(classes.names):
        red, green, blue = classes.colors[number]
        value = str(classes.ids[number]) if classes.has_ids else f"{red} {green} {blue}"
        table.add_row(escape(name), value, notes[name])
    for ignored in classes.ignored_ids:
        if found.pixels[ignored]:
            table.add_row("(no label)", str(ignored), describe_value(found, ignored))
    console.print(table)
    if note := smooth_ids_note(found):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def run_check(action: Check, console: Console) -> int:
    """Run `deepcontrol data check`."""
    report = _with_progress(console, lambda advance: check(action.folder, advance))
    print_report(action.folder, report, console)
    for fault in report.faults:
        console.print(f"[bold red]fault:[/] {escape(str(fault))}", highlight=False, soft_wrap=True)
    count = len(report.faults)
    console.print(f"{count} fault{'s' * (count > 1)}." if count else "No faults.", style="bold")
    return 1 if count else 0


def print_report(root: Path, report: Report, console: Console) -> None:
    """Print the layout, the classes with their shares, and the notes of a dataset."""
    splits = ", ".join(f"{split} {count}" for split, count in report.splits.items())
    folder = escape(str(root))
    console.print(f"{folder}: {report.layout}; valid samples: {splits or 'none'}", soft_wrap=True)
    labeled = report.histogram[: len(report.classes)]
    if labeled.sum():
        unit = "pixels" if report.task == "segmentation" else "images"
        table = Table("class", f"share of {unit} (%)")
        table.columns[1].justify = "right"
        for name, count in zip(report.classes, labeled, strict=True):
            table.add_row(escape(name), f"{100 * count / labeled.sum():.2f}")
        console.print(table)
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)


def run_sheet(action: Sheet, console: Console) -> int:
    """Run `deepcontrol data sheet`."""
    if action.count < 1:
        raise ValueError(f"--count must be at least 1, got {action.count}")
    source = open_source(action.data, action.split, action.data_root)
    sheet = contact_sheet(source, action.count, action.size)
    with replacing(action.out, inside=action.out.parent) as file:
        sheet.save(file, "PNG")
    console.print(f"{source.name}: {escape(str(action.out))}", soft_wrap=True)
    return 0
