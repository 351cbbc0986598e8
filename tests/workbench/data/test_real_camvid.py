"""The real CamVid, if CAMVID_ROOT is set."""

import os
from pathlib import Path

import pytest

from deepcontrol.workbench.data.inspect import check

ROOT = os.environ.get("CAMVID_ROOT")


@pytest.mark.skipif(ROOT is None, reason="CAMVID_ROOT is not set")
def test_check_the_whole_dataset() -> None:
    report = check(Path(str(ROOT)))
    assert report.layout == "camvid"
    assert report.faults == []
    assert report.splits["train"] == 367
    assert report.splits["val"] == 101
    counts = report.histogram[: len(report.classes)]
    share = dict(zip(report.classes, 100 * counts / counts.sum(), strict=True))
    # Published class frequencies.
    assert share["road"] == pytest.approx(31.6, abs=1)
    assert share["building"] == pytest.approx(24.7, abs=1)
    assert share["sky"] == pytest.approx(15.7, abs=1)
    assert max(share["pole"], share["pedestrian"], share["bicyclist"]) < 1.5
