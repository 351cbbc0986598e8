"""The page: one HTML file that holds everything it shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ..runfolder import Run
from .curves import draw_curves
from .depth import SHARE, Scale, departure, draw_depth, draw_heats, draw_multiples
from .figures import data_uri, line_style
from .layers import Track, track, track_open
from .pictures import chosen, picture_uri
from .summary import differing, in_common, summarize

STARTS = {"mean_scale": 1.0, "gain": 1.0, "bias": 0.0}  # of lambda, gamma and beta


@dataclass(frozen=True)
class Section:
    """What the page shows of one run beside the table; pictures as data URIs, or None."""

    run: Run
    color: str
    dashes: str  # of its line, as SVG writes them
    depth: str | None
    multiples: str | None
    others: str | None
    samples: list[tuple[int, str]]
    notes: list[str]


def write_page(runs: Sequence[Run], refused: Sequence[str], folder: Path) -> Path:
    """Write index.html into a folder; returns its path."""
    html = (
        environment()
        .get_template("page.html")
        .render(
            runs=runs,
            refused=refused,
            columns=differing(runs),
            common=in_common(runs),
            summaries=summarize(runs),
            sections=sections(runs),
            curves=data_uri(draw_curves(runs)),
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(html, encoding="utf-8")
    return path


def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names and settings come from files
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def sections(runs: Sequence[Run]) -> list[Section]:
    """One for each run; all runs' colors mean the same, so that they can be compared."""
    tracks = {name: [track(run, name) for run in runs] for name in STARTS}
    scales = {
        name: Scale.around(start, [t.mean for t in tracks[name] if t])
        for name, start in STARTS.items()
    }
    lambdas = [departure(t, 1.0) for t in tracks["mean_scale"] if t]
    scales["departure"] = Scale.up_from_0(lambdas)
    return [section(run, index, scales) for index, run in enumerate(runs)]


def section(run: Run, index: int, scales: dict[str, Scale]) -> Section:
    color, dashes = line_style(index)
    depth = multiples = None
    if lam := track(run, "mean_scale"):
        of_lambda = scales["mean_scale"], scales["departure"]
        depth = data_uri(draw_depth(lam, "lambda", 1.0, *of_lambda))
        multiples = data_uri(draw_multiples(lam, "lambda", 1.0))
    samples, missing = pictures(run)
    return Section(
        run=run,
        color=color,
        dashes=",".join(map(str, dashes)),
        depth=depth,
        multiples=multiples,
        others=draw_others(run, scales),
        samples=samples,
        notes=[*run.notes, *missing],
    )


def draw_others(run: Run, scales: dict[str, Scale]) -> str | None:
    """gamma, beta and the share of open activations, of what the run has."""
    found: list[tuple[str, Track, Scale]] = []
    for name, symbol in (("gain", "gamma"), ("bias", "beta")):
        if parameter := track(run, name):
            found.append((f"{symbol}, mean of each layer", parameter, scales[name]))
    if opened := track_open(run):
        found.append(("share of open activations", opened, SHARE))
    return data_uri(draw_heats(found)) if found else None


def pictures(run: Run) -> tuple[list[tuple[int, str]], list[str]]:
    """The sample pictures, and lines about those that cannot be shown."""
    shown, missing = [], []
    for epoch, path in chosen(run.samples):
        try:
            shown.append((epoch, picture_uri(path)))
        except ValueError as error:
            missing.append(str(error))
    return shown, missing if run.samples else ["there are no sample pictures yet"]
