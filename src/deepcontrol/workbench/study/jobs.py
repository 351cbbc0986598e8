"""The runs of a study: plan, progress of each, and the queue that trains them."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..folders.runfolder import (
    BEST,
    LAST,
    LAYERS,
    METRICS,
    PREVIOUS,
    Run,
    finite_number,
    is_locked,
    read_diverged,
    read_run,
)
from ..folders.storage import remove_tree, scan_records
from ..folders.studyfolder import FINISHED, RUNS, State
from ..models import is_agc
from ..train.config import Train
from ..train.config_file import ConfigChangedError, changed_settings, differences, load_config
from ..train.ensemble import check_configs
from ..train.run import Interrupts
from .arms import Arm, Tuned
from .claims import Claim
from .figure import FIGURE_1
from .measures import Curve, LayerLambda
from .rules import choose
from .settings import Preset

ATTEMPTS = 2
POLL = 0.5  # seconds between two polls of the runs


# The plan


@dataclass(frozen=True)
class Job:
    """One run: an arm with a seed."""

    arm: Arm
    seed: int
    config: Train

    @property
    def name(self) -> str:
        return self.config.out.name

    @property
    def folder(self) -> Path:
        return self.config.out


def plan(
    claims: tuple[Claim, ...],
    preset: Preset,
    out: Path,
    data_root: Path | None,
    read_curve: "CurveReader | None" = None,
) -> list[Job]:
    """List each run once, in training order.

    The arms of figure 1 come first, all with the first seed, then with the next, because a verdict
    needs several. The other arms follow in the same way, then the extra seeds of close claims.

    Presets without the paper's claims are trained stage by stage, or else claim by claim: the first
    seeds of a stage or of a claim's arms before their others.

    A tuned arm has the first seed of every learning rate. Once these runs are finished, it also has
    the other seeds of the best one.

    Args:
        claims: The claims whose arms are trained.
        preset: Protocol, seeds and order.
        out: Study folder.
        data_root: Dataset folder.
        read_curve: Reads the result of a run.
    """

    def job_of(arm: Arm, seed: int) -> Job:
        folder = out / RUNS / f"{arm.name}-s{seed}"
        return Job(arm, seed, preset.config(arm, seed, folder, data_root))

    contenders = tuple(dict.fromkeys(c for claim in claims for c in claim.contenders))
    firsts = [job_of(arm, 0) for c in contenders if isinstance(c, Tuned) for arm in c.arms]
    curves = _finished_curves(firsts, read_curve or finished_curve)
    close = {arm for claim in claims if claim.id in preset.close for arm in claim.arms}
    seeds: dict[Arm, int] = {}
    for contender in contenders:
        chosen = choose(contender, curves) if isinstance(contender, Tuned) else contender
        for arm in contender.arms if isinstance(contender, Tuned) else (contender,):
            usual = preset.seeds_if_close if arm in close else preset.seeds
            seeds[arm] = max(seeds.get(arm, 1), usual if arm == chosen else 1)
    jobs = [job_of(arm, seed) for arm, count in seeds.items() for seed in range(count)]
    if preset.stages:
        return sorted(jobs, key=lambda job: (_stage(job, preset), job.seed))
    if not preset.is_of_paper:
        first = {a: i for i, c in reversed(list(enumerate(claims))) for a in c.arms}
        return sorted(jobs, key=lambda job: (first[job.arm], job.seed))
    figure_1 = {arm.scale_lr(preset.lr_scale) for spec in FIGURE_1 for arm in spec.arms}
    return sorted(
        jobs, key=lambda job: (job.seed >= preset.seeds, job.arm not in figure_1, job.seed)
    )


def _stage(job: Job, preset: Preset) -> int:
    return preset.stages.index((job.arm.model, job.arm.batch))


def _finished_curves(jobs: Sequence[Job], read_curve: "CurveReader") -> dict[Arm, list[Curve]]:
    """Read the finished ones of these runs. Damaged runs are left out."""
    found: dict[Arm, list[Curve]] = defaultdict(list)
    for job in jobs:
        with contextlib.suppress(ValueError):
            if curve := read_curve(job):
                found[job.arm].append(curve)
    return found


def refuse_changed(jobs: list[Job]) -> None:
    """Raise an error if a run differs from its job or is a link to another folder.

    Runs may differ in the engine, which changes the speed and the rounding of the same function.
    """
    for job in jobs:
        if job.folder.is_symlink():
            raise ValueError(
                f"{job.folder} is a symbolic link, and a study writes to its own folder only; "
                "replace it by the folder that it names"
            )
        try:
            existing, _ = load_config(job.folder)
        except (ValueError, OSError):
            continue  # no run yet, or not readable: its own process reports that
        found = differences(replace(job.config, engine=existing.engine), existing)
        if found:
            raise ConfigChangedError(
                f"{job.folder} was trained with other settings: {'; '.join(found)}. Choose another "
                "--out; `deepcontrol report` can still show this study."
            )


def train_command(config: Train) -> list[str]:
    """Return the `deepcontrol train` command of a run, without default options."""
    words = ["deepcontrol", "train"]
    for name, value in changed_settings(config).items():
        words.append(f"--{name.replace('_', '-')}")
        if name == "size":
            words.append("x".join(map(str, value)))
        elif isinstance(value, tuple):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return words


def without_local_paths(config: Train) -> Train:
    """Replace absolute paths, which are invalid on other machines."""
    root = config.data_root
    return replace(
        config,
        out=Path(RUNS) / config.out.name,
        data_root=None if root is None else Path(root.name),
    )


def drop_checkpoints(job: Job) -> None:
    """Delete the checkpoints of a finished run. Its metrics are the result."""
    if not is_locked(job.folder):
        for name in (LAST, PREVIOUS, BEST):
            with contextlib.suppress(OSError):
                remove_tree(job.folder / name)


def form_ensemble(jobs: Sequence[Job]) -> bool:
    """Return whether one process can train these runs at once, from their beginning."""
    if any((job.folder / name).exists() for job in jobs for name in (LAST, PREVIOUS)):
        return False
    try:
        check_configs([job.config for job in jobs])
    except ValueError:
        return False
    return True


# Progress and results of a run


@dataclass(frozen=True)
class Progress:
    """The state of a run folder."""

    epoch: int  # last epoch with a record, or -1
    error: float | None  # validation error of that epoch, as a fraction
    diverged: int | None  # epoch
    damage: str = ""  # the first record that cannot be read

    def is_finished(self, config: Train) -> bool:
        return self.diverged is not None or self.epoch >= config.epochs


def progress(job: Job) -> Progress:
    """Read the last complete record of a run's metrics. Cheap enough for polling."""
    epoch, error, diverged, damage = -1, None, None, ""
    with contextlib.suppress(OSError):
        found = scan_records(job.folder / METRICS)
        if found.lines:
            epoch, error = (
                found.lines[-1].epoch,
                finite_number(found.lines[-1].row.get("val_error")),
            )
        damage = next(iter(found.damage), "")
    try:
        diverged = read_diverged(job.folder)
    except ValueError as fault:
        damage = damage or str(fault)
    return Progress(epoch, error, diverged, damage)


