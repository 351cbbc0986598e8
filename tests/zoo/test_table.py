"""Measure models of the zoo, and compare with the committed table."""

import os
from pathlib import Path

import pytest

from benchmarks.zoo.__main__ import run
from benchmarks.zoo.measure import Row, identity, measure
from benchmarks.zoo.models import ZOO, Entry
from benchmarks.zoo.page import PAGE, TABLE, TRICKY, page
from benchmarks.zoo.worker import Worker
from deepcontrol.workbench.bench.results import read_rows

ROWS = {f"{row['library']}/{row['model']}": row for row in read_rows(TABLE)}
BY_KEY = {entry.key: entry for entry in ZOO}
# The libraries of locks/zoo.lock.
LOCKED = {
    "timm",
    "torchvision",
    "segmentation-models-pytorch",
    "monai",
    "nnunetv2",
    "transformers",
}
# Of these libraries, but measured by `make zoo` alone, because they take long.
NOT_HERE = {
    "timm/seresnet18",
    "timm/tf_efficientnet_lite0",
    "timm/mobilenetv4_conv_small",
    "timm/mobileone_s0",
    "timm/fastvit_t8",
    "timm/repvit_m0_9",
    "timm/efficientvit_b0",
    "timm/mobilevit_xxs",
    "timm/res2net50_14w_8s",
    "timm/xception41",
    "timm/convmixer_1024_20_ks9_p14",
    "torchvision/efficientnet_b0",
    "torchvision/r2plus1d_18",
    "segmentation-models-pytorch/Unet, efficientnet-b0",
    "segmentation-models-pytorch/Unet, dpn68",
    "segmentation-models-pytorch/DeepLabV3, mobilenet_v2",
    "monai/HighResNet, 3-D",
    "monai/resnet10, 3-D",
    "monai/EfficientNetBN, 2-D",
    "transformers/MobileViTForImageClassification",
    "transformers/SegformerForSemanticSegmentation",
    "transformers/SwiftFormerForImageClassification",
    "transformers/HGNetV2ForImageClassification",
}


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ZOO if entry.library in LOCKED and entry.key not in NOT_HERE],
    ids=lambda e: e.key,
)
def test_converts_trains_and_folds(entry: Entry) -> None:
    row = {name: str(value) for name, value in measure(entry).items()}
    check(row)
    # The committed table is up to date.
    expected = ROWS[entry.key]
    for column in ("version", "input", "norms", "fused", "replaced", "skipped"):
        assert row[column] == expected[column], column
    for column in ("verified", "backed_out", "one_position", "constant"):
        assert row[column] == expected[column], column
    for column in ("mib_before", "mib_after"):
        assert float(row[column]) == pytest.approx(float(expected[column]), rel=0.02)


@pytest.mark.parametrize("key", BY_KEY)
def test_row_of_the_table(key: str) -> None:
    check(ROWS[key])


def check(row: dict[str, str]) -> None:
    """Check that a conversion is exact, and that its step at batch 1 is finite."""
    assert row["finite_at_1"] == "True"
    # In fp64 rounding is negligible.
    assert float(row["fold_fp64"]) <= 1e-12
    # At lambda 1, features before global average pooling can be constant (Report.constant), and
    # the outputs nothing but rounding.
    assert float(row["he_fold_fp64"]) <= 1e-10 or float(row["he_fp32_rounding"]) > 1
    assert float(row["bn_start_fp64"]) <= 1e-10
    # In fp32 within 1e-5, unless rounding in the model itself is larger.
    assert float(row["fold"]) <= max(1e-5, 2 * float(row["fp32_rounding"]))
    assert float(row["bn_start"]) <= max(1e-5, 10 * float(row["bn_rounding"]))


def test_table_is_complete() -> None:
    assert list(ROWS) == list(BY_KEY)
    assert len(ROWS) >= 100
    assert len({entry.library for entry in ZOO}) >= 18
    assert BY_KEY.keys() >= NOT_HERE


def test_page_is_generated_from_the_tables() -> None:
    assert PAGE.read_text() == page(list(ROWS.values()), read_rows(TRICKY))


def test_table_is_continued_and_keeps_its_order(tmp_path: Path) -> None:
    out = tmp_path / "zoo.csv"
    first, second = ZOO[1], ZOO[0]
    rows: list[Row] = [{"fused": 1}, {"error": "2"}, {"fused": 3}, {"fused": 4}]
    shown = {"replaced": 0, "mib_before": "", "mib_after": "", "fold": "", "conversion_s": ""}
    measured: list[str] = []

    def record(entry: Entry) -> Row:
        measured.append(entry.key)
        return {**identity(entry), **shown, **rows[len(measured) - 1]}

    run([first], out, False, record)
    run([first, second], out, False, record)
    assert measured == [first.key, second.key]
    # In the order of the zoo, not of the measurements.
    assert [row.get("error", row.get("fused")) for row in read_rows(out)] == ["2", "1"]
    run([first, second], out, False, record)  # errors are measured again
    assert [row["fused"] for row in read_rows(out)] == ["3", "1"]
    run([first], out, True, record)
    assert [row["fused"] for row in read_rows(out)] == ["3", "4"]
    assert measured == [first.key, second.key, second.key, first.key]


def test_library_that_is_not_installed_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Entry("no-such-library", "model", lambda: pytest.fail("built"))
    run([absent], tmp_path / "zoo.csv", False, lambda entry: pytest.fail("measured"))
    assert "no-such-library is not installed: 1 models are left out" in capsys.readouterr().out


def crash(key: str) -> Row:
    os._exit(1)


def test_crash_costs_one_model() -> None:
    with Worker(crash) as worker:
        row = worker.measure(BY_KEY["timm/resnet26d"])
    assert row["error"] == "the process ended"
    assert row["model"] == "resnet26d"
