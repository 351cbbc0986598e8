"""Image sizes on the command line, as HEIGHTxWIDTH or DEPTHxHEIGHTxWIDTH."""

from collections.abc import Sequence
from typing import Annotated

import tyro


def parse_size(text: str) -> tuple[int, int]:
    """Parse "HxW" to (height, width).

    >>> parse_size("256x512")
    (256, 512)
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"invalid size {text!r}: expected HEIGHTxWIDTH, such as 256x512")
    return int(parts[0]), int(parts[1])


def parse_training_size(text: str) -> tuple[int, ...]:
    """Parse "HxW", or "DxHxW" for volumes.

    >>> parse_training_size("64x96x96")
    (64, 96, 96)
    """
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(
            f"invalid size {text!r}: expected HEIGHTxWIDTH, such as 256x512, or for volumes "
            "DEPTHxHEIGHTxWIDTH, such as 64x96x96"
        )
    return tuple(map(int, parts))


def format_size(size: Sequence[int]) -> str:
    """Return a size as the command line takes it.

    >>> format_size((256, 512))
    '256x512'
    """
    return "x".join(map(str, size))


Size = Annotated[
    tuple[int, int],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="HxW",
        instance_from_str=lambda args: parse_size(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda size: [format_size(size)],
    ),
]

# Size of training images, or of the crops of volumes.
TrainingSize = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="HxW|DxHxW",
        instance_from_str=lambda args: parse_training_size(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda size: [format_size(size)],
    ),
]
