"""Write output files: complete or not at all, and never through a symbolic link.

Every file of the workbench is written here. A file is replaced by a temporary file next to it,
which is synced to the disk and renamed, so that a crash or a full disk leaves the old file or the
new one. Run and study folders may come from other machines, so no link in them is followed: a
downloaded folder must not choose which file of this machine is overwritten. Links in the path that
the user named are followed. This module does not import torch.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO


def write_atomic(path: Path, content: str | bytes, inside: Path | None = None) -> None:
    """Replace a file by one with this content. See `replacing` for the arguments."""
    with replacing(path, inside) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, inside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends, or vanishes after an error.

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
    """Open a regular file for appending, and create it if it is missing. See `replacing`."""
    with _explained(path), _open_folder(path, inside) as folder:
        _refuse_special(path, folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return open(os.open(path.name, flags, 0o666, dir_fd=folder), "a")


def make_folder(path: Path, inside: Path) -> Path:
    """Create a folder below `inside`, unless it exists, and return it. See `replacing`."""
    with _explained(path), _open_folder(path / "any", inside):
        return path


def check_writable(path: Path, inside: Path) -> None:
    """Raise OSError if `replacing` would refuse a path. For use before a long computation."""
    with _explained(path), _open_folder(path, inside) as folder:
        _refuse_special(path, folder)


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a file. Of a symbolic link, remove the link alone."""
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
    """Open the folder of a file, and create it, without following links below `inside`."""
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
    """Name the path in errors of the operating system, which names none in a failed write."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # a message of this module
            raise
        raise type(error)(f"cannot write {path} ({error.strerror})") from error
