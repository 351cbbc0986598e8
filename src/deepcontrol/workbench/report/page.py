"""The pages: one self-contained HTML file for some runs, or for a study.

A study's page comes with its figures as files and the verdicts as a Markdown table.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ..folders.runfolder import Run
from ..folders.storage import write_atomic
from ..folders.studyfolder import (
    PAGE,
    VERDICT_TABLE,
    VERDICTS,
    Cell,
    Panel,
    Study,
    StudyRuns,
    Sweep,
)
from ..imagefile import first_and_last, picture_uri
from ..terminal import printable
from . import text
from .classes import (
    ClassRow,
    Confusion,
    class_rows,
    draw_class_bars,
    draw_class_curves,
    draw_confusion,
    frequent_confusions,
    only_class,
)
from .figures import (
    Ranges,
    data_uri,
    draw_contenders,
    draw_error,
    draw_figure,
    draw_final_errors,
    draw_loss,
    draw_one,
    draw_sweep,
    labeled_things,
    line_style,
    own_ranges,
    paired_ranges,
    runs_of,
    save_figure,
)
from .layers import (
    FRACTION,
    Scale,
    Track,
    departure,
    draw_depth,
    draw_heats,
    draw_multiples,
    left_out,
    start_of,
    track,
    track_open,
)
from .summary import (
    ABOUT_AGC,
    contenders,
    differing,
    final_errors,
    in_common,
    runs_summary,
    study_summary,
    summarize,
)

OUTCOMES = dict(zip(VERDICTS, ("holds", "fails", "is undecided"), strict=True))  # check outcomes


def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names and settings come from files
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, folder: Path, inside: Path | None = None, **content: Any) -> Path:
    """Write index.html from a template and return its path."""
    page = folder / PAGE
    html = environment().get_template(template).render(text=text, **content)
    write_atomic(page, html, inside=inside or folder)
    return page


# Runs


@dataclass(frozen=True)
class Section:
    """The part of the page about one run. Pictures are data URIs, or None."""

    run: Run
    color: str
    dashes: str  # SVG dash array of its line
    start: float | None  # initial value of lambda
    depth: str | None
    multiples: str | None
    others: str | None
    classes: list[ClassRow]
    class_curves: str | None
    class_bars: str | None  # if the curves have a single epoch
    confusion: str | None
    confusions: list[Confusion]
    only_class: str | None  # predicted everywhere
    samples: list[tuple[int, str]]
    worst: list[tuple[int, str]]  # the last picture of the worst images, or none
    notes: list[str]


def write_page(
    runs: Sequence[Run],
    refused: Sequence[str],
    folder: Path,
    key: str = "",
    refresh: int | None = None,
    inside: Path | None = None,
) -> Path:
    """Write index.html about some runs into a folder and return its path.

    Args:
        runs: The runs.
        refused: Why some folders are not shown.
        folder: Folder of the page.
        key: Identifies the runs (`page_key` of the package).
        refresh: Seconds after which the page reloads itself; None for never.
        inside: Folder that the user named, if `folder` is below it.
    """
    return render(
        "page.html",
        folder,
        inside,
        key=key,
        refresh=refresh,
        runs=runs,
        refused=refused,
        columns=differing(runs),
        common=in_common(runs),
        summaries=summarize(runs),
        sections=sections(runs),
        summary=runs_summary(runs),
        labeled=labeled_things(runs),
        has_iou=not all(run.is_classification for run in runs),
        error=data_uri(draw_error(runs)),
        loss=data_uri(draw_loss(runs)),
    )


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return a section for each run, with common color scales for comparison."""
    scales = {
        name: Scale.around(start, [t.mean for run in runs if (t := track(run, name))])
        for name, start in (("gain", 1.0), ("bias", 0.0))
    }
    lambdas: dict[float, list[Track]] = defaultdict(list)  # by initial value
    for run in runs:
        if lam := track(run, "mean_scale"):
            lambdas[start_of(lam)].append(lam)
    of_lambda = {start: lambda_scales(start, found) for start, found in lambdas.items()}
    return [section(run, index, scales, of_lambda) for index, run in enumerate(runs)]


