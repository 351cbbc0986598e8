"""The command line: parse the arguments, run the command, print errors as one line."""

import itertools
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from . import helptext
from .bench import Bench, run_bench
from .data import DATASET_NAMES, DataName, open_source
from .data.inspect import check, contact_sheet
from .data_init import Init, run_init
from .demo import Demo, run_demo
from .doctor import Doctor, run_doctor
from .errors import explain, leave_if_device_failed
from .export import Export, run_export
from .folders.output import replacing
from .folders.runfolder import CONFIG
from .predict import Predict, run_predict
from .report import Report, run_report
from .sizes import Size
from .study.command import run_reproduce
from .study.settings import Reproduce
from .terminal import SafeConsole, printable
from .train.commands import Eval, TrainCommand, run_eval, run_train
from .train.config_file import check_code, load_config


@dataclass(frozen=True)
class Check:
    """Read a whole dataset and list all its faults.

    Recognizes CamVid (train/, trainannot/, ...), Cityscapes (leftImg8bit/, gtFine/), images with
    masks (images/, masks/), COCO (annotations/), nnU-Net's volumes (imagesTr/, labelsTr/), CIFAR
    (data_batch_1.bin, ...), Fashion-MNIST (train-images-idx3-ubyte.gz, ...) and image folders
    (train/CLASS/, val/CLASS/, or CLASS/), and reads all splits. The exit code is 1 if there is a
    fault.
    """

    folder: tyro.conf.Positional[Path]
    """Dataset folder."""


@dataclass(frozen=True)
class Sheet:
    """Draw a contact sheet of images and their labels."""

    data: DataName = "streets"
    """Dataset. cityscapes14 is Cityscapes with ClassNet's 14 classes."""
    data_root: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Dataset folder. streets needs none."""
    split: Literal["train", "val", "test"] = "train"
    """Split to draw. For CIFAR and Fashion-MNIST, val is the test set."""
    count: int = 24
    """Number of images."""
    size: Size = (128, 256)
    """Image size. The aspect ratio of the dataset is kept; classification images are squares of
    this height."""
    out: Path = Path("out/sheet.png")
    """PNG file to write."""


@dataclass(frozen=True)
class Data:
    """Set up, check or draw a dataset."""

    action: (
        Annotated[Init, tyro.conf.subcommand("init")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Sheet, tyro.conf.subcommand("sheet")]
    )


# The settings class of each command, and its line in `deepcontrol --help`.
COMMANDS: dict[str, tuple[type[Any], str]] = {
    "train": (TrainCommand, "Train a network, or resume a run."),
    "eval": (Eval, "Evaluate a checkpoint on the validation images."),
    "predict": (Predict, "Label images with a trained network."),
    "export": (Export, "Export a trained network for deployment."),
    "report": (Report, "Write an HTML page about runs or a study."),
    "reproduce": (Reproduce, "Test the claims of the paper."),
    "bench": (Bench, "Measure step time and memory against other norms."),
    "data": (Data, "Set up, check or draw a dataset."),
    "demo": (Demo, "Compare AGC and BatchNorm on this machine, in two minutes."),
    "doctor": (Doctor, "Show versions and devices, and test the ops."),
}
CONFIGURATION = (tyro.conf.OmitSubcommandPrefixes,)


def main(args: list[str] | None = None) -> int:
    """Run a command and return the exit code."""
    args = sys.argv[1:] if args is None else args
    console, command = SafeConsole(), None
    try:
        command = parse(args)
        return run(command, console)
    except BrokenPipeError as error:
        print(flush=True)  # raises again if the closed pipe is standard output
        print_error("error", str(error), SafeConsole(stderr=True))
        return 1
    except Exception as error:
        message = explain(error, args[0] if args else "", written_to(command))
        print_error("error", message, SafeConsole(stderr=True))
        leave_if_device_failed(error)
        return 1
    except KeyboardInterrupt:  # train and reproduce handle SIGINT themselves
        return 128 + signal.SIGINT


def run(command: object, console: Console) -> int:
    """Run the command of these settings and return the exit code."""
    match command:
        case TrainCommand():
            return run_train(command, console)
        case Eval():
            return run_eval(command, console)
        case Predict():
            return run_predict(command, console, SafeConsole(stderr=True))
        case Export():
            return run_export(command, console)
        case Report():
            return run_report(command, console)
        case Reproduce():
            return run_reproduce(command, console)
        case Bench():
            return run_bench(command, console)
        case Data(action=Init() as action):
            return run_init(action, console)
        case Data(action=Check() as action):
            return run_check(action, console)
        case Data(action=Sheet() as action):
            return run_sheet(action, console)
        case Demo():
            return run_demo(command, console)
        case Doctor():
            return run_doctor(console)
    raise AssertionError(command)


def parse(args: list[str]) -> object:
    """Parse the command line to the settings of a command.

    For `train` with the folder of an existing run, that run's settings are the defaults.
    """
    refuse_empty(args)
    if not args or args[0] not in COMMANDS:  # help, or an error
        return tyro.cli(
            overview(),
            args=args,
            prog="deepcontrol",
            description="AGC (automatic gain control): train, evaluate and benchmark networks. "
            "--version prints the version.",
            config=CONFIGURATION,
        )
    name, *flags = args
    shared: dict[str, Any] = {"prog": f"deepcontrol {name}", "config": CONFIGURATION}
    if name == "train" and (run := _run_folder(flags)) is not None and (run / CONFIG).exists():
        started = load_config(run)[0]
        if started.data in DATASET_NAMES:
            raise ValueError(
                f"{run} was started from Python with a torch Dataset, which this command cannot "
                "open: resume it with deepcontrol.workbench.train.Trainer, or choose another --out"
            )
        before = TrainCommand(**vars(started))
        command = helptext.parse(TrainCommand, flags, before, **shared)
        given = any(flag.partition("=")[0] == "--model" for flag in flags)
        check_code(command, run, command.model if given else None)
        return command
    return helptext.parse(COMMANDS[name][0], flags, **shared)


def refuse_empty(args: list[str]) -> None:
    """Exit with code 2 if a value is empty, as after `--out "$UNSET"`.

    An empty path would mean the current folder, and an empty list all of a kind.
    """
    for previous, word in itertools.pairwise(["", *args]):
        if word and not (word.startswith("--") and word.endswith("=")):
            continue
        flag = word.removesuffix("=") or previous
        place = f"{flag} is empty" if flag.startswith("--") else "an argument is empty"
        message = f"{place}: pass a value, or omit it. Is a variable of the shell unset?"
        print_error("error", message, SafeConsole(stderr=True))
        raise SystemExit(2)


def _run_folder(flags: list[str]) -> Path | None:
    """Return the value of --out. The other flags may be valid only with the run's settings."""
    values = [value for flag, value in itertools.pairwise([*flags, ""]) if flag == "--out"]
    values += [flag.removeprefix("--out=") for flag in flags if flag.startswith("--out=")]
    return Path(values[-1]) if values else None


