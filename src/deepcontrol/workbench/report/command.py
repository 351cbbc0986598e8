"""`deepcontrol report`: run folders to a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from ..runfolder import read_runs
from .study import RUNS, is_study, read_study


@dataclass(frozen=True)
class Report:
    """Draw runs, finished or not, as a page: a table, curves, lambda in each layer, pictures.

    Of the folder of a study (`deepcontrol reproduce`) it draws the verdicts, figure 1 of the paper,
    lambda and pictures, and writes the figures as files too.

    The page is one HTML file that holds its pictures, and needs nothing else.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN...", help_behavior_hint="(required)"),
    ]
    """The run folders, or one study's folder."""
    out: Path | None = None
    """The folder to write index.html to; out/report, or the study's own."""


def run_report(command: Report, console: Console) -> int:
    try:  # here, since a machine that only trains may be without matplotlib
        from .page import write_page
        from .study_page import write_study_page
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install 'deepcontrol[workbench]'") from None

    if not command.runs:
        raise ValueError("name a run folder to report on")
    studies = [folder for folder in command.runs if is_study(folder)]
    if studies and len(command.runs) > 1:
        raise ValueError(f"{studies[0]} is a study: report on it alone, or on runs in {RUNS}/")
    if studies:
        study = read_study(studies[0])
        for entry in study.entries:
            if entry.damage:
                line = f"{entry.name} is not as it was when it was judged: {entry.damage}"
                console.print(escape(line), highlight=False, soft_wrap=True)
        page = write_study_page(study, command.out or studies[0])
        console.print(f"The page: {escape(str(page))}", highlight=False, soft_wrap=True)
        return 0
    runs, refused = read_runs(command.runs)
    if not runs:
        raise ValueError("; ".join(refused))
    for text in refused:
        console.print(f"left out: {escape(text)}", highlight=False, soft_wrap=True)
    for run in runs:
        for note in run.notes:
            console.print(f"{escape(run.name)}: {escape(note)}", highlight=False, soft_wrap=True)
    page = write_page(runs, refused, command.out or Path("out/report"))
    console.print(f"{len(runs)} run{'s' * (len(runs) > 1)}: {escape(str(page))}", soft_wrap=True)
    return 0
