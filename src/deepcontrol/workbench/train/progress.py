"""What a run shows: a live line on a terminal, one plain line an epoch everywhere."""

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class Show:
    """The run on the screen. Of several processes the one that leads speaks."""

    def __init__(self, console: Console, speaks: bool = True) -> None:
        self.console, self.speaks = console, speaks
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[words]}"),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not (speaks and console.is_terminal),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Show":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.speaks:
            return
        try:
            self.console.print(escape(text), highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich would leave when nobody reads any more
            self.speaks = False  # the run goes on, and metrics.jsonl says the same

    def begin(self, what: str, total: int) -> None:
        """A new bar in the place of the old one."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total, words="")

    def advance(self, done: int, words: str = "") -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, words=words)

    def decoding(self, name: str, done: int, total: int) -> None:
        """The first use of a data set takes a while."""
        if done == 1:
            self.begin(f"decoding {name}", total)
        self.advance(done)


def step_words(loss: float, images_per_s: float, mib: float, images_left: int) -> str:
    """What stands beside the bar of an epoch; the time left is that of the whole run."""
    left = duration(images_left / images_per_s)
    return f"loss {loss:.4f}  {images_per_s:.1f} images/s  {mib:,.0f} MiB  {left} left"


def epoch_line(metrics: dict[str, float], epochs: int) -> str:
    """What is said of an epoch that is done, from its line in metrics.jsonl."""
    words = [f"epoch {metrics['epoch']}/{epochs}"]
    if metrics["train_loss"] is not None:
        words.append(f"loss {metrics['train_loss']:.4f}")
    words.append(f"val error {metrics['val_error']:.2%}")
    words.append(f"mean IoU {metrics['val_mean_iou']:.3f}")
    if metrics["images_per_s"] is not None:
        words.append(f"{metrics['images_per_s']:.1f} images/s")
    words += [f"{metrics['peak_mib']:,.0f} MiB", duration(metrics["seconds"])]
    return "  ".join(words)


def duration(seconds: float) -> str:
    """As a clock has it.

    >>> duration(75), duration(3 * 86400 + 3600)
    ('1:15', '73:00:00')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
