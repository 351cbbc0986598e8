"""A seeded campaign of faults against the workbench: make test-faults

    python -m tests.faults.campaign --seed 0 --count 500 --processes 40

Each class of faults is tried `count` times, those that start processes `processes` times. An
attempt is "detected" if an error or a note names the fault, "harmless" if every value read or
resumed is the original one (without a checksum: if reading stays within its limits), and failed
otherwise: a changed value in silence, an unexpected
exception, a signal that ends the process, or a changed file outside of the folder. The exit code is
1 if any attempt failed. With --write, the counts go to results.csv in this folder and, as a table,
to docs/reliability.md.
"""

import argparse
import csv
import multiprocessing
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import folders, images, processes

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.csv")
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- tests/faults/results.csv: made by python -m tests.faults.campaign --write -->\n"
END = "<!-- end of tests/faults/results.csv -->\n"
COLUMNS = ("fault", "attempts", "detected", "harmless", "failed")
CLASSES: dict[str, Callable[[random.Random, Path], str]] = {**folders.CLASSES, **images.CLASSES}


@dataclass
class Row:
    """The results of one class of faults."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def values(self) -> dict[str, str]:
        """Return the row of the table."""
        detected, harmless = self.counts["detected"], self.counts["harmless"]
        numbers = (detected + harmless + len(self.failures), detected, harmless, len(self.failures))
        return dict(zip(COLUMNS, (self.name, *map(str, numbers)), strict=True))


def campaign(seed: int, count: int, only: str = "") -> list[Row]:
    """Try each class of faults in this process `count` times, or those with `only` in the name."""
    rows = []
    for name, attempt in CLASSES.items():
        if only not in name:
            continue
        row, rng = Row(name), random.Random(f"{seed} {name}")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            folders.make_run(folder / "run")
            (folder / "outside").mkdir()
            (folder / "outside" / "precious").write_text("mine")
            for number in range(count):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of Pillow and torch, on damaged files
                        row.counts[attempt(rng, folder)] += 1
                except Exception as error:
                    row.failures.append(f"{name}, attempt {number}: {type(error).__name__} {error}")
        rows.append(row)
        print(*row.values().values(), sep=", ", file=sys.stderr, flush=True)
    return rows


def of_processes(name: str, seed: int, count: int) -> Row:
    """Try a class of faults that starts processes `count` times."""
    row = Row(name)
    for number, result in enumerate(processes.attempts(name, seed, count)):
        if result in ("detected", "harmless"):
            row.counts[result] += 1
        else:
            row.failures.append(f"{name}, attempt {number}: {result}")
    print(*row.values().values(), sep=", ", file=sys.stderr, flush=True)
    return row


def table(rows: list[dict[str, str]]) -> str:
    """Return the results as a Markdown table."""
    lines = [" | ".join(COLUMNS), "---" + " | ---:" * 4]
    lines += [" | ".join(row[column] for column in COLUMNS) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def with_table(page: str, rows: list[dict[str, str]]) -> str:
    """Replace the table between the marks of a page."""
    block = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.DOTALL)
    text, count = block.subn(lambda _: f"\n{table(rows)}\n", page)
    if count != 1:
        raise ValueError(f"expected one block between {BEGIN!r} and {END!r}, found {count}")
    return text


def read_results() -> list[dict[str, str]]:
    """Return the rows of the committed results."""
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def write_results(rows: list[dict[str, str]]) -> None:
    """Write the counts to results.csv and to the page. Classes that were not tried are kept."""
    before = {row["fault"]: row for row in (read_results() if RESULTS.exists() else ())}
    found = before | {row["fault"]: row for row in rows}
    rows = [found[name] for name in (*CLASSES, *processes.CLASSES) if name in found]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(with_table(PAGE.read_text(), rows))


def main() -> int:
    parser = argparse.ArgumentParser(description="Try faults against the workbench.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500, help="attempts per class")
    parser.add_argument("--processes", type=int, default=40, help="attempts that start processes")
    parser.add_argument("--only", default="", help="part of the names of the classes to try")
    parser.add_argument("--write", action="store_true", help="write results.csv and the page")
    flags = parser.parse_args()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # side by side
        others = [
            pool.submit(of_processes, name, flags.seed, max(1, flags.processes // divisor))
            for name, (_, divisor) in processes.CLASSES.items()
            if flags.processes and flags.only in name
        ]
        rows = [
            *campaign(flags.seed, flags.count, flags.only),
            *(other.result() for other in others),
        ]
    values = [row.values() for row in rows]
    print(table(values))
    failures = [failure for row in rows for failure in row.failures]
    print("\n".join(failures[:40]), file=sys.stderr)
    if flags.write:
        write_results(values)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
