"""Options of a training in captured steps: as in eager mode, and after an interruption.

On a GPU every case trains twice: eagerly without interruption, and captured, stopped in the middle
and resumed. Both must end with the same weights. On a CPU the second run is eager too, and the
weights are equal bit for bit. All cases take about a minute on an H200.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from deepcontrol import AGCConv2d
from deepcontrol.step import WARMUP_STEPS
from deepcontrol.workbench.models.unet3d import UNet3d
from deepcontrol.workbench.train import Train, Trainer
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import load
from tests.workbench.train.runs import signal_at_step

IMAGES, BATCH, EPOCHS = 24, 4, 2
STOP = WARMUP_STEPS + 2  # after the first captured step
# Largest distance of the weights of both runs, relative to their distance from the start. The
# captured step launches the same kernels, so 0 is expected. Noise of 1e-6 in the images of every
# step leads to 1e-6 to 3e-3, and to 1e-2 and 2e-2 in the cases listed here (on a CPU, 3 seeds).
TOLERANCE = 0.01
ROUNDING = 0.002  # from four times one sample to four samples: 0.0002 on a CPU; in bf16 0.012
TOLERANCES = {"bf16": 0.05, "all": 0.05}


def images(channels: int, *size: int) -> Tensor:
    return torch.randn(IMAGES, channels, *size, generator=torch.Generator().manual_seed(0))


def pixels() -> TensorDataset:
    """Images whose labels follow from their values."""
    values = images(3, 32, 32)
    labels = values.mean(1).mul(1.5).round().clamp(-1, 1).long() + 1
    labels[:, :2] = -1  # unlabeled
    return TensorDataset(values, labels)


def volumes() -> TensorDataset:
    values = images(1, 16, 32, 32)
    return TensorDataset(values, (values[:, 0] > 0).long())


def whole_images() -> TensorDataset:
    values = images(3, 32, 32)
    return TensorDataset(values, torch.arange(IMAGES) % 3)


def own_network() -> nn.Module:
    """A network of the user's own, for `Trainer(config, model, train, val)`."""
    torch.manual_seed(0)
    return nn.Sequential(AGCConv2d(3, 8, kernel_size=3, padding=1), nn.Conv2d(8, 3, kernel_size=1))


def volume_network() -> nn.Module:
    torch.manual_seed(0)
    return UNet3d(1, 2, width=0.125)


UNET = {"model": "unet", "width": 0.1}

# Name: settings, the network (None: that of the settings), and the data.
Case = tuple[dict[str, Any], Callable[[], nn.Module] | None, Callable[[], TensorDataset]]
CASES: dict[str, Case] = {
    "sgd": (UNET, None, pixels),
    "adamw": ({**UNET, "optimizer": "adamw"}, None, pixels),
    "ema": ({**UNET, "ema": 0.9}, None, pixels),
    "dice": ({**UNET, "loss": "dice"}, None, pixels),
    "ce+dice": ({**UNET, "loss": "ce+dice"}, None, pixels),
    "focal": ({**UNET, "loss": "focal"}, None, pixels),
    "accumulate": ({**UNET, "accumulate": 4}, None, pixels),
    "clip": ({**UNET, "clip_grad_norm": 0.1}, None, pixels),
    "onecycle": ({**UNET, "schedule": "onecycle"}, None, pixels),
    "poly": ({**UNET, "schedule": "poly", "warmup_epochs": 0.5}, None, pixels),
    "all": (
        {
            **UNET,
            "optimizer": "adamw",
            "ema": 0.9,
            "loss": "ce+dice",
            "accumulate": 2,
            "clip_grad_norm": 0.1,
            "schedule": "cosine",
            "weight_decay": 0.01,
        },
        None,
        pixels,
    ),
    "recipe": ({**UNET, "recipe": "recommended"}, None, pixels),
    "bf16": ({**UNET, "precision": "bf16"}, None, pixels),
    "bn": ({**UNET, "norm": "bn"}, None, pixels),
    "segnet": ({"width": 0.05}, None, pixels),
    "unet3d": ({"loss": "ce+dice", "lr": 0.02}, volume_network, volumes),
    "classification": (
        {"model": "resnet20", "width": 0.25, "data": "torch-classification"},
        None,
        whole_images,
    ),
    "own network": ({"optimizer": "adamw"}, own_network, pixels),
}
# One at a time they take a second or more on a CPU.
FAST = ("own network", "classification")


