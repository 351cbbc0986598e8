"""The processes of one run: who takes part, and what they must agree on.

Started by torchrun, every process sees its share of each batch. The loss is a mean over *labeled
pixels*, of which the shares hold different numbers, so each process weights its own mean by its
number: then the average of the gradients, which DDP and FSDP take, is the gradient of the whole
batch. With AGC (automatic gain control) samples do not meet, and that is exact.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import VOID

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # the first process may be decoding the data set for all


@dataclass(frozen=True)
class Group:
    """This process among those of the run: one alone, unless torchrun started it."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def highest(self, value: int) -> int:
        """The highest value of any process; all have to ask."""
        if self.world == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(counts)
        return counts

    def mean(self, value: Tensor) -> Tensor:
        return self.total(value.clone()) / self.world if self.world > 1 else value

    def gathered(self, value: T) -> list[T]:
        """Everybody's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: T) -> T:
        """The first process's value."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def share_buffers_(self, model: nn.Module) -> None:
        """Everybody gets the first process's buffers: BatchNorm's running statistics.

        Each process has those of its own images, and the first one's are saved. What is evaluated
        has to be what is saved.
        """
        if self.world == 1:
            return
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0)

    def shares(self, labels: Tensor, images: int) -> Tensor:
        """What this process's mean over pixels, and over images, counts in the whole batch's.

        Times the number of processes, since gradients are averaged. `images` are the batch's.
        """
        own = (labels != VOID).sum().double()
        everybody = self.total(own.clone()).clamp(min=1)
        samples = len(range(self.rank, images, self.world)) / images
        return self.world * torch.stack([own / everybody, torch.full_like(own, samples)])


def launched() -> bool:
    """Whether torchrun, or what does as it does, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """The group of processes for the time of the block, by torchrun's environment variables."""
    if not launched():
        yield Group(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # gloo as well, with a GPU: what the processes agree on must not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend, store=store_of_this_life(world), rank=rank, world_size=world, timeout=PATIENCE
    )
    group = Group(device, rank, world)
    yield group
    # Not after an error: the others may be gone, and the goodbye would wait for them.
    group.highest(0)
    dist.destroy_process_group()


def end_if_launched(code: int) -> None:
    """End a process of a group here and now, once its work is done.

    gloo's threads outlive the group, because torch's caches hold on to it. One of them that lets go
    of its last tensor while Python winds up takes the process down with it: SIGABRT, after a run
    that went well, and torchrun would call it a failure.
    """
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def store_of_this_life(world: int) -> Any:
    """Where the processes find each other, apart from what those before a restart left there.

    After an elastic restart torchrun's store is the same one as before, and torch looks for its
    peers under the names that the dead ones have written.
    """
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=world,
        is_master=not agent_has_it and os.environ["RANK"] == "0",
        timeout=PATIENCE,
    )
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"life{life}", store)  # type: ignore[attr-defined]


# Below, torch's modules for sharding are imported where a run is sharded: they take a second.


def shard_(model: nn.Module, group: Group) -> nn.Module:
    """FSDP2, in place: each layer that has parameters of its own is gathered when it is used."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(group.device.type, (group.world,))
    for module in list(model.modules()):
        if module is not model and next(module.parameters(recurse=False), None) is not None:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(value: Any) -> Any:
    """The same with every sharded tensor put together, which all processes have to do."""
    if is_sharded(value):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, list):
        return [whole(v) for v in value]
    return value


def own_part(value: Any) -> Any:
    """This process's shard of a sharded tensor, which may be empty; any other tensor whole."""
    return value.to_local() if is_sharded(value) else value


def sharded_like(value: Tensor, parameter: Any) -> Tensor:
    """This process's shard of a whole tensor, where the parameter is sharded."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")  # a DTensor
