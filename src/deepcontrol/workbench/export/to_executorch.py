"""`--to executorch`: for phones and boards, by XNNPACK where it can."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .check import Runner
from .program import torch_warnings_ignored


def write_executorch(program: ExportedProgram, path: Path, outputs: Sequence[str]) -> None:
    """One file whose memory is planned ahead, for one size; outputs have no names there."""
    with torch_warnings_ignored():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)


def run_executorch(path: Path) -> Runner:
    """The file in ExecuTorch's runtime for Python."""
    with torch_warnings_ignored():
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(path).load_method("forward")

    def run(images: Tensor) -> tuple[Tensor, ...]:
        found = method.execute([images.contiguous()])
        return tuple(torch.as_tensor(a).clone() for a in found)  # the runtime's memory is reused

    return run
