"""Threads: the limit of a container, and a warning if the cores are busy."""

from pathlib import Path

import pytest
import torch

from deepcontrol.workbench import hardware
from deepcontrol.workbench.hardware import container_cores, crowded_note, fit_threads


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000", None), ("150000 100000", 1.5), ("400000 100000", 4.0), ("damaged", None)],
)
def test_cpu_limit_of_a_container(tmp_path: Path, content: str, cores: float | None) -> None:
    assert container_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text(content)
    assert container_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("cores", "chosen", "threads"), [(2.0, None, 2), (0.5, None, 1), (None, None, 3), (2.0, "3", 3)]
)
def test_threads_fit_into_the_container(
    cores: float | None, chosen: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "container_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        fit_threads()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_busy_cores_are_said_once_threads_would_share_them() -> None:
    assert crowded_note(threads=2, load=0.9, cores=2) == ""
    assert crowded_note(threads=1, load=9.0, cores=2) == ""
    assert "OMP_NUM_THREADS=1" in crowded_note(threads=2, load=1.6, cores=2)
