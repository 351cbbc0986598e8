"""`deepcontrol report`: write a page about runs or about a study.

The modules of this package read run folders and study folders, and never import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from ..folders.runfolder import read_runs
from ..folders.studyfolder import FINISHED, RUNS, StudyRuns, is_study, read_study
from .place import page_folder, page_key, reload_seconds, watch

__all__ = ["Report", "run_report"]


@dataclass(frozen=True)
class Report:
    """Write a page about runs: curves, predictions, worst images, classes, lambda by layer.

    For a study folder (`deepcontrol reproduce`), the page shows a summary, the paper's figure 1,
    the verdicts, lambda and pictures. The figures are also written as files.

    The page is one self-contained HTML file. Runs may be unfinished.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN...", help_behavior_hint="(required)"),
    ]
    """Run folders, or one study folder."""
    watch: bool = False
    """Keep the page up to date while the runs train. It reloads itself in the browser. Ends with
    Ctrl-C, or when all runs are finished."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(
            help_behavior_hint="(default: RUN/report for one run, out/report for several, or the "
            "study folder)"
        ),
    ] = None
    """Folder for index.html."""


def run_report(command: Report, console: Console) -> int:
    """Run `deepcontrol report` and return the exit code."""
    try:  # imported here, because a training machine may lack matplotlib
        from . import page

        del page
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error}: in a clone of the repository, run: pip install '.[workbench]'"
        ) from None

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    if not command.runs:
        raise ValueError("no run folder given: deepcontrol report RUN...")
    if command.watch:
        # Notes, such as "no epoch has finished yet", are on the page and change.
        return watch(command.runs, lambda: _write(command, lambda note: None)[:2], say)
    path, _, line = _write(command, say)
    say(line.format(path))
    return 0


def _write(command: Report, say: Callable[[str], None]) -> tuple[Path, bool, str]:
    """Write the page. Return its path, whether its runs are finished, and a line about it."""
    from .page import write_page, write_study_page

    studies = [folder for folder in command.runs if is_study(folder)]
    if studies and len(command.runs) > 1:
        raise ValueError(
            f"{studies[0]} is a study: report on it alone, or on run folders in its {RUNS}/"
        )
    if studies:
        study = read_study(studies[0])
        study_runs = StudyRuns(studies[0], study)
        for entry in study.runs:
            if damage := study_runs.damage(entry):
                say(f"{entry.name} has changed since it was judged: {damage}")
        refresh = reload_seconds(list(study_runs.found.values())) if command.watch else None
        path = write_study_page(study, study_runs, command.out or studies[0], refresh)
        return path, all(entry.state in FINISHED for entry in study.runs), "Page: {}"
    runs, refused = read_runs(command.runs)
    if not runs:
        raise ValueError("; ".join(refused))
    for reason in refused:
        say(f"skipped: {reason}")
    for run in runs:
        for note in run.notes:
            say(f"{run.name}: {note}")
    folder, note = page_folder(command.runs, command.out)
    if note:
        say(note)
    finished = not refused and all(run.is_finished for run in runs)
    path = write_page(
        runs,
        refused,
        folder,
        key=page_key(command.runs),
        refresh=reload_seconds(runs) if command.watch and not finished else None,
        inside=command.runs[0] if folder.parent == command.runs[0] else None,
    )
    return path, finished, f"{len(runs)} run{'s' * (len(runs) > 1)}: {{}}"
