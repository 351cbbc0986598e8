"""Time torch.compile on AGC networks, with fewer or faster launches per layer.

    python benchmarks/compile_variants.py [--networks segnet:1 unet3d:1] [--rounds 40]
        [--variants ops static plain both] [--out benchmarks/results/compile-variants-cuda.csv]

At batch size 1 a compiled AGC network waits for the host longer than in eager mode: torch launches
its own kernels with a static launcher, but those of registered ops with Triton's, and each AGC
layer has more of them. Variants of the AGC network, all in torch.compile's default mode:

    ops       as users call it
    static    torch's static launcher for the ops' kernels as well
    plain     filters scaled in plain PyTorch, which the compiler turns into kernels of its own
    both      plain filters, and the static launcher

BatchNorm (bn) is compiled with the static launcher's setting off, which does not concern it. All
networks of a batch size train in turn: bf16 autocast, channels_last, learning rate 0. A row has the
time of a step and its ratio to BatchNorm's step of the same round.
"""

import argparse
import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch._inductor import config as inductor

from deepcontrol.workbench.bench.cases import NETWORKS, QUICK, Case
from deepcontrol.workbench.bench.contenders import precision
from deepcontrol.workbench.bench.measure import free_memory, percentiles, training_step, warm_up
from deepcontrol.workbench.bench.results import source_hash, write_results
from deepcontrol.workbench.hardware import hardware

Row = dict[str, object]

filters = importlib.import_module(
    "deepcontrol.ops.gain_conv"
)  # ops exports a function of this name

VARIANTS = ("ops", "static", "plain", "both")
STATIC = "static_launch_user_defined_triton_kernels"


def never() -> bool:
    return False


@contextlib.contextmanager
def compiling(variant: str) -> Iterator[None]:
    """Compile and run in this block as the variant says.

    A step must run where it was compiled: the compiled code checks for the replaced function.
    """
    with contextlib.ExitStack() as stack:
        if variant in ("static", "both"):
            stack.enter_context(inductor.patch({STATIC: True}))
        if variant in ("plain", "both"):
            stack.enter_context(mock.patch.object(filters, "compiles_with_ops", never))
        yield


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()  # so that the host starts with nothing in the queue
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(name: str, batch: int, variants: Sequence[str], rounds: int, device: str) -> list[Row]:
    """Return a row for each variant of a network, and one for BatchNorm."""
    variants = [*variants, "bn"]
    network = (NETWORKS if device == "cuda" else QUICK)[name]
    cases = {
        variant: Case(
            name, "bn" if variant == "bn" else "agc", "compile", batch, network.size, "bf16",
            network.width,
        )
        for variant in variants
    }  # fmt: skip
    calls: dict[str, Callable[[], object]] = {}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    with precision("bf16"):
        for variant, case in cases.items():
            step, inputs = training_step(case, device)
            calls[variant] = functools.partial(step, *inputs)
            with compiling(variant):
                warm_up(step, calls[variant])
        for _ in range(rounds):
            for variant, call in calls.items():
                with compiling(variant):
                    times[variant].append(milliseconds(call, device))
    rows: list[Row] = []
    for variant in variants:
        ratios = [a / b for a, b in zip(times[variant], times["bn"], strict=True)]
        row: Row = {
            "network": name,
            "batch": batch,
            "variant": variant,
            **percentiles("ms", times[variant]),
            **percentiles("vs_bn", ratios),
            "rounds": rounds,
            "source": source_hash(),
        }
        print(
            f"{name} batch {batch}  {variant:7s} {row['ms_p50']:>8} ms, {row['vs_bn_p50']}x "
            f"BatchNorm ({row['vs_bn_p20']} to {row['vs_bn_p80']})",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="+", default=["segnet:1", "unet3d:1"], metavar="NETWORK:BATCH"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each, at least 2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")
    print(f"torch.compile on {hardware(args.device)}, {args.rounds} rounds.")
    rows: list[Row] = []
    for word in args.networks:
        name, _, batch = word.partition(":")
        if name not in NETWORKS or not batch.isdigit() or int(batch) < 1:
            parser.error(f"expected NETWORK:BATCH such as segnet:1, got {word!r}")
        rows += measure(name, int(batch), args.variants, args.rounds, args.device)
        free_memory()
    out = args.out or Path(f"benchmarks/results/compile-variants-{args.device}.csv")
    write_results(out, rows, args.device)


if __name__ == "__main__":
    main()
