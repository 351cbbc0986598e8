"""Image sizes on the command line, as HEIGHTxWIDTH."""

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
