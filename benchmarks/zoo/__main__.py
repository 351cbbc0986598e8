"""AGC (automatic gain control) in models of other libraries: a table of what to_agc makes of them.

Each model is built untrained, converted, and put through forward and backward at batch 1; the bytes
that are kept for the backward are counted before and after, and the folded copy is compared with
the model. It needs the environment of the zoo: `make zoo` sets it up and runs this.

    python -m benchmarks.zoo [--only timm ...] [--report] [--out benchmarks/results/zoo.csv]

--report measures nothing and writes the page docs/zoo.md from the CSV.
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
    parser.add_argument("--only", nargs="*", default=(), help="models whose library/name has this")
    parser.add_argument(
        "--report", action="store_true", help="write the page of what the CSV holds"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "zoo.csv")
    args = parser.parse_args()
    if not args.report:
        run(args.only, args.out)
    rows = read_rows(args.out)
    if not rows:
        parser.error(f"{args.out} has no rows: measure first, without --report")
    if not args.only:
        PAGE.write_text(page(rows))
        print(f"Written to {PAGE}")


def run(only: list[str], out: Path) -> None:
    """Measure, and put the rows into the CSV: a part of the models replaces its own rows."""
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
    print(f"Written to {out}")


if __name__ == "__main__":
    main()
