"""`deepcontrol demo`: its pictures, its trainings and its page."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from deepcontrol.workbench import demo
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.report.comparison import (
    Comparison,
    Side,
    comparison_lines,
    comparison_summary,
    write_comparison_page,
)

COMPARISON = Comparison(
    sides=(Side("AGC", (0.01, 0.03), 12.0, 3.0), Side("BatchNorm", (0.1, 0.2), 10.0, 6.0)),
    seeds=(0, 1),
    images=60,
    epochs=8,
    size=(96, 128),
    machine="<CPU>, 2 threads",
    seconds=75.0,
)


def test_page_shows_the_figures_as_they_are(tmp_path: Path) -> None:
    assert comparison_lines(COMPARISON) == {
        "wrong validation pixels": ["2.0 %", "15.0 %"],
        "of seeds 0 and 1": ["1.0 and 3.0 %", "10.0 and 20.0 %"],
        "time of a training step": ["12.0 ms", "10.0 ms"],
        "activation memory for the backward pass": ["3.00 MiB", "6.00 MiB"],
    }
    assert "takes 1.20 times the time of BatchNorm" in comparison_summary(COMPARISON)
    Image.new("RGB", (40, 20)).save(tmp_path / "x.png")
    page = write_comparison_page(COMPARISON, tmp_path / "x.png", tmp_path).read_text()
    assert "15.0 %" in page
    assert "&lt;CPU&gt;" in page
    assert "<script" not in page


def test_pictures_are_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "IMAGES", 3)
    for folder in (tmp_path / "a", tmp_path / "b"):
        demo.draw_data(folder)
    for path in sorted((tmp_path / "a").glob("*/*.png")):
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert np.array_equal(np.asarray(Image.open(path)), np.asarray(Image.open(other)))
    masks = [np.asarray(Image.open(p)) for p in sorted((tmp_path / "a" / "masks").iterdir())]
    assert set(np.unique(masks[0])) | set(np.unique(masks[1])) == {0, 1, 2}
    (tmp_path / "a" / "images" / "00.png").unlink()
    demo.draw_data(tmp_path / "a")  # a complete folder is left as it is
    assert not (tmp_path / "a" / "images" / "00.png").exists()


def test_a_failed_training_stops_the_others(tmp_path: Path) -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(600)", "--out", str(tmp_path)]
    fails = [sys.executable, "-c", "raise SystemExit('error: no room')", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="a training failed: error: no room"):
        demo.train_all([fails, waits], Console(quiet=True))


@pytest.mark.slow
def test_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in (("IMAGES", 12), ("EPOCHS", 1), ("SIZE", (32, 32)), ("SEEDS", (0,))):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "TIMED_STEPS", 2)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    assert "wrong validation pixels" in said
    page = (tmp_path / "demo" / "index.html").read_text()
    assert "AGC and BatchNorm at batch size 1" in page
    with Image.open(tmp_path / "demo" / "predictions.png") as picture:
        assert picture.width == 4 * 8 * 32  # image, label, two predictions
