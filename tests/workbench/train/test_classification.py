"""Runs of classifiers: records, resume, several processes, and the commands that read them."""

import csv
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepcontrol import AGCConv2d, AGCLinear
from deepcontrol.nn.init import CENTERING_GAIN
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import NO_CLASS, Batch, CropFlip
from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.models import MODELS
from deepcontrol.workbench.optim import scheduled_lr
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import Checkpoint, load, save_best
from deepcontrol.workbench.train.config import Model
from deepcontrol.workbench.train.data import build_augmentation, build_data, open_sources
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import LayerStats, evaluate
from deepcontrol.workbench.train.loop import train_run
from deepcontrol.workbench.train.objective import Objective
from deepcontrol.workbench.train.progress import WRONG, Display, draw_sheet
from deepcontrol.workbench.train.run import Interrupts
from deepcontrol.workbench.train.start import open_run
from tests.noise import make_cifar
from tests.processes import WORLD, run_two
from tests.workbench.train.classifiers import STEPS, TRAIN, VAL, command, tiny, train_here
from tests.workbench.train.runs import differences, metrics, signal_at_step

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cifar(tmp_path_factory.mktemp("cifar") / "bin", TRAIN, VAL)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory, cifar: Path) -> Path:
    """The tiny run without interruption."""
    run = tmp_path_factory.mktemp("classifier") / "run"
    train_here(run, cifar)
    return run


# Training


def test_records_of_a_run(classifier: Path) -> None:
    lines = metrics(classifier)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert [line["step"] for line in lines] == [0, STEPS // 2, STEPS]
    for line in lines:
        assert "val_mean_iou" not in line
        assert len(line["val_class_error"]) == 10
        assert (line["val_error"] * VAL) == pytest.approx(round(line["val_error"] * VAL))
    assert lines[2]["train_loss"] < lines[1]["train_loss"]
    expected = [scheduled_lr(0.05, step, STEPS, 6, "cosine") for step in (0, 10, 21)]
    assert [line["lr"] for line in lines] == expected
    layers = storage.read_records(classifier / runfolder.LAYERS)[0]["layers"]
    assert len(layers) == 19  # all AGC neurons of a ResNet-20
    assert layers["stages.0.branch.1"]["gain"]["mean"] == pytest.approx(CENTERING_GAIN / 3)
    with Image.open(classifier / "samples" / "epoch-0002.png") as sheet:
        assert sheet.size == (8 * 108, 3 * 138)
    assert {path.name.split(".")[0] for path in classifier.iterdir()} == {
        "config", "metrics", "layers", "events", "last", "previous", "best", "samples", "lock",
            "validation",
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "bn"},
        {"model": "mlp", "norm": "agc", "lr": 0.005, "augment": "none"},
        {"model": "plain20", "norm": "gn", "augment": "flip", "schedule": "constant"},
    ],
)
def test_other_networks_and_norms_learn(run: Path, cifar: Path, changes: dict[str, object]) -> None:
    train_here(run, cifar, **changes)
    losses = [line["val_loss"] for line in metrics(run)]
    assert losses[2] < losses[0]


def test_config_names_all_networks() -> None:
    assert get_args(Model) == MODELS


def test_weight_decay_is_for_filters(run: Path, cifar: Path) -> None:
    config = tiny(run, cifar)
    run.mkdir()
    with open_run(config, Group(CPU), Display(Console(quiet=True)), Interrupts()) as opened:
        decayed = {
            id(p) for g in opened.optimizer.param_groups for p in g["params"] if g["weight_decay"]
        }
        for name, parameter in opened.model.named_parameters():
            assert (id(parameter) in decayed) == (parameter.dim() > 1), name


@pytest.mark.parametrize(
    ("augment", "expected"),
    [
        (None, CropFlip((4, 4), flip=True)),
        ("flip", CropFlip((0, 0), flip=True)),
        ("none", CropFlip((0, 0), flip=False)),
    ],
)
def test_augmentation_of_a_run(augment: str | None, expected: CropFlip) -> None:
    assert build_augmentation(tiny(**({} if augment is None else {"augment": augment}))) == expected


# Resume

