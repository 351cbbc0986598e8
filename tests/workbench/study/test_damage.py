"""Damaged studies, and packing into a folder that already holds a study."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.bench.results import read_rows, write_rows
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.storage import format_record, read_records
from deepcontrol.workbench.folders.studyfolder import read_study
from deepcontrol.workbench.study import command
from tests.workbench.study.tiny import TINY, reproduce

# Every test judges a study and writes its page again.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_unrendered")]

ROOT = Path(__file__).parents[3]
AGC, BN = (f"segnet-{norm}-b4-lr0.32-s0" for norm in ("agc", "bn"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the tiny study once."""
    out = tmp_path_factory.mktemp("finished") / "study"
    assert reproduce(out) == 0
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "study"))


def study(folder: Path) -> Any:
    content = json.loads((folder / "study.json").read_text())
    content.pop("crc", None)
    return content


def states(folder: Path) -> dict[str, str]:
    return {run["name"]: run["state"] for run in study(folder)["runs"]}


def claims(folder: Path) -> list[str]:
    return [claim["id"] for claim in study(folder)["claims"]]


def without_epoch_1(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])


def add(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text() + text)


def without(path: Path, key: str) -> None:
    rows = [{k: v for k, v in row.items() if k != key} for row in read_records(path)]
    path.write_text("".join(map(format_record, rows)))


