"""A run folder that came from elsewhere cannot have anything written outside of itself."""

from pathlib import Path

import numpy as np
import pytest

from deepcontrol.workbench import runfolder
from deepcontrol.workbench.runfolder import lock
from deepcontrol.workbench.train.samples import save_png


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("mine\n")
    return path


def test_files_that_are_links(run: Path, precious: Path) -> None:
    run.mkdir()
    for name in ("lock", ".config.json.new", "metrics.jsonl"):
        (run / name).symlink_to(precious)
    with pytest.raises(OSError, match="lock"), lock(run):
        pass
    runfolder.write_atomic(run / "config.json", "{}")
    with pytest.raises(OSError, match="metrics"):
        runfolder.append_record(run / "metrics.jsonl", {"epoch": 1})
    assert precious.read_text() == "mine\n"
    assert (run / "config.json").read_text() == "{}"


def test_pictures_through_links(run: Path, precious: Path) -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    (run / "samples").mkdir(parents=True)
    (run / "samples" / "a.png").symlink_to(precious)
    save_png(pixels, run / "samples" / "a.png")
    assert precious.read_text() == "mine\n"
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    (run / "more").symlink_to(elsewhere)
    with pytest.raises(OSError, match="link"):
        save_png(pixels, run / "more" / "a.png")
    assert not list(elsewhere.iterdir())
