"""Export targets: trace a network with dynamic sizes, write and run its file.

The packages of a target are optional and are imported when it is used.
"""

import importlib.metadata
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..folders.storage import write_atomic
from ..models import ClassNet

INPUT = "images"
AXES = {0: "batch", 2: "height", 3: "width"}  # dynamic axes
Shape = tuple[int, ...]  # (N, C, H, W), or (N, C, D, H, W) for volumes
Runner = Callable[[Tensor], tuple[Tensor, ...]]  # images (N, C, H, W) to outputs


@dataclass(frozen=True)
class Sizes:
    """Image sizes that an exported network accepts.

    The deepest feature map must have at least two rows and columns, because torch.export treats a
    size of 1 as a constant.
    """

    smallest: int  # smallest height and width, in pixels
    step: int  # height and width are multiples of it
    fixed: tuple[int, ...] | None = None  # the only size, with batch size 1; None: dynamic sizes
    channels: int = 3
    any_batch: bool = False  # the batch size is dynamic, also with a fixed image size

    @property
    def traced(self) -> Shape:
        """Shape of the example input, with distinct sizes: tracing equates equal ones."""
        if self.fixed is not None:
            return (2 if self.any_batch else 1, self.channels, *self.fixed)
        sides = [multiple * self.smallest // 2 for multiple in (3, 4)]
        height, width = (side + -side % self.step for side in sides)
        return (2, self.channels, height, width)

    @property
    def checked(self) -> list[Shape]:
        """Shapes for the check: not the traced one, and with odd sides if allowed."""
        channels = self.channels
        if self.fixed is not None:
            batches = (1, 3) if self.any_batch else (1,)
            return [(n, channels, *self.fixed) for n in batches]
        side, step = self.smallest, self.step
        larger = side + (step if step > 1 else 13)
        return [(1, channels, side, side), (3, channels, larger, side + step)]

    def accept(self, size: Sequence[int]) -> bool:
        """Return whether the exported network accepts images of this size."""
        return all(side >= self.smallest and side % self.step == 0 for side in size)

    def __str__(self) -> str:
        multiples = f" in multiples of {self.step}" if self.step > 1 else ""
        return f"sides of at least {self.smallest} pixels{multiples}"

    def dynamic_shapes(self) -> dict[int, Any] | None:
        """Return the dynamic shapes for torch.export; None if there are none."""
        if self.fixed is not None:
            return {0: Dim(AXES[0], min=1)} if self.any_batch else None
        smallest = self.smallest // self.step
        batch, *sides = (Dim(name, min=smallest if axis else 1) for axis, name in AXES.items())
        height, width = (self.step * side if self.step > 1 else side for side in sides)
        return {0: batch, 2: height, 3: width}

    @property
    def axes(self) -> dict[int, str]:
        """Names of the dynamic axes."""
        if self.fixed is None:
            return AXES
        return {0: AXES[0]} if self.any_batch else {}


def sizes_of(
    model: nn.Module,
    fixed: tuple[int, ...] | None = None,
    trained: tuple[int, ...] | None = None,
) -> Sizes:
    """Return the sizes that a network can be exported for.

    ClassNet and UNet accept only multiples of their stride, because their padding is constant in
    the graph. Classifiers, networks of other libraries and networks for volumes get the training
    size, in batches of any size.

    Args:
        model: The network.
        fixed: The only size to support, for targets without dynamic sizes.
        trained: The training size.

    Raises:
        ValueError: The network does not accept the fixed size.
    """
    channels = int(getattr(model, "in_channels", 3))
    if trained is not None and not hasattr(model, "receptive_radius"):
        return Sizes(1, 1, fixed or trained, channels, any_batch=fixed is None)
    stride = int(model.total_stride)  # type: ignore[arg-type]
    sizes = Sizes(2 * stride, int(getattr(model, "pad_multiple", 1)), fixed, channels)
    if fixed is not None and not sizes.accept(fixed):
        raise ValueError(f"--size: expected {sizes}, got {fixed[0]}x{fixed[1]}")
    return sizes


def trace(model: nn.Module, sizes: Sizes) -> ExportedProgram:
    """Trace a network to a graph of torch ops, with its parameters."""
    if isinstance(model, ClassNet):
        model = _TupleOutputs(model)
    with torch.no_grad(), ignore_torch_warnings():
        return torch.export.export(
            model, (torch.randn(sizes.traced),), dynamic_shapes=(sizes.dynamic_shapes(),)
        )


class _TupleOutputs(nn.Module):
    """ClassNet with a plain tuple of outputs: loading must not need this package."""

    def __init__(self, network: ClassNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(images))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return the outputs of SegNet (one) or ClassNet (two) as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@contextmanager
def ignore_torch_warnings() -> Iterator[None]:
    """Ignore deprecation warnings of torch's exporters about their own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


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
            f"{target} needs {', '.join(missing)}: in a clone of the repository, run: "
            f'pip install ".[{extra}]"'
        )


def versions(extra: str | None) -> dict[str, str]:
    """Return the versions of torch and of the packages of an extra."""
    names = ("torch", *(EXTRAS[extra] if extra is not None else ()))
    return {name: importlib.metadata.version(name) for name in names}


def write_onnx(
    program: ExportedProgram, path: Path, outputs: Sequence[str], axes: Mapping[int, str] = AXES
) -> None:
    """Write one ONNX file with the weights, in the default opset of the exporter."""
    with ignore_torch_warnings(), _quiet_registration():
        torch.onnx.export(
            program,
            f=path,
            dynamo=True,
            input_names=[INPUT],
            output_names=list(outputs),
            dynamic_shapes=(dict(axes),),  # names for the dynamic axes of the program
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
    """Silence the exporter's warnings about missing torchvision, not used here."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def quantize(path: Path, images: Iterator[Tensor]) -> None:
    """Quantize the convolutions of an ONNX file to int8, in place, with ONNX Runtime.

    The ranges of inputs come from the images. Filters have one scale per output channel. All other
    ops stay in fp32. The convolutions that compute the means of folded AGC layers also stay in
    fp32, because an error of a mean shifts the whole feature map. They use the quantized filters.

    Args:
        path: ONNX file, overwritten.
        images: Calibration images (1, 3, H, W).
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = path.with_name(f"prepared-{path.name}")
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)  # the quantizer logs warnings to the root logger
    try:
        quant_pre_process(path, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            path,
            _Reader(images),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,  # with QInt8, ONNX Runtime on x86 convolves in fp32
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=_mean_convolutions(prepared),
        )
    finally:
        root.setLevel(before)
        prepared.unlink(missing_ok=True)


class _Reader:
    """Calibration data reader of ONNX Runtime."""

    def __init__(self, images: Iterator[Tensor]) -> None:
        self._images = images

    def get_next(self) -> dict[str, Any] | None:
        image = next(self._images, None)
        return None if image is None else {INPUT: image.contiguous().numpy()}


def _mean_convolutions(path: Path) -> list[str]:
    """List the convolutions of window means, which fold adds.

    Window means are sums divided by their count.
    """
    import onnx

    graph = onnx.load(path).graph
    producer = {name: node.op_type for node in graph.node for name in node.output}
    return [
        node.name
        for node in graph.node
        if node.op_type == "Conv" and producer.get(node.input[0]) == "Div"
    ]


def write_exported(
    program: ExportedProgram, path: Path, outputs: Sequence[str], axes: Mapping[int, str] = AXES
) -> None:
    """Write a torch.export file with the weights. Outputs have no names in it."""
    file = io.BytesIO()  # torch.export.save to a path kills the process on a full disk
    with ignore_torch_warnings():
        torch.export.save(program, file)
    write_atomic(path, file.getvalue())


def run_exported(path: Path) -> Runner:
    """Load a torch.export file."""
    with ignore_torch_warnings():
        module = torch.export.load(path).module()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return as_tuple(module(images))

    return run


def write_executorch(
    program: ExportedProgram, path: Path, outputs: Sequence[str], axes: Mapping[int, str] = AXES
) -> None:
    """Write an ExecuTorch file that uses XNNPACK. Outputs have no names in it."""
    with ignore_torch_warnings():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        write_atomic(path, lowered.to_executorch().buffer)


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
    # Takes the names of the outputs and of the dynamic axes.
    write: Callable[[ExportedProgram, Path, Sequence[str], Mapping[int, str]], None]
    run: Callable[[Path], Runner]
    fixed_size: bool = False  # takes one image of one size


TARGETS: dict[TargetName, Target] = {
    "onnx": Target(".onnx", "export", write_onnx, run_onnx),
    "exported": Target(".pt2", None, write_exported, run_exported),
    "executorch": Target(".pte", "executorch", write_executorch, run_executorch, fixed_size=True),
}