def trainer(name: str, out: Path, **changes: Any) -> Trainer:
    settings, model, data = CASES[name]
    values: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "sample_epochs": (),
        "precision": "fp32",
        "deterministic": True,
        **settings,
        **changes,
    }
    samples = data()
    classes = [f"class {i}" for i in range(int(samples.tensors[1].max()) + 1)]
    own = None if model is None else model()
    return Trainer(Train(out=out, **values), own, samples, samples, classes)


def fit(name: str, out: Path, **changes: Any) -> dict[str, Any]:
    """Train a case to its end and return the tensors of its last checkpoint."""
    trainer(name, out, **changes).fit(Console(quiet=True))
    return tensors(load(out / "last"))


def tensors(checkpoint: Any) -> dict[str, Tensor]:
    """Return weights, momenta and averages by name."""
    found = {f"model.{key}": value for key, value in checkpoint.model.items()}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            found[prefix] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}", inner)

    for part in ("optimizer", "average"):
        collect(part, checkpoint.state.get(part))
    return found


def interrupted(name: str, out: Path, patch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """Stop a case in the middle, resume it, and return the tensors of its last checkpoint."""
    with patch.context() as stopped:
        signal_at_step(STOP, signal.SIGTERM, stopped)
        with pytest.raises(SystemExit) as raised:
            trainer(name, out, **changes).fit(Console(quiet=True))
    assert raised.value.code == 128 + signal.SIGTERM
    position = load(out / "last").state["position"]
    assert (position["epoch"], position["step"]) == (0, STOP)
    return fit(name, out, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_captured_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels may differ, after all; TF32 would make that a difference of 1e-3.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    replayed = count_replays(monkeypatch)
    eager = fit(name, tmp_path / "eager", device="cuda", engine="eager")
    assert not replayed
    graph = interrupted(name, tmp_path / "graph", monkeypatch, device="cuda", engine="graph")
    assert len(replayed) >= 3, "the steps were not captured"
    compare(eager, graph, start(name), TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_steps_on_a_cpu(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    whole = fit(name, tmp_path / "whole", device="cpu")
    resumed = interrupted(name, tmp_path / "resumed", monkeypatch, device="cpu")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    before = start(name)
    moved = [key for key in before if not torch.equal(before[key], whole[f"model.{key}"])]
    assert len(moved) > len(before) // 2
    if name != "sgd" and before.keys() == start("sgd").keys():  # the same network
        plain = request.getfixturevalue("plain")
        is_same = apart(plain, whole, before) <= ROUNDING
        assert is_same == (name == "accumulate")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the tensors of a run without options."""
    return fit("sgd", tmp_path_factory.mktemp("plain") / "run", device="cpu")


def start(name: str) -> dict[str, Tensor]:
    """Return the weights that a case starts with."""
    own = trainer(name, Path("nowhere"), device="cpu")
    model = own.model if own.model is not None else build_model(own.config, len(own.classes))
    return {key: value.clone() for key, value in model.state_dict().items()}


def compare(
    eager: dict[str, Tensor],
    graph: dict[str, Tensor],
    before: dict[str, Tensor],
    tolerance: float,
) -> None:
    """Assert that both runs moved the weights by the same amount in the same direction."""
    assert eager.keys() == graph.keys()
    assert apart(eager, graph, before) <= tolerance
    # Momenta and averages, each relative to its own size
    for key in eager.keys() - {f"model.{own}" for own in before}:
        a, b = eager[key].double().cpu(), graph[key].double().cpu()
        assert (a - b).norm() <= 5 * tolerance * a.norm() + 1e-12, key


def apart(a: dict[str, Tensor], b: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """Return the distance of the weights of two runs, relative to their distance from the start."""
    floats = [key for key in before if before[key].is_floating_point()]

    def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        parts = [(a[key].double() - b[key].double()).norm() for key in floats]
        return float(torch.stack(parts).norm())

    ends = [{key: run[f"model.{key}"].cpu() for key in floats} for run in (a, b)]
    moved = distance(ends[0], before)
    assert moved > 0
    return distance(*ends) / moved


def count_replays(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each replay of a CUDA graph."""
    replayed: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(1)
        replay(graph)

    patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return replayed
