"""Configurations are validated when read, and a run is never resumed with another one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import (
    ConfigChangedError,
    changed_settings,
    check_unchanged,
    differences,
    from_json,
    load_config,
    save_config,
    to_json,
)

CONFIG = Train(out=Path("x"), data="camvid", data_root=Path("a b/c"), lr=0.5, size=(32, 96))


def saved(run: Path, **changes: Any) -> Path:
    """Write config.json for CONFIG, then change values in it."""
    run.mkdir()
    save_config(replace(CONFIG, out=run), {"lr": 0.5}, {"commit": None})
    content = json.loads((run / "config.json").read_text())
    del content["crc"]
    content["config"] |= changes
    (run / "config.json").write_text(json.dumps(content))
    return run


def test_save_and_load(run: Path) -> None:
    config, derived = load_config(saved(run))
    assert config == replace(CONFIG, out=run)
    assert derived == {"lr": 0.5}


def test_run_older_than_a_flag_keeps_its_behavior(run: Path) -> None:
    path = saved(run) / "config.json"
    content = json.loads(path.read_text())
    del content["config"]["clip_grad_norm"], content["config"]["eval_whole"]
    path.write_text(json.dumps(content))
    assert load_config(run)[0] == replace(CONFIG, out=run, eval_whole=True)
    del content["config"]["seed"]  # a field of the first version
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no seed"):
        load_config(run)


# config.json of version 0.1.0 before classification: all fields of that time.
OLD = {
    "out": "x", "model": "segnet", "norm": "agc", "data": "streets", "data_root": None,
    "size": [256, 512], "width": 1.0, "batch_size": 4, "lr": None, "momentum": 0.9,
    "clip_grad_norm": None, "epochs": 150, "seed": 0, "init": "he", "fixed_lambda": None,
    "fixed_gamma": None, "class_weight_scale": 1.0, "device": "auto", "precision": "auto",
    "engine": "graph", "deterministic": False, "fsdp": False, "train_limit": None,
    "val_limit": None, "workers": 0, "eval_batch_size": None, "eval_whole": False,
    "save_epochs": 1, "save_steps": 0, "sample_epochs": [1, 10, 50, 100, 150],
}  # fmt: skip


def test_run_older_than_classification_can_resume() -> None:
    before, now = from_json(OLD), Train(out=Path("x"))
    check_unchanged(now, before)
    check_unchanged(before, now)
    assert {k: v for k, v in to_json(now).items() if k in OLD} == OLD
    assert from_json(to_json(now)) == replace(now, size=(256, 512))
    assert (before.schedule, before.augmentation, before.weight_decay) == ("constant", "flip", 0)


def test_out_is_always_the_folder_itself(run: Path) -> None:
    config, _ = load_config(saved(run, out="../../elsewhere"))
    assert config.out == run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "4"}, "batch_size cannot be '4'"),
        ({"batch_size": True}, "batch_size cannot be True"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"model": "resnet"}, "unknown network 'resnet': choose one of segnet, .*timm:NAME"),
        ({"model": 4}, "model cannot be 4"),
        ({"model": "timm:"}, "expected a network such as timm:resnet18, .*got 'timm:'"),
        ({"model": "timm:resnet18"}, "is for classification, but --data camvid is for segm"),
        ({"model": "smp:Unet", "norm": "gn"}, "smp:Unet supports --norm agc and bn, not gn"),
        ({"model": "smp:Unet", "width": 0.5}, "--width has no effect on --model smp:Unet"),
        ({"pretrained": True}, "--pretrained is for timm:, smp: and torchvision:, not segnet"),
        ({"channels": 5}, "--channels is for --data folder, coco, nnunet, not camvid"),
        ({"fit": "tile"}, "--fit is for --data folder, coco, not camvid"),
        ({"data": "folder", "val_fraction": 1.0}, "--val-fraction must be between 0 and 1"),
        ({"ema": 1.0}, "--ema must be between 0 and 1, such as 0.999; got 1.0"),
        ({"accumulate": 9}, "--accumulate must be at most --batch-size 4"),
        ({"schedule": "onecycle", "warmup_epochs": 1.0}, "omit --warmup-epochs"),
        ({"fsdp": True, "ema": 0.9}, "--ema does not support --fsdp"),
        ({"model": "classnet", "loss": "dice"}, "classnet has a loss of its own"),
        ({"minutes": 0.0}, "--minutes must be positive, got 0"),
        ({"patience": 0}, "--patience must be at least 1, got 0"),
        ({"size": [32]}, r"size cannot be \[32\]"),
        ({"size": [32, -4]}, r"size cannot be \[32, -4\]"),
        ({"data_root": ["a"]}, r"data_root cannot be \['a'\]"),
        ({"lr": "nan"}, "lr cannot be 'nan'"),
        ({"lr": float("nan")}, "NaN is not a number of JSON"),
        ({"lr": 10**400}, "the number 10+... is out of range"),
        ({"seed": 2**63}, "the number 9223372036854775808 is out of range"),
        ({"momentum": 1.0}, "--momentum must be from 0 to 0.999, got 1.0"),
        ({"color": 1}, "unknown color"),
    ],
)
def test_invalid_value_is_named(run: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(saved(run, **changes))
    assert str(run / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1}', "[" * 100_000])
def test_invalid_file_is_refused(run: Path, text: str) -> None:
    run.mkdir()
    with pytest.raises(ValueError, match="is not a run folder"):
        load_config(run)
    (run / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(run)


def test_only_some_settings_may_change_on_resume() -> None:
    changeable = {
        "epochs": 300,
        "workers": 2,
        "save_steps": 7,
        "out": Path("y"),
        "data_root": Path("z"),
    }
    for name, value in changeable.items():
        check_unchanged(replace(CONFIG, **{name: value}), CONFIG)
    changed = replace(CONFIG, lr=0.25, size=(64, 96), norm="bn")
    with pytest.raises(ConfigChangedError) as caught:
        check_unchanged(changed, CONFIG)
    for difference in (
        "--lr was 0.5, now 0.25",
        "--size was 32x96, now 64x96",
        "--norm was agc, now bn",
    ):
        assert difference in str(caught.value)
    assert "momentum" not in str(caught.value)


def test_differences_are_said_in_words() -> None:
    before = Train(out=Path("x"), size=(32, 96))
    same = replace(before, lr=0.08, eval_batch_size=4, augment="flip")  # the defaults, spelled out
    check_unchanged(same, before)
    assert differences(replace(before, lr=0.1), before) == ["--lr was 0.08, now 0.1"]
    changed = replace(before, train_limit=5, batch_size=8, deterministic=True)
    assert differences(changed, before) == [
        "--batch-size was 4, now 8",
        "--deterministic was off, now on",
        "--train-limit was not set, now 5",
    ]


def test_command_with_another_setting_changes_nothing(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert main(["train", "--out", str(whole), "--momentum", "0.95"]) == 1
    assert "--momentum was 0.9, now 0.95" in capsys.readouterr().err
    for path, content in before.items():
        if path.name != "lock":
            assert path.read_bytes() == content


def test_default_learning_rate_follows_the_batch_size() -> None:
    assert Train(out=Path("x"), batch_size=8).learning_rate == pytest.approx(0.16)
    assert Train(out=Path("x"), batch_size=8, lr=0.5).learning_rate == 0.5


def classifier(**changes: Any) -> Train:
    return Train(**{"out": Path("x"), "model": "resnet20", "data": "cifar10", **changes})


@pytest.mark.parametrize(
    ("data", "size", "channels"),
    [
        ("cifar10", (32, 32), 3),
        ("cifar100", (32, 32), 3),
        ("fashion-mnist", (28, 28), 1),
        ("imagefolder", (224, 224), 3),
    ],
)
def test_defaults_of_classification(data: str, size: tuple[int, int], channels: int) -> None:
    config = classifier(data=data, batch_size=64)
    assert (config.image_size, config.in_channels, config.window) == (size, channels, None)
    assert config.learning_rate == pytest.approx(0.1 / 2**0.75)
    assert config.augmentation == "crop+flip"
    assert config.val_batch_size == max(64, 2**18 // (size[0] * size[1]))
    assert replace(config, eval_batch_size=3).val_batch_size == 3
    assert classifier(data=data, size=(48, 48)).image_size == (48, 48)
    assert set(changed_settings(config)) == {"out", "model", "data", "batch_size"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "camvid"}, "resnet20 is for classification, but --data camvid is for segmentat"),
        ({"model": "segnet"}, "segnet is for segmentation, but --data cifar10 is for classific"),
        ({"init": "unit"}, "--init unit is for segmentation"),
        ({"class_weight_scale": 2.0}, "--class-weight-scale is for segmentation"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs must be at least 0, got -1.0"),
        ({"warmup_epochs": 3.0, "epochs": 2}, "at most --epochs 2, got 3.0"),
        ({"weight_decay": float("nan")}, "--weight-decay must be at least 0, got nan"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(**changes)


def test_padded_crops_are_for_classification() -> None:
    with pytest.raises(ValueError, match=r"--augment crop\+flip is for classification"):
        Train(out=Path("x"), augment="crop+flip")


def test_small_images_are_for_classification() -> None:
    assert classifier(size=(8, 8)).image_size == (8, 8)
    with pytest.raises(ValueError, match="--size must be at least 32x32, got 8x8"):
        Train(out=Path("x"), size=(8, 8))


def test_cosine_schedule_fixes_the_epochs() -> None:
    before = classifier(schedule="cosine", epochs=10)
    with pytest.raises(ConfigChangedError, match="--epochs was 10, now 20"):
        check_unchanged(replace(before, epochs=20), before)
    constant = classifier(epochs=10, warmup_epochs=2)
    check_unchanged(replace(constant, epochs=20), constant)


def test_unet_needs_multiples_of_16() -> None:
    with pytest.raises(ValueError, match="multiples of 16 for unet, got 100x130: try 96x128"):
        Train(out=Path("x"), model="unet", size=(100, 130))
