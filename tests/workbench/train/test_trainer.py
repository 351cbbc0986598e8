"""Trainer: your own network and torch Datasets, in the run folders of `deepcontrol train`."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from deepcontrol import AGCConv2d
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import VOID, DatasetBatches, DatasetSplit
from deepcontrol.workbench.folders import storage
from deepcontrol.workbench.train import Train, Trainer
from deepcontrol.workbench.train.config_file import ConfigChangedError, load_config
from tests.workbench.train.runs import CLOCK, command, signal_at_step, tiny

NAMES = ("left", "right")


class Halves(Dataset):
    """Images with a bright half, and noise from all three generators: a random augmentation."""

    classes = NAMES

    def __init__(self, count: int, noise: float = 0.1) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(3, 16, 24) + np.random.rand() + random.random()  # noqa: NPY002
        labels = (torch.arange(24) >= 12).long().expand(16, 24)
        return labels[None] + self.noise * noise, labels


def network(seed: int = 0, classes: int = 2, in_channels: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        AGCConv2d(in_channels, 4, kernel_size=3, padding=1), nn.Conv2d(4, classes, kernel_size=1)
    )


def build(classes: int, in_channels: int) -> nn.Module:
    """What `--model` names for `deepcontrol predict`."""
    return network(classes=classes, in_channels=in_channels)


def settings(out: Path, **changes: Any) -> Train:
    values = {"batch_size": 2, "epochs": 2, "sample_epochs": (2,), "device": "cpu", **changes}
    return Train(out=out, **values)


def weights(run: Path, checkpoint: str = "last") -> dict[str, Tensor]:
    return load_file(run / checkpoint / "model.safetensors")


def same_records(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    strip = [[{k: v for k, v in row.items() if k not in CLOCK} for row in rows] for rows in (a, b)]
    return strip[0] == strip[1]


def test_trains_a_network_on_datasets(tmp_path: Path) -> None:
    model = network()
    trainer = Trainer(settings(tmp_path / "run", epochs=3, lr=0.2), model, Halves(6), Halves(3))
    rows = trainer.fit()
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["val_error"] < 0.1
    assert rows[-1]["train_loss"] < rows[1]["train_loss"]
    config, derived = load_config(tmp_path / "run")
    assert (config.model, config.data, config.norm) == ("custom", "torch-segmentation", "agc")
    assert config.size == (16, 24)
    assert config.channels == 3
    assert derived["classes"] == list(NAMES)
    # The network that was passed has the weights, and a checkpoint has its names.
    assert weights(tmp_path / "run").keys() == model.state_dict().keys()
    best = trainer.evaluate()
    assert best.pixel_error == pytest.approx(min(row["val_error"] for row in rows[1:]))
    drawn = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert drawn == ["epoch-0002.png", "epoch-0003.png", "worst-0002.png", "worst-0003.png"]


def test_recipe_does_not_augment_datasets(tmp_path: Path) -> None:
    chosen = settings(tmp_path, recipe="best")
    assert chosen.augment == "strong"
    config = Trainer(chosen, network(), Halves(6), Halves(3)).config
    assert (config.augment, config.class_weights, config.schedule) == (None, "none", "cosine")
    with pytest.raises(ValueError, match="augment is not for torch Datasets"):
        Trainer(settings(tmp_path, augment="flip"), network(), Halves(6), Halves(3))


def test_classification_by_numbers(tmp_path: Path) -> None:
    images = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    trainer = Trainer(settings(tmp_path, epochs=8, lr=0.5), model, data, data)
    assert trainer.classes == ("class 0", "class 1")
    assert trainer.fit()[-1]["val_error"] == 0
    assert trainer.config.norm == "none"


@pytest.mark.slow
def test_resumed_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with random samples, workers, and an interruption in the middle of an epoch."""
    whole = Trainer(settings(tmp_path / "a"), network(), Halves(5), Halves(3)).fit()
    config = settings(tmp_path / "b", workers=1)
    with monkeypatch.context() as patch:
        signal_at_step(5, 2, patch)
        with pytest.raises(KeyboardInterrupt):
            Trainer(config, network(), Halves(5), Halves(3)).fit()
    resumed = Trainer(config, network(seed=1), Halves(5), Halves(3)).fit()
    assert same_records(whole, resumed)
    for name, value in weights(tmp_path / "a").items():
        assert torch.equal(value, weights(tmp_path / "b")[name]), name


def test_other_data_or_settings_are_refused(tmp_path: Path) -> None:
    Trainer(settings(tmp_path, epochs=1), network(), Halves(4), Halves(2)).fit()
    with pytest.raises(ConfigChangedError, match="other data"):
        Trainer(settings(tmp_path), network(), Halves(4, noise=0.2), Halves(2)).fit()
    with pytest.raises(ConfigChangedError, match=r"--lr was 0\.04, now 1"):
        Trainer(settings(tmp_path, lr=1.0), network(), Halves(4), Halves(2)).fit()


