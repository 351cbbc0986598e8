"""Volumes in nnU-Net's raw layout: reading, and training unet3d on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import VOID, DataError
from deepcontrol.workbench.data.nifti import read_nifti, resampled_shape, voxel_size
from deepcontrol.workbench.data.nnunet import read_layout
from deepcontrol.workbench.data.volumes import (
    CT_PERCENTILES,
    _load_case,
    load_case,
    open_nnunet,
    to_classes,
)
from deepcontrol.workbench.folders import storage
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import load_config

nibabel = pytest.importorskip("nibabel")

CROP = (32, 32, 32)
SHAPE = (48, 40, 32)  # depth, height, width; one volume is smaller than a crop
AFFINE = np.diag([2.0, 1.5, 3.0, 1.0])


def write(path: Path, volume: np.ndarray, affine: np.ndarray = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), affine), path)


def make(root: Path, cases: int = 4, channel: str = "CT", **changes: Any) -> Path:
    """Write volumes of noise with a bright ball, the second channel a copy with another scale."""
    content = {
        "channel_names": {"0": channel, "1": "MRI"},
        "labels": {"background": 0, "ball": 1, "ignore": 2},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(json.dumps(content | changes))
    random = np.random.default_rng(0)
    for i in range(cases):
        shape = SHAPE if i else (24, 40, 32)
        grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
        center = random.uniform(10, 20, 3)
        ball = ((grid - center) ** 2).sum(-1) < 8**2
        image = (100 * ball + random.normal(0, 20, shape)).astype(np.int16)
        labels = ball.astype(np.uint8)
        labels[-1] = 2
        write(root / "imagesTr" / f"case{i}_0000.nii.gz", image)
        write(root / "imagesTr" / f"case{i}_0001.nii.gz", (5 * image).astype(np.float32))
        write(root / "labelsTr" / f"case{i}.nii.gz", labels)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("volumes"))


def test_tiles_cover_each_voxel_once(root: Path) -> None:
    split = open_nnunet(root, "val", CROP)
    layout = read_layout(root)
    truth = sum(np.bincount(load_case(c, layout).labels.ravel(), minlength=256)
                for c in split.dataset.cases)  # fmt: skip
    split.scan()
    assert split.histogram.tolist() == truth[:2].tolist()
    assert truth[VOID] > 0  # the ignored label
    assert split.size == CROP
    assert split.channels == 2
    assert split.classes == ("background", "ball")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04"])
def test_a_damaged_cache_is_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = make(tmp_path / "data", cases=2)
    dataset = open_nnunet(root, "train", CROP).dataset
    expected = load_case(dataset.cases[0], dataset.layout).labels
    _load_case.cache_clear()
    next((tmp_path / "cache").rglob("*.image.npy")).write_bytes(content)
    found = load_case(dataset.cases[0], dataset.layout)
    assert found.image.shape == (2, *expected.shape)


def test_small_volumes_are_padded_without_labels(root: Path) -> None:
    both = [open_nnunet(root, s, CROP).dataset for s in ("train", "val")]
    dataset = next(d for d in both if any(c.name == "case0" for c in d.cases))
    number = [c.name for c in dataset.cases].index("case0")
    index = next(i for i, place in enumerate(dataset.places) if place.case == number)
    image, labels = dataset[index]
    assert image.shape == (2, *CROP)
    assert labels.shape == CROP
    padded = labels == VOID
    assert padded.flatten(1).all(1).sum() >= 8  # 24 slices of 32, in any direction after flips


def test_crops_are_random_and_mirrored_with_their_labels(root: Path) -> None:
    dataset = open_nnunet(root, "train", CROP).dataset
    torch.manual_seed(0)
    crops = [dataset[len(dataset) - 1] for _ in range(12)]
    assert len({labels.numpy().tobytes() for _, labels in crops}) > 6
    for image, labels in crops:
        ball = labels == 1
        if ball.any() and (labels == 0).any():
            assert image[0][ball].mean() > image[0][labels == 0].mean() + 1


def test_intensities(root: Path) -> None:
    """CT: clipped and scaled by the structures of all training cases; others: each volume."""
    dataset = open_nnunet(root, "train", CROP).dataset
    layout = read_layout(root)
    volumes = [load_case(case, layout) for case in dataset.training]
    values = np.concatenate([v.image[0][tuple(v.statistics.points.T)] for v in volumes])
    low, high = np.percentile(values, CT_PERCENTILES)
    found = dataset.intensities[0]
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.mean == pytest.approx(values.clip(low, high).mean(), rel=1e-5)
    assert set(dataset.intensities) == {0}
    whole = open_nnunet(root, "val", (64, 64, 64)).dataset
    image, labels = whole[0]
    inside = labels != VOID
    assert image[0].max() <= (found.high - found.mean) / found.std + 1e-5
    # The ignored slice is a part of the volume, but not of `inside`.
    assert float(image[1][inside].mean()) == pytest.approx(0, abs=0.1)


def test_axes_are_reversed(tmp_path: Path) -> None:
    volume = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    write(tmp_path / "a.nii", volume)
    assert np.array_equal(read_nifti(tmp_path / "a.nii"), volume)


def flags(root: Path, out: Path) -> list[str]:
    return (
        f"train --model unet3d --data nnunet --data-root {root} --size 32x32x32 --width 0.1 "
        f"--batch-size 1 --epochs 2 --lr 0.02 --val-fraction 0.3 --sample-epochs 2 --device cpu "
        f"--out {out}"
    ).split()


@pytest.mark.slow
def test_train_eval_and_report(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*flags(root, run), "--dry-run"]) == 0
    assert "32x32x32, 2 classes" in capsys.readouterr().out
    assert main(flags(root, run)) == 0, capsys.readouterr().err
    rows = storage.read_records(run / "metrics.jsonl")
    assert rows[-1]["train_loss"] < rows[1]["train_loss"]
    config, derived = load_config(run)
    assert config.channels == 2
    assert config.size == CROP
    assert derived["classes"] == ["background", "ball"]
    layers = storage.read_records(run / "layers.jsonl")
    assert any("mean_scale" in about for about in layers[-1]["layers"].values())
    names = sorted(path.name for path in (run / "samples").iterdir())
    assert names == ["epoch-0002.png", "worst-0002.png"]
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    output = capsys.readouterr().out
    assert "ball" in output
    assert " crops: pixel error" in output
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    page = next((tmp_path / "page").glob("*.html")).read_text()
    assert "wrong voxels, %" in page
    assert f"{open_nnunet(root, 'val', CROP, val_fraction=0.3).dataset.cases[0].name} (" in page
    assert main(["train", "--out", str(run)]) == 0  # finished: nothing is left to train
    # Predictions are in the space of the input, and are those of the evaluation.
    cases = open_nnunet(root, "val", CROP, val_fraction=0.3).dataset.cases
    files = [str(path) for case in cases for path in case.images]
    out, wrong = tmp_path / "labels", np.zeros(0, bool)
    assert main(["predict", str(run), *files, "--out", str(out)]) == 0
    for case in cases:
        written = out / f"{case.name}.nii.gz"
        assert np.array_equal(nibabel.load(written).affine, AFFINE)
        truth = to_classes(case.labels, read_nifti(case.labels), read_layout(root))
        wrong = np.append(wrong, (read_nifti(written) != truth)[truth != VOID])
    best = min(row["val_error"] for row in rows[1:])
    assert wrong.mean() <= best + 0.01  # overlapping windows; the evaluation has none
    assert main(["predict", str(run), files[0], "--out", str(out)]) == 1
    assert "case" in (error := capsys.readouterr().err)
    assert "_0001.nii.gz" in error
    check_export(run, capsys)


def check_export(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export a run on volumes: the file takes crops, in batches of any size."""
    assert main(["export", str(run), "--to", "exported"]) == 0, capsys.readouterr().err
    description = json.loads((run / "export" / "unet3d.pt2.json").read_text())
    assert description["input"]["shape"] == ["batch", 2, *CROP]
    assert description["outputs"][0]["shape"] == ["batch", 2, *CROP]
    assert list(description["input"]["intensities"]) == ["0"]
    assert description["folded"]
    assert description["check"]["largest_difference_to_torch"] < 1e-4
    card = (run / "export" / "model-card.md").read_text()
    assert "labels every voxel of a volume" in card
    assert "intensities of channel 0: low" in card
    assert "wrong voxels" in card
    capsys.readouterr()
    assert main(["export", str(run), "--int8"]) == 1
    assert "this run labels volumes" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with one case whose slices are half as thick and twice as many."""
    root = make(tmp_path_factory.mktemp("mixed"))
    for path in (root / "imagesTr").glob("case1_*"):
        write(path, read_nifti(path).repeat(2, 0), np.diag([2.0, 1.5, 1.5, 1.0]))
    labels = root / "labelsTr" / "case1.nii.gz"
    write(labels, read_nifti(labels).repeat(2, 0), np.diag([2.0, 1.5, 1.5, 1.0]))
    return root


def test_volumes_are_resampled_to_the_median_voxel_size(mixed: Path, root: Path) -> None:
    both = [open_nnunet(mixed, s, CROP, resample=True).dataset for s in ("train", "val")]
    assert both[0].spacing == both[1].spacing == (3.0, 1.5, 2.0)
    layout = read_layout(mixed)
    (case,) = (c for d in both for c in d.cases if c.name == "case1")
    assert voxel_size(case.labels) == (1.5, 1.5, 2.0)
    assert load_case(case, layout).labels.shape == (96, 40, 32)
    found = load_case(case, layout, both[0].spacing)
    assert resampled_shape((96, 40, 32), (1.5, 1.5, 2.0), both[0].spacing) == SHAPE
    (same,) = (
        c
        for s in ("train", "val")
        for c in open_nnunet(root, s, CROP).dataset.cases
        if c.name == "case1"
    )
    original = load_case(same, layout)
    assert np.array_equal(found.labels, original.labels)  # every slice is there twice
    assert found.image == pytest.approx(original.image, abs=1e-3)
    # Tiles cover the resampled volume.
    split = open_nnunet(mixed, "train", CROP, resample=True)
    unsampled = open_nnunet(mixed, "train", CROP)
    assert any(c.name == "case1" for c in split.dataset.cases)
    assert len(split) < len(unsampled)


def test_impossible_voxel_sizes(tmp_path: Path) -> None:
    make(tmp_path, cases=5)
    labels = tmp_path / "labelsTr" / "case1.nii.gz"
    write(labels, read_nifti(labels), np.diag([2e5, 1.5e5, 9.0, 1.0]))
    with pytest.raises(DataError, match="is the voxel size in its header wrong"):
        [open_nnunet(tmp_path, split, CROP, resample=True) for split in ("train", "val")]


@pytest.mark.slow
def test_predictions_of_a_resampled_run_have_the_voxels_of_their_input(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "labels"
    assert main([*flags(mixed, run), "--resample"]) == 0, capsys.readouterr().err
    assert load_config(run)[1]["voxel_size"] == [3.0, 1.5, 2.0]
    files = sorted(map(str, (mixed / "imagesTr").glob("case1_*")))
    assert main(["predict", str(run), *files, "--out", str(out), "--probabilities"]) == 0
    written = nibabel.load(out / "case1.nii.gz")
    assert written.shape == (32, 40, 96)
    assert written.header.get_zooms() == (2.0, 1.5, 1.5)
    probabilities = nibabel.load(out / "case1-probabilities.nii.gz").get_fdata()
    assert probabilities.shape == (32, 40, 96, 2)
    assert probabilities.sum(-1) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(probabilities.argmax(-1), written.get_fdata())
    truth = read_nifti(mixed / "labelsTr" / "case1.nii.gz")
    wrong = (read_nifti(out / "case1.nii.gz") != truth)[truth != 2].mean()
    rows = storage.read_records(run / "metrics.jsonl")
    assert wrong <= min(row["val_error"] for row in rows[1:]) + 0.1


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, cases=3)
    assert main(["data", "check", str(tmp_path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "nnunet; valid samples: train 2, val 1" in output
    assert "resample" not in output
    labels = tmp_path / "labelsTr" / "case1.nii.gz"
    write(labels, read_nifti(labels), np.diag([2.0, 1.5, 9.0, 1.0]))
    assert main(["data", "check", str(tmp_path)]) == 0
    assert "train with --resample" in " ".join(capsys.readouterr().out.split())
    write(labels, np.full(SHAPE, 7, np.uint8))
    assert main(["data", "check", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channel_names": None, "modality": {"0": "CT"}}, "`modality` is of nnU-Net 1"),
        ({"labels": {"background": 0, "whole": [1, 2]}}, "regions of several ids"),
        ({"labels": {"background": 0, "ball": 2}}, r"label ids \[0, 2\], expected 0, 1"),
        ({"channel_names": {"0": "CT", "1": "MRI", "2": "PET"}}, "case0_0002.nii.gz: no such file"),
        ({"file_ending": ".nrrd"}, r"has no files \*\.nrrd"),
    ],
)
def test_faults_of_the_layout(
    changes: dict[str, Any], message: str, root: Path, tmp_path: Path
) -> None:
    content = json.loads((root / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps(content | changes))
    for name in ("imagesTr", "labelsTr"):
        (tmp_path / name).symlink_to(root / name)
    with pytest.raises(DataError, match=message):
        open_nnunet(tmp_path, "train", CROP)


def test_faults_of_files(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no dataset\.json"):
        open_nnunet(tmp_path, "train", CROP)
    make(tmp_path, cases=2)
    write(tmp_path / "labelsTr" / "case1.nii.gz", np.full(SHAPE, 7, np.uint8))
    write(tmp_path / "labelsTr" / "case0.nii.gz", np.zeros((24, 40, 31), np.uint8))
    layout = read_layout(tmp_path)
    cases = {
        c.name: c for s in ("train", "val") for c in open_nnunet(tmp_path, s, CROP).dataset.cases
    }
    with pytest.raises(DataError, match="label 7 in 61440 voxels, expected 0 to 1"):
        load_case(cases["case1"], layout)
    with pytest.raises(DataError, match=r"size \(24, 40, 32\), but .* has \(24, 40, 31\)"):
        load_case(cases["case0"], layout)
    (tmp_path / "imagesTr" / "case1_0000.nii.gz").write_bytes(b"no volume")
    with pytest.raises(DataError, match="cannot be read as NIfTI"):
        load_case(cases["case1"], layout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "unet3d"}, "--model unet3d is not for images, which --data streets has"),
        ({"model": "unet", "data": "nnunet"}, "--model unet is not for volumes"),
        (
            {"model": "unet3d", "data": "nnunet", "size": (64, 64)},
            "a --size of 3 numbers, got 64x64",
        ),
        ({"size": (64, 64, 64)}, "--data streets needs a --size of 2 numbers"),
        ({"model": "unet3d", "data": "nnunet", "size": (40, 64, 64)}, "try 32x64x64"),
        ({"model": "unet3d", "data": "nnunet", "augment": "strong"}, "not for volumes: use flip"),
    ],
)
def test_settings_of_volumes(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Train(out=tmp_path, **settings)


def test_init(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without dataset.json, propose one; then check, draw, and say how to train."""
    own = make(tmp_path / "own volumes", cases=3)
    before = json.loads((own / "dataset.json").read_text())
    (own / "dataset.json").unlink()
    assert main(["data", "init", str(own)]) == 0
    printed = capsys.readouterr().out
    layout = read_layout(own)
    assert layout.classes == ("background", "class 1", "class 2")
    assert layout.channels == ("channel 0", "channel 1")
    assert (own / "contact-sheet.png").is_file()
    assert f"--data nnunet --data-root '{own}' --model unet3d --size 48x32x32" in printed
    assert "--resample" not in printed
    (own / "dataset.json").write_text(json.dumps(before))
    for path in [*(own / "imagesTr").glob("case1*"), own / "labelsTr" / "case1.nii.gz"]:
        write(path, read_nifti(path), np.diag([2.0, 1.5, 9.0, 1.0]))
    assert main(["data", "init", str(own)]) == 0
    assert json.loads((own / "dataset.json").read_text()) == before
    assert " --resample --out runs/mine" in capsys.readouterr().out
    write(own / "labelsTr" / "case2.nii.gz", np.full(SHAPE, 7, np.uint8))
    assert main(["data", "init", str(own)]) == 1
    assert "label 7 in" in capsys.readouterr().out
    (own / "dataset.json").unlink()
    assert main(["data", "init", str(own)]) == 1
    assert "0, 1, 2, 7, expected 0 (background), 1, 2, ..." in capsys.readouterr().err
    assert not (own / "dataset.json").exists()
