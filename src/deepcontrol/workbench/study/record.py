"""A study's evidence and record: collect, write study.json, pack the folder.

A packed study holds all evidence for its verdicts and is small enough to commit. It is a study
folder: judging it again gives the same verdicts, and another machine can continue it.
"""

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..bench.results import Row, read_rows, write_rows
from ..folders.runfolder import (
    CONFIG,
    DIVERGED,
    LAYERS,
    METRICS,
    SAMPLES,
    Run,
    finite_number,
    read_run,
)
from ..folders.storage import (
    MAX_FILE_BYTES,
    format_record,
    make_folder,
    read_bytes,
    read_json,
    write_atomic,
    write_json,
)
from ..folders.studyfolder import (
    BENCH,
    FINISHED,
    RUNS,
    ClaimResult,
    Entry,
    Study,
    read_outline,
    write_study,
)
from ..imagefile import as_jpeg
from ..models import is_agc
from .arms import Arm, agc, bn
from .claims import CLASSNET_AGC, CLASSNET_BN, Claim, judge
from .figure import FIGURE_1, figure_2, lr_grid
from .jobs import Job, Queue, train_command, without_local_paths
from .measures import Curve
from .rules import BenchRatio, Evidence
from .settings import PRESETS, Preset, Reproduce

BENCH_RESULTS = Path("benchmarks/results/bench-cuda.csv")  # default output of `deepcontrol bench`
PICTURED = (agc(1), bn(1), agc(4), bn(4), CLASSNET_AGC, CLASSNET_BN)  # arms with sample pictures
LAMBDA_INTERVAL = 2  # epochs between two records of lambda in the packed run that is drawn
LAMBDA_DIGITS = 5  # significant


# Evidence


def collect_evidence(settings: Reproduce, queue: Queue) -> Evidence:
    """Read the finished runs and the benchmark.

    Finished runs with damaged files count as failed.
    """
    curves: dict[Arm, list[Curve]] = defaultdict(list)
    for entry in queue.entries.values():
        if entry.state in ("running", "locked"):  # the last records may be incomplete
            continue
        try:
            curve = queue.read_curve(entry.job)
        except ValueError as error:
            entry.state = "failed"
            entry.fault = f"damaged: {error}; remove {RUNS}/{entry.job.name} to train it again"
            continue
        if curve is not None:
            curves[entry.job.arm].append(curve)
    return Evidence(curves, bench_rows(settings))


def bench_rows(settings: Reproduce) -> list[Row]:
    """Read --bench, this repository's benchmark results, or those of a packed study."""
    default = BENCH_RESULTS if BENCH_RESULTS.exists() else settings.out / BENCH
    return read_rows(settings.bench or default)


def rows_used(claims: Sequence[Claim], *sources: Sequence[Row]) -> list[Row]:
    """Return the benchmark rows of each claim, from the first source with any."""
    used: list[Row] = []
    for claim in claims:
        for rows in sources:
            found = [
                row for c in claim.checks if isinstance(c, BenchRatio) for row in c.rows_used(rows)
            ]
            if found:
                used += [dict(row) for row in found]
                break
    return [row for i, row in enumerate(used) if row not in used[:i]]


# study.json


def existing_claims(out: Path, preset: Preset) -> set[str]:
    """Return the ids of the claims that a study folder already has.

    Raises:
        ValueError: The folder holds a study with another protocol. Their runs must not mix.
    """
    outline = read_outline(out)
    if outline is None:
        return set()
    before, now = asdict(outline[0]), asdict(preset.protocol)
    changed = [f"{name} {before[name]} -> {now[name]}" for name in now if before[name] != now[name]]
    if changed:
        raise ValueError(f"{out} holds another study: {', '.join(changed)}. Choose another folder.")
    return outline[1]


def judge_and_write(settings: Reproduce, queue: Queue) -> Study:
    """Judge all claims by the finished runs, and write study.json."""
    evidence = collect_evidence(settings, queue)
    preset = settings.effective_preset
    jobs = [entry.job for entry in queue.entries.values()]
    runs: dict[Arm, list[str]] = defaultdict(list)
    for job in jobs:
        runs[job.arm].append(job.name)
    lambda_run, pictured = shown_runs(jobs, preset)
    study = Study(
        protocol=preset.protocol,
        preset_epochs=PRESETS[preset.name].epochs,
        seeds=1 + max((job.seed for job in jobs), default=0),
        note=preset.note,
        command=shlex.join(settings.command),
        claims=tuple(_judged(claim, evidence, jobs) for claim in settings.claims),
        grid=lr_grid(evidence.curves),
        figure1=tuple(spec.panel(runs, preset.lr_scale) for spec in FIGURE_1)
        if preset.is_of_paper
        else (),
        figure2=figure_2(dict(runs), preset.lr_scale, preset.panels),
        sweeps=tuple(spec.sweep(evidence.curves) for spec in preset.sweeps),
        runs=_entries(queue),
        pictured=tuple(pictured),
        lambda_run=lambda_run,
    )
    write_study(settings.out, study)
    return study