def lambda_scales(start: float, tracks: Sequence[Track]) -> tuple[Scale, Scale]:
    """Return the scales of lambda's means and distances from its start."""
    distances = [departure(each, start) for each in tracks]
    return Scale.around(start, [each.mean for each in tracks]), Scale.up_from_0(distances)


def section(
    run: Run, index: int, scales: dict[str, Scale], of_lambda: dict[float, tuple[Scale, Scale]]
) -> Section:
    color, dashes = line_style(index)
    depth = multiples = None
    start = None
    if lam := track(run, "mean_scale"):
        start = start_of(lam)
        depth = data_uri(draw_depth(lam, "lambda", start, *of_lambda[start]))
        multiples = data_uri(draw_multiples(lam, "lambda", start))
    samples, missing = sample_pictures(first_and_last(run.samples))
    worst, missing_worst = sample_pictures(run.worst_samples[-1:])
    if not run.samples:
        missing = ["no sample pictures yet"]
    curves = draw_class_curves(run) if run.epochs_done > 1 else None
    bars = None if curves else draw_class_bars(run)
    confusion = draw_confusion(run)
    return Section(
        run=run,
        color=color,
        dashes=",".join(map(str, dashes)),
        start=start,
        depth=depth,
        multiples=multiples,
        others=draw_others(run, scales),
        classes=class_rows(run),
        class_curves=data_uri(curves) if curves else None,
        class_bars=data_uri(bars) if bars else None,
        confusion=data_uri(confusion) if confusion else None,
        confusions=frequent_confusions(run),
        only_class=only_class(run),
        samples=samples,
        worst=worst,
        notes=[*run.notes, *left_out(run), *missing, *missing_worst],
    )


def draw_others(run: Run, scales: dict[str, Scale]) -> str | None:
    """Draw gamma, beta and the fraction of active ReLUs, as far as the run has them."""
    found: list[tuple[str, Track, Scale]] = []
    for name, symbol in (("gain", "gamma"), ("bias", "beta")):
        if parameter := track(run, name):
            found.append((f"{symbol}, mean of each layer", parameter, scales[name]))
    if active := track_open(run):
        found.append(("fraction of active ReLUs", active, FRACTION))
    return data_uri(draw_heats(found)) if found else None


def sample_pictures(
    pictures: Sequence[tuple[int, Path]],
) -> tuple[list[tuple[int, str]], list[str]]:
    """Return pictures' epochs and data URIs, and a note for each that is not shown."""
    shown, missing = [], []
    for epoch, path in pictures:
        try:
            shown.append((epoch, picture_uri(path)))
        except ValueError as error:
            missing.append(str(error))
    return shown, missing


# A study


def write_study_page(study: Study, runs: StudyRuns, out: Path, refresh: int | None = None) -> Path:
    """Write index.html, figures/ and verdicts.md of a study; return the page's path."""
    lambdas = write_figures(study, runs, out)
    sweeps = write_sweeps(study, out)
    errors = final_errors(study, runs)
    compared = contenders(study)
    write_atomic(out / VERDICT_TABLE, text.verdicts_markdown(study) + "\n", inside=out)
    return render(
        "study.html",
        out,
        key="",
        refresh=refresh,
        study=study,
        runs=runs,
        outcomes=OUTCOMES,
        lrs=sorted({cell.lr for cell in study.grid}),
        grid=grid_rows(study),
        about_agc=ABOUT_AGC,
        summary=study_summary(study, errors),
        errors=data_uri(draw_final_errors(errors)) if errors else None,
        contenders=data_uri(draw_contenders(compared)) if len(compared) > 1 else None,
        sweeps=sweeps,
        figure1=draw_panels(study.figure1, runs, paired_ranges(study.figure1, runs.found)),
        figure2=draw_panels(study.figure2, runs, own_ranges(study.figure2, runs.found)),
        lambdas=lambdas,
        pictures=study_pictures(study, runs),
        classes=study_classes(study, runs),
        rows=[
            (entry, summarize([run])[0] if (run := runs.get(entry.name)) else None)
            for entry in study.runs
        ],
        about=about(runs),
    )