KILLED = """
import itertools, os, signal, sys, time
from pathlib import Path
from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main
run, step = Path(sys.argv[1]), int(sys.argv[2])
steps, call = itertools.count(1), TrainingStep.__call__
def counted(self, *batch):
    if next(steps) == step:
        while not (run / "last").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, *batch)
TrainingStep.__call__ = counted
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("step", "workers"), [(5, 0), (15, 2)])
def test_killed_run_ends_alike(
    run: Path, cifar: Path, classifier: Path, step: int, workers: int
) -> None:
    """The schedule, the weight decay and the augmentation continue where they were."""
    words = command(run, cifar, save_steps=2, workers=workers)
    script = [sys.executable, "-c", KILLED, str(run), str(step), *words]
    assert subprocess.run(script, capture_output=True).returncode == -signal.SIGKILL
    assert main(words) == 0
    assert differences(run, classifier) == []


def test_stopped_run_ends_alike(
    run: Path, cifar: Path, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at_step(13, signal.SIGTERM, patch)
        assert main(command(run, cifar)) == 128 + signal.SIGTERM
    # With the settings of the run: crop+flip alone would not fit the default network.
    assert main(["train", "--augment", "crop+flip", f"--out={run}"]) == 0
    assert differences(run, classifier) == []


def test_epochs_of_a_cosine_schedule_are_fixed(
    classifier: Path, run: Path, cifar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(classifier, cifar, epochs=3)) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--epochs was 2, now 3" in said
    assert "of a cosine schedule depend on --epochs" in said
    for epochs in (1, 2):
        train_here(run, cifar, epochs=epochs, schedule="constant", model="mlp", lr=0.005)
    assert [line["epoch"] for line in metrics(run)] == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("weight_decay", [0.0, 0.001])
def test_schedule_is_captured(run: Path, cifar: Path, weight_decay: float) -> None:
    """The captured steps follow the learning rate, also after a resume."""
    settings = {"device": "cuda", "precision": "fp32", "weight_decay": weight_decay}
    runs = {engine: run.with_name(engine) for engine in ("graph", "eager")}
    for engine, out in runs.items():
        out.mkdir(parents=True)
        config = replace(tiny(out, cifar, engine=engine, **settings), deterministic=True)
        display = Display(Console(quiet=True))
        with open_run(config, Group(torch.device("cuda")), display, Interrupts()) as opened:
            assert train_run(opened) == 0
            assert bool(opened.step._graphs) == (engine == "graph")
            lr = opened.optimizer.param_groups[0]["lr"]
            assert float(lr) == pytest.approx(scheduled_lr(0.05, STEPS - 1, STEPS, 6, "cosine"))
    weights = load(runs["eager"] / "last").model
    for name, value in load(runs["graph"] / "last").model.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-2, atol=1e-3, msg=name)


# Several processes


def batch_of(images: int) -> Batch:
    rng = torch.Generator().manual_seed(3)
    pixels = torch.randn(images, 3, 32, 32, generator=rng, dtype=torch.float64)
    labels = torch.randint(10, (images,), generator=rng)
    if images > 2:
        labels[2] = NO_CLASS
    return Batch(pixels, labels, torch.empty(0))


def gradients(group: Group, batch: Batch, images: int) -> dict[str, Tensor]:
    """Return the gradients of a whole batch; `batch` is this process's part of it."""
    model = build_model(tiny(), 10).double()
    objective = Objective("resnet20")
    wrapped = DistributedDataParallel(model) if group.world_size > 1 else model
    scales: tuple[Tensor, ...] = ()
    if group.world_size > 1:
        scales = (group.loss_scales(batch.labels, images, objective.ignored_label),)
    objective.loss(wrapped(batch.images), *objective.targets(batch), *scales).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_in(group: Group, out: Path, root: Path, **changes: Any) -> None:
    config = tiny(out, root, **changes)
    out.mkdir(exist_ok=True)
    display = Display(Console(quiet=True), enabled=False)
    with open_run(config, group, display, Interrupts()) as run:
        assert train_run(run) == 0


def counts(group: Group, root: Path) -> Tensor:
    """Return the confusion matrix of the initial network over the validation images."""
    config = tiny(root=root)
    data = build_data(config, open_sources(config), group, lambda *_: None)
    return evaluate(build_model(config, 10), data.val).counts


def in_each_process(rank: int, folder: str, root: str) -> None:
    group, found = Group(CPU, rank, WORLD), {}
    for images in (1, 5):
        batch = batch_of(images)
        own = Batch(batch.images[rank::WORLD], batch.labels[rank::WORLD], batch.segments)
        if rank >= images:  # like ClassificationBatches
            own = Batch(batch.images[:1], torch.full((1,), NO_CLASS), batch.segments)
        found[images] = gradients(group, own, images)
    train_in(group, Path(folder) / "ddp", Path(root), epochs=1, batch_size=9)
    result = {"gradients": found, "counts": counts(group, Path(root))}
    torch.save(result, Path(folder) / f"{rank}.pt")


def test_two_processes_match_one(tmp_path: Path, cifar: Path) -> None:
    run_two(in_each_process, str(tmp_path), str(cifar))
    single = Group(CPU)
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(found["counts"], counts(single, cifar))
        assert found["counts"].sum() == VAL
        for images, shared in found["gradients"].items():
            for name, value in gradients(single, batch_of(images), images).items():
                torch.testing.assert_close(shared[name], value, rtol=1e-9, atol=1e-12, msg=name)
    train_in(single, tmp_path / "single", cifar, epochs=1, batch_size=9)
    weights = load(tmp_path / "single" / "last").model
    for name, value in load(tmp_path / "ddp" / "last").model.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4, msg=name)
    for key in ("train_loss", "val_loss", "lr"):
        values = [metrics(tmp_path / run)[1][key] for run in ("ddp", "single")]
        assert values[0] == pytest.approx(values[1], rel=1e-4), key


# Initialization


