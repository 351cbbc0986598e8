"""`deepcontrol train --dry-run` and `deepcontrol eval`, as they are typed."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from deepcontrol.nn import saved_bytes
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import Batches, open_source, prepare
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.plan import plan
from deepcontrol.workbench.train.samples import sample_sheet
from tests.workbench.train.runs import command, metrics, tiny


def test_a_dry_run_says_what_would_be_and_does_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(run), "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "segnet, norm agc, width 0.02",
        "7 images, 3 for validation",
        "steps 4 an epoch, 12 in 3 epochs",
        "rate 0.04",
        f"output {run} (new)",
    ):
        assert words in said
    assert not run.exists()


def test_the_plans_figures(run: Path) -> None:
    config = tiny(run, width=0.1)
    planned, model = plan(config), build_model(config, 19)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert planned.state_mib == pytest.approx(3 * 4 * planned.parameters / 2**20)
    kept = saved_bytes(model, torch.randn(2, 3, 32, 64)) / 2**20
    assert planned.activations_mib == pytest.approx(kept, rel=0.01)


def test_eval_gives_what_training_gave(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(whole), "--checkpoint", "last"]) == 0
    said = capsys.readouterr().out
    error = metrics(whole)[-1]["val_error"]
    assert f"on 3 images: pixel error {error:.2%}" in said
    assert "vegetation" in said
    assert main(["eval", str(whole)]) == 0
    best = min(line["val_error"] for line in metrics(whole)[1:])
    assert f"pixel error {best:.2%}" in capsys.readouterr().out


def test_eval_of_a_run_without_checkpoints(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert main(["eval", str(tmp_path)]) == 1
    assert "has no checkpoint 'best'" in capsys.readouterr().err


def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["eval", str(run)], "is no run folder"),
        (command(run, fsdp=""), "torchrun"),
    ):
        assert main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_flag_that_cannot_be_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, message in (
        ("--size", "16x64", "at least 32x32"),
        ("--size", "big", "HEIGHTxWIDTH"),
        ("--momentum", "1", "from 0 to 0.999"),
        ("--lr", "-1", "positive"),
        ("--seed", "99999999999999999999", "--seed must be at most 9223372036854775807"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["train", "--out", str(run), flag, value])
        assert message in capsys.readouterr().err
    assert not run.exists()


def test_samples_are_from_all_over_the_split(tmp_path: Path) -> None:
    cache = prepare(open_source("streets", "val", None, 9), (32, 64), tmp_path)
    for batch_size in (1, 2, 16):
        batches = Batches(cache, batch_size)
        sheet = sample_sheet(nn.Conv2d(3, len(cache.classes), 1), batches, None)
        images = [sheet[32 * i : 32 * i + 32, :64] for i in range(4)]
        assert sheet.shape == (4 * 32, 4 * 64, 3)
        for image, index in zip(images, (0, 2, 4, 6), strict=True):
            assert np.array_equal(image, cache.images[index])


def test_samples_show_image_truth_prediction_and_error(whole: Path) -> None:
    picture = np.asarray(Image.open(whole / "samples" / "epoch-0002.png"))
    assert picture.shape == (3 * 32, 4 * 64, 3)
    _, truth, guess, error = np.split(picture, 4, axis=1)
    wrong = (error == (255, 48, 48)).all(2)
    assert math.isclose(wrong.mean(), metrics(whole)[2]["val_error"], abs_tol=0.05)
    different = (truth != guess).any(2)
    assert (different[wrong]).all()
