"""What a run would be, without starting it: `deepcontrol train --dry-run`."""

import os
from dataclasses import dataclass

import torch

from ...nn import saved_bytes
from .build import build_network, open_sources
from .config import CONFIG, Train, check_unchanged, load_config
from .devices import choose_autocast, choose_device

MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """The figures of a run; memory is an estimate of each process's."""

    parameters: int
    train_images: int
    val_images: int
    classes: int
    steps_per_epoch: int
    steps: int
    device: str
    state_mib: float  # parameters, gradients, momentum
    activations_mib: float  # kept from forward to backward
    continues: bool

    @property
    def memory_mib(self) -> float:
        return self.state_mib + self.activations_mib


def plan(config: Train) -> Plan:
    """Look at the data's folders and at the network, decode and compute nothing, write nothing."""
    continues = (config.out / CONFIG).exists()
    if continues:
        check_unchanged(config, load_config(config.out)[0])
    sources = open_sources(config)
    device = choose_device(config.device)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    with torch.device("meta"):  # shapes without numbers
        model = build_network(config, len(sources.train.classes))
    parameters = sum(p.numel() for p in model.parameters())
    state = parameters * 4 * (3 if config.momentum else 2) / (processes if config.fsdp else 1)
    dtype = choose_autocast(config.precision, device) or torch.float32
    images = -(-config.batch_size // processes)
    inputs = torch.empty(images, 3, *config.size, device="meta", dtype=dtype)
    steps = -(-len(sources.train) // config.batch_size)
    return Plan(
        parameters=parameters,
        train_images=len(sources.train),
        val_images=len(sources.val),
        classes=len(sources.train.classes),
        steps_per_epoch=steps,
        steps=steps * config.epochs,
        device=device.type,
        state_mib=state / MIB,
        activations_mib=saved_bytes(model.to(dtype), inputs) / MIB,
        continues=continues,
    )
