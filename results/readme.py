"""Put figure 1 and the verdicts of results/camvid into README.md, between two marks.

python results/readme.py          (`make readme`; the tests say if it was forgotten)
"""

from pathlib import Path

from deepcontrol.report.study import Study, read_study
from deepcontrol.report.study_page import (
    count_verdicts,
    finished_words,
    protocol_words,
    table_of_verdicts,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
STUDY = "results/camvid"
BEGIN, END = f"<!-- {STUDY}: made by results/readme.py -->\n", f"<!-- end of {STUDY} -->\n"


def main() -> None:
    README.write_text(with_study(README.read_text(), read_study(ROOT / STUDY)))


def with_study(readme: str, study: Study) -> str:
    """The text, with what is between its marks made anew."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + section(study) + END + after


def section(study: Study) -> str:
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
