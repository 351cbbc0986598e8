"""Arguments and output of commands: image sizes, a console for text from files.

Does not import torch.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Image sizes, as HEIGHTxWIDTH or DEPTHxHEIGHTxWIDTH


def parse_size(text: str) -> tuple[int, int]:
    """Parse "HxW" to (height, width).

    >>> parse_size("256x512")
    (256, 512)
    """
    sides = _sides(text)
    if len(sides) != 2:
        raise ValueError(f"invalid size {text!r}: expected HEIGHTxWIDTH, such as 256x512")
    return sides[0], sides[1]


def parse_training_size(text: str) -> tuple[int, ...]:
    """Parse "HxW", or "DxHxW" for volumes.

    >>> parse_training_size("64x96x96")
    (64, 96, 96)
    """
    sides = _sides(text)
    if len(sides) not in (2, 3):
        raise ValueError(
            f"invalid size {text!r}: expected HEIGHTxWIDTH, such as 256x512, or for volumes "
            "DEPTHxHEIGHTxWIDTH, such as 64x96x96"
        )
    return sides


def _sides(text: str) -> tuple[int, ...]:
    """Parse positive integers separated by "x"; return () if one is invalid."""
    parts = text.lower().split("x")
    valid = all(part.isdigit() and int(part) > 0 for part in parts)
    return tuple(map(int, parts)) if valid else ()


def format_size(size: Sequence[int]) -> str:
    """Return a size as the command line takes it.

    >>> format_size((256, 512))
    '256x512'
    """
    return "x".join(map(str, size))


def _argument(
    metavar: str, parse: Callable[[str], tuple[int, ...]]
) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: parse(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda size: [format_size(size)],
    )


Size = Annotated[tuple[int, int], _argument("HxW", parse_size)]
# Size of training images, or of the crops of volumes.
TrainingSize = Annotated[tuple[int, ...], _argument("HxW|DxHxW", parse_training_size)]


# Output


# C0 and C1 controls but for tab and newline, and the surrogates of names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Replace control characters and bytes that are not UTF-8 by backslash escapes.

    A file name may hold any byte, and an escape sequence could rewrite what a terminal shows.

    >>> printable("photo\x1b[2J.png"), printable("caf\udce9.png")
    ('photo\\x1b[2J.png', 'caf\\xe9.png')
    """
    return _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # Python's stand-in for a byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class SafeConsole(Console):
    """A rich console that prints control characters in texts as backslash escapes.

    Names such as a:car:.png stay as they are: rich would print a picture of a car, and would import
    a module for it, which fails exactly when memory or descriptors have run out.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"emoji": False, **settings})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and _UNPRINTABLE.search(segment.text):
                segment = Segment(printable(segment.text), segment.style)
            yield segment