def finished_curve(job: Job) -> Curve | None:
    """Read the result of a run, or return None if the run is not finished.

    Raises:
        ValueError: The run is finished but its files are incomplete, or its records are damaged.
    """
    state = progress(job)
    if not state.is_finished(job.config) and not state.damage:
        return None
    run = read_run(job.folder)
    load_config(job.folder)  # raises if it cannot be read
    if run.damage:
        raise ValueError(run.damage[0])
    if not run.metrics:
        raise ValueError(f"{METRICS} has no readable record")
    columns = {}
    for name, factor in (("val_error", 100.0), ("val_loss", 1.0), ("val_mean_iou", 100.0)):
        pairs = zip(*run.series(name), strict=True)
        columns[name] = tuple(factor * v for e, v in pairs if 0 < e <= job.config.epochs)
    errors, losses, ious = columns.values()
    schedule = job.config.schedule
    if run.diverged is not None:  # the last lambda of a diverged run is meaningless
        return Curve(errors, losses, (), run.diverged, job.seed, schedule, ious)
    if gap := run.missing_epochs(job.config.epochs):
        raise ValueError(gap)
    lambdas = _final_lambdas(run, job.config.epochs) if is_agc(job.arm.norm) else ()
    return Curve(errors, losses, lambdas, None, job.seed, schedule, ious)


