"""What a network can be exported to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.export import ExportedProgram

from .check import Runner
from .to_executorch import run_executorch, write_executorch
from .to_exported import run_exported, write_exported
from .to_onnx import run_onnx, write_onnx

TargetName = Literal["onnx", "exported", "executorch"]


@dataclass(frozen=True)
class Target:
    suffix: str
    extra: str | None  # of pyproject.toml, which brings its packages
    write: Callable[[ExportedProgram, Path, Sequence[str]], None]  # with the outputs' names
    run: Callable[[Path], Runner]
    fixed_size: bool = False


TARGETS: dict[TargetName, Target] = {
    "onnx": Target(".onnx", "export", write_onnx, run_onnx),
    "exported": Target(".pt2", None, write_exported, run_exported),
    "executorch": Target(".pte", "executorch", write_executorch, run_executorch, fixed_size=True),
}
