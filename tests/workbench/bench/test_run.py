"""`deepcontrol bench` on the CPU with tiny sizes: rows, resuming, failures, the check."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from deepcontrol.workbench import bench
from deepcontrol.workbench.bench import contenders, measure
from deepcontrol.workbench.bench.cases import Case
from deepcontrol.workbench.bench.results import read_rows, write_rows
from deepcontrol.workbench.cli import main

TINY = ["bench", "--quick", "--steps", "5", "--only", "neuron", "inference", "--out"]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "check_network", lambda *_: 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Replace the measurement by constant times; returns the list of measured cases."""
    seen: list[Case] = []

    def fake(cases: Sequence[Case], steps: int) -> list[dict[str, str]]:
        seen.extend(cases)
        times = {"ms_p20": "1.0", "ms_p50": "2.0", "ms_p80": "3.0"}
        return [{**case.key, **times} for case in cases]

    monkeypatch.setattr(bench, "measure_interleaved", fake)
    return seen


def test_tiny_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out)]) == 0
    rows = read_rows(out)
    found = {(row["group"], row["contender"]) for row in rows}
    assert found == {
        ("neuron", "agc"), ("neuron", "bn"), ("neuron", "none"),
        ("inference", "agc"), ("inference", "bn"), ("inference", "bn-folded"),
        ("inference", "none"),
    }  # fmt: skip
    for row in rows:
        assert float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
        assert row["torch"] == torch.__version__
        assert {"hardware", "cores", "python", "source", "run", "date"} <= set(row)
        assert ("saved_mib" in row) == (row["group"] == "neuron")
    output = capsys.readouterr().out
    assert "No CUDA device found" in output
    assert "AGC's loss and gradients match fp64" in output
    assert "BatchNorm, BatchNorm," in " ".join(output.split())  # headers of the two ratios
    assert "eager fastest" in " ".join(output.split())
    assert (tmp_path / "bench.png").exists()


def test_segnet_step() -> None:
    case = Case("segnet", "agc", "eager", 1, (32, 32), "fp32", 0.125)
    (row,) = measure.measure_interleaved([case], 1)
    assert float(row["saved_mib"]) > 0


@pytest.mark.usefixtures("unchecked")
def test_resume_measures_missing_cases(tmp_path: Path, measured: list[Case]) -> None:
    out = tmp_path / "bench.csv"
    assert main([*TINY[:-3], "neuron", "--out", str(out)]) == 0
    assert {case.group for case in measured} == {"neuron"}
    measured.clear()
    assert main([*TINY, str(out)]) == 0
    assert {case.group for case in measured} == {"inference"}
    measured.clear()
    assert main([*TINY, str(out)]) == 0
    assert not measured
    assert len(read_rows(out)) == 7
    assert main([*TINY, str(out), "--no-resume"]) == 0
    assert len(measured) == len(read_rows(out)) == 7


def older(row: dict[str, str]) -> dict[str, str]:
    return {**row, "torch": "1.0"}


def failed(row: dict[str, str]) -> dict[str, str]:
    return {**{k: v for k, v in row.items() if not k.startswith("ms_")}, "error": "out of memory"}


def from_other_source(row: dict[str, str]) -> dict[str, str]:
    return {**row, "source": "0123456789"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", [older, failed, from_other_source])
def test_outdated_rows_are_measured_again(
    tmp_path: Path, measured: list[Case], change: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    out = tmp_path / "bench.csv"
    main([*TINY, str(out)])
    rows = read_rows(out)
    write_rows(out, [change(row) if row["group"] == "neuron" else row for row in rows])
    measured.clear()
    assert main([*TINY, str(out)]) == 0
    assert {case.group for case in measured} == {"neuron"}
    assert len(read_rows(out)) == 7
    assert not any("error" in row or row["torch"] == "1.0" for row in read_rows(out))


def test_row_is_valid_for_its_hardware_versions_and_source() -> None:
    here = {"hardware": "x", "torch": "2", "source": "new", "run": "b", "date": "c"}
    row = {"group": "segnet", "contender": "bn", "hardware": "x", "torch": "2", "source": "new"}
    assert bench.is_valid(row, here)
    for column in ("hardware", "torch", "source"):
        assert not bench.is_valid({**row, column: "old"}, here)
    assert not bench.is_valid({**row, "error": "out of memory"}, here)


@pytest.mark.usefixtures("unchecked")
def test_failure_becomes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(contender: str) -> None:
        raise RuntimeError("CUDA out of memory.\nAnd more.")

    monkeypatch.setattr(measure, "inference_neuron", fail)
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out)]) == 0
    rows = read_rows(out)
    errors = [row for row in rows if "error" in row]
    assert {row["group"] for row in errors} == {"inference"}
    assert {row["error"] for row in errors} == {"RuntimeError: CUDA out of memory."}
    assert sum("ms_p50" in row for row in rows) == 3
    assert "failed" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked")
def test_time_limit_and_report(
    tmp_path: Path, measured: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out), "--report"]) == 1
    assert main([*TINY, str(out), "--minutes", "0"]) == 0
    assert not measured
    assert not out.exists()
    assert main([*TINY, str(out)]) == 0
    measured.clear()
    chart = tmp_path / "picture.png"
    assert main([*TINY, str(out), "--report", "--chart", str(chart)]) == 0
    assert not measured
    assert chart.exists()
    assert "time vs. time vs." in " ".join(capsys.readouterr().out.split())  # the two ratios


@pytest.mark.usefixtures("measured")
def test_wrong_gradients_stop_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = contenders.loss_and_gradients

    def wrong(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = right(model, x, y)
        if x.dtype == torch.float32:
            found["the gradient of all `mean_scale`"] *= 1.01
        return found

    monkeypatch.setattr(contenders, "loss_and_gradients", wrong)
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out)]) == 1
    assert not out.exists()
    message = " ".join(capsys.readouterr().err.split())
    assert "the gradient of all `mean_scale` differs" in message
