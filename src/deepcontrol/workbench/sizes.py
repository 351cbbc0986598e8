"""Sizes of images as users type them: HEIGHTxWIDTH."""

from typing import Annotated

import tyro


def parse_size(text: str) -> tuple[int, int]:
    """HxW as (height, width).

    >>> parse_size("256x512")
    (256, 512)
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"a size is HEIGHTxWIDTH, as in 256x512, not {text!r}")
    return int(parts[0]), int(parts[1])


Size = Annotated[
    tuple[int, int],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="HxW",
        instance_from_str=lambda args: parse_size(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda size: [f"{size[0]}x{size[1]}"],
    ),
]
