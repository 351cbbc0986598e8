"""Where a page goes, and how it stays up to date while its runs train (`--watch`).

A watched page is rewritten when a file of its runs changes, and reloads itself in the browser: no
server, no port and no script. The page stops reloading when the watch ends.
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..folders.output import write_atomic
from ..folders.runfolder import CONFIG, DIVERGED, LAYERS, METRICS, SAMPLES, VALIDATION, Run
from ..folders.studyfolder import PAGE, RUNS, STUDY

INTERVAL = 1.0  # seconds between two looks at the files
RELOAD = (5, 60)  # seconds between two reloads of a watched page: an epoch, within these
HEAD_BYTES = 4096  # of a page, in which its key is

_KEY = re.compile(rb'<meta name="generator" content="deepcontrol report ([0-9a-f]{16})">')
_REFRESH = re.compile(rb'<meta http-equiv="refresh" content="\d+">\n')


def page_key(folders: Sequence[Path]) -> str:
    """Return a digest of the folders that a page is about, which is written into the page."""
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
    """Rewrite a page whenever its files change, until Ctrl-C or until its runs are finished.

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
    """Return after how many seconds a watched page reloads: the time of an epoch, in bounds."""
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
