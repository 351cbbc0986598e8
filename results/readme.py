"""Write the tables of the committed studies into README.md and docs/, between marks.

    python results/readme.py          (part of `make readme`; the tests compare the text)

The README has `in_short` of results/camvid, `recipe_in_short` of results/segmentation-recipe, and
`cifar_in_short` of results/cifar-batch; docs/ has the whole tables of the three: `verdicts`,
`of_recipe`, and `by_batch_size`. `of_proposals` is the table of results/proposals-small, and
`recurrent` that of benchmarks/recurrent.py.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill

from deepcontrol.workbench.folders.studyfolder import Measurement, Study, read_study
from deepcontrol.workbench.report.text import (
    by_measure,
    counts_text,
    finished_text,
    grouped_claims,
    join_words,
    lacks_runs,
    measurement_text,
    protocol_text,
    short_labels,
    verdict_table,
)

ROOT = Path(__file__).parents[1]
STUDY = "results/camvid"
CLASSIFICATION = "results/cifar-batch"
RECIPE = "results/segmentation-recipe"
PROPOSALS = "results/proposals-small"
RECURRENT = "benchmarks/results/recurrent-cpu.csv"
FILES = tuple(
    ROOT / name for name in ("README.md", "docs/verdicts.md", "docs/choose.md", "docs/proposals.md")
)
NORMS = {"AGC": "agc", "BatchNorm": "bn", "GroupNorm": "gn"}
CIFAR_NORMS = {"AGC": "AGC+WS", "BatchNorm": "BatchNorm", "GroupNorm": "GroupNorm"}
# Final errors of BatchNorm at learning rates that the study of the recipe does not have.
RECIPE_BATCHNORM = ROOT / "benchmarks" / "results" / "recipe-bn-cuda.csv"
# Norms of benchmarks/recurrent.py, and how much longer sequences may raise the error of one that
# serves in a recurrent network (rule 3 there).
RECURRENT_NORMS = {
    "agc": "AGC",
    "gn": "GroupNorm",
    "ln": "LayerNorm",
    "bn-per-step": "BatchNorm with statistics per step",
    "bn": "BatchNorm",
    "none": "none",
}
RECURRENT_LENGTHS = (8, 32)
SERVES = 1.1

# Row, measure, and the arm of each norm: a prefix of run folders, or a contender of the benchmark.
ROWS = (
    *(
        (f"wrong pixels, batch {batch}", "final error", f"segnet-{{}}-b{batch}-lr{lr}")
        for batch, lr in ((1, 0.02), (4, 0.08), (8, 0.16))
    ),
    ("largest batch in 12 GiB", "largest batch in 12 GiB", "{}"),
)

# Row and arm of the recipe's table; of BatchNorm the best learning rate at each batch size.
RECIPE_ROWS = {
    "AGC with weight standardization, batch size 1": "segnet-agc+ws-b1-lr0.02",
    "AGC, batch size 1": "segnet-agc-b1-lr0.02",
    "BatchNorm, batch size 4, learning rate 0.04": "segnet-bn-b4-lr0.04",
    "BatchNorm, batch size 8, learning rate 0.08": "segnet-bn-b8-lr0.08",
}


def main() -> None:
    names = (STUDY, CLASSIFICATION, RECIPE, PROPOSALS)
    studies = {name: read_study(ROOT / name) for name in names}
    for path in FILES:
        path.write_text(with_studies(path.read_text(), studies, path))


def with_studies(text: str, studies: Mapping[str, Study], path: Path = FILES[0]) -> str:
    """Replace the content of all marked blocks of a text; links are relative to `path`."""
    up = "../" * (len(path.relative_to(ROOT).parts) - 1)
    for study, name, section in (
        (STUDY, "in short", in_short),
        (STUDY, "verdicts", verdicts),
        (CLASSIFICATION, "in short", cifar_in_short),
        (RECIPE, "in short", recipe_in_short),
        (CLASSIFICATION, "by batch size", by_batch_size),
        (RECIPE, "table", of_recipe),
        (PROPOSALS, "table", of_proposals),
    ):
        content = section(studies[study]).replace("](results/", f"]({up}results/")
        text = _fill(text, study, name, content)
    return _fill(text, RECURRENT, "table", recurrent())


def _fill(text: str, source: str, name: str, content: str) -> str:
    begin = f"<!-- {source}, {name}: made by results/readme.py -->\n"
    end = f"<!-- end of {source}, {name} -->\n"
    block = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
    return block.sub(lambda _: content, text)


def in_short(study: Study) -> str:
    """Return the main results as a Markdown table: a row per quantity, a column per norm."""
    cells = {
        (row, norm): _find(study, arm.format(key), measure)
        for row, measure, arm in ROWS
        for norm, key in NORMS.items()
    }
    norms = [norm for norm in NORMS if any((found := cells[r, norm]) and found.n for r, *_ in ROWS)]
    lines = [f"| | {' | '.join(norms)} |", "|---" * (1 + len(norms)) + "|"]
    for row, *_ in ROWS:
        texts = (
            measurement_text(found, with_n=False) if (found := cells[row, norm]) else ""
            for norm in norms
        )
        lines.append(f"| {row} | {' | '.join(texts)} |")
    trained = {found.n for found in cells.values() if found and found.source == "training"}
    seeds = " to ".join(map(str, sorted(trained - {0})))
    note = (
        f"Errors are means and standard deviations over {seeds} seeds, averaged over the last "
        "tenth of the epochs."
    )
    return "\n".join([*lines, "", note]) + "\n"


def _find(study: Study, arm: str, measure: str) -> Measurement | None:
    try:
        return study.measurement(arm, measure)
    except KeyError:
        return None


def verdicts(study: Study) -> str:
    """Return figure 1, the counts, and a table with rules for each group of claims."""
    picture = f"![Figure 1: error and loss by epoch, eight panels]({STUDY}/figures/figure1.png)"
    words = (
        f"**{counts_text(study)}.** {finished_text(study)}: {protocol_text(study)}. Thin lines are "
        "single seeds, and crosses mark runs that diverged."
    )
    parts = [picture, words]
    for group, claims in grouped_claims(study).items():
        parts += [f"## {group.capitalize()}", verdict_table(claims)]
    return "\n\n".join(parts) + "\n"


def by_batch_size(study: Study) -> str:
    """Return the errors of a sweep as a Markdown table: a row per batch size, a column per norm."""
    (sweep,) = study.sweeps
    rows = [[sweep.x_label, *(series.label for series in sweep.series)]]
    rows.append(["---", *["---:"] * len(sweep.series)])
    points = {(series.label, p.x): p.error for series in sweep.series for p in series.points}
    for x in sorted({x for _, x in points}):
        found = [points.get((series.label, x)) for series in sweep.series]
        rows.append([str(x), *(_short(error) if error and error.n else "" for error in found)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}\n\n\\* one seed; the others have 2 or 3. Empty: not run yet.\n"


def cifar_in_short(study: Study) -> str:
    """Return errors as a Markdown table: a row per norm, a column per batch size with two seeds."""
    (sweep,) = study.sweeps
    found = {
        (norm, point.x): point.error
        for norm, label in CIFAR_NORMS.items()
        for series in sweep.series
        if series.label == label
        for point in series.points
    }
    batches = sorted({x for norm, x in found if norm == "AGC" and found[norm, x].n > 1})
    lines = [f"| | {' | '.join(map(str, batches))} |", "|---" + "|---:" * len(batches) + "|"]
    for norm in CIFAR_NORMS:
        errors = [found.get((norm, batch)) for batch in batches]
        cells = (_short(error) if error and error.n > 1 else "" for error in errors)
        lines.append(f"| {norm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def recipe_in_short(study: Study) -> str:
    """Return a sentence with the errors of AGC and of BatchNorm at its best settings."""
    agc = study.measurement(next(iter(RECIPE_ROWS.values())), "final error")
    seeds = defaultdict(list)
    for row in csv.DictReader(RECIPE_BATCHNORM.read_text().splitlines()):
        seeds[row["batch"], row["lr"]].append(float(row["final_error_percent"]))
    trained = {setting: errors for setting, errors in seeds.items() if len(errors) > 1}
    (batch, lr), errors = min(trained.items(), key=lambda item: fmean(item[1]))
    return (
        f"With `--recipe best`, 40 epochs at batch size 1 end at {_short(agc)} wrong pixels; "
        f"BatchNorm, at its best\nbatch size ({batch}) and learning rate ({lr}), ends at "
        f"{fmean(errors):.2f} ± {stdev(errors):.2f}%.\n"
    )


def of_recipe(study: Study) -> str:
    """Return error, mean IoU and loss of the recipe as a Markdown table, a row per arm."""
    measures = {"wrong pixels": "final error", "mean IoU": "final mean IoU", "loss": "final loss"}
    lines = [f"| | {' | '.join(measures)} | seeds |", "|---" + "|---:" * (1 + len(measures)) + "|"]
    for row, arm in RECIPE_ROWS.items():
        found = [study.measurement(arm, measure) for measure in measures.values()]
        cells = (measurement_text(m, with_n=False).replace(" %", "%") for m in found)
        lines.append(f"| {row} | {' | '.join(cells)} | {found[0].n} |")
    return "\n".join(lines) + "\n"


def of_proposals(study: Study) -> str:
    """Return a Markdown table of the claims that are decided or have runs in each arm."""
    lines = ["| Claim | Measured | Verdict |", "|---|---|---|"]
    for claim in study.claims:
        if lacks_runs(claim):
            continue
        cells = []
        for measure, found in by_measure(claim.measurements).items():
            labels = short_labels(found)
            values = (measurement_text(m, with_n=m.n != study.seeds) for m in found)
            pairs = zip(labels, values, strict=True)
            lines_of = (f"{label}: {value}" if label else value for label, value in pairs)
            cells.append("<br>".join([f"*{measure}*", *lines_of]))
        lines.append(f"| {claim.text} | {'<br>'.join(cells)} | {claim.verdict} |")
    note = f"Means and standard deviations of {study.seeds} seeds, or n. {finished_text(study)}: "
    return "\n".join([*lines, "", fill(f"{note}{protocol_text(study)}.", 120), ""])


def recurrent(path: Path = ROOT / RECURRENT) -> str:
    """Return errors of a recurrent network by norm, batch size and length, and the verdict."""
    short, long = RECURRENT_LENGTHS
    errors: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in csv.DictReader(path.read_text().splitlines()):
        for length in RECURRENT_LENGTHS:
            errors[row["norm"], int(row["batch"]), length].append(float(row[f"error_{length}"]))
    batches = sorted({batch for _, batch, _ in errors})
    titles = [f"batch {b}: {short} | {long} frames | ratio" for b in batches]
    rule = "|---" + "|---:" * 3 * len(batches) + "|"
    lines = [f"| norm of the gates | {' | '.join(titles)} |", rule]
    serve = []
    for norm, label in RECURRENT_NORMS.items():
        means = [[fmean(errors[norm, b, length]) for length in RECURRENT_LENGTHS] for b in batches]
        cells = (f"{first:.1%} | {last:.1%} | {last / first:.2f}" for first, last in means)
        lines.append(f"| {label} | {' | '.join(cells)} |")
        serve += [label] * all(last <= SERVES * first for first, last in means)

    def ahead(peer: str, batch: int) -> bool:
        """Return whether AGC is below a peer by more than two standard errors (rule 4)."""
        ours, theirs = (errors[norm, batch, long] for norm in ("agc", peer))
        deviation = math.sqrt(sum(stdev(values) ** 2 / len(values) for values in (ours, theirs)))
        return fmean(theirs) - fmean(ours) > 2 * deviation

    peers = ("bn", "bn-per-step")
    alone = "AGC" in serve and not {RECURRENT_NORMS[norm] for norm in peers} & {*serve}
    holds = alone or all(ahead(norm, batch) for norm in peers for batch in batches)
    seeds = " to ".join(map(str, sorted({len(values) for values in errors.values()})))
    text = (
        f"Means of {seeds} seeds. By the rules of the script, fixed before the runs, a norm serves "
        f"if its error at {long} frames is at most {SERVES} times that at {short}, at both batch "
        f"sizes. These do: {join_words(serve)}. The paper says that batch statistics are not "
        "applicable to recurrent networks. By the same rules this "
        f"{'holds' if holds else 'does not hold'} here."
    )
    return "\n".join([*lines, "", fill(text, 120), ""])


def _short(error: Measurement) -> str:
    return measurement_text(error, with_n=False).replace(" %", "%") + "\\*" * (error.n == 1)


if __name__ == "__main__":
    main()
