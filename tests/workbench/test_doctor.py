"""`deepcontrol doctor` says which path runs, and finds a path that computes something else."""

import pytest
import torch

from deepcontrol.workbench import doctor
from deepcontrol.workbench.cli import main


def test_it_names_versions_and_the_plain_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert torch.__version__ in said
    assert "plain torch" in said
    assert "ok" in said


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path.why_plain is None for path in doctor.paths()][:2] == [False, True]
    monkeypatch.setenv("DEEPCONTROL_KERNELS", "off")
    assert doctor.paths()[1].why_plain == "DEEPCONTROL_KERNELS=off"


@pytest.mark.parametrize("factor", [1.01, torch.nan])
def test_a_wrong_path_is_found(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = doctor._outputs

    def wrong(neuron, x, g):  # type: ignore[no-untyped-def]
        *right, last = outputs(neuron, x, g)
        return (*right, factor * last) if x.dtype == torch.float32 else (*right, last)

    monkeypatch.setattr(doctor, "_outputs", wrong)
    assert main(["doctor"]) == 1
    assert "wrong" in capsys.readouterr().out
