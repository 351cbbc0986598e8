"""The real CamVid, where CAMVID_ROOT says that there is a copy."""

import os
from pathlib import Path

import pytest

from deepcontrol.workbench.data.check import check

ROOT = os.environ.get("CAMVID_ROOT")


@pytest.mark.skipif(ROOT is None, reason="CAMVID_ROOT names no copy of CamVid")
def test_read_whole() -> None:
    report = check(Path(str(ROOT)))
    assert report.layout == "camvid"
    assert report.faults == []
    assert report.splits["train"] == 367
    assert report.splits["val"] == 101
    counts = report.histogram[: len(report.classes)]
    share = dict(zip(report.classes, 100 * counts / counts.sum(), strict=True))
    # The frequencies that are known of the set: road and building lead, the thin things are rare.
    assert share["road"] == pytest.approx(31.6, abs=1)
    assert share["building"] == pytest.approx(24.7, abs=1)
    assert share["sky"] == pytest.approx(15.7, abs=1)
    assert max(share["pole"], share["pedestrian"], share["bicyclist"]) < 1.5
