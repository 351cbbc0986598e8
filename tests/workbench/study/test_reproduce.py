"""`deepcontrol reproduce` end to end: killed, interrupted, with a run that fails."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench import cli
from deepcontrol.workbench.cli import main, parse
from deepcontrol.workbench.study import command as study_command
from deepcontrol.workbench.study.claims import CLAIMS
from deepcontrol.workbench.study.executors import find_slots
from deepcontrol.workbench.study.figure import FIGURE_1
from deepcontrol.workbench.study.jobs import plan, refuse_changed, train_command
from deepcontrol.workbench.study.settings import PRESETS, Reproduce
from deepcontrol.workbench.train import TrainCommand
from deepcontrol.workbench.train.config_file import ConfigChangedError, save_config
from tests.processes import DEADLOCK
from tests.workbench.study.tiny import reproduce

ROOT = Path(__file__).parents[3]
NAMES = [f"segnet-{norm}-b4-lr0.32-s0" for norm in ("agc", "bn")]  # of the runs, in training order


def started(out: Path, *words: str) -> "subprocess.Popen[str]":
    """Start the tiny study in a process of its own."""
    line = [sys.executable, "-m", "tests.workbench.study.tiny", str(out), *words]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLOCK
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)


def study(out: Path) -> Any:
    return json.loads((out / "study.json").read_text())


def states(out: Path) -> dict[str, str]:
    return {run["name"]: run["state"] for run in study(out)["runs"]}


@pytest.mark.slow
@pytest.mark.usefixtures("_unrendered")
def test_killed_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    with started(out, "--slots", "1") as process:
        wait_for(out / "runs" / NAMES[1] / "config.json")  # so the first is finished
        process.kill()
    assert states(out) == {NAMES[0]: "done", NAMES[1]: "waiting"}  # the state when the first ended
    assert main(["report", str(out)]) == 0
    assert "1 of 2 runs finished" in (out / "verdicts.md").read_text()
    first = (out / "runs" / NAMES[0] / "metrics.jsonl").stat()

    assert reproduce(out) == 0
    assert states(out) == dict.fromkeys(NAMES, "done")
    again = (out / "runs" / NAMES[0] / "metrics.jsonl").stat()
    assert again.st_mtime_ns == first.st_mtime_ns  # it was trained once
    for name in NAMES:
        lines = (out / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
    said = capsys.readouterr().out
    assert "2 of 2 runs finished." in said
    assert f"Page: {out / 'index.html'}" in said

    html = (out / "index.html").read_text()
    assert html.count("<img") == 8 + 2 + 2  # panels, lambda, pictures
    before, packed = study(out), tmp_path / "packed"
    # Judged again, and from the packed files, the claims are the same.
    assert reproduce(out, "--minutes", "0", "--pack", str(packed)) == 0
    for again_ in (study(out), study(packed)):
        assert again_["claims"] == before["claims"]
    assert (packed / "index.html").read_text().count("<img") == html.count("<img")
    for path in packed.rglob("*.json"):
        assert str(tmp_path) not in path.read_text(), path
    assert all(
        not (out / "runs" / name / "last").exists() for name in NAMES
    )  # checkpoints are deleted
    epochs = [
        json.loads(line)["epoch"]
        for line in (packed / "runs" / NAMES[0] / "layers.jsonl").read_text().splitlines()
    ]
    assert epochs == [0, 2]
    # A packed study can be continued, and repeats nothing.
    assert reproduce(packed) == 0
    assert states(packed) == dict.fromkeys(NAMES, "done")
    assert study(packed)["command"] == "deepcontrol reproduce --preset quick --out packed"
    # --only keeps the other claims, and packing a folder into itself changes nothing.
    assert reproduce(packed, "--only", "fig1e", "--pack", str(packed / ".." / "packed")) == 0
    assert study(packed)["claims"] == before["claims"]
    assert study(packed)["command"] == "deepcontrol reproduce --preset quick --out packed"
    twice = tmp_path / "twice"
    assert reproduce(packed, "--pack", str(twice)) == 0
    for path in filter(Path.is_file, (packed / "runs").rglob("*")):
        assert (twice / path.relative_to(packed)).read_bytes() == path.read_bytes(), path


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    out = tmp_path / "study"
    with started(out, "--epochs", "1000", "--slots", "2") as process:
        for name in NAMES:
            wait_for(out / "runs" / name / "last")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=DEADLOCK)[0]
    assert process.returncode == 130
    assert "0 of 2 runs finished. 2 left; run the same command to continue." in said
    assert states(out) == dict.fromkeys(NAMES, "stopped")
    for name in NAMES:
        log = (out / "logs" / f"{name}.txt").read_text()
        assert "SIGTERM: saved at step" in log


def test_interrupted_while_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_page(study: Path) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return f"Page: {study}"

    monkeypatch.setattr(study_command, "write_page", write_page)
    assert reproduce(tmp_path / "study", "--minutes", "0") == 130
    assert "Page: " in capsys.readouterr().out  # the first signal waits for the page


def test_interrupted_without_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def doctor(console: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_doctor", doctor)
    assert main(["doctor"]) == 130


@pytest.mark.slow
def test_a_failing_run_does_not_affect_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    broken = out / "runs" / NAMES[1]
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    assert reproduce(out) == 1
    assert states(out) == {name: "failed" if name == NAMES[1] else "done" for name in NAMES}
    said = capsys.readouterr().out
    assert f"{NAMES[1]}: failed, exit code 1: error: " in said
    assert said.count("retrying once") == 1
    assert "1 of 2 runs finished." in said
    claims = {claim["id"]: claim for claim in study(out)["claims"]}
    assert set(claims) == {"fig1c", "fig1e"}
    assert claims["fig1c"]["checks"][0]["operands"][0]["settings"]["lr"] == "lr 0.32"
    html = (out / "index.html").read_text()
    assert f"{NAMES[1]} failed" in html
    assert (out / "figures" / "figure1.png").stat().st_size > 10_000


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [
        name for name in sys.modules if name.startswith("deepcontrol.workbench.report.")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "study"
    assert reproduce(out, "--minutes", "0") == 0
    assert f"`deepcontrol report {out}` on another machine" in capsys.readouterr().out
    assert states(out) == dict.fromkeys(NAMES, "waiting")


@pytest.mark.usefixtures("_unrendered")
def test_checkpoints_can_be_kept(tmp_path: Path) -> None:
    out = tmp_path / "study"
    assert reproduce(out, "--keep-checkpoints") == 0
    assert all((out / "runs" / name / "best" / "model.safetensors").exists() for name in NAMES)


@pytest.mark.slow
def test_minutes_stop_running_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert reproduce(out, "--minutes", "0.03") == 0
    assert "stopped" in states(out).values()
    capsys.readouterr()
    assert reproduce(out, "--epochs", "3") == 1
    assert "another study: epochs 2 -> 3" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_of_a_run_repeats_it(tmp_path: Path) -> None:
    presets = [PRESETS[name] for name in ("camvid", "cifar-batch", "fashion-mlp")]
    for preset in presets:
        jobs = plan(preset.catalog, preset, tmp_path, Path("some where"))
        of_arms = {job.arm: job for job in jobs}  # with the highest seed
        for job in (jobs[0], *of_arms.values()):
            typed = parse(train_command(job.config)[1:])
            assert isinstance(typed, TrainCommand)
            assert replace(typed, size=typed.image_size) == TrainCommand(**vars(job.config))


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_missing_data_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """Not one per run."""
    words = ["reproduce", "--preset", "camvid", "--out", str(tmp_path / "study"), *more]
    for root in ([], ["--data-root", str(tmp_path / "gone")]):
        assert main([*words, *root]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_every_preset_has_a_plan(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        claims = tuple(claim for claim in preset.catalog if claim.id in preset.claims)
        assert len(claims) == len(preset.claims)
        jobs = plan(claims, preset, tmp_path, None)
        assert len({job.name for job in jobs}) == len(jobs)


def test_figure_1_comes_first_and_one_seed_before_the_next(tmp_path: Path) -> None:
    jobs = plan(CLAIMS, PRESETS["camvid"], tmp_path, None)
    drawn = {arm for panel in FIGURE_1 for arm in panel.arms}
    order = [(job.seed >= 3, job.arm not in drawn, job.seed) for job in jobs]
    assert order == sorted(order)
    further = [job for job in jobs if job.seed >= 3]
    assert {job.arm for job in further} == {*FIGURE_1[0].arms, *FIGURE_1[1].arms}
    assert {job.seed for job in further} == {3, 4}
    assert {job.arm for job in jobs[:6]} == {*FIGURE_1[0].arms, *FIGURE_1[1].arms}
    assert (len(drawn), len({job.arm for job in jobs})) == (12, 34)


def test_runs_with_other_settings_are_refused(tmp_path: Path) -> None:
    jobs = plan(CLAIMS, PRESETS["camvid"], tmp_path, None)
    for job in jobs[:2]:
        job.folder.mkdir(parents=True)
        save_config(job.config, {}, {})
    (jobs[2].folder).mkdir()
    (jobs[2].folder / "config.json").write_text("{")  # its own process reports this
    save_config(replace(jobs[0].config, engine="compile+graph"), {}, {})  # the same function
    refuse_changed(jobs)
    save_config(replace(jobs[1].config, eval_whole=True), {}, {})
    with pytest.raises(ConfigChangedError, match="--eval-whole was on, now off"):
        refuse_changed(jobs)


def test_only_and_invalid_options(tmp_path: Path) -> None:
    asked = Reproduce(out=tmp_path, only=("fig1b,fig1a", "speed"))
    assert [claim.id for claim in asked.claims] == ["fig1b", "fig1a", "speed"]
    with pytest.raises(ValueError, match="unknown claim fig9"):
        Reproduce(out=tmp_path, only=("fig9",))
    with pytest.raises(ValueError, match="--last-start must be at least 0, got -1"):
        Reproduce(out=tmp_path, last_start=-1)


def test_the_command_of_a_study_repeats_it(tmp_path: Path) -> None:
    asked = Reproduce(
        out=tmp_path / "x", preset="camvid", only=("fig1a", "fig1b"), seeds=5, epochs=60,
        data_root=tmp_path / "images", minutes=9, slots=3,
    )  # fmt: skip
    typed = parse(asked.command[1:])
    assert typed == Reproduce(
        out=Path("x"), preset="camvid", only=("fig1a,fig1b",), seeds=5, epochs=60,
        data_root=Path("images"),
    )  # fmt: skip
    assert isinstance(typed, Reproduce)
    assert typed.claims == asked.claims


def test_slots_share_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    slots = find_slots(3, ["4", "7"], cores=16)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == list("474747")
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"2"}
    assert [slot.name for slot in find_slots(None, [], cores=2)] == ["cpu", "cpu"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert find_slots(1, [], cores=16)[0].environment == {"OMP_NUM_THREADS": "3"}


def test_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["reproduce", "--out", str(tmp_path), "--executor", "ray"]) == 1
    error = capsys.readouterr().err
    assert "--executor ray needs Ray" in error
    assert 'pip install ".[ray]"' in error
