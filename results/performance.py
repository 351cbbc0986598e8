"""Write the performance tables of README.md and docs/performance.md from the benchmark's CSV.

    python results/performance.py          (part of `make readme`; the tests check the tables)

The CSV is written by `deepcontrol bench` on a GPU. Each file has a block between two marks, which
this script replaces.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "benchmarks" / "results" / "bench-cuda.csv"
SOURCE = "benchmarks/results/bench-cuda.csv"

NETWORKS = {"segnet": "SegNet", "resnet50": "ResNet-50", "unet3d": "3-D U-Net"}
NAMES = {
    "agc": "AGC",
    "bn": "BatchNorm",
    "bn-byte-pool": "BatchNorm, byte-index pooling",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "none": "no normalization",
    "one-liner": "AGC as one line of PyTorch",
}
ENGINES = {
    "eager": "eager",
    "compile": "torch.compile",
    "graph": "CUDA graph",
    "compile+graph": "torch.compile, CUDA graph",
}


@dataclass(frozen=True)
class Step:
    """One measured training step: forward, loss, backward and update."""

    network: str
    contender: str
    engine: str
    batch: int
    size: str
    dtype: str
    ms: float  # median
    ms_p20: float
    ms_p80: float
    activations_mib: float
    run: str  # time at which that run of the benchmark started

    @property
    def case(self) -> tuple[str, int, str]:
        return self.network, self.batch, self.dtype


def read_steps(path: Path = BENCH) -> list[Step]:
    """Read the timed training steps of full-width networks, in the order of the CSV."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ms_p50"] and row["width"] == "1"]
    return [
        Step(
            network=row["group"],
            contender=row["contender"],
            engine=row["engine"],
            batch=int(row["batch"]),
            size=row["size"],
            dtype=row["dtype"],
            ms=float(row["ms_p50"]),
            ms_p20=float(row["ms_p20"]),
            ms_p80=float(row["ms_p80"]),
            activations_mib=float(row["activations_mib"]),
            run=row["run"],
        )
        for row in rows
    ]


def find(steps: Sequence[Step], case: tuple[str, int, str], contender: str) -> list[Step]:
    """Return the steps of one contender in one case, fastest first."""
    found = [s for s in steps if s.case == case and s.contender == contender]
    return sorted(found, key=lambda step: step.ms)


