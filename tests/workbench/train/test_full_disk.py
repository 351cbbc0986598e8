"""A full disk ends a run with a clear message and leaves the old checkpoint intact."""

import errno
import itertools
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from deepcontrol.workbench import cli
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.train import loop
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.progress import Events
from tests.workbench.train.runs import command, differences, train_here


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullFile:
    """A file that raises after a number of bytes. torch wraps its error in one of its own."""

    def __init__(self, file: BinaryIO, space: int) -> None:
        self.file, self.space = file, space

    def write(self, content: bytes) -> int:
        self.space -= self.file.write(content[: self.space])
        if self.space <= 0:
            full()
        return len(content)

    def flush(self) -> None:
        self.file.flush()


@pytest.mark.parametrize("k", [0, 1, 1000, 20_000])
def test_checkpoint(
    k: int,
    whole: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The write of the second epoch's checkpoint fails at byte k."""
    saves, save = itertools.count(1), torch.save

    def limited(state: Any, file: BinaryIO) -> None:
        # Each epoch saves `best` and `last`.
        save(state, FullFile(file, k) if next(saves) == 4 else file)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", limited)
        assert main(command(run)) == 1
    message = capsys.readouterr().err
    assert f"cannot write {run / 'last'}" in message
    assert "No space left on device" in message
    needed = int(message.split("needs about ")[1].split(" bytes")[0].replace(",", ""))
    assert needed > 20_000
    assert load(run / "last").state["position"]["epoch"] == 1
    assert sorted(path.name for path in run.glob(".*")) == []  # the space is freed
    train_here(run)  # with space, the run resumes
    assert differences(run, whole) == []


def test_metrics(whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(run, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl"):
            storage.append_record(run / runfolder.METRICS, {"epoch": 2})
    train_here(run)  # drops the incomplete line
    assert differences(run, whole) == []


def test_sample_pictures(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's error names neither the path nor the free space; the message does."""
    monkeypatch.setattr(loop, "save_png", full)
    assert main(command(run)) == 1
    message = capsys.readouterr().err
    assert re.search(
        rf"{run} could not be written: the disk is full, [\d,]+ bytes are free", message
    )


@pytest.mark.parametrize("words", [["data", "sheet", "--out"], ["export"]])
def test_message_names_the_output_path_of_any_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("run_sheet", "run_export"):
        monkeypatch.setattr(cli, name, full)
    assert main([*words, str(tmp_path / "there")]) == 1
    message = capsys.readouterr().err
    assert f"{tmp_path / 'there'} could not be written: the disk is full" in message


def test_tensorboard_events(
    whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run continues without events."""
    stopped = "TensorBoard events stopped: [Errno 28] No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "flush", full)
        patch.setattr(SummaryWriter, "close", full)
        train_here(run)
        assert capsys.readouterr().out.count(stopped) == 1
    assert differences(run, whole) == []
    lines: list[str] = []
    events = Events(run, 4, lines.append)
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "close", full)
        events.close()
    assert lines == [stopped]
