"""Convert models of other libraries to AGC (automatic gain control) and tabulate the results.

    python -m benchmarks.zoo [--only timm ...] [--report] [--out benchmarks/results/zoo.csv]

Each model is built untrained, converted by to_agc, and run forward and backward at batch 1. The
table has the bytes saved for backward before and after the conversion, and the difference between
the folded copy and the model. `make zoo` sets up the environment and runs this. --report measures
nothing and writes docs/zoo.md from the CSV.
"""

import argparse
import gc
from pathlib import Path

import torch

from deepcontrol.workbench.bench.results import provenance, read_rows, write_rows
from tests.zoo.conftest import declare_torchvision_operators

from .measure import measure
from .models import ZOO
from .page import page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "zoo.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=(), help="parts of library/name to select models"
    )
    parser.add_argument("--report", action="store_true", help="only write docs/zoo.md from the CSV")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "zoo.csv", help="CSV file"
    )
    args = parser.parse_args()
    if not args.report:
        run(args.only, args.out)
    rows = read_rows(args.out)
    if not rows:
        parser.error(f"{args.out} has no rows; run without --report to measure")
    if not args.only:
        PAGE.write_text(page(rows))
        print(f"Wrote {PAGE}")


def run(only: list[str], out: Path) -> None:
    """Measure models and write their rows; with `only`, all other rows are kept."""
    declare_torchvision_operators()
    torch.set_num_threads(1)
    kept = {(r["library"], r["model"]): r for r in read_rows(out)} if only else {}
    rows = []
    for entry in ZOO:
        if not only or any(part in entry.key for part in only):
            row = {**measure(entry), **provenance("cpu")}
            print(
                f"{entry.key:56s} {row['fused']:3} fused {row['replaced']:3} replaced "
                f"{row['mib_before']:>7} MiB to {row['mib_after']:>6}   fold {row['fold']}",
                flush=True,
            )
            rows.append(row)
            gc.collect()
        elif (entry.library, entry.name) in kept:
            rows.append({**kept[entry.library, entry.name]})
    write_rows(out, rows)
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
