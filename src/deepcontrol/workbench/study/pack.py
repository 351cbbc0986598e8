"""What verdicts rest on, small enough to be committed: configurations, metrics, lambda, pictures,
and the benchmark's rows that decide.

A packed study is a study: judged again, it comes to the same verdicts, and its page is made of it.
Copied to another machine, it goes on there: the runs that it holds are done.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.results import Row, write_rows
from ..report.pictures import as_jpeg
from ..runfolder import (
    CONFIG,
    DIVERGED,
    LAYERS,
    METRICS,
    SAMPLES,
    Run,
    finite_number,
    read_run,
    write_atomic,
)
from .jobs import RUNS, Job

BENCH = "bench.csv"
EVERY = 2  # epochs between two lines of lambda, in the run whose layers are drawn
DIGITS = 5


def pack(
    jobs: Sequence[Job],
    folder: Path,
    drawn: str | None,
    pictured: Sequence[str],
    bench: Sequence[Row],
) -> None:
    """Copy runs that are over into a folder; `drawn` and `pictured` keep more."""
    folder.mkdir(parents=True, exist_ok=True)
    if bench:
        write_rows(folder / BENCH, bench)
    for job in jobs:
        into = folder / RUNS / job.name
        if job.folder.resolve() == into.resolve():
            continue
        into.mkdir(parents=True, exist_ok=True)
        write_atomic(into / CONFIG, config_from_nowhere(job.folder / CONFIG))
        shutil.copyfile(job.folder / METRICS, into / METRICS)
        for name in (DIVERGED, LAYERS):  # of an earlier time
            (into / name).unlink(missing_ok=True)
        if (job.folder / DIVERGED).exists():
            shutil.copyfile(job.folder / DIVERGED, into / DIVERGED)
        run = read_run(job.folder)
        if job.arm.norm == "agc" and run.layers:
            *before, last = run.layers
            kept = [line for line in before if job.name == drawn and line["epoch"] % EVERY == 0]
            text = "".join(json.dumps(lambdas(line)) + "\n" for line in [*kept, last])
            write_atomic(into / LAYERS, text)
        if job.name in pictured:
            pack_picture(run, into / SAMPLES)


def pack_picture(run: Run, into: Path) -> None:
    """The last one, if it can be read."""
    for _, picture in run.samples[-1:]:
        packed = picture.suffix == ".jpg"  # once is enough: each time would cost a little
        try:
            content = picture.read_bytes() if packed else as_jpeg(picture)
        except ValueError:  # no picture, no harm
            continue
        into.mkdir(exist_ok=True)
        (into / f"{picture.stem}.jpg").write_bytes(content)


def config_from_nowhere(path: Path) -> str:
    """config.json without the paths of the machine it was made on."""
    content = json.loads(path.read_text())
    for name in ("out", "data_root"):
        if content["config"].get(name) is not None:
            content["config"][name] = Path(content["config"][name]).name
    return json.dumps(content, indent=1) + "\n"


def lambdas(line: dict[str, Any]) -> dict[str, Any]:
    """A line of layers.jsonl with lambda alone, rounded."""
    layers = {
        name: {"mean_scale": {k: float(f"{v:.{DIGITS}g}") for k, v in numbers(of).items()}}
        for name, of in line["layers"].items()
        if numbers(of)
    }
    return {"epoch": line["epoch"], "layers": layers}


def numbers(layer: object) -> dict[str, float]:
    """What a layer says of its lambda."""
    of = layer.get("mean_scale") if isinstance(layer, dict) else None
    found = (
        {name: finite_number(value) for name, value in of.items()} if isinstance(of, dict) else {}
    )
    return {name: value for name, value in found.items() if value is not None}
