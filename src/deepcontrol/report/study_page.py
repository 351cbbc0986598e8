"""A study's page: verdicts, figure 1, lambda, pictures and commands, in one HTML file.

Beside it lie the figures as files, and the verdicts as a table in Markdown.
"""

from collections import Counter, defaultdict
from pathlib import Path

from .depth import Scale, departure, draw_depth, draw_multiples
from .figures import data_uri, save_figure
from .layers import track
from .page import environment
from .panels import draw_figure_1, draw_one
from .pictures import picture_uri
from .study import Cell, Study, read_study
from .summary import shown, summarise

HOLDS = {"reproduced": "holds", "not reproduced": "fails", "undecided": "undecided"}
OVER = ("done", "diverged")


def write_study_page(folder: Path, out: Path) -> Path:
    """index.html, figures/ and verdicts.md of the study in a folder; returns the page's path."""
    study = read_study(folder)
    out.mkdir(parents=True, exist_ok=True)
    figures = write_figures(study, out / "figures")
    html = (
        environment()
        .get_template("study.html")
        .render(
            study=study,
            preset=shown(study.protocol.get("name")),
            protocol=protocol_words(study),
            counts=count_verdicts(study),
            finished=sum(entry.state in OVER for entry in study.entries),
            holds=HOLDS,
            rates=sorted({cell.rate for cell in study.grid}),
            grid=rows_of_grid(study),
            panels=[(panel, data_uri(draw_one(panel))) for panel in study.panels],
            lambdas=figures,
            pictures=pictures(study),
            rows=[
                (entry, summarise([entry.run])[0] if entry.run else None) for entry in study.entries
            ],
            about=about(study),
        )
    )
    page = out / "index.html"
    page.write_text(html, encoding="utf-8")
    (out / "verdicts.md").write_text(markdown(study), encoding="utf-8")
    return page


def count_verdicts(study: Study) -> dict[str, int]:
    """How many claims there are of each verdict that there is, the good ones first."""
    counts = Counter(claim.verdict for claim in study.claims)
    return {verdict: counts[verdict] for verdict in HOLDS if counts[verdict]}


def write_figures(study: Study, folder: Path) -> dict[str, str]:
    """As SVG and PNG: figure 1, and lambda where a run has it; returns the latter for the page."""
    folder.mkdir(exist_ok=True)
    save_figure(draw_figure_1(study.panels), folder / "figure1")
    lam = track(study.layers, "mean_scale") if study.layers else None
    if lam is None:
        return {}
    scales = Scale.around(1.0, [lam.mean]), Scale.up_from_0([departure(lam, 1.0)])
    depth = draw_depth(lam, "lambda", 1.0, *scales)
    multiples = draw_multiples(lam, "lambda", 1.0)
    return {
        "depth": save_figure(depth, folder / "lambda"),
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
        f"{study.seeds} seed{'s' * (study.seeds > 1)}{rates}"
    )


def about(study: Study) -> dict[str, str]:
    """By which code and versions the first run was made."""
    run = next((entry.run for entry in study.entries if entry.run), None)
    if run is None:
        return {}
    versions = run.about.get("versions")
    found = {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    return found | ({"commit": str(run.about["commit"])} if run.about.get("commit") else {})


def markdown(study: Study) -> str:
    """The table of verdicts, for a README."""
    lines = ["| claim | the paper | here | verdict |", "|---|---|---|---|"]
    for claim in study.claims:
        ours = "; ".join(claim.ours) or claim.checks[0].found
        cells = [f"**{claim.id}** {claim.says}", claim.paper, ours, claim.verdict]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, "", f"{protocol_words(study)}.", ""])
