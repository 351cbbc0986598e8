"""Per-class values, the confusion matrix and the worst images, and runs that lack them."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.folders.runfolder import read_run, write_validation
from deepcontrol.workbench.folders.storage import format_record
from deepcontrol.workbench.report.classes import (
    class_rows,
    draw_class_curves,
    draw_confusion,
    frequent_confusions,
    only_class,
)
from deepcontrol.workbench.report.page import write_page
from tests.workbench.report.conftest import make_run

NAMES = ["road", "<b>sky</b>", "car"]
COUNTS = [[90, 0, 10], [0, 50, 0], [20, 0, 30]]


def make_run_with_classes(folder: Path, counts: Any = COUNTS) -> Path:
    make_run(folder)
    content = json.loads((folder / "config.json").read_text())
    content["derived"] |= {
        "classes": NAMES,
        "colors": [[128, 64, 128], [70, 130, 180], [0, 0, 142]],
    }
    del content["derived"]["colours"]
    (folder / "config.json").write_text(json.dumps(content))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["val_class_iou"] = [0.2 * row["epoch"], None, 0.1 * row["epoch"]]
    (folder / "metrics.jsonl").write_text("".join(map(format_record, rows)))
    write_validation(folder, 3, counts, [("a.png", 0.4), ("<i>b</i>.png", 0.1)])
    return folder


def test_page_shows_classes_confusions_and_worst_images(tmp_path: Path) -> None:
    run = read_run(make_run_with_classes(tmp_path / "a"))
    page = write_page([run], [], tmp_path / "o").read_text()
    for text in ("IoU of each class by epoch", "Confusion matrix", "Worst validation images"):
        assert text in page
    assert "&lt;i&gt;b&lt;/i&gt;.png" in page
    assert "<b>sky" not in page
    assert "<i>b" not in page
    assert 'fill="#804080"' in page


def test_values_of_the_classes(tmp_path: Path) -> None:
    run = read_run(make_run_with_classes(tmp_path / "a"))
    rows = class_rows(run)
    assert [row.value for row in rows] == pytest.approx([0.6, None, 0.3])
    assert [row.labeled for row in rows] == [0.5, 0.25, 0.25]
    found = [(c.true, c.predicted, c.share) for c in frequent_confusions(run)]
    assert found == [("car", "road", 0.4), ("road", "car", 0.1)]
    assert only_class(run) is None
    assert draw_class_curves(run) is not None
    assert draw_confusion(run) is not None


def test_one_class_everywhere_is_said_on_the_page(tmp_path: Path) -> None:
    counts = [[90, 0, 0], [50, 0, 0], [0, 0, 0]]
    run = read_run(make_run_with_classes(tmp_path / "a", counts))
    assert only_class(run) == "road"
    page = write_page([run], [], tmp_path / "o").read_text()
    assert 'predicts "road" for every validation pixel' in page


def test_older_runs_have_a_page_without_these_parts(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert draw_class_curves(run) is None
    assert draw_confusion(run) is None
    assert (run.confusion, run.worst_images, only_class(run)) == ([], [], None)
    page = write_page([run], [], tmp_path / "o").read_text()
    assert "<h3>Classes</h3>" not in page
    assert 'fill="#010203"' in page  # the legend needs only the configuration


@pytest.mark.parametrize(
    "content",
    [
        {"confusion": [[1, 2], [3, 4]], "worst": "x"},
        {"confusion": [[-1] * 3] * 3, "worst": [["a"], ["b", None], 3]},
        {"confusion": [["<"] * 3] * 3, "worst": None},
        ["x"],
        "damaged",
    ],
)
def test_invalid_validation_files_are_left_out(tmp_path: Path, content: Any) -> None:
    folder = make_run_with_classes(tmp_path / "a")
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "validation.json").write_text(text)
    run = read_run(folder)
    assert (run.confusion, run.worst_images) == ([], [])
    assert any("validation.json" in note for note in run.notes) == (content == "damaged")
    assert (class_rows(run)[0].labeled, frequent_confusions(run)) == (None, [])
