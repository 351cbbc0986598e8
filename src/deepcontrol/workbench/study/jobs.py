"""The runs of a study, in the order in which they are worth their time, and how far each is."""

import math
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..report.layers import track
from ..runfolder import (
    BEST,
    LAST,
    LAYERS,
    METRICS,
    PREVIOUS,
    Run,
    finite_number,
    is_locked,
    parse_record,
    read_diverged,
    read_run,
)
from ..train.config import ConfigChangedError, Train, differences, load_config
from .arms import Arm
from .claims import Claim
from .figure import FIGURE_1
from .measures import Curve, Filters
from .presets import Preset

RUNS, LOGS = "runs", "logs"


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: Arm
    seed: int
    config: Train

    @property
    def name(self) -> str:
        return self.config.out.name

    @property
    def folder(self) -> Path:
        return self.config.out


def plan(claims: tuple[Claim, ...], preset: Preset, out: Path, data_root: Path | None) -> list[Job]:
    """Each run once. First what figure 1 draws: with the first seed, then with the next; a verdict
    takes several. Then all others, likewise. At last the further seeds of what is close."""
    figure = {arm.at_rate_times(preset.rates_times) for panel in FIGURE_1 for arm in panel.lines}
    close = {arm for claim in claims if claim.id in preset.close for arm in claim.arms}
    jobs = []
    for arm in dict.fromkeys(arm for claim in claims for arm in claim.arms):
        for seed in range(preset.seeds_if_close if arm in close else preset.seeds):
            folder = out / RUNS / f"{arm.name}-s{seed}"
            jobs.append(Job(arm, seed, preset.config(arm, seed, folder, data_root)))
    return sorted(jobs, key=lambda job: (job.seed >= preset.seeds, job.arm not in figure, job.seed))


def refuse_others(jobs: list[Job]) -> None:
    """ConfigChangedError if a run that is there was made in another way than it would be now."""
    for job in jobs:
        try:
            made, _ = load_config(job.folder)
        except (ValueError, OSError):
            continue  # none yet; or it cannot be read, which its own process will say
        found = differences(job.config, made)
        if found:
            raise ConfigChangedError(
                f"{job.folder} was made in another way than it would be now: {', '.join(found)}. "
                "What is there can be shown (`deepcontrol report`) but not gone on with: choose "
                "another --out."
            )


def command(config: Train) -> list[str]:
    """The command that makes the same run by itself; what has its usual value is left out."""
    words = ["deepcontrol", "train"]
    for f in fields(Train):
        value = getattr(config, f.name)
        if value == f.default and f.name != "out":
            continue
        words.append(f"--{f.name.replace('_', '-')}")
        if f.name == "size":
            words.append("x".join(map(str, value)))
        elif isinstance(value, tuple):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return words


def from_nowhere(config: Train) -> Train:
    """The same without the paths of the machine at hand, which say nothing elsewhere."""
    root = config.data_root
    return replace(
        config,
        out=Path(RUNS) / config.out.name,
        data_root=None if root is None else Path(root.name),
    )


def drop_checkpoints(job: Job) -> None:
    """Of a run that is over: the metrics are the result, and a network takes half a gigabyte."""
    if not is_locked(job.folder):
        for name in (LAST, PREVIOUS, BEST):
            shutil.rmtree(job.folder / name, ignore_errors=True)


@dataclass(frozen=True)
class Progress:
    """How far a run is, by what its folder says."""

    epoch: int  # the last whose line is written; -1 before any
    error: float | None  # the last one, a share
    diverged: int | None  # in which epoch

    def is_over(self, config: Train) -> bool:
        return self.diverged is not None or self.epoch >= config.epochs


def progress(job: Job) -> Progress:
    """From the last whole line of its metrics: cheap enough to look again and again."""
    epoch, error = -1, None
    try:
        lines = (job.folder / METRICS).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in reversed(lines):
        try:
            epoch, row = parse_record(line)
        except ValueError:  # torn, or being written
            continue
        error = finite_number(row.get("val_error"))
        break
    return Progress(epoch, error, read_diverged(job.folder))


def finished_curve(job: Job) -> Curve | None:
    """What came of a run; None while it is not over. ValueError if its files do not say it all."""
    if not progress(job).is_over(job.config):
        return None
    run = read_run(job.folder)
    load_config(job.folder)  # or it says why it cannot
    if not run.metrics:
        raise ValueError(f"{METRICS} has no line that can be read")
    columns = {}
    for name, factor in (("val_error", 100.0), ("val_loss", 1.0)):
        pairs = zip(*run.series(name), strict=True)
        columns[name] = tuple(factor * v for e, v in pairs if 0 < e <= job.config.epochs)
    errors, losses = columns["val_error"], columns["val_loss"]
    if run.diverged is not None:  # its lambdas are not where it was going
        return Curve(errors, losses, diverged=run.diverged)
    if gap := run.missing_epochs(job.config.epochs):
        raise ValueError(gap)
    return Curve(errors, losses, _lambdas(run, job.config.epochs) if job.arm.norm == "agc" else ())


def _lambdas(run: Run, epochs: int) -> tuple[Filters, ...]:
    """At the end, layer by layer."""
    lam = track(run, "mean_scale")
    if lam is None or lam.epochs[-1] != epochs:
        raise ValueError(f"{LAYERS} does not say where lambda ended")
    columns = (lam.values[of][:, -1].tolist() for of in ("mean", "min", "max"))
    last = tuple(Filters(*of_layer) for of_layer in zip(*columns, strict=True))
    if any(math.isnan(value) for of_layer in last for value in of_layer):
        raise ValueError(f"the last line of {LAYERS} has no numbers for lambda")
    return last
