"""Put what results/camvid says into README.md, between marks: its main figures, and the verdicts.

python results/readme.py          (`make readme`; the tests say if it was forgotten)
"""

from collections.abc import Callable
from pathlib import Path

from deepcontrol.workbench.report.study import Study, Value, read_study
from deepcontrol.workbench.report.study_page import (
    count_verdicts,
    finished_words,
    protocol_words,
    table_of_verdicts,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
STUDY = "results/camvid"

# What is compared, and the claims (with the beginning of whose figure) that hold AGC's and BN's.
MAIN_FIGURES = (
    ("wrong pixels, batch 1", ("fig1b", "AGC batch 1"), ("fig1a", "BN batch 1")),
    ("wrong pixels, batch 4", ("fig1b", "AGC batch 4"), ("fig1a", "BN batch 4")),
    ("wrong pixels, batch 8", ("fig1b", "AGC batch 8"), ("fig1a", "BN batch 8")),
    ("a training step, batch 8", ("speed", "AGC"), ("speed", "BN")),
    ("its activations", ("memory", "AGC"), ("memory", "BN")),
    ("largest batch in 12 GiB", ("largest-batch", "AGC"), ("largest-batch", "BN")),
)


def main() -> None:
    README.write_text(with_study(README.read_text(), read_study(ROOT / STUDY)))


def with_study(readme: str, study: Study) -> str:
    """The text, with what is between its marks made anew."""
    sections: dict[str, Callable[[Study], str]] = {"in short": in_short, "verdicts": verdicts}
    for name, section in sections.items():
        begin = f"<!-- {STUDY}, {name}: made by results/readme.py -->\n"
        end = f"<!-- end of {STUDY}, {name} -->\n"
        before, rest = readme.split(begin)
        _, after = rest.split(end)
        readme = before + begin + section(study) + end + after
    return readme


def in_short(study: Study) -> str:
    """The main figures, as a table."""
    rows = [
        f"| {what} | {_figure(study, *agc)} | {_figure(study, *bn)} |"
        for what, agc, bn in MAIN_FIGURES
    ]
    seeds = sorted({n for _, *of in MAIN_FIGURES for each in of if (n := _seeds(study, *each))})
    words = (
        f"\nErrors are means and deviations over {' and '.join(seeds)} seeds, of the last tenth of "
        "the epochs.\n"
    )
    return "\n".join(("| | AGC | BatchNorm |", "|---|---|---|", *rows)) + "\n" + words


def _value(study: Study, claim: str, who: str) -> Value:
    """The first of somebody in a claim: the final error, if it is of training."""
    (ours,) = (c.ours for c in study.claims if c.id == claim)
    return next(v for v in ours if v.who.startswith(f"{who} "))


def _figure(study: Study, claim: str, who: str) -> str:
    return _value(study, claim, who).figure.split(" (n=")[0]


def _seeds(study: Study, claim: str, who: str) -> str:
    """Over how many a figure is a mean; nothing of one that is none."""
    _, _, seeds = _value(study, claim, who).figure.partition(" (n=")
    return seeds.rstrip(")")


def verdicts(study: Study) -> str:
    """Figure 1, and a row for each claim."""
    picture = f"![figure 1: error and loss by epoch, eight panels]({STUDY}/figures/figure1.png)"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(study).items())
    words = (
        f"**{counts}.** {finished_words(study)}: {protocol_words(study)}.\n"
        f"Thin lines are seeds, crosses are runs that diverged. `{STUDY}/verdicts.md` has the\n"
        f"rules too, and `{STUDY}/index.html` is the whole page."
    )
    return "\n\n".join((picture, words, table_of_verdicts(study, rules=False) + "\n"))


if __name__ == "__main__":
    main()
