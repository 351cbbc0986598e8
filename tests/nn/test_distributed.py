"""DDP and FSDP over two gloo processes train the same weights as one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepcontrol import AGC2d, AGCConv2d, AGCLinear
from tests.processes import WORLD, run_two


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        AGCConv2d(3, 8, 3, padding=1),
        AGCConv2d(8, 8, 3, padding=1, stride=2),
        nn.Conv2d(8, 8, 1, bias=False),
        AGC2d(8),
        nn.ReLU(),
        nn.Flatten(),
        AGCLinear(128, 4, activation="none"),
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=rng)
    return x, torch.randn(6, 4, dtype=torch.float64, generator=rng)


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()


def ddp(model: nn.Module) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    return DistributedDataParallel(model), model.state_dict


def fsdp(model: nn.Module) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model, lambda: {k: v.full_tensor() for k, v in model.state_dict().items()}


def worker(rank: int, folder: str, wrap: Callable) -> None:
    model, state = wrap(network())
    x, target = (a.chunk(WORLD)[rank] for a in batch())
    train(model, x, target)
    full_state = state()
    if rank == 0:
        torch.save(full_state, Path(folder) / "state.pt")


@pytest.mark.parametrize("wrap", [ddp, pytest.param(fsdp, marks=pytest.mark.slow)])
def test_two_processes_equal_one(wrap: Callable, tmp_path: Path) -> None:
    run_two(worker, str(tmp_path), wrap)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    single = network()
    train(single, *batch())
    start = network().state_dict()
    for name, value in single.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
        assert not torch.equal(value, start[name])
