"""Format a study's numbers: measurements, checks, verdicts, durations, settings.

The page, the terminal tables and results/readme.py all use these functions.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ..folders.runfolder import finite_number
from ..folders.studyfolder import (
    FINISHED,
    VERDICTS,
    Cell,
    CheckResult,
    ClaimResult,
    Measurement,
    Point,
    Study,
    Sweep,
    Verdict,
)

BEYOND_PAPER, MISSING_RUNS = "beyond the paper", "missing runs"
GROUPS = (*VERDICTS, BEYOND_PAPER, MISSING_RUNS)
NORM_NAMES = {"agc": "AGC", "bn": "BatchNorm", "gn": "GroupNorm"}
DATA_NAMES = {
    "camvid": "CamVid",
    "cityscapes": "Cityscapes",
    "streets": "synthetic street scenes",
    "cifar10": "CIFAR-10",
    "fashion-mnist": "Fashion-MNIST",
}
TITLES = {  # title of a study, by preset
    "cifar-batch": "ResNet-20 by batch size",
    "cifar-depth": "Networks by depth",
    "cifar-long": "ResNet-20 after 200 epochs",
    "fashion-mlp": "A fully connected network",
    "proposals": "The paper's proposals",
    "proposals-small": "The paper's proposals in a small network",
    "segmentation-recipe": "One recipe for segmentation",
}


def join_words(words: Sequence[str]) -> str:
    """Join words with commas and "and".

    >>> join_words(["1", "4", "8"]), join_words(["1", "4"]), join_words(["1"])
    ('1, 4 and 8', '1 and 4', '1')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# Measurements


def measurement_text(
    measured: Measurement, with_n: bool = True, with_unit: bool = True, with_std: bool = True
) -> str:
    """Format a measurement: mean ± standard deviation, unit and number of seeds.

    >>> both = Measurement(measure="", arm="", settings={}, unit="%", values=(9.5, 10.5))
    >>> measurement_text(both), measurement_text(both, with_n=False)
    ('10.00 ± 0.71 % (n=2)', '10.00 ± 0.71 %')
    >>> some = Measurement(measure="", arm="", settings={}, values=(None, 9.5), diverged=1)
    >>> measurement_text(some)
    '1 of 2 diverged'
    """
    if measured.text:
        return measured.text
    if not measured.values:
        return "not run"
    if measured.diverged:
        return f"{measured.diverged} of {measured.n} diverged"
    if measured.mean is None:
        return "no value"
    unit = f" {measured.unit}" if measured.unit and with_unit else ""
    if measured.source == "benchmark":
        return f"{number_text(measured.mean, measured.digits)}{unit}"
    std = ""
    if with_std and measured.std is not None:
        std = f" ± {number_text(measured.std, measured.digits)}"
    n = f" (n={measured.n})" if with_n else ""
    return f"{number_text(measured.mean, measured.digits)}{std}{unit}{n}"


def number_text(value: float, digits: int | None) -> str:
    """Format a number with this many decimals; None drops trailing zeros.

    >>> number_text(7.5, None), number_text(-0.26, 1), number_text(-0.001, 2)
    ('7.5', '-0.3', '0.00')
    """
    if digits is None:
        return f"{value:g}"
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 removes the sign of -0.0


def measurement_label(measured: Measurement) -> str:
    """Return the arm's label, with the engine if the benchmark measured it."""
    return ", ".join(_with_engine(measured).values())


def measurement_line(measured: Measurement) -> str:
    """Return "final error, AGC, batch 1, lr 0.02: 7.54 ± 0.19 % (n=5)"."""
    return f"{measured.measure}, {measurement_label(measured)}: {measurement_text(measured)}"


