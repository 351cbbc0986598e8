"""Share one mean between all tiles of an image: tiled inference without seams.

AGC (automatic gain control) subtracts the mean of a map, and the mean of a tile differs from the
mean of its image: tiles that are processed independently show seams. SharedMeans gives the layers
the mean of the whole image, measured layer by layer. Each tile contributes its interior, which
overlaps with no other interior:

    pass k          layers before layer k subtract their measured mean; layer k sums up its maps,
                    and the forward of the tile stops there
    last pass       all layers subtract their measured means: the output

The maps of a layer depend on the means of the layers before it, so the layers must be measured in
order. Measuring all layers in every pass, with the means of the previous pass, needs as many passes
to reach the same means, and its intermediate outputs are worse than those of independent tiles
(dev/LOG.md). Because a pass stops at its layer, all passes together cost about half as much as the
same number of full forwards.
"""

import math
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..ops.layout import accumulate_dtype
from .layer import require_mean

Span = tuple[int, int]  # start and stop, in pixels


class _StopForward(Exception):  # noqa: N818 (control flow, not an error)
    """Stop a forward after the layer that is measured in this pass."""


class SharedMeans:
    """Context manager in which AGC layers subtract one mean for all tiles.

    Call it on every tile of the image, then call `end_pass`, and repeat until `end_pass` returns
    False. The outputs of the last pass equal those of the whole image, except near the borders of a
    tile, where the tile lacks context.

    Layers are identified by the order in which they are called. The strides of the network must be
    powers of two, and convolutions without padding may shorten a map by a tenth at most.

    Args:
        model: A model with AGC layers over 2-D maps.
        pads_to: The model pads height and width of its input to multiples of this, at the bottom
            and right.

    >>> import torch
    >>> from deepcontrol import AGCConv2d
    >>> model = AGCConv2d(3, 8, 3, padding=1)
    >>> image = torch.randn(1, 3, 64, 64)
    >>> with torch.no_grad(), SharedMeans(model) as shared:
    ...     measuring = True
    ...     while measuring:
    ...         upper = shared(image[:, :, :36], interior=((0, 32), (0, 64)))
    ...         lower = shared(image[:, :, 28:], interior=((4, 36), (0, 64)))
    ...         measuring = shared.end_pass()
    >>> tiled = torch.cat([upper[:, :, :32], lower[:, :, 4:]], 2)
    >>> torch.allclose(tiled, model(image), atol=1e-5)
    True
    """

    def __init__(self, model: nn.Module, pads_to: int = 1) -> None:
        self.model, self.pads_to = model, pads_to
        self.layers = [m for m in model.modules() if hasattr(m, "shared_means")]
        require_mean(model, "SharedMeans")
        self._means: list[Tensor] = []  # (N, C), of the layers measured so far
        self._sum: Tensor | None = None  # (N, C) in fp64, of the layer measured in this pass
        self._positions = 0
        self._tile: tuple[tuple[int, int], tuple[Span, Span]]  # size, interior
        self._calls = 0

    def __enter__(self) -> "SharedMeans":
        for layer in self.layers:
            layer.shared_means = self  # type: ignore[assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for layer in self.layers:
            layer.shared_means = None  # type: ignore[assignment]

    def __call__(self, tile: Tensor, interior: tuple[Span, Span]) -> Any:
        """Run the model on a tile.

        Args:
            tile: (N, C, H, W).
            interior: ((row start, row stop), (column start, column stop)): the part of the tile
                that belongs to no other tile's interior. Starts and stops must be multiples of the
                network's stride, except for a stop at the end of the tile.

        Returns:
            The output of the model, or None if a layer was measured in this pass.
        """
        height, width = tile.shape[2:]
        self._tile, self._calls = ((height, width), interior), 0
        try:
            return self.model(tile)
        except _StopForward:
            return None

    def of(self, v: Tensor) -> Tensor:
        """Return the mean (N, C) that a layer subtracts from its maps v (N, C, H, W).

        Called by the layers. The layer that is measured in this pass stops the forward instead.
        """
        call = self._calls
        self._calls += 1
        if call < len(self._means):
            return self._means[call].to(accumulate_dtype(v.dtype))
        self._measure(v)
        raise _StopForward

    def _measure(self, v: Tensor) -> None:
        (height, width), (row_span, column_span) = self._tile
        rows = _in_map(v.shape[2], height, self._padded(height), row_span)
        columns = _in_map(v.shape[3], width, self._padded(width), column_span)
        inner = v[:, :, rows, columns]
        # In fp64, because the number of tiles is not bounded.
        total = inner.sum((2, 3), dtype=accumulate_dtype(v.dtype)).double()
        self._sum = total if self._sum is None else self._sum + total
        self._positions += math.prod(inner.shape[2:])

    def _padded(self, length: int) -> int:
        return -(-length // self.pads_to) * self.pads_to

    def end_pass(self) -> bool:
        """Finish a pass over all tiles. Return False if no layer was left to measure."""
        if self._sum is None:
            return False
        self._means.append(self._sum / self._positions)
        self._sum, self._positions = None, 0
        return True


def _in_map(length: int, tile: int, padded: int, span: Span) -> slice:
    """Map a span of a tile to the positions of a feature map.

    Networks halve their maps and round: 225 pixels become maps of 225, 112, 56, 28, 14 and 7.
    Convolutions without padding shorten a map a little, by one position or a tenth.

    Args:
        length: Length of the map.
        tile: Length of the tile.
        padded: Length of the tile after the model's padding.
        span: Start and stop in the tile.
    """
    start, stop = span
    if (start, stop) == (0, tile):
        return slice(0, length)
    stride = 2 ** max(0, round(math.log2(padded / length)))
    if not padded // stride - max(1, length / 10) <= length <= -(-padded // stride):
        raise ValueError(
            f"cannot tell the stride of a map of {length} positions for {padded} pixels. "
            "Expected strides that are powers of two, and padded convolutions (a map may be a "
            "tenth shorter). If the model pads its input, pass the multiple as pads_to"
        )
    if start % stride or (stop != tile and stop % stride):
        raise ValueError(
            f"the interior {start} to {stop} of {tile} pixels for a map of {length} is not "
            f"aligned: it must start and stop at multiples of the network's stride, {stride} here"
        )
    return slice(start // stride, length if stop == tile else stop // stride)
