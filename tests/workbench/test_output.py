"""Output files: complete or not at all, and never through a link."""

import errno
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from deepcontrol.workbench.folders import output
from deepcontrol.workbench.folders.output import append_text, make_folder, move_file, write_atomic


def write_often(path: Path, text: str, ready: Barrier) -> None:
    ready.wait()
    for _ in range(500):
        write_atomic(path, text)


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(2)
    processes = [context.Process(target=write_often, args=(path, t * 99, ready)) for t in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert path.read_text() in ("a" * 99, "b" * 99)
    assert list(tmp_path.iterdir()) == [path]


def files(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "write_atomic": lambda path, inside: write_atomic(path, "new", inside),
    "move_file": lambda path, inside: move_file(made(inside), path, inside),
    "open_append": lambda path, inside: output.open_append(path, inside),
}


def made(folder: Path) -> Path:
    path = folder / "made"
    path.write_text("new")
    return path


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", ["precious", "missing"])
def test_link_at_the_destination(writer: str, target: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (run / "page").symlink_to(outside / target)
    with pytest.raises(OSError, match="page is a symbolic link"):
        WRITERS[writer](run / "page", run)
    assert files(outside) == {"precious": "mine"}


@pytest.mark.parametrize("writer", WRITERS)
def test_link_to_a_folder(writer: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (run / "figures").symlink_to(outside)
    with pytest.raises(OSError, match="figures is a symbolic link"):
        WRITERS[writer](run / "figures" / "page", run)
    with pytest.raises(OSError, match="figures is a symbolic link"):
        make_folder(run / "figures" / "more", run)
    assert list(outside.iterdir()) == []


def test_folders_are_created(tmp_path: Path) -> None:
    """Links in the path that the user named are followed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    out = tmp_path / "runs" / "a" / "b"
    write_atomic(out / "c" / "page", "new", inside=out)
    assert files(tmp_path / "disk" / "a" / "b" / "c") == {"page": "new"}


def test_a_link_at_the_temporary_name_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".page.new").symlink_to(precious)
    write_atomic(tmp_path / "page", "new")
    assert files(tmp_path) == {"precious": "mine", "page": "new"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_destination_that_is_not_a_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "page")
    for write in (write_atomic, append_text):
        with pytest.raises(OSError, match="page is not a regular file"):
            write(tmp_path / "page", "new")


def test_path_that_leads_out(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="leads out"):
        write_atomic(tmp_path / "run" / ".." / "page", "new", inside=tmp_path / "run")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_atomic(tmp_path / "page", "old")
    monkeypatch.setattr(output.os, failing, full)
    with pytest.raises(OSError, match=r"cannot write .*page \(No space left on device\)"):
        write_atomic(tmp_path / "page", "new")
    assert files(tmp_path) == {"page": "old"}


def test_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "page", "old")
    with pytest.raises(ZeroDivisionError), output.replacing(tmp_path / "page") as file:
        file.write(bytes(1 // 0))
    assert files(tmp_path) == {"page": "old"}


def test_remove_tree_keeps_the_target_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "outside")
    output.remove_tree(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