def overview() -> Any:
    """Return a type from which tyro lists all commands, one line each."""
    commands = (
        Annotated[helptext.tidied(settings), tyro.conf.subcommand(name, description=summary)]
        for name, (settings, summary) in COMMANDS.items()
    )
    return Union[tuple(commands)]  # noqa: UP007


def written_to(command: object) -> Path | None:
    """Return the folder or file that a command writes to, if it is known."""
    action = getattr(command, "action", command)
    return getattr(action, "out", None) or getattr(action, "run", None)


def print_error(kind: str, message: str, console: Console) -> None:
    # Escaped, because a path may contain rich markup.
    text = f"[bold red]{kind}:[/] {escape(message)}"
    try:
        console.print(text, highlight=False, soft_wrap=True)
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, RuntimeError):  # no memory or descriptor is left for colors
        print(f"{kind}: {printable(message)}", file=sys.stderr)


def run_check(action: Check, console: Console) -> int:
    """Run `deepcontrol data check`."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        report = check(
            action.folder, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    splits = ", ".join(f"{split} {count}" for split, count in report.splits.items())
    folder = escape(str(action.folder))
    console.print(f"{folder}: {report.layout}; valid samples: {splits or 'none'}", soft_wrap=True)
    labeled = report.histogram[: len(report.classes)]
    if labeled.sum():
        unit = "pixels" if report.task == "segmentation" else "images"
        table = Table("class", f"share of {unit} (%)")
        table.columns[1].justify = "right"
        for name, count in zip(report.classes, labeled, strict=True):
            table.add_row(name, f"{100 * count / labeled.sum():.2f}")
        console.print(table)
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    for fault in report.faults:
        print_error("fault", str(fault), console)
    count = len(report.faults)
    console.print(f"{count} fault{'s' * (count > 1)}." if count else "No faults.", style="bold")
    return 1 if count else 0


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
