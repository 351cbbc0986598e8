"""A short version of the campaign of faults; make test-faults runs the long one."""

import pytest

from tests.faults import campaign, folders, processes

ATTEMPTS = 15


@pytest.mark.parametrize("name", campaign.CLASSES)
def test_no_fault_passes_in_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "CLASSES", {name: campaign.CLASSES[name]})
    (row,) = campaign.campaign(seed=1, count=ATTEMPTS)
    assert row.failures == []
    assert row.counts.total() == ATTEMPTS


@pytest.mark.slow
def test_commands_with_little_memory_explain_it() -> None:
    """The other classes that start processes have tests of their own, in tests/workbench/train."""
    (name,) = (name for name in processes.CLASSES if name.startswith("little memory"))
    row = campaign.of_processes(name, seed=1, count=3)
    assert row.failures == []
    assert row.counts.total() == 3


def test_campaign_counts_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ignores checksums must make it fail."""
    unchecked = folders.damage_file(folders.flip)
    monkeypatch.setattr(campaign, "CLASSES", {"flipped": unchecked})
    monkeypatch.setattr("deepcontrol.workbench.folders.storage._SEALED", None)
    (row,) = campaign.campaign(seed=1, count=60)
    assert row.failures
    assert row.values()["failed"] == str(len(row.failures))


def test_page_has_the_table_of_the_committed_results() -> None:
    rows, page = campaign.read_results(), campaign.PAGE.read_text()
    assert campaign.with_table(page, rows) == page, "run: python -m tests.faults.campaign --write"
    assert {row["fault"] for row in rows} == {*campaign.CLASSES, *processes.CLASSES}
    assert {row["failed"] for row in rows} == {"0"}
    with pytest.raises(ValueError, match="expected one block"):
        campaign.with_table("no marks", rows)
