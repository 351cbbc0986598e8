"""`deepcontrol report`: write a page about runs or about a study.

The modules of this package read run folders and study folders, and never import torch.
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from ..folders.runfolder import (
    CONFIG,
    DIVERGED,
    LAYERS,
    METRICS,
    SAMPLES,
    VALIDATION,
    Run,
    read_runs,
)
from ..folders.storage import write_atomic
from ..folders.studyfolder import FINISHED, PAGE, RUNS, STUDY, StudyRuns, is_study, read_study

__all__ = ["Report", "run_report"]


@dataclass(frozen=True)
class Report:
    """Write a page about runs, or about a study.

    The page of runs shows curves, predictions, the worst images, classes, and lambda of every
    layer. Runs may be unfinished. The page of a study folder (`deepcontrol reproduce`) shows a
    summary, the paper's figure 1, the verdicts, lambda and pictures; its figures are also written
    as files. A page is one self-contained HTML file.
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
            f'{error}: in a clone of the repository, run: pip install ".[workbench]"'
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
    """Write the page; return its path, whether runs are finished, and a line on it."""
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


# Where a page goes, and --watch


INTERVAL = 1.0  # seconds between two looks at the files
RELOAD = (5, 60)  # seconds between two reloads of a watched page: an epoch, within these
HEAD_BYTES = 4096  # the key is in these first bytes of a page

_KEY = re.compile(rb'<meta name="generator" content="deepcontrol report ([0-9a-f]{16})">')
_REFRESH = re.compile(rb'<meta http-equiv="refresh" content="\d+">\n')


def page_key(folders: Sequence[Path]) -> str:
    """Return a digest of the folders of a page, which is written into the page."""
    paths = sorted(str(folder.resolve()) for folder in folders)
    return hashlib.sha256("\0".join(paths).encode(errors="surrogateescape")).hexdigest()[:16]


def page_folder(folders: Sequence[Path], out: Path | None) -> tuple[Path, str]:
    """Choose the folder of a page about runs, and a note if it replaces another page.

    The default is RUN/report for one run and out/report for several. If that holds a page about
    other runs, it is out/report-2, and so on. A folder that the user named is used as it is.
    """
    if out is not None:
        about_others = (out / PAGE).exists() and _key_of(out / PAGE) != page_key(folders)
        return out, f"replaces the page about other runs in {out}" if about_others else ""
    if len(folders) == 1:
        return folders[0] / "report", ""
    number, chosen = 1, Path("out/report")
    while (chosen / PAGE).exists() and _key_of(chosen / PAGE) != page_key(folders):
        number += 1
        chosen = Path(f"out/report-{number}")
    return chosen, ""


def _key_of(page: Path) -> str:
    try:
        with page.open("rb") as file:
            found = _KEY.search(file.read(HEAD_BYTES))
    except OSError:
        return ""
    return found[1].decode() if found else ""


def watch(
    folders: Sequence[Path], write: Callable[[], tuple[Path, bool]], say: Callable[[str], None]
) -> int:
    """Rewrite a page when its files change, until Ctrl-C or its runs are finished.

    The page reloads itself in the browser: no server, no port and no script. It stops reloading
    when the watch ends.

    Args:
        folders: Run folders, or a study folder. They may not exist yet.
        write: Writes the page; returns its path and whether the runs are finished. It raises
            ValueError if there is nothing to show yet.
        say: Prints a line.
    """
    page, seen, waiting = None, None, False
    try:
        while True:
            state = _state(folders)
            if state != seen:
                seen = state
                try:
                    path, finished = write()
                except ValueError as error:
                    if page is None and not waiting:
                        say(f"{error}. Waiting for it; Ctrl-C ends this command.")
                        waiting = True
                else:
                    if page is None:
                        say(f"Open {path.resolve().as_uri()}")
                        say("The page follows the training. Ctrl-C ends this command.")
                    page = path
                    if finished:
                        say("All runs are finished.")
                        break
            time.sleep(INTERVAL)
    except KeyboardInterrupt:
        pass
    if page is not None:
        write_atomic(page, _REFRESH.sub(b"", page.read_bytes(), count=1))
        say(f"Page: {page}")
    return 0


def reload_seconds(runs: Sequence[Run]) -> int:
    """Return the seconds between reloads of a watched page: an epoch's, in bounds."""
    seconds = [run.series("seconds")[1][-1] for run in runs if run.series("seconds")[1]]
    low, high = RELOAD
    return round(min(max(min(seconds, default=low), low), high))


def _state(folders: Sequence[Path]) -> frozenset[tuple[str, int, int]]:
    """Return names, times and sizes of the files that a page shows."""
    found = set()
    for folder in folders:
        for run in (folder, *folder.glob(f"{RUNS}/*")):
            names = (CONFIG, METRICS, LAYERS, DIVERGED, VALIDATION, STUDY)
            for path in (*(run / name for name in names), *run.glob(f"{SAMPLES}/*")):
                try:
                    about = path.stat()
                except OSError:
                    continue
                found.add((str(path), about.st_mtime_ns, about.st_size))
    return frozenset(found)
