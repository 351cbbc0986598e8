"""A study's folder read as it is: study.json, and the runs that it names.

Like run folders, it may come from somebody else: what has not the right shape is refused, and a
run is looked for by its plain name alone.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..runfolder import Run, read_run

STUDY, RUNS = "study.json", "runs"
METRICS_DRAWN = ("val_error", "val_loss")
VERDICTS = ("reproduced", "not reproduced", "undecided")
OVER = ("done", "diverged")


@dataclass(frozen=True)
class Check:
    """One of the conditions that decide a claim."""

    quantity: str
    region: str
    rule: str  # the two in short
    found: str
    verdict: str


class Value(NamedTuple):
    """Something that was measured."""

    measure: str
    who: str
    figure: str


@dataclass(frozen=True)
class Claim:
    id: str
    says: str
    paper: str
    ours: list[Value]
    verdict: str
    checks: list[Check]


@dataclass(frozen=True)
class Cell:
    """One batch at one rate."""

    batch: int
    rate: float
    error: str
    is_best: bool


@dataclass(frozen=True)
class Line:
    """A line of a panel: the same run over several seeds."""

    label: str
    runs: list[Run]


@dataclass(frozen=True)
class Panel:
    letter: str
    title: str
    metric: str
    lines: list[Line]


@dataclass(frozen=True)
class Entry:
    """A run as the study knows it; `run` is None while there is no folder."""

    name: str
    label: str
    state: str
    fault: str
    command: str
    run: Run | None
    unread: str  # why there is none, if there is a folder

    @property
    def damage(self) -> str:
        """What is wrong with a run that was over when it was judged; nothing, if all is well."""
        if self.state not in OVER:
            return ""
        if self.run is None:
            return self.unread or "its folder is gone"
        return (
            ""
            if self.run.diverged is not None
            else self.run.missing_epochs(self.run.epochs_planned or 0)
        )


@dataclass(frozen=True)
class Study:
    protocol: dict[str, Any]
    seeds: int
    preset_epochs: int  # what the preset has, whatever was asked in their place
    note: str
    command: str
    claims: list[Claim]
    grid: list[Cell]
    panels: list[Panel]  # of figure 1
    beside: list[Panel]  # of figure 2
    entries: list[Entry]
    samples: list[Run]  # whose pictures are shown
    layers: Run | None  # whose lambda is shown
    labels: dict[str, str] = field(default_factory=dict)  # of runs, by name


def is_study(folder: Path) -> bool:
    return (folder / STUDY).is_file()


def read_study(folder: Path) -> Study:
    """ValueError if there is no study, or one that cannot be understood."""
    path = folder / STUDY
    try:
        content = json.loads(path.read_text())
        if content["format"] != 1:
            raise ValueError(f"format {content['format']}")
        return _study(folder, content)
    except FileNotFoundError:
        raise ValueError(f"{folder} is no study: it has no {STUDY}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from None


def _study(folder: Path, content: dict[str, Any]) -> Study:
    found: dict[str, Run | None] = {}
    unread: dict[str, str] = {}
    for row in content["runs"]:
        name = str(row["name"])
        found[name], unread[name] = _find_run(folder, name)

    def those(names: list[str]) -> list[Run]:
        runs = [found.get(name) for name in names]
        return [run for run in runs if run is not None and run.metrics]

    def panels(rows: list[dict[str, Any]]) -> list[Panel]:
        return [
            Panel(
                **_texts(row, "letter", "title"),
                metric=_one_of(METRICS_DRAWN, row["metric"]),
                lines=[Line(str(line["label"]), those(line["runs"])) for line in row["lines"]],
            )
            for row in rows
        ]

    return Study(
        protocol=dict(content["protocol"]),
        seeds=int(content["seeds"]),
        preset_epochs=int(content["preset_epochs"]),
        note=str(content["note"]),
        command=str(content["command"]),
        claims=[_claim(row) for row in content["claims"]],
        grid=[
            Cell(int(row["batch"]), float(row["rate"]), str(row["error"]), bool(row["is_best"]))
            for row in content["grid"]
        ],
        panels=panels(content["panels"]),
        beside=panels(content["beside"]),
        entries=[
            Entry(
                **_texts(row, "name", "label", "state", "fault", "command"),
                run=found[str(row["name"])],
                unread=unread[str(row["name"])],
            )
            for row in content["runs"]
        ],
        samples=[run for run in those(content["samples"]) if run.samples],
        layers=next((r for r in those([content["layers"]]) if r.layers), None),
        labels={str(row["name"]): str(row["label"]) for row in content["runs"]},
    )


def _claim(row: dict[str, Any]) -> Claim:
    checks = [
        Check(
            **_texts(check, "quantity", "region", "rule", "found"),
            verdict=_one_of(VERDICTS, check["verdict"]),
        )
        for check in row["checks"]
    ]
    return Claim(
        **_texts(row, "id", "says", "paper"),
        ours=[Value(str(measure), str(who), str(figure)) for measure, who, figure in row["ours"]],
        verdict=_one_of(VERDICTS, row["verdict"]),
        checks=checks,
    )


def _one_of(known: tuple[str, ...], value: object) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return str(value)


def _texts(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: str(row[name]) for name in names}


def _find_run(folder: Path, name: str) -> tuple[Run | None, str]:
    """The run, or why it cannot be read: nothing of one that has not begun."""
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{name!r} is no run's name")
    try:
        return read_run(folder / RUNS / name), ""
    except ValueError as error:
        return None, str(error) if (folder / RUNS / name).exists() else ""
