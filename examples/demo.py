"""What `make demo` runs: AGC beside BatchNorm on the CPU, and a page to look at.

A narrow SegNet learns to label street scenes, with AGC (automatic gain control) and with BatchNorm,
one image at a time and four at a time: four runs of `deepcontrol train`, one a core, and then
`deepcontrol report` on them.

    python examples/demo.py [--epochs 14] [--out out/demo]

The rate is 0.04 x batch size, twice the paper's: a few minutes are few steps, and for the first
hundreds of them AGC at lambda = 1 learns little more than how frequent each class is.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deepcontrol.cli import main as deepcontrol

SETTINGS = {
    "data": "streets",
    "size": "48x96",
    "width": "0.25",
    "train-limit": "96",
    "val-limit": "16",
    "device": "cpu",
}
RATE = 0.04  # x batch size


@dataclass(frozen=True)
class Run:
    norm: str
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.norm}-batch-{self.batch_size}"

    def command(self, folder: Path, epochs: int) -> list[str]:
        settings = SETTINGS | {
            "norm": self.norm,
            "batch-size": str(self.batch_size),
            "lr": f"{RATE * self.batch_size:g}",
            "epochs": str(epochs),
            "out": str(folder / self.name),
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return ["train", *flags, "--sample-epochs", "1", str(epochs)]


# The longest first, so that the last one to end leaves no core idle for long.
RUNS = [Run("agc", 1), Run("bn", 1), Run("agc", 4), Run("bn", 4)]


def train_all(folder: Path, epochs: int, console: Console) -> None:
    """Train all runs, each in a process of its own with its share of the cores.

    Small maps keep one core busy and two waiting for each other: two runs side by side are done
    sooner than one after the other with two threads each.
    """
    cores = len(os.sched_getaffinity(0))
    at_once = min(cores, len(RUNS))
    environment = os.environ | {"OMP_NUM_THREADS": str(cores // at_once)}
    waiting, running = list(RUNS), dict[Run, subprocess.Popen[bytes]]()
    columns = (TextColumn("{task.description:12s}"), BarColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = {r: progress.add_task(r.name, total=epochs, start=False, said="") for r in RUNS}
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    run = waiting.pop(0)
                    running[run] = start(run.command(folder, epochs), folder, run, environment)
                    progress.start_task(bars[run])
                time.sleep(0.3)
                for run in list(running):
                    show(progress, bars[run], folder / run.name / "metrics.jsonl")
                    if running[run].poll() is not None:
                        finish(running.pop(run), folder / f"{run.name}.log")
                        progress.stop_task(bars[run])
        finally:
            for process in running.values():  # somebody pressed Ctrl-C, or a run failed
                process.terminate()


def start(
    command: Sequence[str], folder: Path, run: Run, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    log: IO[bytes]
    with (folder / f"{run.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "deepcontrol", *command],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish(process: "subprocess.Popen[bytes]", log: Path) -> None:
    if process.returncode:
        sys.exit(f"{log}:\n{log.read_text()}")


def show(progress: Progress, bar: TaskID, metrics: Path) -> None:
    """How far a run is: its last whole line of metrics."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if whole:
        last = json.loads(whole[-1])
        said = f"epoch {last['epoch']:2d}, {last['val_error']:.1%} of the pixels wrong"
        progress.update(bar, completed=last["epoch"], said=said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=14, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder to write to")
    args = parser.parse_args()
    console = Console()
    started = time.perf_counter()
    console.print(
        "AGC and BatchNorm learn to label streets on the CPU, at batch 1 and 4. Each run is"
    )
    console.print(f"  deepcontrol {' '.join(RUNS[0].command(args.out, args.epochs))}", style="dim")
    args.out.mkdir(parents=True, exist_ok=True)
    for run in RUNS:  # of an earlier demo: it would be continued
        shutil.rmtree(args.out / run.name, ignore_errors=True)
    train_all(args.out, args.epochs, console)
    folders = [str(args.out / run.name) for run in RUNS]
    code = deepcontrol(["report", *folders, "--out", str(args.out)])
    page = (args.out / "index.html").resolve()
    seconds = time.perf_counter() - started
    console.print(f"Done in {seconds:.0f} s. Look at it: {page.as_uri()}", soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
