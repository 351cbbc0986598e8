"""Ensembles: the same runs as trained one by one, apart from rounding."""

import functools
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.models import NORMS
from deepcontrol.workbench.optim import set_lr
from deepcontrol.workbench.study.arms import Arm
from deepcontrol.workbench.study.jobs import Job, finished_curve
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import ConfigChangedError, load_config
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.ensemble import (
    VectorizedNetworks,
    check_configs,
    open_runs,
    train_ensemble,
)
from deepcontrol.workbench.train.faults import FaultError
from deepcontrol.workbench.train.loop import train
from deepcontrol.workbench.train.run import Interrupts
from tests.noise import make_cifar
from tests.workbench.train.classifiers import TRAIN, VAL, tiny
from tests.workbench.train.runs import metrics
from tests.workbench.train.runs import tiny as tiny_segmentation

QUIET = Console(quiet=True)
SEEDS_AND_LRS = ((0, 2e-3), (1, 1e-3), (0, 1e-3))


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cifar(tmp_path_factory.mktemp("cifar") / "bin", TRAIN, VAL)


def configs(folder: Path, cifar: Path, lr_scale: float = 1.0, **changes: Any) -> list[Train]:
    """Return three runs with two seeds and two learning rates."""
    return [
        tiny(folder / f"s{seed}-lr{lr}", cifar, seed=seed, lr=lr * lr_scale, **changes)
        for seed, lr in SEEDS_AND_LRS
    ]


@contextmanager
def opened(runs: list[Train], device: str = "cpu") -> Iterator[VectorizedNetworks]:
    with open_runs(runs, Group(torch.device(device)), QUIET, Interrupts()) as found:
        yield VectorizedNetworks(found)


