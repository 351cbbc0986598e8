"""Simulate the statistical power of claim fig1b for a given number of seeds.

    python benchmarks/power.py [--seeds 3 5] [--studies 2000]

Figure 1b claims that AGC ends alike and learns alike at batch sizes 1, 4 and 8. Here the three have
the same true errors, and seeds differ only by chance, with a given standard deviation of the final
error and of the error over all epochs. The claim's own rule judges the simulated studies. The
result is the share of studies with the verdict "reproduced".
"""

import argparse
import random
from pathlib import Path

from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.study.claims import CLAIMS, Claim, judge
from deepcontrol.workbench.study.measures import Curve
from deepcontrol.workbench.study.rules import Evidence

DEVIATIONS = [
    (0.1, 0.2),
    (0.2, 0.35),
    (0.3, 0.5),
    (0.3, 0.2),
]  # percentage points: of the final error, of the error over all epochs
ERROR, COURSE_ERROR, EPOCHS = 8.0, 14.0, 150


def curve(rng: random.Random, end: float, course: float) -> Curve:
    """Draw a curve with two levels: the last tenth of the epochs, and all before."""
    late = EPOCHS // 10
    final = rng.gauss(ERROR, end)
    before = (EPOCHS * rng.gauss(COURSE_ERROR, course) - late * final) / (EPOCHS - late)
    return Curve((before,) * (EPOCHS - late) + (final,) * late, ())


def share_reproduced(claim: Claim, seeds: int, end: float, course: float, studies: int) -> float:
    """Return the share of simulated studies with the verdict "reproduced"."""
    rng = random.Random(0)
    reproduced = 0
    for _ in range(studies):
        runs = {arm: [curve(rng, end, course) for _ in range(seeds)] for arm in claim.arms}
        reproduced += judge(claim, Evidence(runs)).verdict == "reproduced"
    return reproduced / studies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5], help="seeds per study")
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/power.csv"))
    args = parser.parse_args()
    (claim,) = (claim for claim in CLAIMS if claim.id == "fig1b")
    rows = []
    for seeds in args.seeds:
        for end, course in DEVIATIONS:
            share = share_reproduced(claim, seeds, end, course, args.studies)
            print(f"{seeds} seeds, deviation {end} and {course} points: {share:.1%} reproduced")
            rows.append(
                {
                    "claim": claim.id,
                    "seeds": seeds,
                    "deviation_final": end,
                    "deviation_course": course,
                    "reproduced": f"{share:.4f}",
                    "studies": args.studies,
                }
            )
    write_results(args.out, rows, "cpu")


if __name__ == "__main__":
    main()
