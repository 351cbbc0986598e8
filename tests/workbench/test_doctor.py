"""`deepcontrol doctor` shows the implementation in use and finds wrong results."""

import pytest
import torch

from deepcontrol.workbench import doctor
from deepcontrol.workbench.cli import main


def test_shows_versions_and_the_plain_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert torch.__version__ in output
    assert "plain torch" in output
    assert "ok" in output
    assert "eager mode Python: DEEPCONTROL_NATIVE=0" in output


@pytest.mark.gpu
def test_gpu_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [r.why_plain is None for r in doctor.check_devices()][:2] == [False, True]
    monkeypatch.setenv("DEEPCONTROL_KERNELS", "off")
    assert doctor.check_devices()[1].why_plain == "DEEPCONTROL_KERNELS=off"


@pytest.mark.parametrize("factor", [1.01, torch.nan])
def test_wrong_gradients_are_found(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = doctor._outputs

    def wrong(neuron, x, g):  # type: ignore[no-untyped-def]
        *right, last = outputs(neuron, x, g)
        return (*right, factor * last) if x.dtype == torch.float32 else (*right, last)

    monkeypatch.setattr(doctor, "_outputs", wrong)
    assert main(["doctor"]) == 1
    assert "wrong" in capsys.readouterr().out