def _judged(claim: Claim, evidence: Evidence, jobs: Sequence[Job]) -> ClaimResult:
    names = tuple(job.name for job in jobs if job.arm in claim.arms)
    return replace(judge(claim, evidence), runs=names)


def _entries(queue: Queue) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            name=entry.job.name,
            label=f"{entry.job.arm}, seed {entry.job.seed}",
            state=entry.state,
            fault=entry.fault,
            diverged=entry.progress.diverged,
            command=shlex.join(train_command(without_local_paths(entry.job.config))),
        )
        for entry in queue.entries.values()
    )


def shown_runs(jobs: Sequence[Job], preset: Preset) -> tuple[str | None, list[str]]:
    """Return the run for the chart of lambda, and the runs for the sample pictures.

    Without the paper's claims, the first arm with AGC is drawn that has several seeds.
    """
    if not preset.is_of_paper:
        chosen = (job.arm for job in jobs if job.seed == 1 and is_agc(job.arm.norm))
        drawn = next(chosen, None)
        return next((j.name for j in jobs if (j.arm, j.seed) == (drawn, 0)), None), []

    def first_seed(arm: Arm) -> list[str]:
        wanted = arm.scale_lr(preset.lr_scale)
        return [job.name for job in jobs if job.seed == 0 and job.arm == wanted]

    pictured = [name for arm in PICTURED for name in first_seed(arm)]
    return next(iter(first_seed(agc(4))), None), pictured


# The packed study


def pack_settings(settings: Reproduce, folder: Path) -> Reproduce:
    """Return the settings of the packed study, with its own claims added.

    Raises:
        ValueError: The folder holds another study.
    """
    existing = existing_claims(folder, settings.effective_preset)
    return replace(settings, out=folder).with_claims(existing)


def pack(settings: Reproduce, queue: Queue, packed: Reproduce) -> None:
    """Copy the finished runs and the benchmark rows into the packed study."""
    lambda_run, pictured = shown_runs(
        [entry.job for entry in queue.entries.values()], settings.effective_preset
    )
    folder = packed.out
    rows = rows_used(packed.claims, bench_rows(settings), read_rows(folder / BENCH))
    if rows:
        write_rows(folder / BENCH, rows)
    for entry in queue.in_state(*FINISHED):
        name = entry.job.name
        pack_run(entry.job, folder, name == lambda_run, name in pictured)


def pack_run(job: Job, study: Path, all_lambdas: bool, picture: bool) -> None:
    """Copy a run's configuration, metrics and lambda, without paths of this machine."""
    into = study / RUNS / job.name
    if job.folder.resolve() == into.resolve():
        return
    make_folder(into, inside=study)
    write_json(into / CONFIG, _config_without_paths(job.folder / CONFIG), 1, inside=study)
    write_atomic(into / METRICS, read_bytes(job.folder / METRICS, MAX_FILE_BYTES), inside=study)
    for name in (DIVERGED, LAYERS):  # remove files of an earlier pack
        (into / name).unlink(missing_ok=True)
    if (job.folder / DIVERGED).exists():
        write_atomic(into / DIVERGED, read_bytes(job.folder / DIVERGED), inside=study)
    run = read_run(job.folder)
    if is_agc(job.arm.norm) and run.layers:
        *before, last = run.layers
        kept = [row for row in before if all_lambdas and row["epoch"] % LAMBDA_INTERVAL == 0]
        text = "".join(format_record(_lambda_record(row)) for row in [*kept, last])
        write_atomic(into / LAYERS, text, inside=study)
    if picture:
        _pack_picture(run, into / SAMPLES, study)


def _pack_picture(run: Run, into: Path, study: Path) -> None:
    """Copy the last sample picture as JPEG, if it can be read."""
    for _, picture in run.samples[-1:]:
        packed = picture.suffix == ".jpg"  # encoding it again would lose quality
        try:
            content = picture.read_bytes() if packed else as_jpeg(picture)
        except ValueError:
            continue
        write_atomic(into / f"{picture.stem}.jpg", content, inside=study)


def _config_without_paths(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path)
    for name in ("out", "data_root"):
        if content["config"].get(name) is not None:
            content["config"][name] = Path(content["config"][name]).name
    return content


def _lambda_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of layers.jsonl with rounded lambda only."""
    layers = {
        name: {"mean_scale": {k: float(f"{v:.{LAMBDA_DIGITS}g}") for k, v in values.items()}}
        for name, layer in row["layers"].items()
        if (values := _lambda_values(layer))
    }
    return {"epoch": row["epoch"], "layers": layers}


def _lambda_values(layer: object) -> dict[str, float]:
    values = layer.get("mean_scale") if isinstance(layer, dict) else None
    if not isinstance(values, dict):
        return {}
    numbers = {name: finite_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}
