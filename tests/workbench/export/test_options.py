"""Invalid options are reported in one line."""

import importlib.util
from pathlib import Path

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.export.check import RunImages
from deepcontrol.workbench.train.config_file import load_config
from tests.workbench.export.conftest import make_run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]):
    def of(run: Path, *more: str) -> str:
        assert main(["export", str(run), *more]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return of


def test_invalid_run_folders(run: Path, tmp_path: Path, error_of) -> None:
    assert "is not a run folder" in error_of(tmp_path, "--to", "exported")
    line = error_of(run, "--to", "exported", "--checkpoint", "last")
    assert "has no checkpoint 'last'" in line


@pytest.mark.parametrize("link", ["export", "export/segnet.pt2", "export/segnet.pt2.json"])
def test_links_are_not_followed(link: str, run: Path, tmp_path: Path, error_of) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(elsewhere if link == "export" else elsewhere / "precious")
    assert f"{link} is a symbolic link" in error_of(run, "--to", "exported")
    assert [(p.name, p.read_text()) for p in elsewhere.iterdir()] == [("precious", "mine")]


def test_unknown_target(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(run), "--to", "tflite"])
    assert exit_.value.code == 2
    assert "executorch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "package", "command"),
    [
        ("onnx", "onnxscript", 'pip install ".[export]"'),
        ("executorch", "executorch", 'pip install ".[executorch]"'),
    ],
)
def test_missing_packages(
    target: str,
    package: str,
    command: str,
    run: Path,
    error_of,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec("json")
    )
    line = error_of(run, "--to", target)
    where = "in a clone of the repository, run"
    assert line == f"error: --to {target} needs {package}: {where}: {command}"
    assert not (run / "export").exists()


def test_contradicting_options(run: Path, tmp_path: Path, error_of) -> None:
    exported = ("--to", "exported")
    assert "--int8 needs --to onnx, got --to exported" in error_of(run, *exported, "--int8")
    assert "--size needs --to executorch" in error_of(run, *exported, "--size", "64x64")
    assert "remove --no-fold" in error_of(run, *exported, "--fixed-means", "--no-fold")
    bn = make_run(tmp_path / "bn", norm="bn")
    assert "needs a run with norm agc, got norm bn" in error_of(bn, *exported, "--fixed-means")


@pytest.fixture
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepcontrol.workbench.export.require", lambda target, extra: None)


@pytest.mark.usefixtures("_packages")
def test_sizes(run: Path, tmp_path: Path, error_of) -> None:
    line = error_of(run, "--to", "executorch", "--size", "63x64")
    assert "--size: expected sides of at least 64 pixels, got 63x64" in line
    classnet = make_run(tmp_path / "classnet", "classnet")
    line = error_of(classnet, "--int8")
    assert "accepts only sides of at least 256 pixels in multiples of 128" in line


def test_calibration_does_not_use_validation_images(run: Path) -> None:
    images = RunImages(load_config(run)[0])
    seen = list(images.calibration())
    assert [image.shape for image in seen] == [(1, 3, 64, 96)] * 3
    held_out = [batch.images for batch in images.validation().epoch()]
    assert not any(a.equal(b) for a in seen for b in held_out)
