"""`deepcontrol bench` on the CPU, tiny: rows, resuming, failures, and correctness first."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from deepcontrol.workbench.bench import check, cpu, run
from deepcontrol.workbench.bench.cases import Case
from deepcontrol.workbench.bench.record import has_row, read_rows, write_rows
from deepcontrol.workbench.cli import main

TINY = ["bench", "--quick", "--steps", "5", "--only", "neuron", "inference", "--out"]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check_network", lambda *_: 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """What is measured from here on, with times that cost none."""
    seen: list[Case] = []

    def pretend(cases: Sequence[Case], steps: int) -> list[dict[str, str]]:
        seen.extend(cases)
        times = {"ms_p20": "1.0", "ms_p50": "2.0", "ms_p80": "3.0"}
        return [{**case.key, **times} for case in cases]

    monkeypatch.setattr(run, "measure_set", pretend)
    return seen


def test_a_tiny_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    said = capsys.readouterr().out
    assert "No CUDA device here" in said
    assert "AGC's loss and gradients are right" in said
    assert "x BN fastest" in said
    assert (tmp_path / "bench.png").exists()


def test_a_step_of_segnet() -> None:
    case = Case("segnet", "agc", "eager", 1, (32, 32), "fp32", 0.125)
    (row,) = cpu.measure_set([case], 1)
    assert float(row["saved_mib"]) > 0


@pytest.mark.usefixtures("unchecked")
def test_resuming_measures_what_is_missing(tmp_path: Path, measured: list[Case]) -> None:
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


def of_other_source(row: dict[str, str]) -> dict[str, str]:
    return {**row, "source": "0123456789"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", [older, failed, of_other_source])
def test_what_does_not_hold_is_measured_anew(
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


def test_rows_of_another_source_are_measured_again() -> None:
    here = {"hardware": "x", "torch": "2", "source": "new", "run": "b", "date": "c"}
    row = {"group": "segnet", "contender": "bn", "hardware": "x", "torch": "2", "source": "new"}
    assert run.holds(row, here)
    for column in ("hardware", "torch", "source"):
        assert not run.holds({**row, column: "old"}, here)
    assert not run.holds({**row, "error": "out of memory"}, here)


@pytest.mark.usefixtures("unchecked")
def test_a_failing_case_becomes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(contender: str) -> None:
        raise RuntimeError("CUDA out of memory.\nAnd more.")

    monkeypatch.setattr(cpu, "inference_neuron", fail)
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out)]) == 0
    rows = read_rows(out)
    errors = [row for row in rows if "error" in row]
    assert {row["group"] for row in errors} == {"inference"}
    assert {row["error"] for row in errors} == {"RuntimeError: CUDA out of memory."}
    assert sum("ms_p50" in row for row in rows) == 3
    assert "failed" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked")
def test_a_time_limit_and_a_report(
    tmp_path: Path, measured: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out), "--report"]) == 1
    assert main([*TINY, str(out), "--minutes", "-1"]) == 0
    assert not measured
    assert not out.exists()
    assert main([*TINY, str(out)]) == 0
    measured.clear()
    chart = tmp_path / "picture.png"
    assert main([*TINY, str(out), "--report", "--chart", str(chart)]) == 0
    assert not measured
    assert chart.exists()
    assert "x BN eager" in capsys.readouterr().out


@pytest.mark.usefixtures("measured")
def test_nothing_is_timed_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = check.loss_and_gradients

    def wrong(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = right(model, x, y)
        if x.dtype == torch.float32:
            found["the gradient of all `mean_scale`"] *= 1.01
        return found

    monkeypatch.setattr(check, "loss_and_gradients", wrong)
    out = tmp_path / "bench.csv"
    assert main([*TINY, str(out)]) == 1
    assert not out.exists()
    said = " ".join(capsys.readouterr().err.split())
    assert "the gradient of all `mean_scale` differs" in said


def test_the_check_leaves_the_switch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DEEPCONTROL_KERNELS"
    monkeypatch.delenv(name, raising=False)
    with check.kernels_off():
        assert os.environ[name] == "off"
    assert name not in os.environ
    monkeypatch.setenv(name, "on")
    with check.kernels_off():
        assert os.environ[name] == "off"
    assert os.environ[name] == "on"


def test_a_row_is_there_if_all_that_is_asked_for_is(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert not has_row(out, {"seed": 0})  # no file
    write_rows(out, [{"seed": 0, "rate": 0.5, "error": 0.1}, {"seed": 1, "rate": 0.25}])
    assert has_row(out, {"seed": 0, "rate": 0.5})
    assert has_row(out, {"seed": 1})
    assert not has_row(out, {"seed": 1, "rate": 0.5})  # each of them, but in two rows
    assert not has_row(out, {"seed": 1, "error": 0.1})