def gains(model: nn.Module) -> dict[str, Tensor]:
    return {n: m.gain for n, m in model.named_modules() if isinstance(m, (AGCConv2d, AGCLinear))}


def test_branches_start_small_whatever_the_initialization() -> None:
    for init in ("he", "identity"):
        found = gains(build_model(tiny(init=init), 10))
        ends = {name for name in found if name.endswith("branch.1")}
        assert len(ends) == 9
        for name, gain in found.items():
            factor = 1 / 3 if name in ends else 1.0
            expected = torch.full_like(gain, CENTERING_GAIN * factor)
            torch.testing.assert_close(gain, expected, msg=name)


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_fixed_gamma_keeps_the_ends_of_branches_small(value: float) -> None:
    for name, gain in gains(build_model(tiny(fixed_gamma=value), 10)).items():
        factor = value / 3 if name.endswith("branch.1") else value
        expected = torch.full_like(gain, CENTERING_GAIN * factor)
        torch.testing.assert_close(gain, expected, msg=name)
        assert not gain.requires_grad


def test_fixed_parameters_of_linear_neurons() -> None:
    model = build_model(tiny(model="mlp", fixed_gamma=0.5, fixed_lambda=0), 10)
    neurons = [m for m in model.modules() if isinstance(m, AGCLinear)]
    assert len(neurons) == 3
    for neuron in neurons:
        for parameter, value in ((neuron.gain, 0.5), (neuron.mean_scale, 0.0)):
            assert not parameter.requires_grad
            assert parameter.unique().tolist() == [value]


def test_layer_statistics_of_linear_layers() -> None:
    for norm, names in (
        ("agc", {"gain", "mean_scale", "bias", "open"}),
        ("bn", {"gain", "bias", "open"}),
    ):
        model = build_model(tiny(model="mlp", norm=norm), 10).eval()
        found = LayerStats(model).compute(torch.randn(4, 3, 32, 32), Group(CPU))
        assert list(found) == ["layers.0", "layers.1", "layers.2"]
        assert all(set(about) == names for about in found.values())


# Commands


def test_eval_reproduces_the_error_of_training(
    classifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(classifier), "--checkpoint", "last"]) == 0
    printed = capsys.readouterr().out
    assert f"on {VAL} images: error {metrics(classifier)[-1]['val_error']:.2%}" in printed
    assert "airplane" in printed


def test_predictions(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    for name, shape in (("a.png", (32, 32, 3)), ("b.jpg", (40, 70, 3)), ("gray.png", (20, 20))):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(tmp_path / "images" / name)
    (tmp_path / "images" / "torn.png").write_bytes(b"nothing")
    words = ["predict", str(classifier), str(tmp_path / "images"), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "torn.png" in printed.err
    assert "1 of 4 images failed" in printed.out
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b.jpg", "gray.png"]
    classes = list(rows[0])[3:]
    assert classes[0] == "airplane"
    for row in rows:
        probabilities = {name: float(row[name]) for name in classes}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-4)
        assert probabilities[row["class"]] == max(probabilities.values())
        assert row["probability"] == row[row["class"]]


def test_classifiers_that_are_not_finite_are_refused(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    weights = load(run / "best").model
    for value, message in (
        (torch.nan, "has values that are not finite"),
        (1e30, "outputs for this"),
    ):
        save_best(run, Checkpoint({k: torch.full_like(v, value) for k, v in weights.items()}, {}))
        assert main(["predict", str(run), str(tmp_path / "a.png")]) == 1
        assert message in capsys.readouterr().err
    assert not (run / "predictions").exists()


def test_options_for_segmentation_are_refused(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    assert main(["predict", str(classifier), str(tmp_path / "a.png"), "--tile", "64x64"]) == 1
    assert "--tile is for segmentation" in capsys.readouterr().err
    assert main(["export", str(classifier), "--int8"]) == 1
    assert (
        "are for segmentation of images, and this run classifies images" in capsys.readouterr().err
    )


def test_dry_run(run: Path, cifar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command(run, cifar), "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "64 training images, 20 validation images, 32x32, 10 classes" in printed
    assert "lr 0.05 (cosine, 0.5 epochs of warm-up)" in printed
    assert not run.exists()


def test_sheet_marks_wrong_predictions() -> None:
    pictures = [Image.new("RGB", (96, 96), (0, 0, 255)) for _ in range(9)]
    names = ("a", "a very long name that does not fit under a picture", "\u4e2d")
    right = draw_sheet(pictures, [0] * 9, [0] * 9, names)
    assert right.shape == (2 * 138, 8 * 108, 3)
    assert not (right == WRONG).all(2).any()
    wrong = draw_sheet(pictures, [0] * 8 + [2], [0] * 8 + [1], names)
    rows, columns = np.nonzero((wrong == WRONG).all(2))
    assert rows.min() >= 138  # only the ninth picture
    assert columns.max() < 108
    unlabeled = draw_sheet(pictures[:1], [NO_CLASS], [1], names)
    assert not (unlabeled == WRONG).all(2).any()