CurveReader = Callable[[Job], Curve | None]


class CurveCache:
    """Read the result of each run once it is finished, and keep it."""

    def __init__(self) -> None:
        self._curves: dict[Path, Curve] = {}

    def __call__(self, job: Job) -> Curve | None:
        """Return the result of a run, or None if the run is not finished.

        Raises:
            ValueError: The run is finished but its files are incomplete.
        """
        curve = self._curves.get(job.folder) or finished_curve(job)
        if curve is not None:
            self._curves[job.folder] = curve
        return curve


def _final_lambdas(run: Run, epochs: int) -> tuple[LayerLambda, ...]:
    """Read lambda after the last epoch, layer by layer."""
    last = [row["layers"] for row in run.layers[-1:] if row["epoch"] == epochs]
    layers = [
        layer["mean_scale"]
        for by_name in last
        for layer in by_name.values()
        if isinstance(layer, dict) and "mean_scale" in layer
    ]
    if not layers:
        raise ValueError(f"{LAYERS} has no lambda for epoch {epochs}")
    found = []
    for layer in layers:
        values = layer if isinstance(layer, dict) else {}
        numbers = [finite_number(values.get(name)) for name in ("mean", "min", "max")]
        if None in numbers:
            raise ValueError(f"the last record of {LAYERS} has no numbers for lambda")
        found.append(LayerLambda(*(n for n in numbers if n is not None)))
    return tuple(found)


# The queue


class Executor(Protocol):
    """Trains jobs in the background."""

    def has_room(self) -> bool: ...
    def start(self, jobs: Sequence[Job]) -> str: ...
    def ended(self) -> list[tuple[str, int]]: ...
    def stop(self) -> None: ...


@dataclass
class QueueEntry:
    """A job and its state."""

    job: Job
    state: State
    progress: Progress
    attempts: int = 0
    where: str = ""  # device or cluster
    fault: str = ""  # exit code and last log line of a failed run


