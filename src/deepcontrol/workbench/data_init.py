"""`deepcontrol data init`: propose the classes of a folder of images and masks."""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .data.classfile import YAML, ClassFile, format_yaml, read_class_file
from .data.folder import FolderOptions
from .data.sample import DataError
from .data.survey import (
    Survey,
    describe_values,
    draw_folder_sheet,
    has_class_file,
    propose_classes,
    suggest_size,
    survey,
)
from .folders.output import replacing, write_atomic

SHEET = "contact-sheet.png"
FAULTS_SHOWN = 20


@dataclass(frozen=True)
class Init:
    """Look at images and masks of your own, and write classes.yaml.

    The folder holds images/ and masks/, or train/images/, train/masks/, val/images/ and val/masks/.
    Masks are PNG files of class ids (index, palette or gray images) or of colors (RGB), with the
    names of the images.

    Writes classes.yaml with the values or colors of the masks, for you to name, and
    contact-sheet.png with images beside their masks. Lists every file that is wrong. The exit code
    is 1 if there is one.
    """

    folder: tyro.conf.Positional[Path]
    """Dataset folder."""
    overwrite: bool = False
    """Replace an existing classes.yaml."""
    val_fraction: float = 0.2
    """Share of the images for validation, if there is no val/."""


def run_init(command: Init, console: Console) -> int:
    """Survey a folder, write its class file and a contact sheet, and list its faults."""
    root = command.folder
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        found = survey(
            root,
            command.val_fraction,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
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
        sheet = draw_folder_sheet(root, found, classes)
        if sheet is not None:
            with replacing(root / SHEET) as file:
                sheet.save(file, "PNG")
            console.print(f"wrote {escape(str(root / SHEET))}: look at it", soft_wrap=True)
    for fault in faults[:FAULTS_SHOWN]:
        console.print(f"[bold red]fault:[/] {escape(str(fault))}", highlight=False, soft_wrap=True)
    if len(faults) > FAULTS_SHOWN:
        console.print(f"... and {len(faults) - FAULTS_SHOWN} more faults")
    if faults:
        count = len(faults)
        console.print(f"{count} fault{'s' * (count > 1)}.", style="bold")
        return 1
    console.print(_next_command(root, found), highlight=False, soft_wrap=True, markup=False)
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
    console.print(table)


def _next_command(root: Path, found: Survey) -> str:
    height, width = suggest_size(found.sizes)
    channels = found.most_channels
    flags = f"--size {height}x{width}"
    if channels != FolderOptions().channels:
        flags += f" --channels {channels}"
    return (
        "No faults. Next:\n"
        f"  deepcontrol train --data folder --data-root {root} --model unet {flags} --out runs/mine"
    )
