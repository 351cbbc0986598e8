"""Tuned arms: the choice of a learning rate, and the plan that grows with the results."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from deepcontrol.workbench.report.text import check_found, edges_text, sweep_table
from deepcontrol.workbench.study import jobs as jobs_
from deepcontrol.workbench.study.arms import Arm, Tuned, tuned
from deepcontrol.workbench.study.classification import BATCH_SWEEP, at
from deepcontrol.workbench.study.figure import SweepSpec
from deepcontrol.workbench.study.jobs import CurveCache, Job, Queue, plan
from deepcontrol.workbench.study.measures import FINAL, Curve
from deepcontrol.workbench.study.rules import Check, Evidence, choose, measure_contender
from deepcontrol.workbench.study.settings import PRESETS, Reproduce
from deepcontrol.workbench.train.config_file import save_config
from deepcontrol.workbench.train.run import Interrupts
from tests.workbench.study.test_jobs import Instant, states

STAGES = tuple(("resnet20", batch) for batch in (128, 8, 32, 4, 2, 1))
PRESET = replace(PRESETS["cifar-batch"], stages=STAGES)
GRID = at("bn", 8)  # learning rates 0.01, 0.03, 0.1
LOW, MIDDLE, HIGH = GRID.arms


def ended(error: float, seed: int = 0) -> Curve:
    """Return a run of three epochs; an infinite error diverges."""
    if math.isinf(error):
        return Curve((90.0,), (2.0,), diverged=2, seed=seed, schedule="cosine")
    return Curve((80.0, 60.0, error), (2.0, 1.5, 1.0), seed=seed, schedule="cosine")


def of_first_seeds(*errors: float) -> dict[Arm, list[Curve]]:
    return {arm: [ended(e)] for arm, e in zip(GRID.arms, errors, strict=False)}


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [
        ((30.0, 20.0, 25.0), MIDDLE),
        ((30.0, 20.0, math.inf), MIDDLE),
        ((20.0, 20.0, 20.0), LOW),  # a tie: the lower learning rate
        ((math.inf, math.inf, 80.0), HIGH),
        ((math.inf, math.inf, math.inf), None),
        ((30.0, 20.0), None),  # the third is not finished
    ],
)
def test_the_lowest_error_of_seed_0_chooses(errors: tuple[float, ...], chosen: Arm | None) -> None:
    assert choose(GRID, of_first_seeds(*errors)) == chosen


def test_other_seeds_do_not_choose() -> None:
    curves = of_first_seeds(30.0, 20.0, 25.0)
    curves[HIGH].append(ended(1.0, seed=1))
    assert choose(GRID, curves) == MIDDLE
    del curves[HIGH][0]  # the run of seed 0 is damaged
    assert choose(GRID, curves) is None


def test_the_mean_is_over_all_seeds_of_the_chosen_one() -> None:
    curves = of_first_seeds(30.0, 20.0, 25.0)
    curves[MIDDLE] += [ended(22.0, 1), ended(24.0, 2)]
    measured, values = measure_contender(FINAL, GRID, curves)
    assert (measured.label, measured.arm) == (str(MIDDLE), MIDDLE.name)
    assert values == [20.0, 22.0, 24.0]


def test_divergence_at_all_learning_rates_decides() -> None:
    curves = of_first_seeds(math.inf, math.inf, math.inf)
    curves |= {arm: [ended(40.0)] for arm in at("agc+wn", 8).arms}
    curves[at("agc+wn", 8).arms[0]] += [ended(41.0, 1), ended(42.0, 2)]
    check = Check(measure=FINAL, arm=GRID, against=at("agc+wn", 8), low=1.0)
    result = check.judge(Evidence(curves))
    assert result.verdict == "reproduced"
    assert check_found(result) == "worse without bound: runs diverged"
    assert result.operands[0].label == "ResNet-20, BN, batch 8, lr 0.01 to 0.1"


def test_arms_of_a_grid_differ_in_the_learning_rate_only() -> None:
    assert tuned(LOW, (0.01, 0.03, 0.1)) == GRID
    for arms in ((), (MIDDLE, LOW), (LOW, LOW), (LOW, replace(MIDDLE, norm="gn"))):
        with pytest.raises(ValueError, match="differ only in the learning rate"):
            Tuned(arms)


# The sweep


def test_a_sweep_has_the_chosen_errors_and_the_grid() -> None:
    spec = SweepSpec("Title", "batch size", (("BN", ((8, GRID), (32, at("bn", 32)))),))
    curves = of_first_seeds(30.0, 25.0, 20.0)
    sweep = spec.sweep(curves)
    (point,) = sweep.series[0].points  # batch 32 has no run yet
    assert (point.x, point.lr, point.error.values, point.at_edge) == (8, 0.1, (20.0,), True)
    assert [(c.lr, c.error.values, c.is_best) for c in point.tried] == [
        (0.01, (30.0,), False),
        (0.03, (25.0,), False),
        (0.1, (20.0,), True),
    ]
    assert edges_text(sweep).endswith("could be better: BN at batch size 8 (lr 0.1).")
    assert sweep_table(sweep).splitlines()[-1] == "| 8 | 20.00 % (n=1), lr 0.1 |"
    inside = spec.sweep(of_first_seeds(30.0, 20.0, 25.0))
    assert not inside.series[0].points[0].at_edge
    assert edges_text(inside) == ""
    waiting = spec.sweep(of_first_seeds(30.0)).series[0].points[0]
    assert (waiting.lr, waiting.error.values, waiting.at_edge) == (None, (), False)
    assert spec.sweep({}).series == ()


# The plan

# Final errors by learning rate, so that each contender's choice is known.
ERRORS = {0.1: 0.30, 0.3: 0.20, 1.0: 0.40, 0.01: 0.25, 0.03: 0.35}
CLAIM = tuple(claim for claim in PRESET.catalog if claim.id == "weight-norm")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_, "POLL", 0)


def train(job: Job) -> int:
    """Write the files of a finished run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    save_config(job.config, {}, {})
    metrics, layers = [], []
    for epoch in range(job.config.epochs + 1):
        error = ERRORS[job.arm.lr] + 0.01 * job.seed
        metrics.append({"epoch": epoch, "val_error": error, "val_loss": 1.0})
        scale = {"mean": 1.0, "min": 0.9, "max": 1.1}
        layers.append({"epoch": epoch, "layers": {"stem": {"mean_scale": scale}}})
    for name, rows in (("metrics.jsonl", metrics), ("layers.jsonl", layers)):
        (job.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


class Trains(Instant):
    """Executor whose runs finish at the first poll."""

    def ended(self) -> list[tuple[str, int]]:
        found = [(name, train(job)) for name, job in self.running.items()]
        self.running.clear()
        return found


def planned(out: Path) -> list[Job]:
    return plan(CLAIM, PRESET, out, None)


def test_further_seeds_join_when_the_learning_rate_is_chosen(tmp_path: Path) -> None:
    jobs = planned(tmp_path)
    assert {job.seed for job in jobs} == {0}
    assert [job.arm.batch for job in jobs] == [128] * 6 + [8] * 6  # stage by stage
    grid_of_128 = [job for job in jobs if job.arm.batch == 128]
    for job in grid_of_128[:5]:
        train(job)
    first = grid_of_128[0].arm.norm
    assert {(j.arm.norm, j.arm.lr, j.seed) for j in planned(tmp_path) if j.seed} == {
        (first, 0.3, 1),
        (first, 0.3, 2),
    }
    train(grid_of_128[5])
    names = [(j.arm.batch, j.seed) for j in planned(tmp_path)]
    assert names == [(128, 0)] * 6 + [(128, 1)] * 2 + [(128, 2)] * 2 + [(8, 0)] * 6


def test_the_queue_trains_further_seeds_in_one_call(tmp_path: Path) -> None:
    read = CurveCache()

    def replan() -> tuple[list[Job], set[str]]:
        jobs = plan(CLAIM, PRESET, tmp_path, None, read)
        return jobs, {job.name for job in jobs if job.arm.batch == 128}

    queue = Queue(*replan_first(replan), replan=replan, read_curve=read)
    executor = Trains({}, room=3)
    queue.run(executor, Interrupts(), math.inf)
    of_128 = [name for name in queue.entries if "-b128-" in name]
    assert sorted(executor.started) == sorted(of_128)  # each once
    assert len(of_128) == 6 + 4
    assert set(states(queue)) == {"done", "not selected"}
    assert list(queue.entries) == [job.name for job in planned(tmp_path)]
    assert executor.started[6:] == [name for name in of_128 if not name.endswith("-s0")]


def test_one_process_trains_runs_that_differ_in_seed_and_learning_rate(tmp_path: Path) -> None:
    jobs = planned(tmp_path)
    (jobs[1].folder / "last").mkdir(parents=True)  # an ensemble cannot resume a checkpoint
    executor = Trains({}, room=20)
    queue = Queue(jobs, Path("logs"), at_once=2)
    queue.run(executor, Interrupts(), math.inf)
    assert set(states(queue)) == {"done"}
    assert sorted(executor.started) == sorted(job.name for job in jobs)
    by_name = {job.name: job for job in jobs}
    sizes = [len(group) for group in executor.groups]
    assert max(sizes) == 2
    assert [jobs[1].name] in executor.groups
    for group in executor.groups:
        assert len({(by_name[n].arm.norm, by_name[n].arm.batch) for n in group}) == 1


def replan_first(replan):  # type: ignore[no-untyped-def]
    jobs, selected = replan()
    return jobs, Path("logs"), *[lambda *_: None] * 4, selected


def test_an_arm_that_a_claim_names_has_all_seeds(tmp_path: Path) -> None:
    """Even if another learning rate is chosen."""
    claims = tuple(c for c in PRESET.catalog if c.id in ("weight-norm", "parts-gamma"))
    seeds = [(j.arm.lr, j.seed) for j in plan(claims, PRESET, tmp_path, None) if j.seed]
    assert seeds == [(0.3, 1), (0.3, 1), (0.3, 2), (0.3, 2)]


def test_a_damaged_run_chooses_nothing(tmp_path: Path) -> None:
    for job in planned(tmp_path):
        train(job)
    damaged = planned(tmp_path)[0].folder
    chosen = {job.arm for job in planned(tmp_path) if job.seed}
    assert len(chosen) == 4
    (damaged / "config.json").write_text("{")
    assert len({job.arm for job in planned(tmp_path) if job.seed}) == 3


def test_each_finished_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = planned(tmp_path)[:2]
    train(job)
    read, names, original = CurveCache(), [], jobs_.finished_curve

    def counted(job: Job) -> Curve | None:
        names.append(job.name)
        return original(job)

    monkeypatch.setattr(jobs_, "finished_curve", counted)
    assert read(job) == read(job)
    assert read(other) is read(other) is None
    assert names == [job.name, other.name, other.name]


# Settings


def test_only_names_claims_of_the_preset(tmp_path: Path) -> None:
    asked = Reproduce(out=tmp_path, preset="cifar-depth", only=("depth-gn",))
    assert [claim.id for claim in asked.claims] == ["depth-gn"]
    with pytest.raises(ValueError, match="unknown claim fig1b for --preset cifar-depth"):
        Reproduce(out=tmp_path, preset="cifar-depth", only=("fig1b",))
    with pytest.raises(ValueError, match="unknown claim depth-gn for --preset quick"):
        Reproduce(out=tmp_path, only=("depth-gn",))


@pytest.mark.parametrize("name", ["cifar-batch", "cifar-depth", "cifar-long", "fashion-mlp"])
def test_runs_follow_the_protocol(tmp_path: Path, name: str) -> None:
    preset = PRESETS[name]  # type: ignore[index]
    jobs = plan(preset.catalog, preset, tmp_path, None)
    stages = [(job.arm.model, job.arm.batch) for job in jobs]
    assert stages == sorted(stages, key=preset.stages.index)
    assert set(stages) == set(preset.stages)
    for job in jobs:
        config = job.config
        assert (config.schedule, config.warmup_epochs, config.weight_decay) == (
            "cosine",
            0.25,
            5e-4,
        )
        assert config.sample_epochs == (config.epochs,)
        assert config.task == "classification"
        assert config.augmentation == ("none" if name == "fashion-mlp" else "crop+flip")


def test_the_sweep_has_all_contenders() -> None:
    assert [label for label, _ in BATCH_SWEEP.series] == [
        "AGC+WS", "AGC+WN", "AGC", "BatchNorm", "WS+BN", "GroupNorm", "FRN", "EvoNorm-S0", "WS+GN",
    ]  # fmt: skip
