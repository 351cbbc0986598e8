"""One mean for all tiles of an image, so that AGC labels it as if it had seen it whole.

A tile has another mean than its image, and AGC (automatic gain control) subtracts the mean: tiles
that go through a network one by one show seams. Here the layers get the mean of the whole image,
counted layer by layer over all tiles, each of which counts its interior, where no other tile does:

    pass k          layers before the k-th subtract what was counted; the k-th counts, and the
                    forward of the tile ends there
    the last pass   all layers subtract what was counted: the output

A layer's maps depend on the means before it, so this order is not a choice: all layers counting in
every pass, each with the means of the pass before, end in the same means after as many passes, and
until then are further off than tiles with means of their own (LOG.md). A pass ends at its layer,
so that all of them cost about half as much as that many whole ones.
"""

import math
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..ops.layout import accumulate_dtype

Span = tuple[int, int]  # from and up to, in pixels


class _CountedError(Exception):
    """Ends a forward at the layer that was to count: what comes after it has no mean yet."""


class SharedMeans:
    """While it is entered, the AGC layers of `model` subtract one mean for all tiles.

    Call it on every tile of the image, then `end_pass`, and again until that says that nothing was
    left to count: the outputs of the last pass are those of the whole image, as far as the tiles'
    own borders don't reach. Layers are told apart by the order in which they are called. Strides
    must be powers of two, and maps lose no more than a tenth by convolutions that do not pad;
    pads_to: the multiple that the model pads its input to, below and right.

    >>> import torch
    >>> from deepcontrol import AGCConv2d
    >>> model = AGCConv2d(3, 8, 3, padding=1)
    >>> image = torch.randn(1, 3, 64, 64)
    >>> with torch.no_grad(), SharedMeans(model) as shared:
    ...     counting = True
    ...     while counting:
    ...         upper = shared(image[:, :, :36], interior=((0, 32), (0, 64)))
    ...         lower = shared(image[:, :, 28:], interior=((4, 36), (0, 64)))
    ...         counting = shared.end_pass()
    >>> tiled = torch.cat([upper[:, :, :32], lower[:, :, 4:]], 2)
    >>> torch.allclose(tiled, model(image), atol=1e-5)
    True
    """

    def __init__(self, model: nn.Module, pads_to: int = 1) -> None:
        self.model, self.pads_to = model, pads_to
        self.layers = [m for m in model.modules() if hasattr(m, "shared_means")]
        self._means: list[Tensor] = []  # (N, C) of the layers counted so far
        self._sum: Tensor | None = None  # of the layer that counts in this pass, in fp64
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
        """The model's output on a tile (N, C, H, W), or None where a layer still had to count.

        interior: the rows and columns of the tile that no other tile counts. An interior that
        reaches the tile's end reaches the image's, with whatever rounding leaves there.
        """
        height, width = tile.shape[2:]
        self._tile, self._calls = ((height, width), interior), 0
        try:
            return self.model(tile)
        except _CountedError:
            return None

    def of(self, v: Tensor) -> Tensor:
        """For a layer: the mean (N, C) to subtract from its maps v (N, C, H, W)."""
        call = self._calls
        self._calls += 1
        if call < len(self._means):
            return self._means[call].to(accumulate_dtype(v.dtype))
        self._count(v)
        raise _CountedError

    def _count(self, v: Tensor) -> None:
        (height, width), (of_rows, of_columns) = self._tile
        rows = _in_map(v.shape[2], height, self._padded(height), of_rows)
        columns = _in_map(v.shape[3], width, self._padded(width), of_columns)
        inner = v[:, :, rows, columns]
        # The tiles are added up in fp64: there may be any number of them.
        total = inner.sum((2, 3), dtype=accumulate_dtype(v.dtype)).double()
        self._sum = total if self._sum is None else self._sum + total
        self._positions += math.prod(inner.shape[2:])

    def _padded(self, length: int) -> int:
        return -(-length // self.pads_to) * self.pads_to

    def end_pass(self) -> bool:
        """All tiles were seen: keep what was counted. False if no layer was left to count."""
        if self._sum is None:
            return False
        self._means.append(self._sum / self._positions)
        self._sum, self._positions = None, 0
        return True


def _in_map(length: int, tile: int, padded: int, span: Span) -> slice:
    """The part of a map of this length that a span of its tile, padded to so much, becomes.

    Networks halve their maps, and round: 225 pixels have maps of 225, 112, 56, 28, 14 and 7. Where
    convolutions do not pad, maps are a little shorter, by a position or a tenth of them.
    """
    start, stop = span
    if (start, stop) == (0, tile):
        return slice(0, length)
    stride = 2 ** max(0, round(math.log2(padded / length)))
    if not padded // stride - max(1, length / 10) <= length <= -(-padded // stride):
        raise ValueError(
            f"cannot tell the stride of a map of {length} for {padded} pixels: means are shared in "
            "networks that halve their maps, by convolutions that pad (a tenth may be lost), and "
            "that pad their input as pads_to says"
        )
    if start % stride or (stop != tile and stop % stride):
        raise ValueError(
            "a tile's interior must lie on multiples of the network's stride: "
            f"got {start} to {stop} of {tile} pixels for a map of {length}"
        )
    return slice(start // stride, length if stop == tile else stop // stride)
