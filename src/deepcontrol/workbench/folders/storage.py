"""Write and read the files of runs and studies. Does not import torch.

Every file of the workbench is written here. A file is replaced by a temporary file next to it,
which is synced to the disk and renamed, so that a crash or a full disk leaves the old file or the
new one. Run and study folders may come from other machines, so no link in them is followed: a
downloaded folder must not choose which file of this machine is overwritten. Links in the path that
the user named are followed.

Files may be damaged. The reader of JSON accepts regular files of a limited size, nesting depth and
number range, so that no content makes it hang, exhaust the memory or pass a value on that later
arithmetic cannot represent. The last key of an object, "crc", is the CRC-32 of all bytes before
it. Other readers see one more key. A flipped bit or an edited digit is detected. Files without a
checksum are accepted.

Records (JSON Lines) have one object per epoch, each with its checksum. From the first line with a
checksum on, all lines must have one.
"""

import fcntl
import io
import itertools
import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO


def write_atomic(path: Path, content: str | bytes, inside: Path | None = None) -> None:
    """Replace a file by one with this content. See `replacing` for the arguments."""
    with replacing(path, inside) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, inside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends, or is removed on error.

    Args:
        path: The file to replace.
        inside: The folder that the user named; `path` is below it. Missing folders are created,
            and folders below `inside` must not be symbolic links. None: the folder of `path`,
            which must exist.

    Raises:
        OSError: The path is a link or not a regular file, or writing failed. The message names it.
    """
    temporary = f".{path.name}.new"
    with _explained(path), _open_folder(path, inside) as folder:
        _refuse_special(path, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)  # a study folder may have several writers
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)  # frees the space
            raise
        os.fsync(folder)


def move_file(source: Path, path: Path, inside: Path | None = None) -> None:
    """Move a complete file to `path`, on the same file system. See `replacing`."""
    with _explained(path), _open_folder(path, inside) as folder:
        _refuse_special(path, folder)
        sync(source)
        os.replace(source, path.name, dst_dir_fd=folder)
        os.fsync(folder)


def append_text(path: Path, text: str) -> None:
    """Append to a file and sync it to the disk."""
    with _explained(path), open_append(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def open_append(path: Path, inside: Path | None = None) -> TextIO:
    """Open a regular file for appending; create it if missing. See `replacing`."""
    with _explained(path), _open_folder(path, inside) as folder:
        _refuse_special(path, folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return open(os.open(path.name, flags, 0o666, dir_fd=folder), "a")


def make_folder(path: Path, inside: Path) -> Path:
    """Create a folder below `inside` unless it exists; return it. See `replacing`."""
    with _explained(path), _open_folder(path / "any", inside):
        return path


def check_writable(path: Path, inside: Path) -> None:
    """Raise OSError if `replacing` would refuse a path, before a long computation."""
    with _explained(path), _open_folder(path, inside) as folder:
        _refuse_special(path, folder)


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a file; of a symbolic link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    with _explained(path):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _open_folder(path: Path, inside: Path | None) -> Iterator[int]:
    """Open or create the folder of a file, without following links below `inside`."""
    if inside is None:
        inside = path.parent
    else:
        inside.mkdir(parents=True, exist_ok=True)
    handle = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        place = inside
        for name in path.parent.relative_to(inside).parts:
            place /= name
            if name == "..":
                raise OSError(f"{path} leads out of {inside}")
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=handle)
            if stat.S_ISLNK(_mode(name, handle)):
                raise OSError(_link_message(place))
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _refuse_special(path: Path, folder: int) -> None:
    """Raise OSError if a path is a link, a folder or a device."""
    try:
        mode = _mode(path.name, folder)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(_link_message(path))
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is not a regular file, so it is not written; remove it first")


def _mode(name: str, folder: int) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode


def _link_message(path: Path) -> str:
    return (
        f"{path} is a symbolic link, and outputs are not written through links; remove it, or "
        "name its target as the output"
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the path in errors of the operating system.

    It names none in a failed write.
    """
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # a message of this module
            raise
        raise type(error)(f"cannot write {path} ({error.strerror})") from error


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
    """Write an object with its checksum. See `replacing` for `inside`."""
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
        raise ValueError(f"the number {shortened(text, 24)} is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > MAX_INT:
        raise ValueError(f"the number {shortened(text, 24)} is out of range")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _null(name: str) -> None:
    return None


def shortened(text: str, length: int = 60) -> str:
    """Return a text of at most `length` characters, for a message."""
    return text if len(text) <= length else f"{text[:length]}..."


def _crc(body: bytes) -> str:
    return f"{zlib.crc32(body):08x}"


MAX_FILE_BYTES = 2**28  # hundreds of times the records of a long run
MAX_LINES = 10**6
MAX_DAMAGE = 100  # further damaged lines are not listed
MAX_EPOCH = 10**7

Row = dict[str, Any]


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line with its checksum and sync it.

    Numbers that are not finite become null.
    """
    append_text(path, format_record(record))


def format_record(record: Mapping[str, Any]) -> str:
    """Return the line of a record, with its checksum.

    >>> print(format_record({"epoch": 1, "val_loss": math.nan}), end="")
    {"epoch": 1, "val_loss": null, "crc": "77cf7d97"}
    """
    return add_checksum(json.dumps(_without_nan(record), allow_nan=False)) + "\n"


def read_records(path: Path) -> list[Row]:
    """Return all records of a file, without their checksums.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line cannot be read.
    """
    found = scan_records(path)
    if found.damage or found.torn:
        raise ValueError(f"{path.parent}: {(found.damage or [found.torn])[0]}")
    return [line.row for line in found.lines]


@dataclass(frozen=True)
class Line:
    """A readable line."""

    epoch: int
    row: Row
    text: bytes


@dataclass(frozen=True)
class Scan:
    """The content of a file of records."""

    lines: list[Line]  # all readable lines, in their order
    damage: list[str]  # a message for each complete line that cannot be read
    torn: str = ""  # message if the last line is incomplete, as a killed process leaves it

    def by_epoch(self) -> list[Row]:
        """Return one record per epoch, sorted.

        The last wins: a resumed run repeats epochs.
        """
        rows = {line.epoch: line.row for line in self.lines}
        return [rows[epoch] for epoch in sorted(rows)]

    @property
    def last_epoch(self) -> int:
        """The last epoch that has a record, or -1."""
        return max((line.epoch for line in self.lines), default=-1)


def scan_records(path: Path) -> Scan:
    """Read a file of records in any state. A missing file raises OSError."""
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
    except ValueError as error:
        return Scan([], [str(error)])
    lines: list[Line] = []
    damage: list[str] = []
    torn, needs_checksum = "", False
    for number, text in enumerate(io.BytesIO(content), start=1):
        if not text.endswith(b"\n"):
            torn = f"line {number} of {path.name} is incomplete"
            break
        if number > MAX_LINES or len(damage) == MAX_DAMAGE:
            damage.append(f"line {number} of {path.name} and those after it are not read")
            break
        text = text[:-1]
        try:
            epoch, row, has_checksum = _parse(text)
            if needs_checksum and not has_checksum:
                raise ChecksumError(row)
            needs_checksum = has_checksum
            lines.append(Line(epoch, row, text + b"\n"))
        except ChecksumError:
            damage.append(f"line {number} of {path.name} cannot be read (wrong checksum)")
            needs_checksum = True
        except ValueError:
            damage.append(f"line {number} of {path.name} cannot be read")
    return Scan(lines, damage, torn)


def last_epoch(path: Path) -> int:
    """Return the last epoch that has a record, or -1."""
    return scan_records(path).last_epoch if path.exists() else -1


def truncate_records(path: Path, epoch: int) -> list[str]:
    """Drop the records after `epoch`. A run resumed from there writes them again.

    A file with lines that cannot be read is kept under another name.

    Returns:
        A message for each damaged line and for each missing epoch.
    """
    if not path.exists():
        return [f"there is no {path.name}"] if epoch >= 0 else []
    found = scan_records(path)
    kept = [line for line in found.lines if line.epoch <= epoch]
    messages = list(found.damage)
    epochs = {line.epoch for line in kept}
    if missing := epoch + 1 - len(epochs):
        first = next(number for number in itertools.count() if number not in epochs)
        more = f" and of {missing - 1} more" * (missing > 1)
        messages.append(f"{path.name} has no record of epoch {first}{more}")
    if found.damage:
        copy = unused_name(path, "damaged")
        write_atomic(copy, read_bytes(path, MAX_FILE_BYTES))
        messages = [f"{message}; the file is kept as {copy.name}" for message in messages]
    write_atomic(path, b"".join(line.text for line in kept))
    return messages


def unused_name(path: Path, suffix: str) -> Path:
    """Return the path with the first number that is not in use: metrics.jsonl.old1."""
    number = 1
    while (found := path.with_name(f"{path.name}.{suffix}{number}")).exists():
        number += 1
    return found


def add_checksums(path: Path) -> bool:
    """Add checksums to the lines without one; return whether the file changed.

    No other byte of a line is changed. It can be repeated.

    Raises:
        ValueError: A line cannot be read. The file is left as it is.
    """
    text, changed = [], False
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines(), start=1):
        try:
            has_checksum = _parse(line)[2]
        except ValueError as error:
            raise ValueError(f"line {number} of {path} cannot be read: {error}") from None
        text.append(line.decode() if has_checksum else add_checksum(line.decode()))
        changed |= not has_checksum
    if changed:
        write_atomic(path, "".join(f"{line}\n" for line in text))
    return changed


def _parse(line: bytes) -> tuple[int, Row, bool]:
    row, has_checksum = parse_object(line, null_constants=True)
    return epoch_of(row), row, has_checksum


def epoch_of(row: object) -> int:
    """Return the epoch of a record; raise ValueError if it has none."""
    epoch = row.get("epoch") if isinstance(row, dict) else None
    if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH:
        raise ValueError("no epoch")
    return epoch


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
