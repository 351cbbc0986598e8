"""A study's page: verdicts, figures, lambda, pictures and commands, in one HTML file.

Beside it lie the figures as files, and the verdicts as a table in Markdown.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from .depth import Scale, departure, draw_depth, draw_multiples
from .figures import data_uri, save_figure
from .layers import track
from .page import environment
from .panels import common_ranges, draw_figure, draw_one, ranges
from .pictures import picture_uri
from .study import OVER, VERDICTS, Cell, Study, Value
from .summary import shown, summarize

HOLDS = dict(zip(VERDICTS, ("holds", "fails", "is undecided"), strict=True))


def write_study_page(study: Study, out: Path) -> Path:
    """index.html, figures/ and verdicts.md of a study; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    lambdas = write_figures(study, out / "figures")
    of_1, of_2 = common_ranges(study.panels), ranges(study.beside)
    html = (
        environment()
        .get_template("study.html")
        .render(
            study=study,
            preset=shown(study.protocol.get("name")),
            protocol=protocol_words(study),
            counts=count_verdicts(study),
            finished=finished_words(study),
            by_measure=by_measure,
            holds=HOLDS,
            rates=sorted({cell.rate for cell in study.grid}),
            grid=rows_of_grid(study),
            panels=[(p, data_uri(draw_one(p, of_1[p.letter]))) for p in study.panels],
            beside=[(p, data_uri(draw_one(p, of_2[p.letter]))) for p in study.beside],
            lambdas=lambdas,
            pictures=pictures(study),
            rows=[
                (entry, summarize([entry.run])[0] if entry.run else None) for entry in study.entries
            ],
            about=about(study),
        )
    )
    page = out / "index.html"
    page.write_text(html, encoding="utf-8")
    (out / "verdicts.md").write_text(markdown(study) + "\n", encoding="utf-8")
    return page


def count_verdicts(study: Study) -> dict[str, int]:
    """How many claims there are of each verdict that there is, the good ones first."""
    counts = Counter(claim.verdict for claim in study.claims)
    return {verdict: counts[verdict] for verdict in HOLDS if counts[verdict]}


def write_figures(study: Study, folder: Path) -> dict[str, str]:
    """As SVG and PNG: curves, and lambda where a run has it; returns the latter for the page."""
    folder.mkdir(exist_ok=True)
    words = protocol_words(study)
    figure_1 = draw_figure(study.panels, common_ranges(study.panels), words)
    save_figure(figure_1, folder / "figure1")
    if study.beside:
        figure_2 = draw_figure(study.beside, ranges(study.beside), f"SegNet, {words}")
        save_figure(figure_2, folder / "figure2")
    lam = track(study.layers, "mean_scale") if study.layers else None
    if lam is None:
        return {}
    scales = Scale.around(1.0, [lam.mean]), Scale.up_from_0([departure(lam, 1.0)])
    depth = draw_depth(lam, "lambda", 1.0, *scales)
    multiples = draw_multiples(lam, "lambda", 1.0)
    return {
        "depth": save_figure(depth, folder / "lambda", shaded=True),
        "multiples": save_figure(multiples, folder / "lambda-layers"),
    }


def rows_of_grid(study: Study) -> dict[int, dict[float, Cell]]:
    """Cells by batch and rate."""
    rows: dict[int, dict[float, Cell]] = defaultdict(dict)
    for cell in study.grid:
        rows[cell.batch][cell.rate] = cell
    return rows


def pictures(study: Study) -> list[tuple[str, int, str]]:
    """Label, epoch and picture of the last sample of each run that is to be shown."""
    found = []
    for run in study.samples:
        epoch, path = run.samples[-1]
        try:
            found.append((study.labels[run.name], epoch, picture_uri(path)))
        except ValueError:  # no picture, no harm
            continue
    return found


def protocol_words(study: Study) -> str:
    """What all runs have in common, in a line."""
    p = study.protocol
    limit = f", {shown(p['train_limit'])} images" if p.get("train_limit") else ""
    width = f", width {shown(p.get('width'))}" if p.get("width") != 1 else ""
    times = p.get("rates_times", 1)
    rates = f", at {shown(times)} times the paper's rates" if times != 1 else ""
    other = p.get("epochs") != study.preset_epochs
    instead = f" in place of the preset's {study.preset_epochs}" if other else ""
    return (
        f"{shown(p.get('data'))}{limit} at {shown(p.get('size'))}{width}, "
        f"{shown(p.get('epochs'))} epochs{instead}, "
        f"up to {study.seeds} seed{'s' * (study.seeds > 1)}{rates}"
    )


def about(study: Study) -> dict[str, list[str]]:
    """By which code and on what the runs were made: the most frequent first, with their numbers."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    runs = [entry.run for entry in study.entries if entry.run]
    for run in runs:
        versions = run.about.get("versions")
        of_run = dict(versions) if isinstance(versions, dict) else {}
        of_run |= {k: run.about[k] for k in ("commit", "machine") if run.about.get(k)}
        for name, value in of_run.items():
            found[str(name)][str(value)] += 1
    return {
        name: [
            value if count == len(runs) else f"{value} ({count} of {len(runs)} runs)"
            for value, count in counts.most_common()
        ]
        for name, counts in found.items()
    }


def by_measure(values: Sequence[Value]) -> dict[str, list[Value]]:
    """Those of one measure together."""
    found: dict[str, list[Value]] = defaultdict(list)
    for value in values:
        found[value.measure].append(value)
    return dict(found)


def markdown(study: Study) -> str:
    """The table of verdicts, and what it is of."""
    below = [f"{finished_words(study)}: {protocol_words(study)}.", study.note]
    return "\n\n".join([table_of_verdicts(study), *filter(None, below)])


def table_of_verdicts(study: Study, rules: bool = True) -> str:
    """In Markdown; without its rules it fits into a README."""
    names = ["claim", "the paper", "here", *["rule"] * rules, "verdict"]
    rows = [names, ["---"] * len(names)]
    for claim in study.claims:
        ours = "<br>".join(
            "<br>".join([f"*{measure}*", *(f"{value.who}: {value.figure}" for value in of)])
            for measure, of in by_measure(claim.ours).items()
        )
        rule = "<br>".join(dict.fromkeys(check.rule for check in claim.checks))
        row = [f"**{claim.id}** {claim.says}", claim.paper, ours or claim.checks[0].found]
        rows.append([cell.replace("|", "/") for cell in [*row, *[rule] * rules, claim.verdict]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def finished_words(study: Study) -> str:
    over = sum(entry.state in OVER for entry in study.entries)
    return f"{over} of {len(study.entries)} runs are done"
