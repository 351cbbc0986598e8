"""The table of runs: their settings and results."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..runfolder import Row, Run
from .text import duration_text, percent, setting_text

HIDDEN = ("out", "workers", "save_steps", "sample_epochs")  # have no influence on the results
ALWAYS = ("model", "norm", "batch_size")  # shown even if all runs agree


@dataclass(frozen=True)
class Summary:
    """A row of the table, as text. Values that do not exist yet are empty."""

    differences: list[str]
    epochs: str
    final_error: str
    best_error: str
    best_epoch: str
    is_best: bool  # lowest error of all runs
    mean_iou: str
    time: str
    images_per_s: str


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the names of the settings that differ between runs, and those always shown."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [
        name
        for name in names
        if name not in HIDDEN
        and (name in ALWAYS or len({setting_text(run.config.get(name)) for run in runs}) > 1)
    ]


def in_common(runs: Sequence[Run]) -> Row:
    """Return the settings that all runs share."""
    different = {*differing(runs), *HIDDEN}
    return {k: setting_text(v) for k, v in runs[0].config.items() if k not in different}


def summarize(runs: Sequence[Run]) -> list[Summary]:
    names = differing(runs)
    best = [min(run.series("val_error")[1], default=None) for run in runs]
    lowest = min((error for error in best if error is not None), default=None)
    return [_summary(run, names, lowest) for run in runs]


def _summary(run: Run, names: Sequence[str], lowest: float | None) -> Summary:
    epochs, errors = run.series("val_error")
    iou = run.series("val_mean_iou")[1]
    speeds = sorted(run.series("images_per_s")[1])
    best = min(errors, default=None)
    return Summary(
        differences=[setting_text(run.config.get(name)) for name in names],
        epochs=f"{run.epochs_done} of {run.epochs_planned or '?'}",
        final_error=percent(errors[-1] if errors else None),
        best_error=percent(best),
        best_epoch="" if best is None else str(epochs[errors.index(best)]),
        is_best=best is not None and best == lowest,
        mean_iou=percent(iou[-1] if iou else None),
        time=duration_text(sum(run.series("seconds")[1])),
        images_per_s=f"{speeds[len(speeds) // 2]:.3g}" if speeds else "",
    )
