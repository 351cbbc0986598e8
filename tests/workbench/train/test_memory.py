"""Runs that are impossible are refused before anything is allocated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepcontrol.workbench import hardware
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import open_source, prepare
from deepcontrol.workbench.train import memory
from deepcontrol.workbench.train.commands import plan
from deepcontrol.workbench.train.memory import check_memory, step_bytes
from tests.workbench.train.runs import command, tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", ["100000x100000", "1000000000x1000000000"])
def test_impossible_sizes_are_refused(
    size: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decode(*args: Any) -> None:
        pytest.fail("the images were decoded")

    monkeypatch.setattr("deepcontrol.workbench.train.start.build_data", decode)
    assert main(command(run, size=size)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a step with 2 images of {size} needs at least" in line
    assert "smaller --batch-size, --size or --width" in line


def test_only_what_exceeds_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny(), width=1.0, size=(1024, 1024))
    source = open_source("streets", "train", limit=7)
    needed = step_bytes(config, len(source.classes), 2, CPU)
    for total, refused in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(memory, "total_memory", lambda device, total=total: total)
        if refused:
            with pytest.raises(
                ValueError, match="a step with 2 images of 1024x1024 needs at least"
            ):
                check_memory(config, source, CPU)
            check_memory(config, replace(source, count=1), CPU)  # a smaller batch
            check_memory(replace(config, engine="compile"), source, CPU)  # saves less
        else:
            check_memory(config, source, CPU)


def test_the_estimate_is_that_of_the_plan(run: Path) -> None:
    config = tiny(run, width=0.1)
    planned = plan(config)
    assert step_bytes(config, 19, 2, CPU) == pytest.approx(planned.memory_mib * 2**20)


def test_total_memory_respects_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hardware.total_memory(CPU)
    assert 2**28 < whole < 2**50
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**27, 2**27))
    assert hardware.total_memory(CPU) == 2**27


def test_caches_of_impossible_sizes_are_refused(tmp_path: Path) -> None:
    source = open_source("streets", "val", limit=2)
    with pytest.raises(ValueError, match="images of 100000000x100000000 are too large"):
        prepare(source, (10**8, 10**8), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
