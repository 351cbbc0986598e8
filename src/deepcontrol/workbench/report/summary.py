"""Summaries: a study in one paragraph, and runs as the rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..folders.runfolder import Run, finite_number
from ..folders.storage import Row
from ..folders.studyfolder import ClaimResult, Line, Measurement, Panel, Study, StudyRuns, Sweep
from .text import (
    DATA_NAMES,
    NORM_NAMES,
    count_verdicts,
    duration_text,
    is_of_paper,
    join_words,
    percent,
    setting_text,
)

# A study

ABOUT_AGC = (
    "AGC (automatic gain control) replaces batch normalization. Each filter subtracts lambda times "
    "the mean of its own feature map and multiplies the rest by gamma; both are learned. Nothing "
    "is averaged over the batch, so AGC should train equally well at every batch size."
)

FINAL_ERROR = "final error"
FinalErrors = dict[str, dict[int, Measurement]]  # by norm and batch size


def final_errors(study: Study, runs: StudyRuns) -> FinalErrors:
    """Return SegNet's final error by norm and batch, at the paper's learning rates.

    They are the lines of the panels that compare batch sizes: one norm, and a learning rate
    proportional to the batch size. Arms without a finished run are left out.
    """
    found: FinalErrors = {}
    for panel in (*study.figure1, *study.figure2):
        norm, errors = _compare_batches(panel, study, runs)
        if errors and norm not in found:
            found[norm] = dict(sorted(errors.items()))
    return {norm: found[norm] for norm in NORM_NAMES if norm in found}


def _compare_batches(
    panel: Panel, study: Study, runs: StudyRuns
) -> tuple[str, dict[int, Measurement]]:
    """Return norm and final errors of a panel; empty if it compares anything else."""
    errors: dict[int, Measurement] = {}
    kinds = set()
    lines = [(line, run) for line in panel.lines if (run := _first_run(line, runs))]
    for line, run in lines:
        batch, lr = run.config.get("batch_size"), finite_number(run.config.get("lr"))
        if not isinstance(batch, int) or batch < 1 or lr is None or batch in errors:
            return "", {}
        kinds.add((str(run.config.get("model")), str(run.config.get("norm")), round(lr / batch, 9)))
        try:
            errors[batch] = study.measurement(line.runs[0].rpartition("-s")[0], FINAL_ERROR)
        except KeyError:
            return "", {}
    if len(errors) < 2 or len(kinds) != 1:
        return "", {}
    model, norm, _ = kinds.pop()
    measured = {batch: error for batch, error in errors.items() if error.n}
    return (norm, measured) if model == "segnet" and norm in NORM_NAMES else ("", {})


def _first_run(line: Line, runs: StudyRuns) -> Run | None:
    return next((run for name in line.runs if (run := runs.get(name))), None)


def contenders(study: Study) -> list[Measurement]:
    """Return the final error of each arm that a claim compares, lowest first.

    Arms without a finished run and diverged ones are left out.
    """
    found = {
        measured.arm: measured
        for claim in study.claims
        for measured in claim.measurements
        if measured.measure == FINAL_ERROR and measured.mean is not None
    }
    return sorted(found.values(), key=lambda measured: measured.mean or 0.0)


def study_summary(study: Study, errors: FinalErrors) -> str:
    """Summarize a study in a few sentences: errors, time, memory and verdicts."""
    sentences = [*_error_sentences(study, errors), *map(_sweep_sentence, study.sweeps)]
    if not is_of_paper(study) and not study.sweeps:
        sentences.append(_lowest_sentence(study))
    sentences += [_speed_sentence(study), _verdict_sentence(study)]
    return " ".join(filter(None, sentences))


def _error_sentences(study: Study, errors: FinalErrors) -> list[str]:
    """Return sentences on final errors, divergence, and the batch size's influence."""
    parts: list[str] = []
    diverged: list[str] = []
    listed: list[int] = []  # the batch sizes that the sentence named last
    for norm, by_batch in errors.items():
        name = NORM_NAMES[norm]
        means = {batch: error.mean for batch, error in by_batch.items() if error.mean is not None}
        if means:
            values = join_words([f"{mean:.1f}" for mean in means.values()])
            part = f"{name} at {values}%" if parts else f"{name} ends at {values}% wrong pixels"
            if listed != list(means):
                listed = list(means)
                part += (
                    f" at batch size{'s' * (len(means) > 1)} {join_words(list(map(str, means)))}"
                )
            parts.append(part)
        diverged += [
            f"{name} diverged in {error.diverged} of {error.n} runs at batch size {batch}."
            for batch, error in by_batch.items()
            if error.diverged
        ]
    if not parts:
        return diverged
    return [f"{_training_text(study)}: {'; '.join(parts)}.", *diverged, _range_sentence(errors)]


def _range_sentence(errors: FinalErrors) -> str:
    """Say by how much each norm's error depends on the batch size."""
    ranges = []
    for norm, by_batch in errors.items():
        means = [error.mean for error in by_batch.values() if error.mean is not None]
        if len(means) > 1 and len(means) == len(by_batch):
            ranges.append(f"{max(means) - min(means):.1f} points with {NORM_NAMES[norm]}")
    if len(ranges) < 2:
        return ""
    return f"Between the batch sizes, the error differs by {join_words(ranges)}."