def by_measure(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Group measurements by measure."""
    found: dict[str, list[Measurement]] = defaultdict(list)
    for measured in measurements:
        found[measured.measure].append(measured)
    return dict(found)


# Checks


def check_quantity(check: CheckResult) -> str:
    """Return "final error: AGC, batch 1, lr 0.02 minus AGC, batch 4, lr 0.08"."""
    if "quantity" in check.text:
        return check.text["quantity"]
    joint = " divided by " if check.kind == "ratio" else " minus "
    return f"{check.measure}: {joint.join(operand.label for operand in check.operands)}"


def check_region(check: CheckResult) -> str:
    """Return the region of a check as text, such as "within 1 point of 0"."""
    return check.text.get("region") or region_text(check.low, check.high, check.unit)


def check_rule(check: CheckResult) -> str:
    """Return "final error: difference above 1 point", without the arms."""
    if "rule" in check.text:
        return check.text["rule"]
    if check.kind == "ratio":
        return f"{check_quantity(check)} {check_region(check)}"
    difference = "difference " * (check.kind == "difference")
    return f"{check.measure}: {difference}{check_region(check)}"


def region_text(low: float | None, high: float | None, unit: str = "") -> str:
    """Describe an open region with its unit.

    >>> region_text(-1, 1, "points"), region_text(2, None, "points"), region_text(0.6, 1)
    ('within 1 point of 0', 'above 2 points', 'between 0.6 and 1')
    """
    if low is None and high is None:
        return "any value"
    if high is None:
        return f"above {_with_unit(low or 0.0, unit)}"
    if low is None:
        return f"below {_with_unit(high, unit)}"
    if low == -high:
        return f"within {_with_unit(high, unit)} of 0"
    return f"between {low:g} and {_with_unit(high, unit)}"


def _with_unit(number: float, unit: str) -> str:
    singular = unit.removesuffix("s") if number == 1 else unit
    return f"{number:g} {singular}" if unit else f"{number:g}"


def check_found(check: CheckResult) -> str:
    """Return the estimate and its interval as text, or why there is none."""
    if "found" in check.text:
        return check.text["found"]
    seeds = " and ".join(dict.fromkeys(str(operand.n) for operand in check.operands))
    seeds += " seed" if seeds == "1" else " seeds"
    match check.problem:
        case "not run":
            missing = [operand.label for operand in check.operands if not operand.n]
            return f"no finished run of {' and of '.join(missing)}"
        case "diverged":
            side = "worse" if check.operands[0].diverged else "better"
            return f"{side} without bound: runs diverged"
        case "some diverged":
            return f"too few runs to decide ({seeds}): some diverged"
        case "no value":
            return "no value: runs diverged, or do not record this measure"
        case "no benchmark":
            return "the benchmark file has no such rows; run `deepcontrol bench`"
        case "separate benchmarks":
            return "measured in two benchmark calls; run `deepcontrol bench --no-resume`"
    if check.estimate is None:
        return "no estimate"
    if check.kind == "ratio":
        return number_text(check.estimate, check.digits)
    unit = f" {check.unit}" if check.unit else ""
    estimate = f"{number_text(check.estimate, check.digits)}{unit}"
    if check.interval_low is None or check.interval_high is None:
        return f"{estimate}, {seeds}: no spread to judge by"
    low, high = (number_text(v, check.digits) for v in (check.interval_low, check.interval_high))
    return f"{estimate} (90% interval {low} to {high}, {seeds})"


def deciding_checks(claim: ClaimResult) -> list[CheckResult]:
    """Return the checks that decide a claim. One failed check fails it."""
    return [check for check in claim.checks if check.verdict == claim.verdict]


def deciding_values(claim: ClaimResult) -> tuple[str, list[tuple[str, str]]]:
    """Return the deciding measure, and a short label and the mean of each arm."""
    operands = [operand for check in deciding_checks(claim) for operand in check.operands]
    shown = [m for m in claim.measurements if m in operands] or list(claim.measurements)
    if not shown:
        return "", []
    shown = [measured for measured in shown if measured.measure == shown[0].measure]
    labels = short_labels(shown)
    texts = [measurement_text(measured, with_n=False, with_std=False) for measured in shown]
    return shown[0].measure, list(zip(labels, texts, strict=True))


def short_labels(measurements: Sequence[Measurement]) -> list[str]:
    """Label each arm by the settings in which the arms differ, and by its engine.

    The learning rate is left out too if it depends only on the batch size. An arm that has no
    further settings than the others is "default"; a single arm has an empty label.
    """
    if len(measurements) < 2:
        return [""] * len(measurements)
    settings = [_with_engine(measured) for measured in measurements]
    shared = set.intersection(*(set(each.items()) for each in settings))
    batches = [each.get("batch") for each in settings]
    lrs = [each.get("lr") for each in settings]
    if len(set(zip(batches, lrs, strict=True))) == len(set(batches)):
        shared |= {("lr", lr) for lr in lrs if lr is not None}
    kept = (
        [words for name, words in each.items() if (name, words) not in shared] for each in settings
    )
    return [", ".join(words) or "default" for words in kept]


def _with_engine(measured: Measurement) -> dict[str, str]:
    """Return the settings of an arm; the last one names the engine of the benchmark."""
    settings = dict(measured.settings)
    if measured.engine and settings:
        name, words = settings.popitem()
        settings[name] = f"{words} ({measured.engine})"
    return settings


# Studies


def study_title(study: Study) -> str:
    """Return a study's heading, such as "ResNet-20 by batch size on CIFAR-10"."""
    title = TITLES.get(study.protocol.name, "Deep Control")
    return f"{title} on {DATA_NAMES.get(study.protocol.data, study.protocol.data)}"


def grouped_claims(study: Study) -> dict[str, list[ClaimResult]]:
    """Return the claims by group, without empty groups.

    The paper's claims are grouped by verdict and followed by ours. If all claims are ours, they are
    grouped by verdict, and undecided ones without runs come last.
    """
    of_paper = is_of_paper(study)
    groups: dict[str, list[ClaimResult]] = {group: [] for group in GROUPS}
    for claim in study.claims:
        group: str = claim.verdict
        if of_paper and claim.beyond_paper:
            group = BEYOND_PAPER
        elif not of_paper and lacks_runs(claim):
            group = MISSING_RUNS
        groups[group].append(claim)
    return {group: claims for group, claims in groups.items() if claims}


def is_of_paper(study: Study) -> bool:
    """Return whether a study judges any claim of the paper."""
    return not all(claim.beyond_paper for claim in study.claims)


def shows_paper(study: Study) -> bool:
    """Return whether the paper's results differ, and so need a column."""
    return is_of_paper(study) or len({claim.paper for claim in study.claims}) > 1


def lacks_runs(claim: ClaimResult) -> bool:
    """Return whether a claim is undecided because runs have not finished."""
    missing = any(check.problem == "not run" for check in claim.checks)
    return claim.verdict == "undecided" and missing


def count_verdicts(claims: Sequence[ClaimResult]) -> dict[Verdict, int]:
    """Count the claims of each verdict, without zeros."""
    counts = Counter(claim.verdict for claim in claims)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def counts_text(study: Study) -> str:
    """Return "17 reproduced, 7 not reproduced, 11 undecided"."""
    return ", ".join(f"{n} {verdict}" for verdict, n in count_verdicts(study.claims).items())


def finished_text(study: Study) -> str:
    """Return "100 of 109 runs finished"."""
    finished = sum(entry.state in FINISHED for entry in study.runs)
    return f"{finished} of {len(study.runs)} runs finished"


def protocol_text(study: Study) -> str:
    """Return the settings that all runs share, in one line."""
    p = study.protocol
    limit = f", {p.train_limit} images" if p.train_limit else ""
    width = f", width {setting_text(p.width)}" if p.width != 1 else ""
    scale = (
        f", {setting_text(p.lr_scale)} times the paper's learning rates" if p.lr_scale != 1 else ""
    )
    instead = f" instead of {study.preset_epochs}" if p.epochs != study.preset_epochs else ""
    seeds = f"up to {study.seeds} seed{'s' * (study.seeds > 1)}"
    size = "x".join(map(str, p.size))
    return f"{p.data}{limit} at {size}{width}, {p.epochs} epochs{instead}, {seeds}{scale}" + (
        f", {p.schedule} schedule" * (p.schedule != "constant")
        + f", warm-up of {setting_text(p.warmup_epochs)} epoch{'s' * (p.warmup_epochs != 1)}"
        * (p.warmup_epochs > 0)
        + f", weight decay {setting_text(p.weight_decay)}" * (p.weight_decay > 0)
        + f", {p.augment} augmentation" * (p.augment == "strong")
        + ", no class weights" * (p.class_weights == "none")
    )


def verdict_table(claims: Sequence[ClaimResult]) -> str:
    """Return a Markdown table with a row per claim."""
    names = ["claim", "paper", "measured", "rule", "verdict"]
    rows = [names, ["---"] * len(names)]
    for claim in claims:
        measured = "<br>".join(
            "<br>".join([f"*{measure}*", *(_cell_line(each) for each in of)])
            for measure, of in by_measure(claim.measurements).items()
        )
        rule = "<br>".join(dict.fromkeys(map(check_rule, claim.checks)))
        found = measured or check_found(claim.checks[0])
        row = [f"**{claim.id}** {claim.text}", claim.paper, found, rule, claim.verdict]
        rows.append([cell.replace("|", "/") for cell in row])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell_line(measured: Measurement) -> str:
    return f"{measurement_label(measured)}: {measurement_text(measured)}"


def verdicts_markdown(study: Study) -> str:
    """Return the content of verdicts.md: a table per group, protocol and note."""
    parts = [f"**{counts_text(study)}.** {finished_text(study)}: {protocol_text(study)}."]
    for group, claims in grouped_claims(study).items():
        parts += [f"## {group.capitalize()}", verdict_table(claims)]
    for sweep in begun_sweeps(study):
        parts += [f"## {sweep.title}", sweep_table(sweep), *filter(None, [edges_text(sweep)])]
    return "\n\n".join([*parts, *filter(None, [study.note])])


# Sweeps


def begun_sweeps(study: Study) -> list[Sweep]:
    """Return the sweeps with at least one trained network."""
    return [sweep for sweep in study.sweeps if any(series.points for series in sweep.series)]


def sweep_table(sweep: Sweep) -> str:
    """Return a Markdown table of errors and learning rates: rows x, columns series."""
    rows = [[sweep.x_label, *(series.label for series in sweep.series)]]
    rows.append(["---"] * len(rows[0]))
    for x in sorted({point.x for series in sweep.series for point in series.points}):
        found = [next((p for p in series.points if p.x == x), None) for series in sweep.series]
        rows.append([str(x), *("" if point is None else point_text(point) for point in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def point_text(point: Point) -> str:
    """Return "34.20 ± 0.31 % (n=3), lr 0.01", or why there is no error."""
    lr = "" if point.lr is None else f", lr {point.lr:g}"
    return f"{measurement_text(point.error)}{lr}"


def sweep_rows(sweep: Sweep) -> list[tuple[int, float, list[Cell | None]]]:
    """Return the cells of all learning rates: x, learning rate, a cell per series."""
    cells = {
        (point.x, cell.lr, i): cell
        for i, series in enumerate(sweep.series)
        for point in series.points
        for cell in point.tried
    }
    keys = sorted({(x, lr) for x, lr, _ in cells})
    return [(x, lr, [cells.get((x, lr, i)) for i in range(len(sweep.series))]) for x, lr in keys]


def edges_text(sweep: Sweep) -> str:
    """Name the points whose best learning rate is at the grid's edge; "" if none."""
    found = [
        f"{series.label} at {sweep.x_label} {point.x} (lr {point.lr:g})"
        for series in sweep.series
        for point in series.points
        if point.lr is not None and point.at_edge
    ]
    if not found:
        return ""
    return (
        "The best learning rate is the lowest or highest of its grid, so that one outside could "
        f"be better: {join_words(found)}."
    )


# Runs


def percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.2f}"


def duration_text(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> duration_text(59.4), duration_text(3600 * 30 + 61)
    ('59 s', '30:01 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"


def setting_text(value: Any) -> str:
    """Format a setting as it is typed on the command line.

    >>> setting_text([256, 512]), setting_text(None), setting_text(0.125), setting_text(True)
    ('256x512', '-', '0.125', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value))
    number = finite_number(value)
    return str(value) if number is None else f"{number:.10g}"
