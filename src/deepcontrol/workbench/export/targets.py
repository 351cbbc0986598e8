"""Export targets: write a traced network as a file, and run that file.

Their packages are optional. They are imported when a target is used.
"""

import importlib.metadata
import importlib.util
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .program import AXES, INPUT, Runner, as_tuple, ignore_torch_warnings

TargetName = Literal["onnx", "exported", "executorch"]

# Import names of the packages of each extra in pyproject.toml.
EXTRAS = {
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "executorch": ("executorch",),
}


class MissingPackageError(ValueError):
    """The packages of a target are not installed."""


def require(target: str, extra: str) -> None:
    """Raise MissingPackageError unless all packages of an extra are installed."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{target} needs {', '.join(missing)}: pip install 'deepcontrol[{extra}]'"
        )


def versions(extra: str | None) -> dict[str, str]:
    """Return the versions of torch and of the packages of an extra."""
    names = ("torch", *(EXTRAS[extra] if extra is not None else ()))
    return {name: importlib.metadata.version(name) for name in names}


def write_onnx(program: ExportedProgram, path: Path, outputs: Sequence[str]) -> None:
    """Write one ONNX file with the weights, in the default opset of the exporter."""
    with ignore_torch_warnings(), _quiet_registration():
        torch.onnx.export(
            program,
            f=path,
            dynamo=True,
            input_names=[INPUT],
            output_names=list(outputs),
            dynamic_shapes=(AXES,),  # names for the dynamic axes of the program
            external_data=False,
            verbose=False,
        )


def run_onnx(path: Path) -> Runner:
    """Load an ONNX file in ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, ...]:
        outputs = session.run(None, {INPUT: images.contiguous().numpy()})
        return tuple(torch.from_numpy(a) for a in outputs)

    return run


@contextmanager
def _quiet_registration() -> Iterator[None]:
    """Silence the warnings of the exporter about missing torchvision, which is not used here."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def write_exported(program: ExportedProgram, path: Path, outputs: Sequence[str]) -> None:
    """Write a torch.export file with the weights. The format has no names for outputs."""
    file = io.BytesIO()  # torch.export.save to a path kills the process on a full disk
    with ignore_torch_warnings():
        torch.export.save(program, file)
    path.write_bytes(file.getbuffer())


def run_exported(path: Path) -> Runner:
    """Load a torch.export file."""
    with ignore_torch_warnings():
        module = torch.export.load(path).module()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return as_tuple(module(images))

    return run


def write_executorch(program: ExportedProgram, path: Path, outputs: Sequence[str]) -> None:
    """Write an ExecuTorch file that uses XNNPACK. The format has no names for outputs."""
    with ignore_torch_warnings():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)


def run_executorch(path: Path) -> Runner:
    """Load an ExecuTorch file in the Python runtime."""
    with ignore_torch_warnings():
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(path).load_method("forward")

    def run(images: Tensor) -> tuple[Tensor, ...]:
        outputs = method.execute([images.contiguous()])
        return tuple(torch.as_tensor(a).clone() for a in outputs)  # the runtime reuses its memory

    return run


@dataclass(frozen=True)
class Target:
    """A file format to export to."""

    suffix: str
    extra: str | None  # extra in pyproject.toml with its packages
    write: Callable[[ExportedProgram, Path, Sequence[str]], None]  # with the names of the outputs
    run: Callable[[Path], Runner]
    fixed_size: bool = False  # takes one image of one size


TARGETS: dict[TargetName, Target] = {
    "onnx": Target(".onnx", "export", write_onnx, run_onnx),
    "exported": Target(".pt2", None, write_exported, run_exported),
    "executorch": Target(".pte", "executorch", write_executorch, run_executorch, fixed_size=True),
}
