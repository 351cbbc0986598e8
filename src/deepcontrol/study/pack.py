"""What verdicts rest on, small enough to be committed: configurations, metrics, lambda, pictures.

A packed study is a study: judged again, it comes to the same verdicts, and its page is made of it.
Copied to another machine, it goes on there: the runs that it holds are done.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report.pictures import as_jpeg
from ..report.runs import CONFIG, DIVERGED, LAYERS, METRICS, SAMPLES, read_run
from ..train.records import read, write_whole
from .jobs import RUNS, Job, progress

EVERY = 2  # epochs between two lines of lambda, in the run whose layers are drawn
DIGITS = 5


def pack(jobs: Sequence[Job], folder: Path, drawn: str | None, pictured: Sequence[str]) -> None:
    """Copy the runs that are over into a folder; `drawn` and `pictured` keep more."""
    for job in jobs:
        into = folder / RUNS / job.name
        if not progress(job).is_over(job.config) or job.folder.resolve() == into.resolve():
            continue
        into.mkdir(parents=True, exist_ok=True)
        write_whole(into / CONFIG, config_from_nowhere(job.folder / CONFIG))
        shutil.copyfile(job.folder / METRICS, into / METRICS)
        if (job.folder / DIVERGED).exists():
            shutil.copyfile(job.folder / DIVERGED, into / DIVERGED)
        if job.arm.norm == "agc":
            lines = read(job.folder / LAYERS)
            kept = [line for line in lines[:-1] if job.name == drawn and line["epoch"] % EVERY == 0]
            text = "".join(json.dumps(lambdas(line)) + "\n" for line in [*kept, *lines[-1:]])
            write_whole(into / LAYERS, text)
        if job.name in pictured:
            for _, picture in read_run(job.folder).samples[-1:]:
                (into / SAMPLES).mkdir(exist_ok=True)
                packed = picture.suffix == ".jpg"  # once is enough: each time would cost a little
                content = picture.read_bytes() if packed else as_jpeg(picture)
                (into / SAMPLES / f"{picture.stem}.jpg").write_bytes(content)


def config_from_nowhere(path: Path) -> str:
    """config.json without the paths of the machine it was made on."""
    content = json.loads(path.read_text())
    content["config"]["out"] = Path(content["config"]["out"]).name
    if content["config"]["data_root"] is not None:
        content["config"]["data_root"] = Path(content["config"]["data_root"]).name
    return json.dumps(content, indent=1) + "\n"


def lambdas(line: dict[str, Any]) -> dict[str, Any]:
    """A line of layers.jsonl with lambda alone, rounded."""
    layers = {
        name: {"mean_scale": {k: float(f"{v:.{DIGITS}g}") for k, v in of["mean_scale"].items()}}
        for name, of in line["layers"].items()
        if "mean_scale" in of
    }
    return {"epoch": line["epoch"], "layers": layers}
