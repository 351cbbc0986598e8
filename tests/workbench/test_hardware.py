"""Threads of a container, and `deepcontrol doctor`, which tests the ops on each device."""

from pathlib import Path

import pytest
import torch

from deepcontrol.workbench import hardware
from deepcontrol.workbench.cli import main
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


@pytest.mark.parametrize(("count", "words"), [(1, "1 thread"), (4, "4 threads")])
def test_names_of_a_cpu(count: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: count)
    assert hardware.hardware("cpu").endswith(f", {words}")


# deepcontrol doctor


def test_shows_versions_and_the_plain_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert torch.__version__ in output
    assert "plain torch" in output
    assert "eager mode Python: DEEPCONTROL_NATIVE=0" in output
    assert "ok" in output


@pytest.mark.gpu
def test_gpu_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [r.why_plain is None for r in hardware.check_devices()][:2] == [False, True]
    monkeypatch.setenv("DEEPCONTROL_KERNELS", "off")
    assert hardware.check_devices()[1].why_plain == "DEEPCONTROL_KERNELS=off"


@pytest.mark.parametrize("factor", [1.01, torch.nan])
def test_wrong_gradients_are_found(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = hardware._outputs

    def wrong(neuron, x, g):  # type: ignore[no-untyped-def]
        *right, last = outputs(neuron, x, g)
        return (*right, factor * last) if x.dtype == torch.float32 else (*right, last)

    monkeypatch.setattr(hardware, "_outputs", wrong)
    assert main(["doctor"]) == 1
    assert "wrong" in capsys.readouterr().out
