"""The committed table of structures that mislead a converter."""

import dataclasses

import pytest

from benchmarks.zoo.page import TRICKY
from deepcontrol.workbench.bench.results import read_rows
from tests.convert.campaign import judge
from tests.convert.test_tricky import CASES

ROWS = {row["structure"]: row for row in read_rows(TRICKY)}


def test_table_has_all_structures_and_none_is_wrong() -> None:
    assert list(ROWS) == list(CASES), "run python -m tests.convert.campaign"
    assert len(ROWS) >= 80
    assert not [name for name, row in ROWS.items() if "failure" in row]
    assert not [n for n, row in ROWS.items() if row["without_example"] == "not reported"]


@pytest.mark.parametrize("name", ["plain", "isinstance_tensor"])
def test_row_is_reproduced(name: str) -> None:
    row = {column: str(value) for column, value in judge(name).items() if value != ""}
    assert {column: ROWS[name].get(column) for column in row} == row


def test_wrong_conversion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that expects a fusion which the converter backs out counts as wrong."""
    wrong = dataclasses.replace(CASES["isinstance_tensor"], fused=1)
    monkeypatch.setitem(CASES, "isinstance_tensor", wrong)
    assert str(judge("isinstance_tensor")["failure"]).startswith("AssertionError")
