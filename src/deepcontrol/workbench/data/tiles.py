"""Windows that cover an image or a volume: where they start, and the pixels that each predicts."""

import itertools

Windows = list[tuple[int, slice]]  # along one side: start of each window, pixels it predicts


def window_starts(length: int, size: int, stride: int) -> list[int]:
    """Return evenly spaced starts of windows over a side, at most `stride` apart.

    >>> window_starts(384, 256, 256), window_starts(384, 256, 64), window_starts(200, 256, 64)
    ([0, 128], [0, 64, 128], [0])
    """
    rest = max(0, length - size)
    count = 1 + -(-rest // stride)
    return [round(i * rest / max(1, count - 1)) for i in range(count)]


def windows(length: int, size: int) -> Windows:
    """Return the windows along one side: each start, and the pixels that it predicts.

    Each pixel belongs to the window with the nearest center.

    >>> windows(384, 256)
    [(0, slice(0, 192, None)), (128, slice(192, 384, None))]
    >>> windows(512, 512)
    [(0, slice(0, 512, None))]
    """
    starts = window_starts(length, size, stride=size)
    borders = [(a + b + size) // 2 for a, b in itertools.pairwise(starts)]
    predicted = itertools.pairwise([0, *borders, length])
    return [(start, slice(*part)) for start, part in zip(starts, predicted, strict=True)]


def tile_corners(image: tuple[int, int], tile: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the first row and column of evenly spaced tiles that cover an image.

    >>> tile_corners((256, 600), (256, 256))
    [(0, 0), (0, 172), (0, 344)]
    """
    rows, columns = (window_starts(a, b, stride=b) for a, b in zip(image, tile, strict=True))
    return [(y, x) for y in rows for x in columns]
