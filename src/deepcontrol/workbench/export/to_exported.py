"""`--to exported`: torch.export's own file, for torch without this package."""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .check import Runner
from .program import as_tuple, torch_warnings_ignored


def write_exported(program: ExportedProgram, path: Path, outputs: Sequence[str]) -> None:
    """One file with the weights in it. It returns what the network does, so names go nowhere."""
    file = io.BytesIO()  # on a full disk torch's own writer ends the process
    with torch_warnings_ignored():
        torch.export.save(program, file)
    path.write_bytes(file.getbuffer())


def run_exported(path: Path) -> Runner:
    with torch_warnings_ignored():
        module = torch.export.load(path).module()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return as_tuple(module(images))

    return run
