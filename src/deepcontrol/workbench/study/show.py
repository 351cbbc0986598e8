"""What a study shows: one live table of all runs, or a line for each change in a log."""

import time

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..train.progress import duration
from .claims import Judged
from .queue import Entry, Queue

# What a reader wants to see first when there are more runs than lines.
ORDER = (
    "failed", "running", "elsewhere", "stopped", "waiting", "not asked for", "diverged", "done"
)  # fmt: skip
STYLES = {"failed": "bold red", "running": "bold", "diverged": "yellow", "done": "green"}
VERDICTS = {"reproduced": "green", "not reproduced": "red", "undecided": "yellow"}


class Show:
    """The queue on the screen."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()
        self._live = Live(console=console, transient=True, refresh_per_second=2)

    def __enter__(self) -> "Show":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, entry: Entry, what: str) -> None:
        """A line that stays; in a terminal of faults alone, since the table has the rest."""
        if self.console.is_terminal and not (entry.fault or entry.state == "diverged"):
            return
        at = duration(time.monotonic() - self.started)
        error = "" if entry.progress.error is None else f", error {entry.progress.error:.2%}"
        epoch = f" (epoch {max(entry.progress.epoch, 0)}{error})"
        line = f"{at}  {entry.job.name}: {what}{epoch}"
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def look(self, queue: Queue) -> None:
        if self._live.is_started:
            self._live.update(table_of_runs(queue, time.monotonic() - self.started))


def table_of_runs(queue: Queue, seconds: float) -> Table:
    entries = sorted(queue.entries.values(), key=lambda e: ORDER.index(e.state))
    over = len(queue.having("done", "diverged"))
    title = f"{over} of {len(entries)} runs are done, {duration(seconds)}"
    table = Table(title=title, title_justify="left", box=None)
    for name, justify in (("run", "left"), ("", "left"), ("epoch", "right"), ("error %", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for entry in entries:
        state = f"{entry.state}, {entry.where}" if entry.state == "running" else entry.state
        error = entry.progress.error
        table.add_row(
            entry.job.name,
            state,
            f"{max(entry.progress.epoch, 0)}/{entry.job.config.epochs}",
            "" if error is None else f"{100 * error:.2f}",
            style=STYLES.get(entry.state, ""),
        )
    return table


def table_of_verdicts(judged: list[Judged]) -> Table:
    table = Table("claim", "the paper", "here", "verdict", title="Verdicts", title_justify="left")
    table.columns[2].overflow = "fold"
    for each in judged:
        style = VERDICTS[each.verdict]
        table.add_row(
            f"[bold]{each.claim.id}[/] {escape(each.claim.says)}",
            escape(each.claim.paper),
            escape("\n".join(map(str, each.ours)) or each.findings[0].found),
            f"[{style}]{each.verdict}[/]",
        )
    return table