def changed_digit(text: str) -> str:
    """Change the first decimal of the last line."""
    *before, last = text.splitlines(keepends=True)
    at = last.index("0.") + 2
    return "".join(before) + last[:at] + str((int(last[at]) + 1) % 10) + last[at + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a missing epoch": ("metrics.jsonl", without_epoch_1, "no error and loss of epoch 1"),
    "no errors": (
        "metrics.jsonl",
        lambda path: without(path, "val_error"),
        "metrics.jsonl has no error and loss of epoch 1 and 1 more",
    ),
    "no losses": (
        "metrics.jsonl",
        lambda path: without(path, "val_loss"),
        "metrics.jsonl has no error and loss of epoch 1 and 1 more",
    ),
    "another kind of configuration": (
        "config.json",
        lambda path: path.write_text("[1]"),
        "config.json is not of format",
    ),
    "no lambda": ("layers.jsonl", Path.unlink, "layers.jsonl has no lambda for epoch 2"),
    "lambda of epoch 0 only": (
        "layers.jsonl",
        lambda path: path.write_text(path.read_text().splitlines(keepends=True)[0]),
        "layers.jsonl has no lambda for epoch 2",
    ),
    "no configuration": ("config.json", Path.unlink, "it has no config.json"),
    "a torn configuration": ("config.json", lambda p: p.write_text("{"), "cannot read"),
    "lambda without numbers": (
        "layers.jsonl",
        add(format_record({"epoch": 2, "layers": {"a": {"mean_scale": 3}}})),
        "the last record of layers.jsonl has no numbers",
    ),
    "a changed digit": (
        "metrics.jsonl",
        lambda path: path.write_text(changed_digit(path.read_text())),
        "line 3 of metrics.jsonl cannot be read (wrong checksum)",
    ),
    "a changed setting": (
        "config.json",
        lambda path: path.write_text(path.read_text().replace('"seed": 0', '"seed": 1')),
        "config.json is damaged: its content does not match its checksum",
    ),
    "lines of another kind": (
        "metrics.jsonl",
        add('5\n{"epoch": "4"}\n{"epoch": 3, "val_'),
        "line 4 of metrics.jsonl cannot be read",
    ),
    "an unreadable divergence mark": (
        "diverged.json",
        lambda path: path.write_text('{"epoch"'),
        "diverged.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_does_not_affect_the_others(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    file, do, words = DAMAGES[damage]
    do(out / "runs" / AGC / file)
    packed = tmp_path / "packed"
    assert reproduce(out, "--minutes", "0", "--pack", str(packed)) == 1
    said = capsys.readouterr().out
    assert f"failed: {AGC}: damaged: " in said
    assert words in said
    assert f"remove runs/{AGC}" in said
    for folder in (out, packed):
        assert states(folder) == {AGC: "failed", BN: "done"}
        assert words in (folder / "index.html").read_text()
        judged = read_study(folder)
        assert judged.measurement("segnet-agc-b4-lr0.32", "final error").n == 0
        assert judged.measurement("segnet-bn-b4-lr0.32", "final error").n == 1
    assert not (packed / "runs" / AGC).exists()


@pytest.mark.parametrize(
    ("file", "do"),
    [
        ("metrics.jsonl", add('{"epoch": 3, "val_')),
        ("layers.jsonl", add("{torn")),
        ("samples", lambda path: [p.write_bytes(b"no picture") for p in path.iterdir()]),
    ],
)
def test_harmless_damage(out: Path, tmp_path: Path, file: str, do: Callable[[Path], Any]) -> None:
    before = study(out)["claims"]
    do(out / "runs" / AGC / file)
    assert reproduce(out, "--minutes", "0", "--pack", str(tmp_path / "packed")) == 0
    for folder in (out, tmp_path / "packed"):
        assert states(folder) == dict.fromkeys((AGC, BN), "done")
        assert study(folder)["claims"] == before


def test_a_file_instead_of_a_run_folder_fails_alone(out: Path) -> None:
    shutil.rmtree(out / "runs" / AGC)
    (out / "runs" / AGC).write_text("")
    assert reproduce(out) == 1
    assert states(out) == {AGC: "failed", BN: "done"}


@pytest.mark.parametrize("link", ["runs", "logs", f"runs/{AGC}"])
def test_links_in_a_study_are_not_followed(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.rmtree(out / "runs" / AGC)  # it would be trained
    if link == f"runs/{AGC}":
        elsewhere.mkdir()
    else:
        (out / link).rename(elsewhere)
    (out / link).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    assert reproduce(out) == 1
    assert f"{link} is a symbolic link" in capsys.readouterr().err
    assert sorted(elsewhere.rglob("*")) == before


def test_a_damaged_run_is_trained_again_after_removal(out: Path) -> None:
    before = study(out)["claims"]
    without_epoch_1(out / "runs" / AGC / "metrics.jsonl")
    assert reproduce(out) == 1
    shutil.rmtree(out / "runs" / AGC)
    assert reproduce(out) == 0
    assert study(out)["claims"] == before


def test_packing_does_not_overwrite_another_study(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    assert reproduce(out, "--minutes", "0", "--pack", str(packed)) == 0
    other = study(packed)
    other["protocol"]["width"] = 1.0
    (packed / "study.json").write_text(json.dumps(other))
    assert reproduce(out, "--minutes", "0", "--pack", str(packed)) == 1
    assert "holds another study: width 1.0 -> 0.02" in capsys.readouterr().err
    assert study(packed) == other
    (tmp_path / "file").write_text("")
    for words in (("--pack", str(tmp_path / "file")), ("--out", str(tmp_path / "file"))):
        assert reproduce(out, *words) == 1
        assert "file is not a folder" in capsys.readouterr().err


def test_packing_keeps_existing_claims(out: Path, tmp_path: Path) -> None:
    packed, small = tmp_path / "packed", tmp_path / "small"
    assert reproduce(out, "--minutes", "0", "--pack", str(packed)) == 0
    assert reproduce(small, "--only", "fig1e", "--minutes", "0", "--pack", str(packed)) == 0
    assert (claims(small), claims(packed)) == (["fig1e"], ["fig1c", "fig1e"])
    assert states(packed) == dict.fromkeys((AGC, BN), "done")  # although `small` has no runs


def test_claims_outside_the_preset_are_judged_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "study"
    for words, expected in (
        (("--only", "spikes"), ["spikes"]),
        (("--only", "fig1e"), ["fig1e", "spikes"]),
        ((), ["fig1c", "fig1e", "spikes"]),
        (("--only", "speed"), ["fig1c", "fig1e", "spikes", "speed"]),
    ):
        assert reproduce(out, "--minutes", "0", *words) == 0
        assert claims(out) == expected


def test_a_packed_study_needs_no_other_benchmark_file(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    assert reproduce(out, "--only", "speed,memory", "--minutes", "0", "--pack", str(packed)) == 0
    verdicts = {claim["id"]: claim["verdict"] for claim in study(packed)["claims"]}
    assert verdicts["speed"] == verdicts["memory"] == "reproduced"  # by this repository's benchmark
    before = study(packed)
    monkeypatch.chdir(tmp_path)
    twice = tmp_path / "twice"
    assert reproduce(packed, "--minutes", "0", "--pack", str(twice)) == 0
    for folder in (packed, twice):
        assert study(folder)["claims"] == before["claims"]
    assert (twice / "bench.csv").read_text() == (packed / "bench.csv").read_text()
    assert reproduce(packed, "--minutes", "0", "--bench", "none.csv") == 1
    assert "--bench: no file none.csv" in capsys.readouterr().err


def test_packing_keeps_the_benchmark_rows_of_existing_claims(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, small = tmp_path / "packed", tmp_path / "small"
    assert reproduce(out, "--only", "speed", "--minutes", "0", "--pack", str(packed)) == 0
    assert reproduce(out, "--only", "largest-batch", "--minutes", "0", "--pack", str(small)) == 0
    for row in (rows := read_rows(small / "bench.csv")):
        row["contender"] = row["contender"].replace("bn", "gn")
    write_rows(small / "bench.csv", [row for row in rows if row["group"] == "max-batch"])
    monkeypatch.chdir(tmp_path)  # without another benchmark file
    assert reproduce(small, "--minutes", "0", "--pack", str(packed)) == 0
    verdicts = {claim["id"]: claim["verdict"] for claim in study(packed)["claims"]}
    assert verdicts["speed"] == "reproduced"


def test_packing_removes_an_outdated_divergence_mark(out: Path, tmp_path: Path) -> None:
    packed, mark = tmp_path / "packed", out / "runs" / AGC / "diverged.json"
    mark.write_text('{"epoch": 2, "step": 1}')
    for state in ("diverged", "done"):
        assert reproduce(out, "--minutes", "0", "--pack", str(packed)) == 0
        assert states(packed)[AGC] == states(out)[AGC] == state
        mark.unlink(missing_ok=True)


def test_the_report_names_runs_damaged_since(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(out)]) == 0
    assert "has changed" not in capsys.readouterr().out
    without_epoch_1(out / "runs" / AGC / "metrics.jsonl")
    (out / "runs" / BN / "config.json").write_text("{")
    assert main(["report", str(out)]) == 0
    said, html = capsys.readouterr().out, (out / "index.html").read_text()
    for name, words in ((AGC, "no error and loss of epoch 1"), (BN, "cannot read")):
        assert f"{name} has changed since it was judged: " in said
        assert words in said
        assert f"{name} has changed since it was judged: " in html
    shutil.rmtree(out / "runs" / BN)
    assert main(["report", str(out)]) == 0
    assert "its folder is missing" in capsys.readouterr().out


def test_a_study_beside_a_run_is_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(out / "runs" / AGC), str(out)]) == 1
    assert f"{out} is a study: report on it alone" in capsys.readouterr().err


def no_protocol(record: Any) -> None:
    record["protocol"] = None


def other_verdict(record: Any) -> None:
    record["claims"][0]["verdict"] = "maybe"


def other_metric(record: Any) -> None:
    record["figure1"][0]["metric"] = "val_errors"


@pytest.mark.parametrize("change", [no_protocol, other_verdict, other_metric])
def test_a_malformed_study_json_is_one_error(
    out: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None]
) -> None:
    record = study(out)
    change(record)
    (out / "study.json").write_text(json.dumps(record))
    assert main(["report", str(out)]) == 1
    assert "study.json: " in capsys.readouterr().err
    if change is no_protocol:  # reproduce reads nothing else from it
        assert reproduce(out, "--minutes", "0") == 1
        assert "study.json: " in capsys.readouterr().err


def test_a_study_of_format_1_is_continued(out: Path) -> None:
    protocol = asdict(TINY.protocol)
    protocol["rates_times"] = protocol.pop("lr_scale")
    check = {"quantity": "step time: BN over AGC", "region": "", "rule": "", "found": ""}
    claim = {"id": "speed", "says": "It is faster", "paper": "30 %", "ours": [], "runs": []}
    claim |= {"verdict": "undecided", "checks": [{**check, "verdict": "undecided"}]}
    old: dict[str, Any] = {"format": 1, "protocol": protocol, "claims": [claim], "layers": None}
    old |= {key: [] for key in ("grid", "panels", "beside", "runs", "samples")}
    old |= {"preset_epochs": 2, "seeds": 1, "note": "", "command": ""}
    before = study(out)["claims"]
    (out / "study.json").write_text(json.dumps(old))
    assert reproduce(out, "--minutes", "0") == 0
    assert study(out)["format"] == 3
    assert study(out)["claims"][:-1] == before
    assert claims(out)[-1] == "speed"


def test_the_committed_study_judged_again_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The present rules come to the same study.json, in any folder."""
    committed = ROOT / "results" / "camvid"
    copy = tmp_path / "camvid"
    shutil.copytree(committed / "runs", copy / "runs")
    shutil.copyfile(committed / "bench.csv", copy / "bench.csv")
    monkeypatch.setattr(command, "write_page", str)
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "camvid", "--data-root", "camvid", "--minutes", "0"]
    assert main(["reproduce", "--out", str(copy), *words]) == 0
    assert study(copy) == study(committed)