def first_batches(networks: VectorizedNetworks, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels of the first batches of all streams."""
    epochs = zip(*(stream.epoch(1) for stream in networks.streams), strict=True)
    for batches in itertools.islice(epochs, count):
        yield torch.stack([b.images for b in batches]), torch.stack([b.labels for b in batches])


# Single steps


@pytest.mark.parametrize(
    "changes",
    [
        *({"norm": norm} for norm in NORMS),
        {"norm": "agc", "clip_grad_norm": 0.1},
        {"norm": "agc", "fixed_lambda": 0.5, "fixed_gamma": 1.0},
        {"norm": "agc", "momentum": 0, "weight_decay": 0, "schedule": "constant"},
        {"norm": "agc", "model": "mlp"},
        {"norm": "bn", "model": "mlp"},
        {"norm": "ln", "model": "mlp"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_steps_are_those_of_single_networks(
    tmp_path: Path, cifar: Path, changes: dict[str, Any]
) -> None:
    runs = configs(tmp_path, cifar, warmup_epochs=0.2, **changes)
    with open_runs(runs, Group(torch.device("cpu")), QUIET, Interrupts()) as singles:
        for single in singles:
            single.model.double()  # networks are chaotic: rounding in fp32 is soon visible
        networks = VectorizedNetworks(singles)
        networks.start_epoch(1)
        start = networks.weights.detach().clone()
        losses = torch.zeros(len(runs), dtype=torch.float64)
        for step, (images, labels) in enumerate(first_batches(networks, 2)):
            networks.step(images.double(), labels)
            for index, single in enumerate(singles):
                stream = networks.streams.index(single.train)
                set_lr(single.optimizer, single.lr_at(step))
                loss = single.step(images[stream].double(), labels[stream])
                losses[index] += 6 * loss
        for index, single in enumerate(singles):
            values = networks.state(index)
            assert values.keys() == single.model.state_dict().keys()
            for name, expected in single.model.state_dict().items():
                torch.testing.assert_close(values[name], expected, rtol=1e-8, atol=1e-8, msg=name)
        torch.testing.assert_close(networks.loss_sum, losses, rtol=1e-6, atol=0)
        assert ((networks.weights - start).abs().amax(1) > 1e-5).all()


def test_networks_with_one_seed_share_their_images(tmp_path: Path, cifar: Path) -> None:
    with opened(configs(tmp_path, cifar)) as networks:
        assert [stream.seed for stream in networks.streams] == [0, 1]
        assert torch.equal(networks.weights[0], networks.weights[2])
        assert not torch.equal(networks.weights[0], networks.weights[1])


@pytest.mark.parametrize("engine", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
def test_batch_norm_in_bf16(
    tmp_path: Path, cifar: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    changes = {"model": "mlp", "norm": "bn", "precision": "bf16", "engine": engine}
    with opened(configs(tmp_path, cifar, **changes)) as networks:
        networks.start_epoch(1)
        for images, labels in first_batches(networks, 2):
            networks.step(images, labels)
        for index, run in enumerate(networks.runs):
            stream = networks.streams.index(run.train)
            for step, (images, labels) in enumerate(first_batches(networks, 2)):
                set_lr(run.optimizer, run.lr_at(step))
                run.step(images[stream], labels[stream])
            values = networks.state(index)
            for name, expected in run.model.state_dict().items():
                torch.testing.assert_close(values[name], expected, rtol=0.01, atol=2e-3, msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings(  # of torch.compile
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32:UserWarning"
)
@pytest.mark.parametrize("norm", ["agc", "bn", "gn"])
def test_captured_steps_agree_with_eager_ones(tmp_path: Path, cifar: Path, norm: str) -> None:
    found = {}
    for engine in ("eager", "graph", "compile+graph"):
        runs = configs(tmp_path / engine, cifar, 0.1, norm=norm, engine=engine, device="cuda")
        runs = [replace(run, precision="fp32", deterministic=True) for run in runs]
        with opened(runs, "cuda") as networks:
            networks.start_epoch(1)
            for images, labels in first_batches(networks, 11):  # the last one is smaller
                networks.step(images, labels)
            assert (networks.captured is None) == (engine == "eager")
            assert networks.good_steps.tolist() == [11, 11, 11]
            found[engine] = networks.weights.detach()
    for weights in found.values():
        torch.testing.assert_close(weights, found["eager"], rtol=1e-3, atol=5e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["agc", "bn"])
def test_runs_on_a_gpu_are_similar_to_single_ones(tmp_path: Path, cifar: Path, norm: str) -> None:
    runs = configs(tmp_path / "ensemble", cifar, 0.1, norm=norm, device="cuda")
    assert train_ensemble(runs, QUIET) == 0
    for run in runs:
        alone = replace(run, out=tmp_path / "alone" / run.out.name)
        assert train(alone, QUIET) == 0
        for mine, expected in zip(metrics(run.out)[1:], metrics(alone.out)[1:], strict=True):
            assert mine["train_loss"] == pytest.approx(expected["train_loss"], rel=0.05)


# Run folders


# At higher learning rates, differences from rounding grow to 1e-3 and more within the 22 steps.
@pytest.mark.parametrize(
    ("norm", "lr_scale"),
    [
        ("agc", 1.0),
        pytest.param("bn", 0.02, marks=pytest.mark.slow),
        pytest.param("gn", 0.1, marks=pytest.mark.slow),
        pytest.param("ws+gn", 0.1, marks=pytest.mark.slow),
    ],
)
def test_records_are_those_of_single_runs(
    tmp_path: Path, cifar: Path, norm: str, lr_scale: float
) -> None:
    runs = configs(tmp_path / "ensemble", cifar, lr_scale, norm=norm)
    assert train_ensemble(runs, QUIET) == 0
    for run in runs:
        alone = replace(run, out=tmp_path / "alone" / run.out.name)
        assert train(alone, QUIET) == 0
        assert {p.name.split(".")[0] for p in alone.out.iterdir()} == {
            *(p.name.split(".")[0] for p in run.out.iterdir()), "last", "previous", "best"
        }  # fmt: skip
        assert load_config(run.out)[1] == load_config(alone.out)[1]
        for mine, expected in zip(metrics(run.out), metrics(alone.out), strict=True):
            assert mine.keys() == expected.keys()
            for name in ("epoch", "step", "lr"):
                assert mine[name] == expected[name]
            assert abs(mine["val_error"] - expected["val_error"]) <= 1.01 / VAL
            for name in ("train_loss", "val_loss"):
                assert mine[name] == pytest.approx(expected[name], abs=1e-4)
        assert abs(metrics(run.out)[2]["val_loss"] - metrics(run.out)[0]["val_loss"]) > 1e-3
        layers, expected_layers = (
            storage.read_records(folder / runfolder.LAYERS)[-1]["layers"]
            for folder in (run.out, alone.out)
        )
        assert layers.keys() == expected_layers.keys()
        for name, layer in layers.items():
            assert layer["bias"] == pytest.approx(expected_layers[name]["bias"], abs=1e-4)


def test_study_reads_the_runs(tmp_path: Path, cifar: Path) -> None:
    runs = configs(tmp_path, cifar)
    train_ensemble(runs, QUIET)
    for run in runs:
        curve = finished_curve(Job(Arm("agc", 6, run.learning_rate), run.seed, run))
        assert curve is not None
        assert len(curve.errors) == run.epochs
        assert len(curve.lambdas) == 19


def test_diverged_network_does_not_change_the_others(tmp_path: Path, cifar: Path) -> None:
    healthy = configs(tmp_path / "healthy", cifar, norm="bn")
    assert train_ensemble(healthy, QUIET) == 0
    mixed = configs(tmp_path / "mixed", cifar, norm="bn")
    mixed[1] = replace(mixed[1], lr=1e30)
    assert train_ensemble(mixed, QUIET) == 0
    for index in (0, 2):
        assert metrics(mixed[index].out) == metrics(healthy[index].out)
        assert not (mixed[index].out / runfolder.DIVERGED).exists()

    alone = replace(mixed[1], out=tmp_path / "alone")
    with pytest.raises(FaultError):
        train(alone, QUIET)
    assert runfolder.read_diverged(mixed[1].out) == 1
    for name in (runfolder.DIVERGED, runfolder.LAYERS):
        assert (mixed[1].out / name).read_text() == (alone.out / name).read_text()
    assert [line["epoch"] for line in metrics(mixed[1].out)] == [0]


def test_ensemble_stops_when_all_networks_have_diverged(tmp_path: Path, cifar: Path) -> None:
    runs = [replace(run, lr=1e30) for run in configs(tmp_path, cifar)]
    runs[1] = replace(runs[1], lr=1e31)
    assert train_ensemble(runs, QUIET) == 0
    assert [runfolder.read_diverged(run.out) for run in runs] == [1, 1, 1]


@pytest.mark.slow
def test_interrupted_ensemble_starts_again(
    tmp_path: Path, cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = configs(tmp_path / "stopped", cifar)
    steps, step = itertools.count(1), VectorizedNetworks.step

    def counted(self: VectorizedNetworks, images: Tensor, labels: Tensor) -> None:
        if next(steps) == 15:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, images, labels)

    monkeypatch.setattr(VectorizedNetworks, "step", counted)
    assert train_ensemble(runs, QUIET) == 128 + signal.SIGTERM
    assert [line["epoch"] for line in metrics(runs[0].out)] == [0, 1]
    assert train_ensemble(runs, QUIET) == 0
    whole = configs(tmp_path / "whole", cifar)
    assert train_ensemble(whole, QUIET) == 0
    for run, expected in zip(runs, whole, strict=True):
        assert metrics(run.out) == metrics(expected.out)


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "bn"}, "may differ in seed, lr and out only, but --norm is agc, bn"),
        ({"clip_grad_norm": 1.0}, "--clip-grad-norm is 1.0, None"),
        ({"out": Path("runs/0")}, "each run needs its own --out"),
    ],
)
def test_unequal_runs_are_refused(changes: dict[str, Any], message: str) -> None:
    runs = [tiny(Path(f"runs/{i}"), seed=i) for i in range(3)]
    check_configs(runs)
    runs[2] = replace(runs[2], **changes)
    with pytest.raises(ValueError, match=message):
        check_configs(runs)


def test_unsuitable_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        check_configs([])
    with pytest.raises(ValueError, match="for classification"):
        check_configs([tiny_segmentation()])
    with pytest.raises(ValueError, match="single process"):
        check_configs([replace(tiny(), fsdp=True)])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="single process"):
        check_configs([tiny()])


def test_occupied_folders_are_refused(tmp_path: Path, cifar: Path) -> None:
    runs = configs(tmp_path, cifar, model="mlp", epochs=1, warmup_epochs=0, schedule="constant")
    with (
        runfolder.lock(runs[2].out),
        pytest.raises(runfolder.RunInUseError, match="in use by process"),
    ):
        train_ensemble(runs, QUIET)
    assert not (runs[0].out / runfolder.CONFIG).exists()
    (runs[2].out / runfolder.LOCK).unlink()

    assert train_ensemble(runs[:1], QUIET) == 0
    before = (runs[0].out / runfolder.METRICS).read_bytes()
    with pytest.raises(ValueError, match="has a finished run"):
        train_ensemble(runs, QUIET)
    with pytest.raises(ConfigChangedError, match="--seed was 0, now 5"):
        train_ensemble([replace(runs[0], seed=5), runs[1]], QUIET)
    assert (runs[0].out / runfolder.METRICS).read_bytes() == before

    train(runs[1], QUIET)
    (runs[1].out / runfolder.METRICS).unlink()
    with pytest.raises(ValueError, match="has a checkpoint, and an ensemble cannot resume it"):
        train_ensemble(runs[1:], QUIET)
    assert not (runs[2].out / runfolder.CONFIG).exists()
