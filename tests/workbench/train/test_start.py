"""The start of a run: its configuration, its lock, and a folder that changes during the run."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.train import start as start_module
from deepcontrol.workbench.train.config_file import load_config
from tests.workbench.train.runs import command, differences, metrics, train_here


class Killed(BaseException):
    """Stands for kill -9: no handler of the run may catch it."""


def test_configuration_is_written_before_the_data_are_decoded(
    whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(start_module, "build_data", killed)
        with pytest.raises(Killed):
            main(command(run))
    config, derived = load_config(run)
    assert (config.width, config.epochs) == (0.02, 3)
    assert derived == {}
    assert main(["train", "--out", str(run)]) == 0  # without flags
    assert differences(run, whole) == []


def test_interrupted_decoding_keeps_the_configuration(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        build = start_module.build_data

        def interrupted(config: Any, sources: Any, group: Any, progress: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            progress("streets", 1, 2)
            return build(config, sources, group, progress)

        patch.setattr(start_module, "build_data", interrupted)
        assert main(command(run)) == 130
    assert load_config(run)[0].width == 0.02


def test_failed_start_leaves_the_folder_free(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong flag must not become the run's configuration."""
    assert main(command(run, data="camvid", data_root=tmp_path / "missing")) == 1
    assert not run.exists()
    run.mkdir()  # a folder that was there before stays
    assert main(command(run, data="camvid", data_root=tmp_path / "missing")) == 1
    assert list(run.iterdir()) == []
    train_here(run, epochs=1)
    capsys.readouterr()
    assert main(command(run, momentum="0.5")) == 1
    assert "--momentum was 0.9, now 0.5" in capsys.readouterr().err
    assert load_config(run)[0].momentum == 0.9


@pytest.mark.parametrize("name", ["lock", "last"])
def test_folder_without_a_configuration_is_refused(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings are unknown, and a bare `train --out` would start another network."""
    run.mkdir()
    (run / name).mkdir() if name == "last" else (run / name).touch()
    for words in (["train", "--out", str(run)], command(run)):
        assert main(words) == 1
        thing = {"lock": "lock file", "last": "checkpoint"}[name]
        assert f"has a {thing} but no config.json" in capsys.readouterr().err
    assert not (run / "config.json").exists()


def at_step(step: int, do: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    call, steps = TrainingStep.__call__, iter(range(1, 100))

    def counted(self: TrainingStep, *batch: Any) -> Any:
        if next(steps) == step:
            do()
        return call(self, *batch)

    patch.setattr(TrainingStep, "__call__", counted)


def test_deleted_lock_ends_the_run(
    whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        at_step(6, (run / "lock").unlink, patch)
        assert main(command(run)) == 1
    assert "is no longer the file that this process has locked" in capsys.readouterr().err
    assert [line["epoch"] for line in metrics(run)] == [0, 1]
    train_here(run)
    assert differences(run, whole) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_renamed_folder_ends_the_run(
    replaced: bool,
    whole: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written to the old path, not even if another run is there now."""
    moved = run.with_name("moved")

    def move() -> None:
        run.rename(moved)
        if replaced:
            shutil.copytree(whole, run)

    with monkeypatch.context() as patch:
        at_step(6, move, patch)
        assert main(command(run)) == 1
    assert "was deleted, moved or replaced" in capsys.readouterr().err
    if replaced:
        assert differences(run, whole) == []
    else:
        assert not run.exists()
    train_here(moved)
    assert differences(moved, whole) == []


def test_damaged_record_is_named_and_its_file_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(run, epochs=2)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    digit = lines[1].index('"val_error": 0.') + len('"val_error": 0.')
    lines[1] = lines[1][:digit] + "0123456789"[int(lines[1][digit]) - 1] + lines[1][digit + 1 :]
    path.write_text(damaged := "".join(lines))
    capsys.readouterr()
    train_here(run)
    said = capsys.readouterr().out
    assert "line 2 of metrics.jsonl cannot be read (wrong checksum)" in said
    assert "metrics.jsonl has no record of epoch 1" in said
    assert "kept as metrics.jsonl.damaged1" in said
    assert (run / "metrics.jsonl.damaged1").read_text() == damaged
    assert [line["epoch"] for line in metrics(run)] == [0, 2, 3]


# The configuration and the checkpoints


def changed(run: Path, part: str, with_checksum: bool = False, **values: Any) -> None:
    """Change config.json by hand; without a checksum it looks like one of an older version."""
    path = run / "config.json"
    content = json.loads(path.read_text())
    old = content[part]
    old |= {name: v(old[name]) if callable(v) else v for name, v in values.items()}
    if not with_checksum:
        del content["crc"]
    path.write_text(json.dumps(content, indent=2))


@pytest.fixture
def copied(whole: Path, run: Path) -> Path:
    return Path(shutil.copytree(whole, run))


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "seed 0 -> 2": ("config", {"seed": 2}),
    "momentum 0.9 -> 0.8": ("config", {"momentum": 0.8}),
    "val_limit 3 -> 2": ("config", {"val_limit": 2}),
    "image_size [32, 64] -> [64, 64]": ("derived", {"image_size": [64, 64]}),
    "classes ['": ("derived", {"classes": lambda names: ["x", *names[1:]]}),
    "colors [[": ("derived", {"colors": lambda colors: [[1, 2, 3], *colors[1:]]}),
}
COMMANDS = {
    "train": ["train", "--epochs", "4", "--out"],
    "eval": ["eval"],
    "predict": ["predict"],
    "export": ["export", "--to", "exported"],
}


