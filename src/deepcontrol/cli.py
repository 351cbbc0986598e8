"""The command line: dataclasses that say what a command takes, and a function that runs each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .data import DataError, open_source
from .data.check import check
from .data.sheet import contact_sheet


def parse_size(text: str) -> tuple[int, int]:
    """HxW as (height, width).

    >>> parse_size("256x512")
    (256, 512)
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"a size is HEIGHTxWIDTH, as in 256x512, not {text!r}")
    return int(parts[0]), int(parts[1])


Size = Annotated[
    tuple[int, int],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="HxW",
        instance_from_str=lambda args: parse_size(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda size: [f"{size[0]}x{size[1]}"],
    ),
]


@dataclass(frozen=True)
class Check:
    """Read a data set whole and list everything that is wrong with it.

    Recognises CamVid (train/, trainannot/, ...) and Cityscapes (leftImg8bit/, gtFine/), and reads
    whichever splits are there. Exits with 1 if there is a fault.
    """

    folder: tyro.conf.Positional[Path]
    """The data set's folder."""


@dataclass(frozen=True)
class Sheet:
    """Draw a contact sheet of samples beside their labels."""

    data: str = "streets"
    """streets, camvid, cityscapes or cityscapes14."""
    data_root: Path | None = None
    """The data set's folder; streets needs none."""
    split: str = "train"
    """train, val or test."""
    count: int = 24
    """How many samples."""
    size: Size = (128, 256)
    """Each image's size; the data set's aspect is kept."""
    out: Path = Path("out/sheet.png")
    """The PNG to write."""


@dataclass(frozen=True)
class Data:
    """Check data sets and look at them."""

    action: (
        Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Sheet, tyro.conf.subcommand("sheet")]
    )


def main(args: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"data": Data},
        args=args,
        prog="deepcontrol",
        description="Automatic gain control in every convolutional neuron: the workbench.",
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    console = Console()
    try:
        match command.action:
            case Check() as action:
                return run_check(action, console)
            case Sheet() as action:
                return run_sheet(action, console)
    except (DataError, ValueError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    raise AssertionError(command)


def run_check(action: Check, console: Console) -> int:
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        report = check(
            action.folder, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    found = ", ".join(f"{split} {count}" for split, count in report.splits.items())
    console.print(f"{action.folder}: {report.layout}; sound samples: {found or 'none'}")
    labelled = report.histogram[: len(report.classes)]
    if labelled.sum():
        table = Table("class", "pixels %")
        table.columns[1].justify = "right"
        for name, count in zip(report.classes, labelled, strict=True):
            table.add_row(name, f"{100 * count / labelled.sum():.2f}")
        console.print(table)
    for fault in report.faults:
        console.print(f"[red]fault:[/] {fault}", highlight=False, soft_wrap=True)
    verdict = f"{len(report.faults)} faults" if report.faults else "No faults."
    console.print(verdict, style="bold")
    return 1 if report.faults else 0


def run_sheet(action: Sheet, console: Console) -> int:
    source = open_source(action.data, action.split, action.data_root)
    sheet = contact_sheet(source, action.count, action.size)
    action.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(action.out)
    console.print(f"{source.name}: {action.out}", soft_wrap=True)
    return 0