def _training_text(study: Study) -> str:
    """Return "SegNet on CamVid, 150 epochs"."""
    p = study.protocol
    width = f" at {100 * p.width:g}% of its width" if p.width != 1 else ""
    data = DATA_NAMES.get(p.data, p.data)
    images = f"{p.train_limit} images of {data}" if p.train_limit else data
    if p.train_limit and p.data == "streets":
        images = f"{p.train_limit} {data}"
    return f"SegNet{width} on {images}, {p.epochs} epochs"


def _sweep_sentence(sweep: Sweep) -> str:
    """Name the series with the lowest error at each x; "" if nothing is compared yet."""
    lowest: dict[str, dict[int, float]] = {}
    for x in sorted({p.x for series in sweep.series for p in series.points}):
        points = [(series.label, p) for series in sweep.series for p in series.points if p.x == x]
        at_x = [(label, p.error) for label, p in points if p.error.n]
        means = [(mean, label) for label, error in at_x if (mean := error.mean) is not None]
        if len(at_x) > 1 and means:
            mean, label = min(means)
            lowest.setdefault(label, {})[x] = mean
    if not lowest:
        return ""
    parts = []
    for label, by_x in lowest.items():
        ends = dict.fromkeys(f"{error:.1f}" for error in (min(by_x.values()), max(by_x.values())))
        parts.append(f"with {label} at {join_words(list(map(str, by_x)))} ({' to '.join(ends)}%)")
    return f"{sweep.title}, lowest {join_words(parts)}."


def _lowest_sentence(study: Study) -> str:
    """Name the arm with the lowest final error; "" if fewer than two are measured."""
    found = contenders(study)
    if len(found) < 2 or found[0].mean is None:
        return ""
    return (
        f"{_training_text(study)}: the lowest final error is {found[0].mean:.1f}%, with "
        f"{found[0].label}."
    )


def _speed_sentence(study: Study) -> str:
    """Compare time and memory of a step, if the benchmark measured both norms."""
    parts = []
    for measure, words in (
        ("step time", "a training step takes {0:.1f} ms with AGC and {1:.1f} ms with BatchNorm"),
        ("activation memory", "the activations take {0:.1f} and {1:.1f} GiB"),
    ):
        try:
            agc, bn = (study.measurement(norm, measure).mean for norm in ("agc", "bn"))
        except KeyError:
            continue
        if agc is not None and bn is not None:
            scale = 1 / 1024 if measure == "activation memory" else 1.0
            parts.append(words.format(agc * scale, bn * scale))
    if len(parts) < 2:
        return ""
    return f"On the benchmark's GPU at batch size 8, {parts[0]}, and {parts[1]}."


def _verdict_sentence(study: Study) -> str:
    """Return a sentence on how many of the paper's claims are reproduced.

    "Of the paper's 24 claims, 10 are reproduced, 6 are not and 8 are undecided."
    """
    ours = [claim for claim in study.claims if claim.beyond_paper]
    paper = [claim for claim in study.claims if not claim.beyond_paper]
    sentences = []
    if paper:
        plural = "s" * (len(paper) > 1)
        sentences.append(f"Of the paper's {len(paper)} claim{plural}, {_verdict_words(paper)}.")
    if ours:
        plural = "s" * (len(ours) > 1)
        sentences.append(f"Of {len(ours)} claim{plural} beyond the paper, {_verdict_words(ours)}.")
    return " ".join(sentences)


def _verdict_words(claims: Sequence[ClaimResult]) -> str:
    counts = count_verdicts(claims).items()
    return join_words([f"{n} {'is' if n == 1 else 'are'} {verdict}" for verdict, n in counts])


# Runs

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
    """Return the settings that differ between runs, and those always shown."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name
        for name in names
        if name not in HIDDEN
        and (name in ALWAYS or len({setting_text(run.settings.get(name)) for run in runs}) > 1)
    ]


def in_common(runs: Sequence[Run]) -> Row:
    """Return the settings that all runs share."""
    different = {*differing(runs), *HIDDEN}
    return {k: setting_text(v) for k, v in runs[0].settings.items() if k not in different}


def runs_summary(runs: Sequence[Run]) -> str:
    """Return a sentence on the lowest validation error; "" if there is none."""
    found = [(best, run) for run in runs if (best := run.best()) is not None]
    if not found:
        return ""
    (epoch, lowest), run = min(found, key=lambda pair: pair[0][1])
    at = f"{percent(lowest)}% after epoch {epoch}"
    if len(runs) == 1:
        return f"The lowest validation error is {at}."
    return f"The lowest validation error is {at}, by {run.name}."


def summarize(runs: Sequence[Run]) -> list[Summary]:
    names = differing(runs)
    lowest = min((best[1] for run in runs if (best := run.best()) is not None), default=None)
    return [_summary(run, names, lowest) for run in runs]


def _summary(run: Run, names: Sequence[str], lowest: float | None) -> Summary:
    errors = run.series("val_error")[1]
    iou = run.series("val_mean_iou")[1]
    speeds = sorted(run.series("images_per_s")[1])
    epoch, best = run.best() or (None, None)
    return Summary(
        differences=[setting_text(run.settings.get(name)) for name in names],
        epochs=f"{run.epochs_done} of {run.epochs_planned or '?'}",
        final_error=percent(errors[-1] if errors else None),
        best_error=percent(best),
        best_epoch="" if epoch is None else str(epoch),
        is_best=best is not None and best == lowest,
        mean_iou=percent(iou[-1] if iou else None),
        time=duration_text(sum(run.series("seconds")[1])),
        images_per_s=f"{speeds[len(speeds) // 2]:.3g}" if speeds else "",
    )
