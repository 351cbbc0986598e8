"""The device, the precision and the processes of a run.

Under torchrun every process trains on its own images of each batch. The loss is a mean over
*labeled pixels*, and the processes have different numbers of them. Each process therefore scales
its mean by its number of pixels (`Group.loss_scales`), so that the average of the gradients that
DDP and FSDP compute is the gradient of the whole batch. With AGC (automatic gain control) this is
exact, because no sample depends on another.
"""

import os
import resource
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
from ..data.augment import to_device
from ..hardware import hardware
from .config import Train

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # the first process may have to decode the dataset


# Device and precision


def choose_device(name: str) -> torch.device:
    """Return the device for "cpu", "cuda" or "auto" (a GPU if there is one)."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch finds no CUDA device; run `deepcontrol doctor`")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def choose_autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype for autocast, or None for fp32."""
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def describe_machine(device: torch.device, autocast: torch.dtype | None) -> str:
    """Return the hardware and the precision of a run as text."""
    dtype = str(autocast or torch.float32).removeprefix("torch.")
    return f"{hardware(device.type)}, {dtype}"


def configure_torch(config: Train) -> None:
    """Set torch's process-wide state: determinism, cuDNN benchmark mode and seed."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(config.deterministic)  # a worker trains several runs
    torch.backends.cudnn.benchmark = not config.deterministic
    torch.manual_seed(config.seed)


def peak_mib(device: torch.device) -> float:
    """Return the peak memory in MiB: tensors on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# Processes


@dataclass(frozen=True)
class Group:
    """The processes of a run. All collective methods must be called by every process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and prints."""
        return self.rank == 0

    def max(self, value: int) -> int:
        """Return the maximum over all processes."""
        if self.world_size == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all processes."""
        return self.sum_(value.clone()) / self.world_size if self.world_size > 1 else value

    def all_gather(self, value: T) -> list[T]:
        """Return the objects of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return the main process's object."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def broadcast_buffers_(self, model: nn.Module) -> None:
        """Copy the main process's buffers (BatchNorm statistics) to all processes.

        Each process has statistics of its own images, and checkpoints hold those of the main
        process. The evaluation must use the same ones.
        """
        if self.world_size == 1:
            return
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0)

    def loss_scales(
        self, labels: Tensor, images: int, ignored_label: int = VOID, parts: int = 1
    ) -> Tensor:
        """Return the factors for this process's mean over labels and mean over samples.

        With them, the average over the processes is the mean over the whole batch.

        Args:
            labels: Labels of this process's images.
            images: Number of images in the whole batch.
            ignored_label: Label of pixels or images that the loss ignores.
            parts: Parts into which the labels are split (`split_batch`).

        Returns:
            (2,), or (parts, 2) for several parts.
        """
        own_samples = len(range(self.rank, images, self.world_size))
        if parts > 1:
            pieces = labels.tensor_split(parts)
            own = torch.stack([(piece != ignored_label).sum() for piece in pieces]).double()
            total = self.sum_(own.sum()).clamp(min=1)
            lengths = [len(piece) * (own_samples > 0) for piece in pieces]
            shares = to_device(lengths, labels.device).double() / images
            return self.world_size * torch.stack([own / total, shares], 1)
        own = (labels != ignored_label).sum().double()
        total = self.sum_(own.clone()).clamp(min=1)
        samples = own_samples / images
        return self.world_size * torch.stack([own / total, torch.full_like(own, samples)])


def is_distributed() -> bool:
    """Return whether torchrun (or a launcher like it) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


_process_groups: list[Any] = []  # alive until the process ends


@contextmanager
def process_group(device: torch.device) -> Iterator[Group]:
    """Join the process group that torchrun's environment variables describe.

    Without torchrun, the group is this process alone.
    """
    if not is_distributed():
        yield Group(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # With a GPU gloo is needed as well: signals and messages must not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _rendezvous_store(world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    # DDP's reducer must not be the last owner: it would free gloo's group with the interpreter lock
    # held and wait for a thread that needs the lock to free a tensor.
    _process_groups.append(dist.group.WORLD)
    group = Group(device, rank, world_size)
    yield group
    # Skipped after an error: other processes may have died, and these calls would wait for them.
    group.max(0)
    dist.destroy_process_group()


def exit_if_distributed(code: int) -> None:
    """Exit immediately, without Python's shutdown, if torchrun started this process.

    gloo's threads outlive the process group, because torch's caches keep it alive. A thread that
    frees its last tensor during Python's shutdown aborts the process (SIGABRT) after a successful
    run, and torchrun would report a failure.
    """
    if is_distributed():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rendezvous_store(world_size: int) -> Any:
    """Return a store for this start only.

    After an elastic restart torchrun's store still holds the addresses of the dead processes.
    """
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=world_size,
        is_master=not agent_has_store and os.environ["RANK"] == "0",
        timeout=TIMEOUT,
    )
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"life{restarts}", store)  # type: ignore[attr-defined]


# Sharded tensors. torch's sharding modules take a second to import, so only sharded runs do.


def shard_(model: nn.Module, group: Group) -> nn.Module:
    """Shard a model in place with FSDP2, one unit per layer with parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(group.device.type, (group.world_size,))
    for module in list(model.modules()):
        if module is not model and next(module.parameters(recurse=False), None) is not None:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unshard(value: Any) -> Any:
    """Return `value` with full tensors in place of shards. A collective call."""
    if is_sharded(value):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: unshard(v) for k, v in value.items()}
    if isinstance(value, list):
        return [unshard(v) for v in value]
    return value


def local_shard(value: Any) -> Any:
    """Return this process's shard, which may be empty; other tensors unchanged."""
    return value.to_local() if is_sharded(value) else value


def shard_like(value: Tensor, parameter: Any) -> Tensor:
    """Return this process's shard of a full tensor if the parameter is sharded."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")  # a DTensor
