"""The table of runs: what they differ in, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runfolder import Row, Run, finite_number

HIDDEN = ("out", "workers", "save_steps", "sample_epochs")  # change no number of a run
ALWAYS = ("model", "norm", "batch_size")  # shown even where all runs agree


@dataclass(frozen=True)
class Summary:
    """One run's line; numbers as text, empty where there are none yet."""

    differences: list[str]
    epochs: str
    final_error: str
    best_error: str
    best_epoch: str
    is_best: bool  # of all runs
    mean_iou: str
    time: str
    images_per_s: str


def differing(runs: Sequence[Run]) -> list[str]:
    """The names of the settings that a reader needs to tell the runs apart."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [
        name
        for name in names
        if name not in HIDDEN
        and (name in ALWAYS or len({shown(run.config.get(name)) for run in runs}) > 1)
    ]


def in_common(runs: Sequence[Run]) -> Row:
    """What all runs were started with alike."""
    different = {*differing(runs), *HIDDEN}
    return {k: shown(v) for k, v in runs[0].config.items() if k not in different}


def summarize(runs: Sequence[Run]) -> list[Summary]:
    names = differing(runs)
    best = [min(run.series("val_error")[1], default=None) for run in runs]
    lowest = min((error for error in best if error is not None), default=None)
    return [_summary(run, names, lowest) for run in runs]


def _summary(run: Run, names: Sequence[str], lowest: float | None) -> Summary:
    epochs, errors = run.series("val_error")
    iou = run.series("val_mean_iou")[1]
    rates = sorted(run.series("images_per_s")[1])
    best = min(errors, default=None)
    return Summary(
        differences=[shown(run.config.get(name)) for name in names],
        epochs=f"{run.epochs_done} of {run.epochs_planned or '?'}",
        final_error=percent(errors[-1] if errors else None),
        best_error=percent(best),
        best_epoch="" if best is None else str(epochs[errors.index(best)]),
        is_best=best is not None and best == lowest,
        mean_iou=percent(iou[-1] if iou else None),
        time=duration(sum(run.series("seconds")[1])),
        images_per_s=f"{rates[len(rates) // 2]:.3g}" if rates else "",
    )


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def duration(seconds: float) -> str:
    """
    >>> duration(59.4), duration(3600 * 30 + 61)
    ('59 s', '30:01 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"


def shown(value: Any) -> str:
    """A setting as a user types it.

    >>> shown([256, 512]), shown(None), shown(0.125), shown(True)
    ('256x512', '-', '0.125', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value))
    of_number = finite_number(value)
    return str(value) if of_number is None else f"{of_number:.10g}"
