"""Measure every model of the zoo, and compare with the committed table."""

from pathlib import Path

import pytest

from benchmarks.zoo.__main__ import run
from benchmarks.zoo.measure import measure
from benchmarks.zoo.models import ZOO, Entry
from benchmarks.zoo.page import page
from deepcontrol.workbench.bench.results import read_rows

ROOT = Path(__file__).parents[2]
ROWS = {
    (row["library"], row["model"]): row
    for row in read_rows(ROOT / "benchmarks" / "results" / "zoo.csv")
}


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.key)
def test_converts_trains_and_folds(entry: Entry) -> None:
    row = {name: str(value) for name, value in measure(entry).items()}
    assert row["finite_at_1"] == "True"
    # In fp64 rounding is negligible.
    assert float(row["fold_fp64"]) <= 1e-12
    assert float(row["he_fold_fp64"]) <= 1e-10
    assert float(row["bn_start_fp64"]) <= 1e-10
    # In fp32 within 1e-5, unless rounding in the model itself is larger.
    assert float(row["fold"]) <= max(1e-5, 2 * float(row["fp32_rounding"]))
    assert float(row["bn_start"]) <= max(1e-5, 10 * float(row["bn_rounding"]))
    # The committed table is up to date.
    expected = ROWS[entry.library, entry.name]
    for column in ("version", "input", "fused", "replaced", "skipped", "one_position", "hazards"):
        assert row[column] == expected[column], column
    for column in ("mib_before", "mib_after"):
        assert float(row[column]) == pytest.approx(float(expected[column]), rel=0.02)


def test_table_is_complete() -> None:
    assert list(ROWS) == [(entry.library, entry.name) for entry in ZOO]
    per_library = {library: [r for r in ROWS if r[0] == library] for library, _ in ROWS}
    minimum = {
        "timm": 5,
        "torchvision": 5,
        "segmentation-models-pytorch": 5,
        "monai": 4,
        "transformers": 3,
    }
    for library, models in minimum.items():
        assert len(per_library[library]) >= models
    for row in ROWS.values():
        assert row["finite_at_1"] == "True"
        assert float(row["fold"]) <= 1e-5, row["model"]


def test_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs" / "zoo.md").read_text() == page(list(ROWS.values()))


def test_measuring_some_models_keeps_the_other_rows(tmp_path: Path) -> None:
    out = tmp_path / "zoo.csv"
    run(["torchvision/shufflenet"], out)
    (first,) = read_rows(out)
    run(["torchvision/resnet18"], out)
    rows = read_rows(out)
    # In the order of the zoo, not of the measurements.
    assert [row["model"] for row in rows] == ["resnet18", "shufflenet_v2_x0_5"]
    assert rows[1] == first
