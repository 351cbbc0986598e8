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
HOST_TIME = BENCH.with_name("host-time-cuda.csv")
SOURCE = "benchmarks/results/bench-cuda.csv"

NETWORKS = {"segnet": "SegNet", "resnet50": "ResNet-50", "unet3d": "3-D U-Net"}
NNUNETS = {"nnunet": "plain", "nnunet-res": "residual encoder"}
NAMES = {
    "agc": "AGC",
    "bn": "BatchNorm",
    "bn-byte-pool": "BatchNorm, byte-index pooling",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "frn": "FRN",
    "evonorm-s0": "EvoNorm-S0",
    "none": "no normalization",
    "one-liner": "AGC as one line of PyTorch",
}
ENGINES = {
    "eager": "eager",
    "compile": "torch.compile",
    "reduce-overhead": "reduce-overhead",
    "graphed": "graphed model",
    "graph": "CUDA graph",
    "compile+graph": "torch.compile, CUDA graph",
}
# A reader's ways to run a step, and the engines of each. The fastest of them counts.
MODES = {
    "eager": ("eager",),
    "torch.compile": ("compile",),
    "captured": ("graph", "compile+graph"),
}
MODE_ENGINES = tuple(engine for engines in MODES.values() for engine in engines)


@dataclass(frozen=True)
class Step:
    """One measured training step: forward, loss, backward and update."""

    network: str
    contender: str
    engine: str
    batch: int
    size: str  # with the memory format, if it is not channels_last
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
            size=row["size"] + (", contiguous" if row.get("layout") == "contiguous" else ""),
            dtype=row["dtype"],
            ms=float(row["ms_p50"]),
            ms_p20=float(row["ms_p20"]),
            ms_p80=float(row["ms_p80"]),
            activations_mib=float(row["activations_mib"] or "nan"),  # none for reduce-overhead
            run=row["run"],
        )
        for row in rows
    ]


def find(steps: Sequence[Step], case: tuple[str, int, str], contender: str) -> list[Step]:
    """Return the steps of one contender in one case in all MODES, fastest first."""
    found = [s for s in steps if s.case == case and s.contender == contender]
    return sorted((s for s in found if s.engine in MODE_ENGINES), key=lambda step: step.ms)


def in_mode(steps: Sequence[Step], mode: str) -> Step | None:
    """Return the fastest step of a mode, or None if it was not measured."""
    found = [step for step in steps if step.engine in MODES[mode]]
    return min(found, key=lambda step: step.ms, default=None)


def in_all_modes(steps: Sequence[Step]) -> list[Step]:
    """Return the steps of the cases in which AGC was measured in every mode."""
    cases = {
        step.case for step in steps if all(in_mode(find(steps, step.case, "agc"), m) for m in MODES)
    }
    return [step for step in steps if step.case in cases]


