"""A file with wrong outputs raises an error and is removed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.workbench import export
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.export.check import MismatchError, check, difference
from deepcontrol.workbench.export.targets import TARGETS, Sizes, Target

SIZES = Sizes(smallest=64, step=1)
MODEL = nn.Conv2d(3, 2, 1)


def right(images: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (MODEL(images),)


def test_equal_outputs_pass() -> None:
    comparison = check(right, MODEL, SIZES)
    assert comparison.difference == 0
    (one, *_), (several, _, height, _) = comparison.shapes
    assert (one, several > 1, height % 2) == (1, True, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y + 2e-3,
        lambda y: y * torch.nan,
        lambda y: y[..., 1:],
        lambda y: torch.where(torch.tensor(y.shape[0] > 1), y.flip(0), y),  # only for one shape
    ],
)
def test_wrong_outputs_raise(wrong: object) -> None:
    with pytest.raises(MismatchError, match=r"differs from torch by .* on \d images of"):
        check(lambda images: (wrong(right(images)[0]),), MODEL, SIZES)  # type: ignore[operator]


def test_one_wrong_input_is_rejected() -> None:
    calls = []

    def run(images: Tensor) -> tuple[Tensor, ...]:
        calls.append(images.shape)
        return (right(images)[0] + (len(calls) == 1),)

    comparison = check(run, MODEL, SIZES)
    assert comparison.difference == 0
    (rejected,) = comparison.rejected
    assert rejected > 0.1
    assert len(calls) == 3


def test_differences_are_relative_only_to_large_outputs() -> None:
    images = torch.full((1, 3, 4, 4), 100.0)
    large = right(images)[0].abs().max()
    assert large > 1
    found = difference(lambda x: (right(x)[0] + 0.5,), MODEL, images)
    assert found == pytest.approx(0.5 / large.item(), rel=1e-3)
    assert difference(lambda x: (right(x)[0] + 0.5,), MODEL, images * 0) == pytest.approx(0.5)


def test_no_file_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a target whose file returns zeros."""
    zeros = Target(
        ".pt2",
        None,
        lambda program, path, outputs, axes: path.write_text("zeros"),
        lambda path: lambda images: (torch.zeros(len(images), 19, *images.shape[2:]),),
    )
    monkeypatch.setitem(TARGETS, "exported", zeros)
    monkeypatch.setattr(export, "trace", lambda model, sizes: None)
    assert main(["export", str(run), "--to", "exported"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the exported network differs from torch by")
    assert not list((run / "export").iterdir())
