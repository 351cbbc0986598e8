"""Write the tables of results/camvid into README.md and docs/verdicts.md, between marks.

    python results/readme.py          (part of `make readme`; the tests compare the text)

`in_short` returns the README's table, and `verdicts` the verdict table of the docs.
"""

import re
from collections.abc import Callable
from pathlib import Path

from deepcontrol.workbench.report.text import (
    counts_text,
    finished_text,
    grouped_claims,
    measurement_text,
    protocol_text,
    verdict_table,
)
from deepcontrol.workbench.studyfolder import Measurement, Study, read_study

ROOT = Path(__file__).parents[1]
STUDY = "results/camvid"
FILES = (ROOT / "README.md", ROOT / "docs" / "verdicts.md")
NORMS = {"AGC": "agc", "BatchNorm": "bn", "GroupNorm": "gn"}

# Row, measure, and the arm of each norm: a prefix of run folders, or a contender of the benchmark.
ROWS = (
    *(
        (f"wrong pixels, batch {batch}", "final error", f"segnet-{{}}-b{batch}-lr{lr}")
        for batch, lr in ((1, 0.02), (4, 0.08), (8, 0.16))
    ),
    ("training step, batch 8, fastest engine", "step time", "{}"),
    ("activation memory, batch 8, leanest engine", "activation memory", "{}"),
    ("largest batch in 12 GiB", "largest batch in 12 GiB", "{}"),
)


def main() -> None:
    study = read_study(ROOT / STUDY)
    for path in FILES:
        if path.exists():
            path.write_text(with_study(path.read_text(), study, path))


def with_study(text: str, study: Study, path: Path = FILES[0]) -> str:
    """Replace the content of all marked blocks of a text; links are relative to `path`."""
    up = "../" * (len(path.relative_to(ROOT).parts) - 1)
    sections: dict[str, Callable[[Study], str]] = {"in short": in_short, "verdicts": verdicts}
    for name, section in sections.items():
        begin = f"<!-- {STUDY}, {name}: made by results/readme.py -->\n"
        end = f"<!-- end of {STUDY}, {name} -->\n"
        content = section(study).replace("](results/", f"]({up}results/")
        block = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
        text = block.sub(lambda _, content=content: content, text)  # type: ignore[misc]
    return text


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


if __name__ == "__main__":
    main()
