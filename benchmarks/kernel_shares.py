"""List the kernels of a training step and their shares of its GPU time.

    python benchmarks/kernel_shares.py [--networks resnet50:64 unet3d:1] [--contenders agc bn]
        [--engines graph compile+graph] [--seconds 60] [--append]
        [--out benchmarks/results/kernel-shares-cuda.csv]

A case is a network with its batch size, a contender and an engine of `deepcontrol bench`. The CSV
has one row per kernel: its kind, calls and milliseconds per step, its share of the time of all
kernels, and the median time of the step. Kernels of a captured step may run in parallel, so the
sum of their times may exceed the time of the step. For each case, a table by kind and the slowest
kernels are printed. On a CPU the rows are operators of tiny networks.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deepcontrol.workbench.bench.cases import CONTENDERS, ENGINES, NETWORKS, QUICK, Case
from deepcontrol.workbench.bench.contenders import precision
from deepcontrol.workbench.bench.kernels import group_by_kind, profile_kernels
from deepcontrol.workbench.bench.measure import (
    event_milliseconds,
    free_memory,
    quantile,
    step_memory,
    training_step,
    warm_up,
)
from deepcontrol.workbench.bench.results import source_hash, write_results
from deepcontrol.workbench.hardware import hardware

Row = dict[str, object]

DEFAULT_NETWORKS = ("resnet50:64", "unet3d:1", "segnet:8", "resnet50:1")
TIMED_STEPS = 20
SHOWN = 12  # kernels of a printed table


def list_cases(
    networks: Sequence[str], contenders: Sequence[str], engines: Sequence[str], quick: bool
) -> list[Case]:
    """Return the cases, in the order in which they are measured."""
    cases = []
    for word in networks:
        name, _, batch = word.partition(":")
        if name not in NETWORKS or not batch.isdigit() or int(batch) < 1:
            raise ValueError(
                f"expected NETWORK:BATCH such as resnet50:64, with a network of "
                f"{', '.join(NETWORKS)}; got {word!r}"
            )
        network = (QUICK if quick else NETWORKS)[name]
        cases += [
            Case(name, contender, engine, int(batch), network.size, "bf16", network.width)
            for contender in contenders
            for engine in engines
        ]
    # AGC first and engines with torch.compile last: an interrupted run has the most of interest.
    return sorted(cases, key=lambda case: (case.engine.startswith("compile"), case.contender))


def measure(case: Case, device: str) -> list[Row]:
    """Return the rows of a case, the slowest kernel first."""
    on_gpu = device == "cuda"
    with precision(case.dtype):
        step, batch = training_step(case, device)
        step_ms, memory = "", {}
        if on_gpu:
            memory = [step_memory(step, batch) for _ in range(3)][-1]
            warm_up(step, lambda: step(*batch))
            step_ms = f"{quantile(event_milliseconds(lambda: step(*batch), TIMED_STEPS), 0.5):.3f}"
        kernels = profile_kernels(step, batch, 3 if on_gpu else 1)
    total = sum(kernel.ms for kernel in kernels.values())
    kinds = {
        name: kind
        for kind, names in group_by_kind({n: k.ms for n, k in kernels.items()}).items()
        for name in names
    }
    slowest = sorted(kinds, key=lambda name: -kernels[name].ms)
    return [
        {
            **case.key,
            "step_ms": step_ms,
            **memory,
            "kind": kinds[name],
            "kernel": " ".join(name.split())[:160],
            "calls": f"{kernels[name].calls:g}",
            "gpu_ms": f"{kernels[name].ms:.4f}",
            "share": f"{kernels[name].ms / total:.4f}",
            "source": source_hash(),
        }
        for name in slowest
    ]


def show(case: Case, rows: Sequence[Row]) -> None:
    """Print the time by kind of kernel, and the slowest kernels."""
    total = sum(float(str(row["gpu_ms"])) for row in rows)
    first = rows[0]
    print(
        f"\n{case.group} batch {case.batch}, {case.contender}, {case.engine}: step "
        f"{first['step_ms'] or '-'} ms, kernels {total:.3f} ms, "
        f"activations {first.get('activations_mib', '-')} MiB"
    )
    for kind in dict.fromkeys(str(row["kind"]) for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        ms = sum(float(str(row["gpu_ms"])) for row in of_kind)
        calls = sum(float(str(row["calls"])) for row in of_kind)
        print(f"  {kind:22s} {ms:8.3f} ms {100 * ms / total:5.1f}% {calls:6g} calls")
    for row in rows[:SHOWN]:
        print(f"    {row['gpu_ms']:>8} ms {row['calls']:>5} calls  {str(row['kernel'])[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=DEFAULT_NETWORKS, metavar="NETWORK:BATCH")
    parser.add_argument("--contenders", nargs="+", default=["agc", "bn"], choices=CONTENDERS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="default: graph compile+graph; on a CPU eager"
    )
    parser.add_argument("--seconds", type=float, help="start no case after this time")
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--append", action="store_true", help="keep the rows of the CSV file")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    engines = args.engines or (["graph", "compile+graph"] if on_gpu else ["eager"])
    try:
        cases = list_cases(args.networks, args.contenders, engines, quick=not on_gpu)
    except ValueError as error:
        parser.error(str(error))
    print(f"Kernels on {hardware(args.device)}, {len(cases)} cases.")
    rows: list[Row] = []
    begin = time.monotonic()
    for i, case in enumerate(cases):
        if args.seconds is not None and time.monotonic() - begin > args.seconds:
            print(f"\nStopped after {args.seconds:g} seconds: {len(cases) - i} cases are missing.")
            break
        found = measure(case, args.device)
        show(case, found)
        rows += found
        if case.engine.startswith("compile"):
            torch.compiler.reset()
        free_memory()
    out = args.out or Path(f"benchmarks/results/kernel-shares-{args.device}.csv")
    write_results(out, rows, args.device, append=args.append)


if __name__ == "__main__":
    main()
