"""A short version of the campaign of faults; make test-faults runs the long one."""

import pytest

from tests.faults import campaign


@pytest.mark.parametrize("name", campaign.CLASSES)
def test_no_fault_passes_in_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "CLASSES", {name: campaign.CLASSES[name]})
    (row,) = campaign.campaign(seed=1, count=25)
    assert row.failures == []
    assert row.counts.total() == 25
    assert row.counts["detected"] > 0


def test_campaign_counts_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ignores checksums must make it fail."""
    unchecked = campaign.damage_file(campaign.flip)
    monkeypatch.setattr(campaign, "CLASSES", {"flipped": unchecked})
    monkeypatch.setattr("deepcontrol.workbench.folders.json_files._SEALED", None)
    (row,) = campaign.campaign(seed=1, count=60)
    assert row.failures
    assert f"| {len(row.failures)} |" in campaign.table([row])
