"""The study folder: file names, typed content of study.json, writing, reading.

    study.json        protocol, claims with their checks, figures, runs (`Study`)
    runs/NAME/        one run folder per run (runfolder.py)
    logs/NAME.txt     output of each run's process
    bench.csv         benchmark rows that claims rest on (packed studies)
    index.html, verdicts.md, figures/    written by `deepcontrol report`

`deepcontrol reproduce` fills these dataclasses with numbers. The report, the terminal tables and
results/readme.py format them (report/text.py). This module does not import torch.

Study folders are untrusted input: a value of the wrong type is an error, and a run is looked up by
its plain name only.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, TypeVar

from .runfolder import Run, is_within, read_run
from .storage import read_json, shortened, write_json

STUDY = "study.json"
RUNS, LOGS, FIGURES = "runs", "logs", "figures"
BENCH = "bench.csv"
PAGE, VERDICT_TABLE = "index.html", "verdicts.md"
FORMAT = 3

Verdict = Literal["reproduced", "not reproduced", "undecided"]
VERDICTS: tuple[Verdict, ...] = typing.get_args(Verdict)
State = Literal[
    "done", "diverged", "running", "locked", "waiting", "stopped", "failed", "not selected"
]
FINISHED: tuple[State, ...] = ("done", "diverged")
Metric = Literal["val_error", "val_loss"]
Problem = Literal[
    "",  # there is an estimate with an interval
    "not run",  # an arm has no finished run
    "diverged",  # one side diverged, the other did not: this decides
    "some diverged",
    "no value",
    "no spread",  # there is an estimate, but no interval
    "no benchmark",
    "separate benchmarks",
]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings that all runs of a study share, constant within a study folder."""

    name: str  # preset
    data: str
    classnet_data: str
    size: tuple[int, int]
    epochs: int
    width: float = 1.0
    lr_scale: float = 1.0  # factor on the paper's learning rates
    train_limit: int | None = None
    val_limit: int | None = None
    eval_batch_size: int = 16  # the validation loss is a mean over such batches
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_epochs: float = 0.0
    weight_decay: float = 0.0
    augment: str | None = None  # None: the default of the task
    class_weights: str = "enet"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measure of one arm: a value per seed, or a single value of the benchmark."""

    measure: str  # "final error"
    arm: str  # prefix of the run folders' names, or a contender of the benchmark
    settings: dict[str, str]  # {"norm": "AGC", "batch": "batch 1", "lr": "lr 0.02"}
    source: Literal["training", "benchmark"] = "training"
    engine: str = ""  # benchmark engine, such as "compile+graph"
    unit: str = ""
    digits: int | None = 2  # decimals to show; None for as many as there are
    values: tuple[float | None, ...] = ()  # None for a run without a finite value
    diverged: int = 0  # number of runs that diverged
    text: str = ""  # replaces the numbers in studies of format 1

    @property
    def label(self) -> str:
        """The arm's label, such as "AGC, batch 1, lr 0.02"."""
        return ", ".join(self.settings.values())

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """The mean over seeds, or None if a run has no value."""
        finite = [value for value in self.values if value is not None]
        return fmean(finite) if finite and len(finite) == self.n else None

    @property
    def std(self) -> float | None:
        """The standard deviation over seeds, or None for fewer than two values."""
        finite = [value for value in self.values if value is not None]
        return stdev(finite) if self.n > 1 and len(finite) == self.n else None


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A quantity, the open region that it must lie in, its estimate, and the verdict.

    The quantity is the first operand's mean, its difference to the second operand's, or the ratio
    of the two.
    """

    kind: Literal["mean", "difference", "ratio"]
    measure: str
    unit: str = ""
    digits: int = 2
    low: float | None = None  # lower end of the region; None if unbounded
    high: float | None = None
    operands: tuple[Measurement, ...] = ()
    estimate: float | None = None
    interval_low: float | None = None  # 90% over seeds; of a time, from its p20 and p80
    interval_high: float | None = None
    problem: Problem = ""
    verdict: Verdict
    text: dict[str, str] = field(default_factory=dict)  # replaces the numbers in format 1


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim with its checks and its verdict."""

    id: str
    text: str
    paper: str  # the paper's own result, in short
    beyond_paper: bool = False  # the claim is ours
    verdict: Verdict
    checks: tuple[CheckResult, ...]
    runs: tuple[str, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """All operands that were measured or can be trained, without repetition."""
        found: list[Measurement] = []
        for check in self.checks:
            for operand in check.operands:
                measured = operand.n or operand.text or operand.source == "training"
                if measured and operand not in found:
                    found.append(operand)
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The final error at one batch size and learning rate."""

    batch: int
    lr: float
    error: Measurement
    is_best: bool  # lowest error of its batch size; in a sweep, the chosen learning rate


@dataclass(frozen=True)
class Point:
    """A point of a sweep: the error of a network at its best learning rate."""

    x: int  # batch size or depth
    error: Measurement  # at the chosen learning rate; without values while none is chosen
    tried: tuple[Cell, ...]  # by rising learning rate

    @property
    def lr(self) -> float | None:
        """The chosen learning rate; None if none is chosen yet, or if all diverged."""
        return next((cell.lr for cell in self.tried if cell.is_best), None)

    @property
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the lowest or the highest of those tried."""
        return self.lr is not None and self.lr in (self.tried[0].lr, self.tried[-1].lr)


@dataclass(frozen=True)
class Series:
    """A line of a sweep, such as a norm."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Sweep:
    """A chart of the final error over batch sizes or depths."""

    title: str
    x_label: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Line:
    """A line of a panel: one arm over several seeds."""

    label: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """A chart of one metric by epoch."""

    letter: str
    title: str
    metric: Metric
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run of the study."""

    name: str  # folder name
    label: str
    state: State
    fault: str = ""  # why it failed
    diverged: int | None = None  # epoch
    command: str  # trains this run alone

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name or self.name in (".", ".."):
            raise ValueError(f"{self.name!r} is not the name of a run")


@dataclass(frozen=True, kw_only=True)
class Study:
    """The content of study.json."""

    protocol: Protocol
    preset_epochs: int  # the protocol's epochs may differ (--epochs)
    seeds: int  # the largest number of seeds of an arm
    note: str
    command: str
    claims: tuple[ClaimResult, ...]
    grid: tuple[Cell, ...] = ()
    figure1: tuple[Panel, ...]  # empty in studies without the paper's claims
    figure2: tuple[Panel, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    runs: tuple[Entry, ...]
    pictured: tuple[str, ...] = ()  # runs with sample pictures on the page
    lambda_run: str | None = None  # run in the chart of lambda

    def claim(self, claim_id: str) -> ClaimResult:
        """Return the claim with this id, or raise KeyError."""
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        raise KeyError(claim_id)

    def measurement(self, arm: str, measure: str) -> Measurement:
        """Return a measure of an arm from whichever claim has it, or raise KeyError.

        The arm is the prefix of its run folders' names, such as "segnet-agc-b8-lr0.16", or a
        contender of the benchmark, such as "agc".
        """
        for claim in self.claims:
            for found in claim.measurements:
                if (found.arm, found.measure) == (arm, measure):
                    return found
        raise KeyError((arm, measure))

    def label(self, run: str) -> str:
        """Return the label of a run, or raise KeyError."""
        return {entry.name: entry.label for entry in self.runs}[run]


class StudyRuns:
    """The run folders of a study, each read once."""

    def __init__(self, folder: Path, study: Study) -> None:
        self.found: dict[str, Run] = {}
        self.errors: dict[str, str] = {}  # for existing folders that cannot be read
        for entry in study.runs:
            run = folder / RUNS / entry.name
            if not is_within(run, folder):
                self.errors[entry.name] = "its folder is a link out of the study folder"
                continue
            try:
                self.found[entry.name] = read_run(run)
            except ValueError as error:
                if run.exists():
                    self.errors[entry.name] = str(error)

    def get(self, name: str | None) -> Run | None:
        return None if name is None else self.found.get(name)

    def with_metrics(self, names: Sequence[str]) -> list[Run]:
        """Return those of the named runs that have at least one epoch's record."""
        runs = [self.found.get(name) for name in names]
        return [run for run in runs if run is not None and run.metrics]

    def damage(self, entry: Entry) -> str:
        """Describe the damage to a run that was finished when it was judged; "" if none."""
        if entry.state not in FINISHED:
            return ""
        run = self.found.get(entry.name)
        if run is None:
            return self.errors.get(entry.name, "its folder is missing")
        if run.damage:
            return run.damage[0]
        return "" if run.diverged is not None else run.missing_epochs(run.epochs_planned or 0)


# Writing and reading


def is_study(folder: Path) -> bool:
    return (folder / STUDY).is_file()


def write_study(folder: Path, study: Study) -> None:
    """Write study.json. Fields that have their default value are left out."""
    content = {"format": FORMAT, **_as_data(study)}
    write_json(folder / STUDY, content, indent=1)


def read_study(folder: Path) -> Study:
    """Read study.json of format 1, 2 or 3.

    Raises:
        ValueError: There is no study, or its content is not as expected.
    """
    with _readable(folder):
        return _load(Study, _read_content(folder), "study")


def read_outline(folder: Path) -> tuple[Protocol, set[str]] | None:
    """Return protocol and claim ids of a study, or None without a study.json.

    Raises:
        ValueError: study.json cannot be read, or the path is not a folder.
    """
    if not folder.is_file() and not (folder / STUDY).exists():
        return None
    with _readable(folder):
        content = _read_content(folder)
        ids = {str(claim["id"]) for claim in content["claims"]}
        return _load(Protocol, content["protocol"], "study.protocol"), ids


def _read_content(folder: Path) -> dict[str, Any]:
    content = dict(read_json(folder / STUDY))
    if content["format"] == 1:
        content = convert_format_1(content) | {"format": 2}
    if content["format"] == 2:
        content = convert_format_2(content)
    elif content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}; expected 1 to {FORMAT}")
    return content


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn all errors of reading a study into a ValueError with advice."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a study folder: it has no {STUDY}") from None
    except NotADirectoryError:
        raise ValueError(f"{folder} is not a folder") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"cannot read {folder / STUDY}: {reason}. If it is removed, `deepcontrol reproduce "
            "--minutes 0` writes it again from the runs."
        ) from None


