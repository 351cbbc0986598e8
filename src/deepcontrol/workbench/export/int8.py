"""Convolutions in eight bits, by ONNX Runtime's static quantization."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .program import INPUT


def quantize(path: Path, images: Iterator[Tensor]) -> None:
    """Put the inputs and filters of a network's convolutions in eight bits, in its file.

    Ranges are those met on the images. Filters have one scale for each output channel. Everything
    between the convolutions stays fp32, and so do the means of folded neurons: they are sums over
    a whole map, so their eight bits would shift all of it. They are those of the filters in eight
    bits, which is what they correct.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = path.with_name(f"prepared-{path.name}")
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)  # the quantizer warns through the root of all loggers
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
            nodes_to_exclude=_convolutions_of_means(prepared),
        )
    finally:
        root.setLevel(before)
        prepared.unlink(missing_ok=True)


class _Reader:
    """Images as the calibration asks for them, one at a time."""

    def __init__(self, images: Iterator[Tensor]) -> None:
        self._images = images

    def get_next(self) -> dict[str, Any] | None:
        image = next(self._images, None)
        return None if image is None else {INPUT: image.contiguous().numpy()}


def _convolutions_of_means(path: Path) -> list[str]:
    """The nodes that make a map's mean of its input's window sums, divided by their count."""
    import onnx

    graph = onnx.load(path).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    return [
        node.name
        for node in graph.node
        if node.op_type == "Conv" and made_by.get(node.input[0]) == "Div"
    ]
