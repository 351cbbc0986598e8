"""Label volumes in overlapping windows with Gaussian weights."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from deepcontrol.workbench.data.volumes import Statistics, moments, normalize
from deepcontrol.workbench.predict import volumes
from deepcontrol.workbench.predict.volumes import (
    VolumeFormat,
    VolumeNetwork,
    class_probabilities,
    find_jobs,
    gaussian_weights,
    predict_volumes,
)

CROP = (8, 8, 8)


class Toy(nn.Module):
    """Logits that depend on the position in the window, as near its border."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        position = torch.linspace(-1, 1, x.shape[-1])
        return torch.cat([self.scale * x, x.mean() + position.expand_as(x), x.square()], 1)


def network(model: nn.Module | None = None) -> VolumeNetwork:
    form = VolumeFormat({}, None)
    return VolumeNetwork(model or Toy(), ("a", "b", "c"), 1, CROP, form)


@pytest.mark.parametrize("shape", [(8, 8, 8), (12, 20, 9), (5, 16, 30)])
def test_windows_are_blended(shape: tuple[int, ...]) -> None:
    """Compare with a loop over all voxels of all windows, in fp64."""
    image = np.random.default_rng(0).normal(3, 2, (1, *shape)).astype(np.float32)
    found = class_probabilities(network(), image)
    statistics = Statistics(*moments(image), np.empty((0, 3), np.int64))
    whole = normalize(image, statistics, {})
    # As in the code: the fewest windows that are at most half a side apart, evenly spaced.
    starts = []
    for side, own in zip(shape, CROP, strict=True):
        rest = max(0, side - own)
        count = 1 + -(-rest // (own // 2))
        starts.append([round(i * rest / max(1, count - 1)) for i in range(count)])
    total, weights = np.zeros((3, *shape)), np.zeros(shape)
    gauss = gaussian_weights(CROP).astype(np.float64)
    for z, y, x in itertools.product(*starts):
        window = np.zeros((1, 1, *CROP), np.float32)
        part = whole[:, z : z + 8, y : y + 8, x : x + 8]
        d, h, w = part.shape[1:]
        window[0, :, :d, :h, :w] = part
        with torch.no_grad():
            own = Toy()(torch.from_numpy(window))[0].double().softmax(0).numpy()
        total[:, z : z + d, y : y + h, x : x + w] += own[:, :d, :h, :w] * gauss[:d, :h, :w]
        weights[z : z + d, y : y + h, x : x + w] += gauss[:d, :h, :w]
    assert found == pytest.approx(total / weights, abs=1e-5)
    assert found.sum(0) == pytest.approx(1, abs=1e-5)


def test_outputs_that_are_not_finite() -> None:
    model = Toy()
    torch.nn.init.constant_(model.scale, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        class_probabilities(network(model), np.ones((1, *CROP), np.float32))


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.nii.gz").touch()
    (tmp_path / "b-probabilities.nii.gz").touch()
    assert len(find_jobs([tmp_path], 1, tmp_path / "out")) == 2
    with pytest.raises(ValueError, match=r"a\.nii\.gz is an input volume.*--out"):
        find_jobs([tmp_path], 1, tmp_path / ".." / tmp_path.name)
    (tmp_path / "b.nii.gz").touch()
    both = [tmp_path / "b.nii.gz", tmp_path / "b-probabilities.nii.gz"]
    with pytest.raises(ValueError, match=r"is an input volume"):
        find_jobs(both, 1, tmp_path)


def test_a_failed_device_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.nii.gz").touch()

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(volumes, "case_probabilities", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        predict_volumes(network(), [tmp_path], tmp_path / "out", Console(), Console())


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "free_memory", lambda device: 2 * 3 * 4 * 8**3 - 1)
    with pytest.raises(ValueError, match="probabilities of 3 classes in 8x8x8 voxels"):
        class_probabilities(network(), np.ones((1, *CROP), np.float32))


@pytest.mark.parametrize(
    ("derived", "message"),
    [
        ({"voxel_size": [0, 1]}, "expected 3 positive lengths"),
        ({"voxel_size": 2}, "invalid format of volumes"),
        ({"intensities": {"0": [1, 2]}}, "invalid format of volumes"),
    ],
)
def test_invalid_formats(derived: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VolumeFormat.of_run(Path("run"), derived)