def _as_data(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _as_data(content)
            for f in dataclasses.fields(value)
            if (content := getattr(value, f.name)) != _default(f)
        }
    if isinstance(value, (list, tuple)):
        return [_as_data(item) for item in value]
    return value


def _default(f: "dataclasses.Field[Any]") -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default


T = TypeVar("T")


def _load(kind: type[T], value: Any, where: str) -> T:
    """Convert JSON data to a dataclass and check each value's type.

    Raises:
        ValueError: A value is missing or has another type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shortened(repr(value))}; expected an object")
    hints = typing.get_type_hints(kind)
    given = {}
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        if f.name in value:
            given[f.name] = _value(hints[f.name], value[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no {f.name}")
    return kind(**given)


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _load(hint, value, where)  # type: ignore[arg-type]
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # "T | None" is the only union here
        return None if value is None else _value(options[0], value, where)
    if origin is Literal and value in options:
        return value
    if origin is tuple and isinstance(value, list):
        items = enumerate(value)
        if options[-1] is Ellipsis or len(options) == len(value):
            return tuple(_value(options[0], item, f"{where}[{i}]") for i, item in items)
    if origin is dict and isinstance(value, dict):
        return {str(k): _value(options[1], v, f"{where}.{k}") for k, v in value.items()}
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    names = " or ".join(map(repr, options)) if origin is Literal else getattr(hint, "__name__", "")
    raise ValueError(f"{where} is {shortened(repr(value))}; expected {names or hint}")


# Older formats


def convert_format_2(old: Any) -> Any:
    """Convert study.json of format 2: its measurements have labels, no settings."""
    if isinstance(old, list):
        return [convert_format_2(item) for item in old]
    if not isinstance(old, dict):
        return old
    new = {name: convert_format_2(value) for name, value in old.items()}
    if "measure" in new and "label" in new:
        new["settings"] = _settings_of_format_2(new.pop("label"))
    return new


def _settings_of_format_2(label: str) -> dict[str, str]:
    """Return the settings that a label lists.

    >>> _settings_of_format_2("ResNet-20, AGC, batch 8, lr 0.02, clip norm 1")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'model': 'ResNet-20', 'norm': 'AGC', 'batch': 'batch 8', 'lr': 'lr 0.02',
     'clip norm 1': 'clip norm 1'}
    """
    parts = label.split(", ")
    settings = {}
    if len(parts) > 2 and parts[2].startswith("batch "):
        settings["model"] = parts.pop(0)
    settings["norm"] = parts.pop(0)
    for part in parts:
        name = part.split(" ")[0]
        settings[name if name in ("batch", "lr") else part] = part
    return settings


def convert_format_1(old: dict[str, Any]) -> dict[str, Any]:
    """Convert study.json of format 1. Its measurements stay text."""
    protocol = dict(old["protocol"])
    protocol["lr_scale"] = protocol.pop("rates_times", 1.0)
    protocol.setdefault("classnet_data", protocol["data"])
    states = {"elsewhere": "locked", "not asked for": "not selected"}
    return {
        "protocol": protocol,
        "claims": [_claim_of_format_1(claim) for claim in old["claims"]],
        "grid": [
            {
                "batch": cell["batch"],
                "lr": cell["rate"],
                "error": _text_measurement("final error", f"batch {cell['batch']}", cell["error"]),
                "is_best": cell["is_best"],
            }
            for cell in old["grid"]
        ],
        "figure1": old["panels"],
        "figure2": old["beside"],
        "runs": [{**run, "state": states.get(run["state"], run["state"])} for run in old["runs"]],
        "pictured": old["samples"],
        "lambda_run": old["layers"],
        **{name: old[name] for name in ("preset_epochs", "seeds", "note", "command")},
    }


def _claim_of_format_1(old: dict[str, Any]) -> dict[str, Any]:
    checks = [
        {
            "kind": "mean",
            "measure": check["quantity"].split(":")[0],
            "verdict": check["verdict"],
            "text": {name: check[name] for name in ("quantity", "region", "rule", "found")},
        }
        for check in old["checks"]
    ]
    # Format 1 lists the measurements with the claim, not with the checks.
    checks[0]["operands"] = [_text_measurement(*value) for value in old["ours"]]
    return {
        "id": old["id"],
        "text": old["says"],
        "paper": old["paper"],
        "beyond_paper": old["paper"] in ("not in the paper", "not measured"),
        "verdict": old["verdict"],
        "checks": checks,
        "runs": old["runs"],
    }


def _text_measurement(measure: str, label: str, text: str) -> dict[str, Any]:
    return {"measure": measure, "arm": label, "label": label, "text": text}
