"""Progress in a real terminal, TensorBoard, and sample pictures."""

import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from deepcontrol.workbench.data import Batches, open_source, prepare
from deepcontrol.workbench.data.drawing import draw_captions
from deepcontrol.workbench.folders.runfolder import read_run
from deepcontrol.workbench.metrics import ConfusionMatrix
from deepcontrol.workbench.train import loop
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.progress import sample_sheet, save_png
from tests.processes import DEADLOCK
from tests.workbench.train.runs import command, metrics, train_here

pexpect = pytest.importorskip("pexpect", reason="pexpect drives the terminal")


def terminal(*words: str) -> Any:
    arguments = ["-m", "deepcontrol", *words]
    return pexpect.spawn(
        sys.executable, arguments, encoding="utf-8", timeout=DEADLOCK, dimensions=(30, 150)
    )


@pytest.mark.slow
def test_train_interrupt_and_resume_in_a_terminal(run: Path) -> None:
    child = terminal(*command(run, epochs=400))
    child.expect(r"segnet agc on 7 images of streets, 4 steps per epoch, lr 0\.04")
    child.expect(r"epoch \d+/400.* \d/4 .*loss \d\.\d+ .*images/s .*MiB .*\d:\d\d left")
    # The permanent line of any later epoch: the bar may have been matched late.
    child.expect(r"epoch \d+/400  loss \d\.\d+  val error \d+\.\d+%  mean IoU 0\.\d+")
    child.sendintr()  # Ctrl-C
    child.expect(r"SIGINT: saved at step (\d+)\. Run the same command to resume\.")
    step = int(child.match.group(1))
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    position = load(run / "last").state["position"]
    assert 4 * position["epoch"] + position["step"] == step

    epochs = position["epoch"] + 2
    child = terminal("train", "--out", str(run), "--epochs", str(epochs))
    child.expect(rf"resuming after epoch {position['epoch']}, step {position['step']}\r")
    child.expect(rf"finished {epochs} epochs")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert [line["epoch"] for line in metrics(run)] == list(range(epochs + 1))


def test_an_error_is_one_line(run: Path) -> None:
    child = terminal("train", "--out", str(run), "--data", "camvid")
    screen = child.read()
    child.close()
    assert child.exitstatus == 1
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen).strip().splitlines()
    assert lines == ["error: --data camvid needs --data-root, the folder of the dataset"]


def test_time_left_includes_evaluations(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, left = loop.evaluate, []

    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return evaluate(*args)

    def record(loss: float, images_per_s: float, mib: float, images_left: int) -> str:
        left.append(images_left / images_per_s)
        return ""

    monkeypatch.setattr(loop, "evaluate", slow)
    monkeypatch.setattr(loop, "step_status", record)
    train_here(run, epochs=1)
    assert 0.4 < left[-1] < 2  # after the last step only its evaluation is left


def test_training_works_without_tensorboard(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train_here(run, epochs=1)
    assert capsys.readouterr().out.count("no TensorBoard events are written: ") == 1


def test_samples_are_spread_over_the_split(tmp_path: Path) -> None:
    cache = prepare(open_source("streets", "val", None, 9), (32, 64), tmp_path)
    for batch_size in (1, 2, 16):
        batches = Batches(cache, batch_size)
        sheet = sample_sheet(nn.Conv2d(3, len(cache.classes), 1), batches, None)
        # Below a line of captions, and enlarged by 3.
        top = len(draw_captions(["image"], sheet.shape[1]))
        images = [sheet[top + 96 * i : top + 96 * i + 96 : 3, :192:3] for i in range(4)]
        assert sheet.shape[0] > top + 4 * 96  # and the legend
        assert sheet.shape[1] == 3 * 4 * 64
        for image, index in zip(images, (0, 2, 4, 6), strict=True):
            assert np.array_equal(image, cache.images[index])


def test_samples_show_image_truth_prediction_and_error(whole: Path) -> None:
    picture = np.asarray(Image.open(whole / "samples" / "epoch-0002.png"))
    top = len(draw_captions(["image"], picture.shape[1]))
    picture = picture[top : top + 3 * 96]  # between captions and legend
    _, truth, guess, error = np.split(picture, 4, axis=1)
    wrong = (error == (255, 48, 48)).all(2)
    assert math.isclose(wrong.mean(), metrics(whole)[2]["val_error"], abs_tol=0.05)
    different = (truth != guess).any(2)
    assert (different[wrong]).all()


def test_the_worst_images_come_first(whole: Path) -> None:
    last = metrics(whole)[-1]
    run = read_run(whole)
    errors = [error for _, error in run.worst_images]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 3  # all validation images
    assert {name for name, _ in run.worst_images} == {"image 0", "image 1", "image 2"}
    wrong = sum(map(sum, run.confusion)) - sum(run.confusion[i][i] for i in range(19))
    assert math.isclose(wrong / sum(map(sum, run.confusion)), last["val_error"])
    assert math.isclose(sum(errors) / 3, last["val_error"], abs_tol=0.05)
    assert [epoch for epoch, _ in run.worst_samples] == [epoch for epoch, _ in run.samples]
    assert run.worst_samples[-1][0] == last["epoch"]


def test_iou_of_each_class_is_recorded(whole: Path) -> None:
    for row in metrics(whole):
        known = [iou for iou in row["val_class_iou"] if iou is not None]
        assert math.isclose(sum(known) / len(known), row["val_mean_iou"])


def test_pictures_are_not_written_through_links(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    pixels = np.zeros((2, 2, 3), np.uint8)
    (run / "samples").mkdir(parents=True)
    (run / "samples" / "a.png").symlink_to(precious)
    with pytest.raises(OSError, match="is a symbolic link"):
        save_png(pixels, run / "samples" / "a.png")
    assert precious.read_text() == "mine\n"
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    (run / "more").symlink_to(elsewhere)
    with pytest.raises(OSError, match="link"):
        save_png(pixels, run / "more" / "a.png")
    assert not list(elsewhere.iterdir())


def test_one_class_everywhere_is_said_at_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ConfusionMatrix, "only_class", property(lambda self: 2))
    train_here(run, epochs=2)
    printed = capsys.readouterr().out
    assert printed.count("predicts 'building' for every validation pixel") == 1


def test_run_folder_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / os.fsdecode(b"caf\xe9\x1b[2J")
    train_here(run, epochs=1)
    printed = capsys.readouterr().out
    assert "caf\\xe9\\x1b[2J: segnet agc" in printed
    assert "no TensorBoard events are written" in printed
    assert "\x1b[2J" not in printed