@pytest.mark.parametrize("with_checksum", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", COMMANDS)
def test_changed_configuration_is_named(
    name: str, change: str, with_checksum: bool, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part, values = CHANGES[change]
    changed(copied, part, with_checksum, **values)
    picture = next(copied.glob("samples/*.png"))
    words = [*COMMANDS[name], str(copied), *([str(picture)] if name == "predict" else [])]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert change in said
    assert f"cp {copied}/" in said
    assert "has changed since" in said or "does not match its checksum" in said


def test_configuration_is_restored_from_the_checkpoint(copied: Path, whole: Path) -> None:
    changed(copied, "config", seed=2)
    shutil.copyfile(copied / "last" / "config.json", copied / "config.json")
    train_here(copied)
    assert differences(copied, whole) == []


def test_flipped_epochs_are_noticed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run may have other epochs, so that the checkpoint's copy cannot tell."""
    changed(copied, "config", with_checksum=True, epochs=7)
    assert main(["train", "--out", str(copied)]) == 1
    assert "epochs 3 -> 7" in capsys.readouterr().err


def test_checkpoint_of_another_run_is_refused(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "other", seed=5, epochs=1)
    shutil.rmtree(copied / "best")
    shutil.copytree(tmp_path / "other" / "best", copied / "best")
    capsys.readouterr()
    assert main(["eval", str(copied)]) == 1
    assert "seed 5 -> 0" in capsys.readouterr().err


def test_settings_without_influence_may_change(whole: Path, copied: Path) -> None:
    assert main(["train", "--out", str(copied), "--epochs", "4", "--workers", "1"]) == 0
    shutil.rmtree(copied / "last")
    (copied / "previous").rename(copied / "last")  # saved with 3 epochs and no workers
    assert main(["eval", str(copied), "--checkpoint", "last"]) == 0


def test_commit_is_not_that_of_a_repository_around_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment often lies in the user's own repository."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    installed = tmp_path / ".venv" / "start.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(start_module, "__file__", str(installed))
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    assert start_module.about("")["commit"] is None
    for words in (["add", "-f", ".venv"], ["commit", "-q", "-m", "b"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert start_module.about("")["commit"] == head.stdout.strip()