def test_settings_alone_train_as_the_command_does(tmp_path: Path) -> None:
    config = tiny(tmp_path / "python", epochs=1)
    rows = Trainer(config).fit()
    assert main(command(tmp_path / "command", epochs=1)) == 0
    assert same_records(rows, storage.read_records(tmp_path / "command" / "metrics.jsonl"))


@pytest.mark.slow
def test_commands_read_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    Trainer(settings(run, epochs=1), network(), Halves(4), Halves(2)).fit()
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    capsys.readouterr()
    assert main(["train", "--out", str(run)]) == 1
    assert "resume it with deepcontrol.workbench.train.Trainer" in capsys.readouterr().err
    assert main(["eval", str(run)]) == 1
    assert "which a command cannot open" in capsys.readouterr().err
    image = tmp_path / "image.png"
    Image.new("RGB", (64, 32)).save(image)
    out = ["--out", str(tmp_path / "labels")]
    assert main(["predict", str(run), str(image), *out]) == 1
    assert "pass --model module:function" in capsys.readouterr().err
    model = ["--model", f"{__name__}:build"]
    assert main(["predict", str(run), str(image), *out, *model]) == 0, capsys.readouterr().err


def test_batches_do_not_depend_on_workers() -> None:
    split = DatasetSplit(Halves(5), "train")
    one, two = (DatasetBatches(split, 2, shuffle=True, seed=3, workers=n) for n in (0, 2))
    state = torch.get_rng_state()
    first = [batch.images for batch in one.epoch(1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b.images) for a, b in zip(first, two.epoch(1), strict=True))
    assert torch.equal(next(iter(one.epoch(1, start=2))).images, first[2])
    assert not torch.equal(next(iter(one.epoch(2))).images, first[0])
    # Two processes have the samples of one.
    parts = [DatasetBatches(split, 2, shuffle=True, seed=3, rank=r, world=2) for r in (0, 1)]
    shards = [list(part.epoch(1)) for part in parts]
    assert torch.equal(torch.cat([shards[0][0].images, shards[1][0].images]), first[0])
    assert (shards[1][2].labels == VOID).all()  # the last batch has a single sample


class Wrong(Dataset):
    def __init__(self, *sample: Any, classes: tuple[str, ...] = NAMES) -> None:
        self.sample, self.classes = sample, classes

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.sample


IMAGE = torch.zeros(3, 8, 8)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((IMAGE,), "tuple of length 1, expected a pair"),
        ((object(), 0), "expected tensors: convert them in the dataset"),
        ((IMAGE[0], 0), r"image float32 \(8, 8\), expected float or uint8 \(C, H, W\)"),
        ((IMAGE.long(), 0), "expected float or uint8"),
        ((IMAGE, 0.5), r"label float32 \(\), expected integer class ids"),
        ((IMAGE, torch.zeros(8, 9, dtype=torch.long)), r"class ids of shape \(8, 8\)"),
        ((IMAGE, 2), "label 2, expected 0 to 1 for 2 classes"),
        ((IMAGE, torch.full((8, 8), 7)), "label 7, expected 0 to 1"),
    ],
)
def test_wrong_samples_are_named(sample: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        _ = DatasetSplit(Wrong(*sample), "train").task
    assert "sample 0 of the train dataset" in str(error.value)


def test_wrong_arguments(tmp_path: Path) -> None:
    data = Halves(2)
    with pytest.raises(ValueError, match="got a train dataset without val"):
        Trainer(settings(tmp_path), network(), data)
    with pytest.raises(ValueError, match=r"expected logits of shape \(1, 2, 16, 24\)"):
        Trainer(settings(tmp_path), network(classes=3), data, data)
    with pytest.raises(ValueError, match="augment is not for torch Datasets"):
        Trainer(settings(tmp_path, augment="flip"), network(), data, data)
    with pytest.raises(ValueError, match="width is for networks by name"):
        Trainer(settings(tmp_path, width=0.5), network(), data, data)
    with pytest.raises(ValueError, match="the validation samples are classification"):
        Trainer(settings(tmp_path), network(), data, Wrong(IMAGE, 0))
    with pytest.raises(ValueError, match="classes of the train dataset are unknown"):
        Trainer(settings(tmp_path), None, TensorDataset(IMAGE[None], torch.zeros(1).long()),
                TensorDataset(IMAGE[None], torch.zeros(1).long()))  # fmt: skip


def test_negative_labels_have_no_class() -> None:
    labels = torch.tensor([[0, -100], [1, VOID]])
    read = DatasetSplit(Wrong(torch.zeros(1, 2, 2), labels), "train").read(0, 0, 0)[1]
    assert read.tolist() == [[0, VOID], [1, VOID]]
    assert int(DatasetSplit(Wrong(IMAGE, -1), "train").read(0, 0, 0)[1]) == -1