def main_table(steps: Sequence[Step]) -> str:
    """Compare AGC and BatchNorm in bf16 in every mode; one row per network."""
    heads = [*MODES, "activations, captured"]
    lines = [
        "| AGC / BatchNorm | " + " | ".join(heads) + " |",
        "|---" + "|---:" * len(heads) + "|",
    ]
    for case in _cases(steps, "bf16"):
        agc, bn = (find(steps, case, contender) for contender in ("agc", "bn"))
        cells = [_compared(in_mode(agc, mode), in_mode(bn, mode)) for mode in MODES]
        cells.append(_memory_compared(in_mode(agc, "captured"), in_mode(bn, "captured")))
        lines.append(f"| {_name(agc[0])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _compared(agc: Step | None, peer: Step | None) -> str:
    """Format both times and their ratio; "-" for a missing measurement."""
    if agc is None or peer is None:
        return " / ".join(f"{step.ms:.2f} ms" if step else "-" for step in (agc, peer))
    return f"{agc.ms:.2f} / {peer.ms:.2f} ms: {_time_ratio(agc, peer)}"


def _memory_compared(agc: Step | None, peer: Step | None) -> str:
    if agc is None or peer is None:
        return "-"
    mine, theirs = agc.activations_mib, peer.activations_mib
    return f"{mine:.0f} / {theirs:.0f} MiB: {mine / theirs:.2f}x"


def engine_table(steps: Sequence[Step]) -> str:
    """List the step times of AGC and BatchNorm in bf16 in every engine measured."""
    measured = {s.engine for s in steps if s.dtype == "bf16" and s.network in NETWORKS}
    engines = [engine for engine in ENGINES if engine in measured]
    heads = ["network, batch", "", *(ENGINES[engine] for engine in engines)]
    lines = [f"| {' | '.join(heads)} |", "|---|---" + "|---:" * len(engines) + "|"]
    for case in _cases(steps, "bf16"):
        for contender in ("agc", "bn"):
            found = {s.engine: s for s in steps if (s.case, s.contender) == (case, contender)}
            times = [f"{found[e].ms:.2f}" if e in found else "" for e in engines]
            some = next(iter(found.values()))
            lines.append(f"| {_name(some)} | {NAMES[contender]} | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"


def contender_table(steps: Sequence[Step], case: tuple[str, int, str]) -> str:
    """List every contender of one case in every mode, fastest first.

    The activations are those of the fastest engine. A star marks a time of an earlier run of the
    benchmark than the latest in the table.
    """
    names = dict.fromkeys(s.contender for s in steps if s.case == case)
    measured = [some for name in names if (some := find(steps, case, name))]
    found = sorted(measured, key=lambda some: some[0].ms)
    latest = max(step.run for some in found for step in some)
    lines = [
        f"| step in ms | {' | '.join(MODES)} | activations |",
        "|---" + "|---:" * (len(MODES) + 1) + "|",
    ]
    marked = False
    for some in found:
        cells = []
        for step in (in_mode(some, mode) for mode in MODES):
            mark = "" if step is None or step.run == latest else " \\*"
            marked |= bool(mark)
            cells.append("" if step is None else f"{step.ms:.2f}{mark}")
        lines.append(
            f"| {NAMES[some[0].contender]} | {' | '.join(cells)} "
            f"| {some[0].activations_mib:.0f} MiB |"
        )
    table = "\n".join(lines) + "\n"
    if marked:
        table += "\n\\* measured in an earlier run of the benchmark than the other times.\n"
    return table


def nnunet_section(steps: Sequence[Step]) -> str:
    """Compare AGC with InstanceNorm in nnU-Net, beside BatchNorm and no normalization.

    Each contender is in its fastest engine. Nothing, if it was not measured.
    """
    measured = [s for s in steps if s.network in NNUNETS and s.engine in MODE_ENGINES]
    cases = dict.fromkeys((s.network, s.size, s.batch) for s in measured)
    lines = []
    for case in cases:
        members = [s for s in measured if (s.network, s.size, s.batch) == case]
        peers = {
            contender: min((s for s in members if s.contender == contender), key=lambda s: s.ms)
            for contender in dict.fromkeys(s.contender for s in members)
        }
        agc, instance = peers.get("agc"), peers.get("in")
        if agc is None or instance is None:
            continue
        times = [f"{peers[c].ms:.2f}" if c in peers else "" for c in ("agc", "in", "bn", "none")]
        network, size, batch = case
        memory = agc.activations_mib / instance.activations_mib
        lines.append(
            f"| {NNUNETS[network]} {size}, {batch} | {' | '.join(times)} "
            f"| {_time_ratio(agc, instance)} | {memory:.2f}x |"
        )
    if not lines:
        return ""
    heads = ["network, batch", *(NAMES[c] for c in ("agc", "in", "bn", "none"))]
    heads += ["time: AGC / InstanceNorm", "activations"]
    return "\n".join(
        [
            "## nnU-Net\n",
            "Step time in ms, each contender in its fastest engine.\n",
            f"| {' | '.join(heads)} |",
            "|---" + "|---:" * (len(heads) - 1) + "|",
            *lines,
            "",
        ]
    )


def host_time_section(path: Path = HOST_TIME) -> str:
    """List the host time of a layer in eager mode. Nothing, if it was not measured."""
    if not path.exists():
        return ""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        "## Host time of a layer in eager mode\n",
        f"Microseconds to queue the kernels of one layer (`{HOST_TIME.relative_to(ROOT)}`).\n",
        "| | forward | backward | sum | p20 to p80 | / conv+BN+ReLU |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        forward, backward, total, p20, p80 = (
            f"{float(row[name]):.0f}"
            for name in (
                "forward_us_p50",
                "backward_us_p50",
                "total_us_p50",
                "total_us_p20",
                "total_us_p80",
            )
        )
        ratio = f"{float(row['total_vs_batchnorm_p50']):.2f}x"
        name = row["contender"] + (", compiled helper" if row.get("path") == "native" else "")
        lines.append(f"| {name} | {forward} | {backward} | {total} | {p20} to {p80} | {ratio} |")
    return "\n".join([*lines, ""])


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
        ROOT / "README.md": {"steps": main_table(in_all_modes(steps))},
        ROOT / "docs" / "performance.md": {
            "steps": main_table(steps),
            "engines": engine_table(steps),
            "contenders": contender_table(steps, ("segnet", 8, "bf16")),
            "volumes": contender_table(steps, ("unet3d", 1, "bf16")),
            "nnU-Net": nnunet_section(steps),
            "host time": host_time_section(),
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
    found = {case for case in found if case[0] in NETWORKS}
    found &= {s.case for s in steps if s.contender == "bn"}
    order = list(NETWORKS)
    return sorted(found, key=lambda case: (order.index(case[0]), -case[1]))


def _name(step: Step) -> str:
    return f"{NETWORKS[step.network]} {step.size}, {step.batch}"


def _time_ratio(step: Step, reference: Step) -> str:
    """Return the ratio of the medians, with ~ if two runs of the benchmark measured them."""
    mark = "" if step.run == reference.run else "~"
    return f"{mark}{step.ms / reference.ms:.2f}x"


def main() -> None:
    for path, contents in blocks().items():
        path.write_text(fill(path.read_text(), contents))


if __name__ == "__main__":
    main()