class Queue:
    """All runs of a study, and the loop that trains them.

    Args:
        jobs: The runs, in training order.
        logs: Folder of the processes' output.
        on_change: Called with an entry and a message for each change of state.
        on_poll: Called with the queue after each poll of the runs.
        on_finish: Called with each finished job before another one starts.
        on_ended: Called with the queue whenever processes have ended.
        selected: Names of the jobs to train; None for all.
        at_once: Largest number of runs that one process trains at once, as an ensemble.
        replan: Called whenever processes have ended. Returns all jobs in their order, among them
            new ones that depend on the results, and the names of those to train.
        read_curve: Reads the result of a run.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        logs: Path,
        on_change: Callable[[QueueEntry, str], None] = lambda entry, message: None,
        on_poll: Callable[["Queue"], None] = lambda queue: None,
        on_finish: Callable[[Job], None] = lambda job: None,
        on_ended: Callable[["Queue"], None] = lambda queue: None,
        selected: Collection[str] | None = None,
        at_once: int = 1,
        replan: Callable[[], tuple[Sequence[Job], Collection[str]]] | None = None,
        read_curve: CurveReader = finished_curve,
    ) -> None:
        self.entries: dict[str, QueueEntry] = {}
        self.logs = logs
        self.on_change, self.on_poll = on_change, on_poll
        self.on_finish, self.on_ended = on_finish, on_ended
        self.at_once, self.replan, self.read_curve = at_once, replan, read_curve
        self.add(jobs, selected)

    def add(self, jobs: Sequence[Job], selected: Collection[str] | None) -> None:
        """Add the jobs that are not in the queue yet, and take over the order of all."""
        before, self.entries = self.entries, {}
        for job in jobs:
            known = before.pop(job.name, None)
            self.entries[job.name] = entry = known or QueueEntry(job, "waiting", progress(job))
            if known or self._mark_if_finished(entry):
                continue
            if selected is not None and job.name not in selected:
                entry.state = "not selected"
        self.entries |= before

    def in_state(self, *states: State) -> list[QueueEntry]:
        return [entry for entry in self.entries.values() if entry.state in states]

    def run(
        self,
        executor: Executor,
        interrupts: Interrupts,
        deadline: float,
        last_start: float = math.inf,
    ) -> None:
        """Train until all runs are finished, the deadline passes or a signal arrives.

        After `last_start` no run is started, and the running ones continue.
        """
        for entry in self.in_state(*FINISHED):
            self.on_finish(entry.job)
        while self.in_state("waiting", "locked", "running"):
            if ended := executor.ended():
                self._collect(ended)
                if self.replan is not None:
                    self.add(*self.replan())
                self.on_ended(self)
            may_start = time.monotonic() < last_start
            is_idle = not may_start and not self.in_state("running")
            if interrupts.signum or time.monotonic() >= deadline or is_idle:
                self._stop(executor)
                return
            if may_start:
                self._start(executor)
            for entry in self.in_state("running", "locked"):
                entry.progress = progress(entry.job)
            self.on_poll(self)
            time.sleep(POLL if self.in_state("waiting", "locked", "running") else 0)

    def _start(self, executor: Executor) -> None:
        for entry in self.in_state("waiting", "locked"):
            if not executor.has_room():
                return
            if entry.state not in ("waiting", "locked") or not self._can_start(entry):
                continue  # an ensemble with an earlier entry may train it already
            group = [entry]
            for other in self.in_state("waiting"):
                together = [*(e.job for e in group), other.job]
                if len(group) == self.at_once or other is entry or entry.attempts:
                    continue  # a run that failed is tried again alone
                if not other.attempts and form_ensemble(together):
                    group += [other] * self._can_start(other)
            where = executor.start([e.job for e in group])
            for each in group:
                each.where, each.state = where, "running"
                each.attempts += 1
                others = f" with {len(group) - 1} others" if len(group) > 1 else ""
                self.on_change(each, f"started on {where}{others}")

    def _can_start(self, entry: QueueEntry) -> bool:
        if is_locked(entry.job.folder):  # a process of an earlier call may still be saving
            entry.state = "locked"
            return False
        entry.progress = progress(entry.job)
        return not self._mark_if_finished(entry)

    def _stop(self, executor: Executor) -> None:
        executor.stop()
        self._collect(executor.ended(), stopping=True)
        for entry in self.in_state("waiting", "locked"):
            entry.state = "stopped"
        self.on_poll(self)

    def _collect(self, ended: Sequence[tuple[str, int]], stopping: bool = False) -> None:
        for name, code in ended:
            entry = self.entries[name]
            entry.progress = progress(entry.job)
            if self._mark_if_finished(entry):
                self.on_finish(entry.job)
                self.on_change(entry, entry.state)
            elif stopping:
                entry.state = "stopped"
                self.on_change(entry, "stopped, saved" if entry.progress.epoch >= 0 else "stopped")
            elif is_locked(entry.job.folder):  # another process was faster
                entry.state = "locked"
                entry.attempts -= 1
            else:
                entry.fault = f"exit code {code}: {last_line(self.logs / f'{name}.txt')}"
                entry.state = "failed" if entry.attempts >= ATTEMPTS else "waiting"
                retry = "" if entry.state == "failed" else "; retrying once"
                self.on_change(entry, f"failed, {entry.fault}{retry}")

    def _mark_if_finished(self, entry: QueueEntry) -> bool:
        if entry.progress.is_finished(entry.job.config):
            entry.state = "done" if entry.progress.diverged is None else "diverged"
            entry.fault = ""  # clear the fault of an earlier attempt
            return True
        return False


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return "no output"
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
