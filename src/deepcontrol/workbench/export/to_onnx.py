"""`--to onnx`: for ONNX Runtime and whatever else reads ONNX."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .check import Runner
from .program import AXES, INPUT, torch_warnings_ignored


def write_onnx(program: ExportedProgram, path: Path, outputs: Sequence[str]) -> None:
    """One file with the weights in it, in the exporter's default opset."""
    with torch_warnings_ignored(), _quiet_registration():
        torch.onnx.export(
            program,
            f=path,
            dynamo=True,
            input_names=[INPUT],
            output_names=list(outputs),
            dynamic_shapes=(AXES,),  # the program has them already: this gives them their names
            external_data=False,
            verbose=False,
        )


def run_onnx(path: Path) -> Runner:
    """The file in ONNX Runtime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, ...]:
        found = session.run(None, {INPUT: images.contiguous().numpy()})
        return tuple(torch.from_numpy(a) for a in found)

    return run


@contextmanager
def _quiet_registration() -> Iterator[None]:
    """Without the exporter's warnings that torchvision, which nothing here uses, is missing."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
