"""What cannot be exported is said in one line."""

import importlib.util
from pathlib import Path

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.export.images import RunImages
from deepcontrol.workbench.train.config import load_config
from tests.workbench.export.conftest import make_run


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]):
    def of(run: Path, *more: str) -> str:
        assert main(["export", str(run), *more]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return of


def test_runs_that_are_none(run: Path, tmp_path: Path, complaint) -> None:
    assert "is no run folder" in complaint(tmp_path, "--to", "exported")
    said = complaint(run, "--to", "exported", "--checkpoint", "last")
    assert "has no checkpoint 'last'" in said


def test_unknown_target(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(run), "--to", "tflite"])
    assert exit_.value.code == 2
    assert "executorch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "package", "command"),
    [
        ("onnx", "onnxscript", "pip install 'deepcontrol[export]'"),
        ("executorch", "executorch", "pip install 'deepcontrol[executorch]'"),
    ],
)
def test_missing_packages(
    target: str,
    package: str,
    command: str,
    run: Path,
    complaint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else there("json")
    )
    said = complaint(run, "--to", target)
    assert said == f"error: --to {target} needs {package}: {command}"
    assert not (run / "export").exists()


def test_contradictions(run: Path, tmp_path: Path, complaint) -> None:
    exported = ("--to", "exported")
    assert "--int8 is for --to onnx" in complaint(run, *exported, "--int8")
    assert "--size is for --to executorch" in complaint(run, *exported, "--size", "64x64")
    assert "leave --no-fold out" in complaint(run, *exported, "--fixed-means", "--no-fold")
    bn = make_run(tmp_path / "bn", norm="bn")
    assert "this run has norm bn" in complaint(bn, *exported, "--fixed-means")


@pytest.fixture
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepcontrol.workbench.export.command.require", lambda target, extra: None)


@pytest.mark.usefixtures("_packages")
def test_sizes(run: Path, tmp_path: Path, complaint) -> None:
    said = complaint(run, "--to", "executorch", "--size", "63x64")
    assert "--size: expected sides of at least 64 pixels, got 63x64" in said
    classnet = make_run(tmp_path / "classnet", "classnet")
    said = complaint(classnet, "--int8")
    assert "it takes sides of at least 256 pixels in multiples of 128" in said


def test_calibration_does_not_see_validation_images(run: Path) -> None:
    images = RunImages(load_config(run)[0])
    seen = list(images.calibration())
    assert [image.shape for image in seen] == [(1, 3, 64, 96)] * 3
    held_out = [batch.images for batch in images.validation().epoch()]
    assert not any(a.equal(b) for a in seen for b in held_out)
