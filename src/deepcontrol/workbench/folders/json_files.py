"""Read and write JSON files: one reader with limits, and a checksum in every file.

Files may be damaged or come from other machines. The reader accepts regular files of a limited
size, nesting depth and number range, so that no content makes it hang, exhaust the memory or pass
a value on that later arithmetic cannot represent.

The last key of an object, "crc", is the CRC-32 of all bytes before it. Other readers see one more
key. A flipped bit or an edited digit is detected; files of older versions have no checksum and are
read as before. This module does not import torch.
"""

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output import write_atomic

MAX_BYTES = 16 * 2**20  # parsed, up to 30 times as much
MAX_DEPTH = 64
MAX_INT = 2**63 - 1  # the largest seed that torch.Generator accepts
MAX_FLOAT = 1e100  # far above any value of fp32; its square is finite
CRC = "crc"
# The end of an object with a checksum, of which the key or the value may be damaged.
_SEALED = re.compile(
    rb'(.*\S)\s*,\s*"(?:crc":\s*"([^"]*)|[^"]{3}":\s*"[0-9a-f]{8})"\s*\}\s*', re.DOTALL
)


class ChecksumError(ValueError):
    """A JSON object does not match its checksum.

    Attributes:
        content: The object as it is, for a comparison with an intact one.
    """

    def __init__(self, content: Any) -> None:
        super().__init__("its content does not match its checksum")
        self.content = content


def read_json(path: Path) -> Any:
    """Read a JSON file; the checksum is verified and left out.

    Raises:
        OSError: The file does not exist or cannot be read.
        ValueError: It is not a regular file, too large, damaged, or not JSON.
    """
    return parse_object(read_bytes(path))[0]


def write_json(
    path: Path, content: Mapping[str, Any], indent: int, inside: Path | None = None
) -> None:
    """Write an object with its checksum. See `output.replacing` for `inside`."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    write_atomic(path, add_checksum(text) + "\n", inside)


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: The file does not exist or cannot be read.
        ValueError: It is not a regular file, or larger.
    """
    # O_NONBLOCK: opening a FIFO would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if about.st_size > limit:
            raise ValueError(f"{path.name} has {about.st_size:,} bytes, expected at most {limit:,}")
        return file.read()


def add_checksum(text: str) -> str:
    """Add the key "crc" to the text of a JSON object that is not empty.

    >>> add_checksum('{"epoch": 1}')
    '{"epoch": 1, "crc": "fac9bcd2"}'
    """
    body = text.rstrip().removesuffix("}").rstrip()
    space = text[len(body) :].rstrip().removesuffix("}")  # the line break of an indented text
    indent = re.match(r"\{(\n\s*)?", text)
    before = (indent and indent[1]) or " "
    return f'{body},{before}"{CRC}": "{_crc(body.encode())}"{space}}}'


def parse_object(content: bytes, null_constants: bool = False) -> tuple[Any, bool]:
    """Parse JSON, verify its checksum and leave it out.

    Args:
        content: UTF-8 text.
        null_constants: Read NaN and Infinity as None. JSON has neither, but older versions wrote
            them into records.

    Returns:
        The value, and whether it has a checksum.

    Raises:
        ChecksumError: The checksum is wrong.
        ValueError: The text is not JSON, is nested too deeply, or has a number out of range.
    """
    value = parse_json(content, null_constants)
    sealed = _SEALED.fullmatch(content)
    if sealed is None or not isinstance(value, dict):
        return value, False
    value.popitem()
    if _crc(sealed[1]).encode() != sealed[2]:
        raise ChecksumError(value)
    return value, True


def parse_json(content: str | bytes, null_constants: bool = False) -> Any:
    """Parse JSON text within the limits of this module. See `parse_object`.

    >>> parse_json('{"lr": 1e400}')
    Traceback (most recent call last):
    ValueError: the number 1e400 is out of range
    """
    text = content.decode() if isinstance(content, bytes) else content
    if len(text) > MAX_BYTES:
        raise ValueError(f"{len(text):,} characters of JSON, expected at most {MAX_BYTES:,}")
    try:
        value = json.loads(
            text,
            parse_float=_float,
            parse_int=_int,
            parse_constant=_null if null_constants else _refuse,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [item for item in level if isinstance(item, (dict, list))]
        if not inner:
            return
        level = [x for item in inner for x in (item.values() if isinstance(item, dict) else item)]
    if any(isinstance(item, (dict, list)) for item in level):
        raise ValueError("nested too deeply")


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) <= MAX_FLOAT:
        raise ValueError(f"the number {_short(text)} is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > MAX_INT:
        raise ValueError(f"the number {_short(text)} is out of range")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _null(name: str) -> None:
    return None


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:24]}..."


def _crc(body: bytes) -> str:
    return f"{zlib.crc32(body):08x}"