def main_table(steps: Sequence[Step]) -> str:
    """Compare AGC and BatchNorm in bf16, each in its fastest engine; one row per network."""
    lines = [
        "| network, batch | time: AGC | BatchNorm | ratio | memory: AGC | BatchNorm | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in _cases(steps, "bf16"):
        agc, bn = (find(steps, case, contender)[0] for contender in ("agc", "bn"))
        lines.append(
            f"| {_name(agc)} | {agc.ms:.2f} ms | {bn.ms:.2f} ms | {_time_ratio(agc, bn)} "
            f"| {agc.activations_mib:.0f} MiB | {bn.activations_mib:.0f} MiB "
            f"| {agc.activations_mib / bn.activations_mib:.2f}x |"
        )
    return "\n".join(lines) + "\n"


def eager_note(steps: Sequence[Step]) -> str:
    """State how AGC compares with BatchNorm in eager mode, SegNet at batches 8 and 1."""
    times = {
        batch: [
            _in_engine(find(steps, ("segnet", batch, "bf16"), contender), "eager").ms
            for contender in ("agc", "bn")
        ]
        for batch in (8, 1)
    }
    slower = all(agc > bn for agc, bn in times.values())
    order = "slower than BatchNorm" if slower else "not always faster than BatchNorm"
    cases = " and ".join(
        f"{agc:.1f} ms against {bn:.1f} ms at batch {batch}" for batch, (agc, bn) in times.items()
    )
    return f"**In eager mode AGC is {order}**: SegNet takes {cases}.\n"


def engine_table(steps: Sequence[Step]) -> str:
    """List every engine measured for AGC and BatchNorm in bf16, one row per network."""
    engines = ("eager", "graph", "compile+graph")
    heads = [f"{name}: {e}" for name in ("AGC", "BN") for e in engines]
    lines = [f"| network, batch | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for case in _cases(steps, "bf16"):
        found = {(s.contender, s.engine): s for s in steps if s.case == case}
        cells = [found.get((c, e)) for c in ("agc", "bn") for e in engines]
        some = find(steps, case, "agc")[0]
        words = [f"{cell.ms:.2f}" if cell else "" for cell in cells]
        lines.append(f"| {_name(some)} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def contender_table(steps: Sequence[Step], case: tuple[str, int, str]) -> str:
    """List every contender of one case in its fastest engine, fastest first."""
    names = dict.fromkeys(s.contender for s in steps if s.case == case)
    fastest = sorted((find(steps, case, name)[0] for name in names), key=lambda step: step.ms)
    latest = max(step.run for step in fastest)
    lines = ["| | fastest engine measured | step | activations |", "|---|---|---:|---:|"]
    for step in fastest:
        mark = "" if step.run == latest else " \\*"
        lines.append(
            f"| {NAMES[step.contender]}{mark} | {ENGINES[step.engine]} | {step.ms:.2f} ms "
            f"| {step.activations_mib:.0f} MiB |"
        )
    table = "\n".join(lines) + "\n"
    if any(step.run != latest for step in fastest):
        table += "\n\\* measured in an earlier run of the benchmark than the other rows.\n"
    return table


def tf32_table(steps: Sequence[Step]) -> str:
    """Compare AGC and BatchNorm in TF32, each in its fastest engine."""
    lines = [
        "| network, batch | AGC | BatchNorm | time ratio | memory ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in _cases(steps, "tf32"):
        agc, bn = (find(steps, case, contender)[0] for contender in ("agc", "bn"))
        lines.append(
            f"| {_name(agc)} | {agc.ms:.2f} ms | {bn.ms:.2f} ms | {_time_ratio(agc, bn)} "
            f"| {agc.activations_mib / bn.activations_mib:.2f}x |"
        )
    return "\n".join(lines) + "\n"


def largest_batch_table(path: Path = BENCH) -> str:
    """List the largest batch of 256x512 images that SegNet trains at in limited memory."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["largest_batch"]]
    lines = ["| | memory | largest batch |", "|---|---:|---:|"]
    for row in sorted(rows, key=lambda row: row["contender"]):
        name = f"{NAMES[row['contender']]}, {ENGINES[row['engine']]}"
        lines.append(f"| {name} | {row['limit_gib']} GiB | {row['largest_batch']} |")
    return "\n".join(lines) + "\n"


def blocks() -> dict[Path, dict[str, str]]:
    """Return the generated blocks of each file, by name."""
    steps = read_steps()
    return {
        ROOT / "README.md": {"steps": main_table(steps), "eager": eager_note(steps)},
        ROOT / "docs" / "performance.md": {
            "steps": main_table(steps),
            "eager": eager_note(steps),
            "engines": engine_table(steps),
            "contenders": contender_table(steps, ("segnet", 8, "bf16")),
            "volumes": contender_table(steps, ("unet3d", 1, "bf16")),
            "tf32": tf32_table(steps),
            "largest batch": largest_batch_table(),
        },
    }


def fill(text: str, contents: dict[str, str]) -> str:
    """Replace the text between the marks of each block.

    Raises:
        ValueError: the text does not have exactly one block of a name.
    """
    for name, content in contents.items():
        begin = f"<!-- {SOURCE}, {name}: made by results/performance.py -->\n"
        end = f"<!-- end of {SOURCE}, {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one block that begins with {begin.strip()!r}")
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = before + begin + content + end + after
    return text


def _cases(steps: Sequence[Step], dtype: str) -> list[tuple[str, int, str]]:
    """Return the cases measured for AGC and BatchNorm: by network, large batches first."""
    found = {s.case for s in steps if s.contender == "agc" and s.dtype == dtype}
    found &= {s.case for s in steps if s.contender == "bn"}
    order = list(NETWORKS)
    return sorted(found, key=lambda case: (order.index(case[0]), -case[1]))


def _name(step: Step) -> str:
    return f"{NETWORKS[step.network]} {step.size}, {step.batch}"


def _time_ratio(step: Step, reference: Step) -> str:
    """Return the ratio of the medians, with ~ if two runs of the benchmark measured them."""
    mark = "" if step.run == reference.run else "~"
    return f"{mark}{step.ms / reference.ms:.2f}x"


def _in_engine(steps: Sequence[Step], engine: str) -> Step:
    return next(step for step in steps if step.engine == engine)


def main() -> None:
    for path, contents in blocks().items():
        path.write_text(fill(path.read_text(), contents))


if __name__ == "__main__":
    main()
