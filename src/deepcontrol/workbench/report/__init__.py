"""`deepcontrol report`: write a page about runs or about a study.

The modules of this package read run folders and study folders, and never import torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from ..folders.runfolder import read_runs
from ..folders.studyfolder import RUNS, StudyRuns, is_study, read_study

__all__ = ["Report", "run_report"]


@dataclass(frozen=True)
class Report:
    """Write a page about runs: curves, table, lambda by layer, pictures.

    For a study folder (`deepcontrol reproduce`), the page shows a summary, the paper's figure 1,
    the verdicts, lambda and pictures. The figures are also written as files.

    The page is one self-contained HTML file. Runs may be unfinished.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN...", help_behavior_hint="(required)"),
    ]
    """Run folders, or one study folder."""
    out: Path | None = None
    """Folder for index.html. Default: out/report, or the study folder."""


def run_report(command: Report, console: Console) -> int:
    """Run `deepcontrol report` and return the exit code."""
    try:  # imported here, because a training machine may lack matplotlib
        from .page import write_page, write_study_page
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error}: in a clone of the repository, run: pip install '.[workbench]'"
        ) from None

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    if not command.runs:
        raise ValueError("no run folder given: deepcontrol report RUN...")
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
        say(f"Page: {write_study_page(study, study_runs, command.out or studies[0])}")
        return 0
    runs, refused = read_runs(command.runs)
    if not runs:
        raise ValueError("; ".join(refused))
    for reason in refused:
        say(f"skipped: {reason}")
    for run in runs:
        for note in run.notes:
            say(f"{run.name}: {note}")
    page = write_page(runs, refused, command.out or Path("out/report"))
    say(f"{len(runs)} run{'s' * (len(runs) > 1)}: {page}")
    return 0