def draw_panels(
    panels: Sequence[Panel], runs: StudyRuns, ranges: Ranges
) -> dict[str, list[tuple[Panel, str]]]:
    """Return each panel with its data URI, sorted into "complete" and "incomplete".

    A panel is a comparison and needs two lines with runs. If no panel has two yet, those with one
    count as complete.
    """
    lines = {p.letter: sum(bool(runs_of(line, runs.found)) for line in p.lines) for p in panels}
    needed = min(2, max(lines.values(), default=0)) or 1
    found: dict[str, list[tuple[Panel, str]]] = {"complete": [], "incomplete": []}
    for panel in panels:
        picture = data_uri(draw_one(panel, runs.found, ranges[panel.letter]))
        group = "complete" if lines[panel.letter] >= needed else "incomplete"
        found[group].append((panel, picture))
    return found


def write_figures(study: Study, runs: StudyRuns, out: Path) -> dict[str, str]:
    """Save the figures as SVG and PNG; return those of lambda as data URIs."""
    subtitle = text.protocol_text(study)
    if study.figure1:
        ranges = paired_ranges(study.figure1, runs.found)
        save_figure(draw_figure(study.figure1, runs.found, ranges, subtitle), out, "figure1")
    if study.figure2:
        ranges = own_ranges(study.figure2, runs.found)
        figure = draw_figure(study.figure2, runs.found, ranges, f"SegNet, {subtitle}")
        save_figure(figure, out, "figure2")
    drawn = runs.get(study.lambda_run)
    lam = track(drawn, "mean_scale") if drawn else None
    if lam is None:
        return {}
    start = start_of(lam)
    depth = draw_depth(lam, "lambda", start, *lambda_scales(start, [lam]))
    multiples = draw_multiples(lam, "lambda", start)
    return {
        "start": f"{start:g}",
        "depth": save_figure(depth, out, "lambda", shaded=True),
        "multiples": save_figure(multiples, out, "lambda-layers"),
    }


def write_sweeps(study: Study, out: Path) -> list[tuple[Sweep, str]]:
    """Save the sweeps' charts as sweep1, sweep2, ...; return sweeps with data URIs."""
    return [
        (sweep, save_figure(draw_sweep(sweep), out, f"sweep{i}"))
        for i, sweep in enumerate(text.begun_sweeps(study), 1)
    ]


def grid_rows(study: Study) -> dict[int, dict[float, Cell]]:
    """Return the cells by batch size and learning rate."""
    rows: dict[int, dict[float, Cell]] = defaultdict(dict)
    for cell in study.grid:
        rows[cell.batch][cell.lr] = cell
    return rows


def study_pictures(study: Study, runs: StudyRuns) -> list[tuple[str, int, str]]:
    """Return label, epoch and data URI of the last picture of each pictured run."""
    found = []
    for run in runs.with_metrics(study.pictured):
        for epoch, path in run.samples[-1:]:
            try:
                found.append((study.label(run.name), epoch, picture_uri(path)))
            except ValueError:  # a page without this picture is still useful
                continue
    return found


def study_classes(study: Study, runs: StudyRuns) -> list[ClassRow]:
    """Return the pictured runs' classes, for the legend.

    The runs share one dataset.
    """
    pictured = [run for run in runs.with_metrics(study.pictured) if run.samples]
    return class_rows(pictured[0]) if pictured else []


def about(runs: StudyRuns) -> dict[str, list[str]]:
    """Return versions, commits and machines of the runs, the most frequent first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs.found.values():
        versions = run.about.get("versions")
        of_run = dict(versions) if isinstance(versions, dict) else {}
        of_run |= {k: run.about[k] for k in ("commit", "machine") if run.about.get(k)}
        for name, value in of_run.items():
            found[str(name)][str(value)] += 1
    total = len(runs.found)
    return {
        name: [
            value if count == total else f"{value} ({count} of {total} runs)"
            for value, count in counts.most_common()
        ]
        for name, counts in found.items()
    }
