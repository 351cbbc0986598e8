"""A console for text from files: control characters are shown, never sent to the terminal."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

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
