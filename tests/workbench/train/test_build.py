"""A run resumes only on the data that it was started on, and needs labels to evaluate."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from tests.workbench.train.runs import command, metrics, train_here


def test_data_may_move_but_not_change(
    camvid: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"data": "camvid", "train_limit": 2, "val_limit": 2}
    train_here(run, **flags, data_root=camvid, epochs=1)
    moved = camvid.with_name("moved")
    shutil.copytree(camvid, moved, copy_function=shutil.copyfile)  # with new timestamps
    shutil.rmtree(camvid)
    train_here(run, **flags, data_root=moved, epochs=2)
    assert [line["epoch"] for line in metrics(run)] == [0, 1, 2]
    before = json.loads((run / "config.json").read_text())
    assert before["config"]["data_root"] == str(moved)
    picture = moved / "trainannot" / "1.png"
    labels = np.asarray(Image.open(picture)).copy()
    labels[3, 5] = (labels[3, 5] + 1) % 11
    Image.fromarray(labels).save(picture)
    capsys.readouterr()
    assert main(command(run, **flags, epochs=3)) == 1
    message = capsys.readouterr().err
    then = before["derived"]["fingerprints"]
    assert f"was started on other data: train {then['train']} -> 2 images " in message
    assert "val 2 images" not in message
    assert json.loads((run / "config.json").read_text()) == before


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_without_labels_are_refused(
    split: str, camvid: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (camvid / f"{split}annot").iterdir():
        with Image.open(path) as label:
            Image.new("L", label.size, 11).save(path)
    flags = {"data": "camvid", "data_root": camvid, "train_limit": 2, "val_limit": 2}
    assert main(command(run, **flags)) == 1
    message = capsys.readouterr().err
    assert f"camvid-{split}: no pixel has a label" in message
    assert f"deepcontrol data check {camvid}" in message
