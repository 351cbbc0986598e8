"""Convert models of other libraries to AGC and tabulate the results.

    python -m benchmarks.zoo [--only timm ...] [--fresh] [--report] [--out FILE.csv]

AGC is automatic gain control. Each model is built untrained, converted by to_agc, and run forward
and backward at batch 1. The table has the bytes saved for backward before and after the conversion,
the differences between the model before, after and folded, and the time of the conversion. `make
zoo` sets up the environment and runs this. Rows that the CSV has are kept unless --fresh is given
or they are errors, so an interrupted table can be continued; models of libraries that are not
installed are left out. --report measures nothing and writes docs/zoo.md from the CSV.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from deepcontrol.workbench.bench.results import provenance, read_rows, write_rows

from .measure import Row
from .models import ZOO, Entry
from .page import PAGE, TABLE, TRICKY, page
from .worker import Worker


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=(), help="parts of library/name to select models"
    )
    parser.add_argument("--fresh", action="store_true", help="measure models again")
    parser.add_argument("--report", action="store_true", help="only write docs/zoo.md from the CSV")
    parser.add_argument("--out", type=Path, default=TABLE, help="CSV file")
    args = parser.parse_args()
    if not args.report:
        selected = [e for e in ZOO if not args.only or any(part in e.key for part in args.only)]
        with Worker() as worker:
            run(selected, args.out, args.fresh, worker.measure)
    rows = read_rows(args.out)
    if not rows:
        parser.error(f"{args.out} has no rows; run without --report to measure")
    if args.out == TABLE:
        PAGE.write_text(page(rows, read_rows(TRICKY)))
        print(f"Wrote {PAGE}")


def run(selected: Sequence[Entry], out: Path, fresh: bool, measure: Callable[[Entry], Row]) -> None:
    """Measure the selected models and write each row; all other rows are kept."""
    rows: dict[str, Row] = {f"{r['library']}/{r['model']}": {**r} for r in read_rows(out)}
    missing = [e for e in selected if not e.is_installed]
    for library in dict.fromkeys(e.library for e in missing):
        count = sum(e.library == library for e in missing)
        print(f"{library} is not installed: {count} models are left out")
    kept = {key for key, row in rows.items() if not fresh and "error" not in row}
    for entry in selected:
        if entry in missing or entry.key in kept:
            continue
        row = {**measure(entry), **provenance("cpu")}
        print(f"{entry.key:56s} {_summary(row)}", flush=True)
        rows[entry.key] = row
        write_rows(out, [rows[e.key] for e in ZOO if e.key in rows])
    print(f"{out} has {len(rows)} of {len(ZOO)} models")


def _summary(row: Row) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return (
        f"{row['fused']:3} fused {row['replaced']:3} replaced {row['mib_before']:>7} MiB to "
        f"{row['mib_after']:>6}   fold {row['fold']}   {row['conversion_s']} s"
    )


if __name__ == "__main__":
    main()
