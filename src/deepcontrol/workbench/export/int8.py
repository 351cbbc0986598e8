"""Quantize an ONNX file to int8 with the static quantization of ONNX Runtime.

The ranges come from training images of the run, the accuracy check uses its validation images.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data import Batches, open_source, prepare
from ..sizes import Size
from ..train.config import Train
from ..train.evaluate import split_windows
from .targets import INPUT


def quantize(path: Path, images: Iterator[Tensor]) -> None:
    """Quantize the convolutions of an ONNX file to int8, in place.

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
    """List the convolutions of window means (sums divided by their count), which fold adds."""
    import onnx

    graph = onnx.load(path).graph
    producer = {name: node.op_type for node in graph.node for name in node.output}
    return [
        node.name
        for node in graph.node
        if node.op_type == "Conv" and producer.get(node.input[0]) == "Div"
    ]


CALIBRATION_IMAGES = 64  # at most


class RunImages:
    """Images of a run's dataset, one at a time and without augmentation."""

    def __init__(self, config: Train, data_root: Path | None = None) -> None:
        self._config = config if data_root is None else replace(config, data_root=data_root)

    def calibration(self) -> Iterator[Tensor]:
        """Iterate over training images (1, 3, H, W), in windows if the run uses them.

        Validation images are not used, so that they can measure the result.
        """
        config = self._config
        source = open_source(config.data, "train", config.data_root, config.train_limit)
        limit = min(CALIBRATION_IMAGES, len(source))
        source = open_source(config.data, "train", config.data_root, limit)
        for batch in Batches(prepare(source, config.image_size), 1).epoch():
            yield from split_windows(batch.images, config.window)

    @property
    def window(self) -> Size | None:
        """Window size for larger images; None to use whole images."""
        return self._config.window

    def validation(self) -> Batches:
        """Return the validation set with batch size 1."""
        config = self._config
        source = open_source(config.data, "val", config.data_root, config.val_limit)
        return Batches(prepare(source, config.image_size), 1)
